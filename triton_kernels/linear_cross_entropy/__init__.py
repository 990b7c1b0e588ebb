"""The rows of the loss, and the filtered gradient."""
