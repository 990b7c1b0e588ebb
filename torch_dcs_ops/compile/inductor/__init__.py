"""The only user of private parts of TorchInductor: what scan_lowering needs of it."""
