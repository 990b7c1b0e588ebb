"""Log-semiring products, their gradients, maxima and samples."""
