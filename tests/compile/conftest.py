from compile.generated_code import lowered_scans  # noqa: F401  (the fixture `kernels`)
