"""What the ops do with DTensors: importing this registers the rules, family by family."""

from . import log_bmm, losses, lines, unruled

__all__: list[str] = []
