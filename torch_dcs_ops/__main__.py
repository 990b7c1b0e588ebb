"""``python -m torch_dcs_ops``."""

from torch_dcs_ops.cli import main

raise SystemExit(main())
