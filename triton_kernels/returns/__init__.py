"""Returns and advantages: temporal differences and n-step sums."""
