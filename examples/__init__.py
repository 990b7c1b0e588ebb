"""Runnable examples; `python -m torch_dcs_ops demo` runs `ppo`, `language_model` and `crf_tagger`, others by name."""
