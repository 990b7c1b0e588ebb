"""Runnable examples; `python -m torch_dcs_ops demo` runs `ppo` and `language_model`."""
