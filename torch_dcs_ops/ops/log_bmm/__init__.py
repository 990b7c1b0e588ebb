"""Matrix products of the log and the max semiring, and samples of their terms."""
