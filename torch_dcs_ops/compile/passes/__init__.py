"""What fuses and rewrites in the graph before the compiler lowers it."""
