"""The ops: importing this package registers everything about them, op by op."""

from . import scan as _scan  # isort: skip  # The private family that the others are fronts of.
from .cumsum import cumsum
from .discounted_cumsum import discounted_cumsum, discounted_cumsum_left, discounted_cumsum_right

__all__ = ["cumsum", "discounted_cumsum", "discounted_cumsum_left", "discounted_cumsum_right"]
