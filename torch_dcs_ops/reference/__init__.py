"""The ops in plain PyTorch: the definition of the semantics, the tests' oracle, and the kernels of last resort."""
