from linear_cross_entropy.filter.kernel_oracle import filter_steps  # noqa: F401  (the fixture `steps`)
