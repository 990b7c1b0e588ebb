"""The loss and the log-probabilities of a linear layer whose classes are shared out among ranks."""
