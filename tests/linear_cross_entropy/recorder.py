"""A backend that looks at AOTAutograd's graphs."""

from __future__ import annotations

from typing import Any

import torch


class Recorder:
    """Keeps the names of the dcs ops in AOTAutograd's graphs: those of the forward, then those of the backward.

    But for `_tied`, a copy of one number, which only torch before 2.13 has in backwards.
    """

    def __init__(self) -> None:
        self.ops: list[list[str]] = []

    def __call__(self, module: torch.fx.GraphModule, inputs: Any) -> Any:
        from functorch.compile import make_boxed_func
        from torch._dynamo.backends.common import aot_autograd

        def keep(graph: torch.fx.GraphModule, _: Any) -> Any:
            names = [str(node.target) for node in graph.graph.nodes]
            self.ops.append([name for name in names if name.startswith("dcs.") and name != "dcs._tied.default"])
            return make_boxed_func(graph.forward)

        return aot_autograd(fw_compiler=keep)(module, inputs)
