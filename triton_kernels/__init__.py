"""Triton kernels and their launchers, one folder a family.

Nothing here knows of torch.library. Installed as torch_dcs_ops.triton_kernels.
"""
