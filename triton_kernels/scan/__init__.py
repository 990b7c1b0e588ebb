"""Discounted and plain cumulative sums."""
