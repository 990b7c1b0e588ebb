"""The cross entropy of a linear layer, which never holds the logits."""
