"""Returns and advantages of reinforcement learning, in one pass each."""
