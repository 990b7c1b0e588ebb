"""Triton kernels compiled for a GPU of compute capability 9.0, where none is.

The interpreter takes what the compiler refuses, as it knows nothing of types that must agree.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def compiled_for_sm_90(
    kernel: Any,
    constants: Mapping[str, Any],
    kinds: Mapping[str, str],
    pointer: str = "*fp64",
    number: str = "i32",
    warps: int = 4,
    aligned: Sequence[str] = (),
) -> Any:
    """`kinds` of arguments that are neither constants nor of the kind `pointer` (..._ptr), int64 (..._bits), `number`.

    `aligned` are known to be divisible by 16.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names: list[str] = kernel.arg_names
    kinds = dict(kinds) | dict.fromkeys(constants, "constexpr")

    def kind(name: str) -> str:
        by_ending = pointer if name.endswith("_ptr") else "i64" if name.endswith("_bits") else number
        return kinds.get(name, by_ending)

    source = ASTSource(
        fn=kernel,
        signature={name: kind(name) for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        attrs={(names.index(name),): [["tt.divisibility", 16]] for name in aligned if name in names},
    )
    return triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})


def constants_behind_acc(kernel: Any, **known: Any) -> dict[str, Any]:
    """Of a kernel whose options come behind ACC: all on but those that are `known`, and sums in float64."""
    import triton

    names: list[str] = kernel.arg_names
    return dict.fromkeys(names[names.index("ACC") + 1 :], True) | {"ACC": triton.language.float64} | known
