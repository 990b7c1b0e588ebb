"""How an op's lowering becomes loops of Inductor's; `codegen` is how its code generator writes these.

To be imported where `support.supports("scans")`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch._inductor import config, ir, lowering
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as ops
from torch._library.utils import get_layout_constraint_tag

from . import codegen, plain_ops
from .codegen import DirectedScan

# The C++ code for CPUs has no scans; a CPU has the library's kernels.
GENERATED_DEVICES = ("cuda",)

# A value inside a kernel that is being traced, and a function from an index into a tensor to such a value.
Value: TypeAlias = Any
Index: TypeAlias = Sequence[Any]
Loader: TypeAlias = Callable[[Index], Value]
Combine: TypeAlias = Callable[[tuple[Value, ...], tuple[Value, ...]], tuple[Value, ...]]


@functools.cache
def register(lowerings: tuple[tuple[Any, Callable[..., Any]], ...]) -> None:
    """(op, function that builds its kernel or returns None) for every op, once a process."""
    codegen.wrap_methods()
    plain_ops.wrap_compilation({op for op, _ in lowerings})
    for op, build in lowerings:
        lowering.register_lowering(op, type_promotion_kind=None)(_guarded(op, build))


def directed_scan(
    input: Any,
    dtypes: tuple[torch.dtype, ...],
    loaders: tuple[Loader, ...],
    axis: int,
    combine: Combine,
    reverse: bool,
    number: float | None = None,
) -> Any:
    """The last member of a scan over tuples: input's shape and dtype, and the strides of the result of the fake."""
    size, strides = list(input.get_size()), _strides_of_result()
    is_time_major = not is_known_to_equal(strides[axis], 1)
    scan = ir.TensorBox.create(
        DirectedScan(  # type: ignore[call-arg]  # Inductor's dataclass decorator is not typed
            device=input.get_device(),
            dtype=input.get_dtype(),
            dtypes=dtypes,
            inner_fn=loaders[-1],
            inner_fns=loaders,
            size=size,
            ranges=[*size[:axis], *size[axis + 1 :]],
            scan_ranges=[size[axis]],
            combine_fn=combine,
            reindex=lambda index, scan_index: [*index[:axis], *scan_index, *index[axis:]],
            reduction_hint=ReductionHint.OUTER if is_time_major else ReductionHint.INNER,
            output_index=len(loaders) - 1,
            reverse=reverse,
            is_time_major=is_time_major,
            number=number,
        )
    )
    scan.realize()
    order = ir.get_stride_order(strides, V.graph.sizevars.shape_env)
    return ir.ExternKernel.require_stride_order(scan, order)


def pointwise(input: Any, dtype: torch.dtype, loader: Loader) -> Any:
    """A tensor of the shape of `input`, computed where it is used."""
    return ir.Pointwise.create(device=input.get_device(), dtype=dtype, inner_fn=loader, ranges=list(input.get_size()))


def is_tensor(argument: Any) -> bool:
    """Whether an argument of a lowering is a tensor, and not a number."""
    return isinstance(argument, ir.TensorBox)


def sum_over(tensor: Any, axes: list[int]) -> Any:
    return lowering.lowerings[torch.ops.aten.sum.dim_IntList](tensor, axes) if axes else tensor


def to_dtype(tensor: Any, dtype: torch.dtype) -> Any:
    return lowering.to_dtype(tensor, dtype)


def constant_value(tensor: Any) -> float | None:
    """The number that a 0-D tensor is known to hold while compiling."""
    constant = lowering.get_constant_value(tensor)
    return None if constant is None else torch.tensor(constant.value, dtype=tensor.get_dtype()).item()


def is_known_to_equal(size: Any, number: int) -> bool:
    return bool(V.graph.sizevars.statically_known_equals(size, number))


def index_value(expression: Any) -> Value:
    return ops.index_expr(sympy.sympify(expression), torch.int64)


def generates_scans(device: torch.device) -> bool:
    """Whether the code generator for `device` has scans over tuples, and may give a tile's steps another order.

    Block pointers and tensor descriptors are not made of the index that a kernel turns around, and of a tiled axis of
    time Triton scans one part.
    """
    features = (BackendFeature.SCAN, BackendFeature.TUPLE_REDUCTION)
    if device.type not in GENERATED_DEVICES or not all(V.graph.has_feature(device, feature) for feature in features):
        return False
    triton = config.triton
    return not (triton.tile_reductions or triton.use_block_ptr or triton.use_tensor_descriptor)


def has_work_to_fuse() -> bool:
    """Whether the operation being lowered has a producer or a consumer that computes anything, seen through views."""
    node = V.graph.current_node

    def is_computed(other: Any) -> bool:
        if other.op != "call_function" or not _has_dimensions(other):
            return False
        return any(map(is_computed, other.all_input_nodes)) if _is_view(other) else True

    def is_computed_from(other: Any) -> bool:
        if other.op != "call_function":
            return False
        return any(map(is_computed_from, other.users)) if _is_view(other) else True

    return any(map(is_computed, node.all_input_nodes)) or any(map(is_computed_from, node.users))


def _strides_of_result() -> Any:
    value = V.graph.current_node.meta["val"]
    return (value[0] if isinstance(value, tuple | list) else value).stride()


def _is_view(node: Any) -> bool:
    return not isinstance(node.target, torch._ops.OpOverload) or bool(node.target.is_view)


def _has_dimensions(node: Any) -> bool:
    value = node.meta.get("val")
    return not isinstance(value, torch.Tensor) or value.dim() > 0


def _guarded(op: Any, build: Callable[..., Any]) -> Callable[..., Any]:
    def lower(*args: Any, **kwargs: Any) -> Any:
        result = build(*args, **kwargs) if plain_ops.generates_scans() else None
        return _call_extern_kernel(op, args, kwargs) if result is None else result

    return lower


def _call_extern_kernel(op: Any, args: Any, kwargs: Any) -> Any:
    """What Inductor does with an op that it has no lowering for."""
    node = V.graph.current_node
    constraint = lowering.tag_to_layout_constraint(get_layout_constraint_tag(op, with_default=True))
    if constraint is lowering.constrain_to_fake_tensors:
        if "eager_input_vals" in node.meta:
            fake_args, fake_kwargs = _by_schema(op, *node.meta["eager_input_vals"])
            args, kwargs = _by_schema(op, args, kwargs)
            args, kwargs = constraint(args, kwargs, fake_args, fake_kwargs)
    elif constraint is not None:
        args, kwargs = constraint(node, *args, **kwargs)
    return lowering.fallback_handler(op, add_to_fallback_set=False)(*args, **kwargs)


def _by_schema(op: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    normalized = torch.fx.operator_schemas.normalize_function(op, args, kwargs)
    assert normalized is not None
    return normalized[0], normalized[1]
