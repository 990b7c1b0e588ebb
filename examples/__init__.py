"""Runnable examples; `python -m torch_dcs_ops demo` runs `reinforce_cartpole`."""
