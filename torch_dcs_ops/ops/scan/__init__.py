"""Discounted and plain cumulative sums: first-order scans."""
