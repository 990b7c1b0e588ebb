"""What the ops of every family use."""
