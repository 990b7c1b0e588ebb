"""What tests ask of torch.compile's caches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator


@contextlib.contextmanager
def no_cached_graphs() -> Iterator[None]:
    """Every graph goes through the passes and the code generator, and what is generated is built at most once.

    torch's own `force_disable_caches` takes an empty folder for every graph: the same C++ and the headers of torch were
    compiled anew, for three seconds a graph.
    """
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    with functorch_config.patch(enable_autograd_cache=False), inductor_config.patch(fx_graph_cache=False):
        yield
