"""Triton kernels and their launchers, of which `scan.scan` and `scan.scan_gradients` are the entries.

Nothing here knows of torch.library. Installed as torch_dcs_ops.triton_kernels.
"""
