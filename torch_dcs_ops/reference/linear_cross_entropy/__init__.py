"""The cross entropy of a linear layer in plain PyTorch."""
