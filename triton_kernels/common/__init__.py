"""What the launchers and kernels of every family use."""
