"""Everything that the scan lowering touches of Inductor's private parts, in one place.

Inductor lowers a scan to `ir.Scan`, which its Triton generator turns into `tl.associative_scan`, with the pointwise
operations around it in the same kernel. To that is added, by wrapping methods and only for kernels that hold a
:class:`DirectedScan`:

* A scan from the last step to the first keeps the natural index, so that its producers and consumers read and write
  what they would beside any other kernel, and the kernel walks the axis of time backwards. A flipped index instead
  would fuse with producers alone, as consumers want the other index.
* Two scans that walk in opposite directions are kept out of one kernel.
* Under dynamic shapes consumers may loop over batch and time in the other order than the scan. Inductor changes the
  order to fuse them, but gives up at strides that are symbols; for scans the sizes of the example inputs decide.
* Where time is an outer dimension, a thread is given two neighbouring rows and all their steps of a tile, so that the
  scan stays in its registers: the kernel loops over time, and Triton is told of no longer runs in memory than two.
  It lays a tile out for the widest loads otherwise (16 rows a thread beside a bool operand), has threads to spare, and
  spreads them over time: 30 shuffles an element for GAE. Of few rows there are not enough for the threads of a GPU:
  then a block holds all steps of its rows, and a thread successive ones.
* The launch configurations of such a kernel come from `_heuristics`.

Versions of torch that none of this was tested with get the extern kernels and one warning.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import logging
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import sympy
import torch
from torch._inductor import config, ir, lowering
from torch._inductor.codegen.common import BackendFeature
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.dependencies import MemoryDep
from torch._inductor.runtime.hints import ReductionHint
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as ops
from torch._library.utils import get_layout_constraint_tag

from . import _heuristics, _source, _versions

logger = logging.getLogger("torch_dcs_ops")

# The C++ code for CPUs has no scans; a CPU has the library's kernels.
GENERATED_DEVICES = ("cuda",)

# A value inside a kernel that is being traced, and a function from an index into a tensor to such a value.
Value: TypeAlias = Any
Index: TypeAlias = Sequence[Any]
Loader: TypeAlias = Callable[[Index], Value]
Combine: TypeAlias = Callable[[tuple[Value, ...], tuple[Value, ...]], tuple[Value, ...]]

# The methods that `register` wraps, with the parameters that the wrappers rely on.
_WRAPPED_METHODS = (
    (TritonKernel, "iteration_ranges_codegen_header", ("self", "entry", "code")),
    (TritonKernel, "codegen_kernel", ("self", "name")),
    (TritonKernel, "should_use_persistent_reduction", ("self",)),
    (SIMDScheduling, "can_fuse", ("self", "node1", "node2")),
    (MemoryDep, "decide_loop_order_to_match", ("self", "other")),
)
_ROWS_OF_A_THREAD = 2
_STEPS_OF_A_THREAD = 4  # 16 bytes of float32
_LONGEST_WHOLE_ROW = 4096
# Successive steps of a thread where blocks hold whole columns. 32 are faster (GAE of 1024 steps of 4096 columns 0.94 of
# its traffic, with 16 steps 0.88), but ask for 64 values of each operand in a thread's registers.
_STEPS_OF_A_COLUMN = {"few operands": 32, "many operands": 16}


@functools.cache
def register(lowerings: tuple[tuple[Any, Callable[..., Any]], ...]) -> bool:
    """`scan_lowering.install`: (op, function that builds its kernel or returns None) for every op, once a process."""
    if _versions.torch_version() not in _versions.TESTED_VERSIONS or not _methods_are_known():
        logger.warning(
            "scans do not fuse with other operations under torch %s: the scan lowering is tested with torch %s",
            torch.__version__,
            _versions.tested(),
        )
        return False
    _wrap_methods()
    for op, build in lowerings:
        lowering.register_lowering(op, type_promotion_kind=None)(_guarded(op, build))
    return True


def active() -> bool:
    """Whether the graph being compiled asked for the lowerings, by a pre-grad pass with `dcs_scan_lowering` set.

    That pass is part of the key of Inductor's cache of graphs, so what is compiled with and without never mixes. Where
    it is not (a pass before it has no uuid, or torch is told to run them before it looks into the cache), there are
    none.
    """
    passes: Any = config.pre_grad_custom_pass
    if not isinstance(passes, list | tuple):
        passes = [passes]
    if not any(getattr(graph_pass, "dcs_scan_lowering", False) for graph_pass in passes):
        return False
    is_in_the_key = getattr(config, "pre_grad_pass_timing", "late") != "early"
    if is_in_the_key and all(hasattr(graph_pass, "uuid") and graph_pass.uuid() is not None for graph_pass in passes):
        return True
    _say_that_the_key_lacks_them()
    return False


@functools.cache
def _say_that_the_key_lacks_them() -> None:
    logger.warning(
        "scans do not fuse with other operations: a pre-grad pass without a uuid, or pre_grad_pass_timing='early', "
        "keeps the pass that asks for it out of the compiler's cache keys"
    )


@ir.ir_dataclass  # type: ignore[attr-defined]
class DirectedScan(ir.Scan):
    """A scan that may accumulate in a wider dtype than its output has, and may run from the last step to the first.

    With `reverse` the combine function's left operand is of later steps, all indices are the natural ones still.
    """

    reverse: bool
    is_time_major: bool
    # `Scan.column_gamma`
    number: float | None

    def store_reduction(
        self, output_name: str | None, indexer: Callable[..., Any], vars: Index, scan_vars: Index
    ) -> Any:
        index = self.reindex(vars, scan_vars)
        scanned = ops.scan(self.dtypes, self.combine_fn, tuple(inner_fn(index) for inner_fn in self.inner_fns))
        # Consumers in the same kernel take the stored value, and shall not compute in the wider dtype.
        value = ops.to_dtype(scanned[self.output_index], self.dtype)
        return ops.store(output_name or "unnamed", indexer(index), value)


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


def sum_over(tensor: Any, axis: int) -> Any:
    return lowering.lowerings[torch.ops.aten.sum.dim_IntList](tensor, [axis])


def to_dtype(tensor: Any, dtype: torch.dtype) -> Any:
    return lowering.to_dtype(tensor, dtype)


def constant_value(tensor: Any) -> float | None:
    """The number that a 0-D tensor is known to hold while compiling."""
    constant = lowering.get_constant_value(tensor)
    return None if constant is None else torch.tensor(constant.value, dtype=tensor.get_dtype()).item()


def size_hint(size: Any) -> int:
    """The size that the example inputs had; compiled code does not depend on it being right.

    For sizes of Inductor's graph; _build.hint is for those of graphs before it.
    """
    return int(V.graph.sizevars.optimization_hint(size))


def is_known_to_equal(size: Any, number: int) -> bool:
    return bool(V.graph.sizevars.statically_known_equals(size, number))


def index_value(expression: Any) -> Value:
    return ops.index_expr(sympy.sympify(expression), torch.int64)


def generates_scans(device: torch.device, reverse: bool) -> bool:
    """Whether the code generator for `device` has scans over tuples and, with `reverse`, may walk backwards.

    Block pointers and tensor descriptors are not made of the index that the kernel turns around, and of a tiled axis of
    time Triton scans one part.
    """
    features = (BackendFeature.SCAN, BackendFeature.TUPLE_REDUCTION)
    if device.type not in GENERATED_DEVICES or not all(V.graph.has_feature(device, feature) for feature in features):
        return False
    if config.triton.tile_reductions:
        return False
    return not (reverse and (config.triton.use_block_ptr or config.triton.use_tensor_descriptor))


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
        result = build(*args, **kwargs) if active() else None
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


def _methods_are_known() -> bool:
    def parameters(owner: Any, name: str) -> tuple[str, ...]:
        method = inspect.getattr_static(owner, name, None)
        return tuple(inspect.signature(method).parameters) if callable(method) else ()

    return all(parameters(owner, name) == known for owner, name, known in _WRAPPED_METHODS)


def _wrap_methods() -> None:
    write_header = TritonKernel.iteration_ranges_codegen_header
    write_kernel = TritonKernel.codegen_kernel
    is_persistent: Callable[..., bool] = TritonKernel.should_use_persistent_reduction
    may_fuse: Callable[..., bool] = SIMDScheduling.can_fuse
    decide_order = MemoryDep.decide_loop_order_to_match

    @functools.wraps(write_header)
    def iteration_ranges_codegen_header(self: Any, entry: Any, code: Any) -> None:
        write_header(self, entry, code)
        if entry.prefix == "x" and entry.tensor_dim == 0 and self.triton_tensor_ndim() == 2 and _is_time_major(self):
            code.writeline(f"{entry.name} = tl.max_contiguous({entry.name}, [{_ROWS_OF_A_THREAD}, 1])")
        if not entry.is_reduction:
            return
        # The mask was made of the index that counts up, and so leaves out the same steps.
        backwards, length = _walks_backwards(self), f"{entry.prefix}numel"
        if self.persistent_reduction and _holds_whole_columns(self):
            code.writeline(f"{entry.name} = group_scan.column_order({entry.name}, {_steps_of_a_column(self)})")
            if not self._has_constant_mask(entry):
                code.writeline(f"{entry.prefix}mask = {entry.name} < {length}")
        if _scans_by_groups(self):
            if backwards:
                code.writeline(f"{entry.name} = group_scan.mirrored({entry.name}, {length}, {_STEPS_OF_A_THREAD})")
            # Else the narrowest operand, such as a bool, would decide how many steps a thread loads.
            code.writeline(f"{entry.name} = tl.max_contiguous({entry.name}, [1, {_STEPS_OF_A_THREAD}])")
        elif backwards:
            code.writeline(f"{entry.name} = {length} - 1 - {entry.name}")

    @functools.wraps(write_kernel)
    def codegen_kernel(self: Any, name: str | None = None) -> str:
        source: str = write_kernel(self, name)
        if _scans_of_kernel(self):
            source = _source.with_imports(source)
            if self.persistent_reduction and _holds_whole_columns(self):
                source = _source.with_columns(source, _steps_of_a_column(self), _scans_of_kernel(self)[0].number)
            elif _scans_by_groups(self) and _walks_backwards(self):
                source = _source.with_turned_groups(source, _STEPS_OF_A_THREAD)
        return source

    @functools.wraps(is_persistent)
    def should_use_persistent_reduction(self: Any) -> bool:
        if _is_time_major(self):
            return _holds_whole_columns(self)
        return is_persistent(self) or _holds_whole_rows(self)

    @functools.wraps(may_fuse)
    def can_fuse(self: Any, node1: Any, node2: Any) -> bool:
        return _walk_alike(node1, node2) and may_fuse(self, node1, node2)

    @functools.wraps(decide_order)
    def decide_loop_order_to_match(self: Any, other: Any) -> list[int] | None:
        if _is_scanned(self.name):
            self, other = _with_strides_of_the_example(self), _with_strides_of_the_example(other)
        order: list[int] | None = decide_order(self, other)
        return order

    replacements: tuple[tuple[Any, Callable[..., Any]], ...] = (
        (TritonKernel, iteration_ranges_codegen_header),
        (TritonKernel, codegen_kernel),
        (TritonKernel, should_use_persistent_reduction),
        (SIMDScheduling, can_fuse),
        (MemoryDep, decide_loop_order_to_match),
    )
    for owner, method in replacements:
        setattr(owner, method.__name__, method)
    # Other names of the same method, by which the scheduler calls it.
    SIMDScheduling.can_fuse_vertical = can_fuse
    SIMDScheduling.can_fuse_horizontal = can_fuse


def _is_scanned(buffer_name: str) -> bool:
    return isinstance(getattr(V.graph.try_get_buffer(buffer_name), "data", None), DirectedScan)


def _with_strides_of_the_example(dependency: Any) -> Any:
    """Good for choosing an order of loops; whether the reordered loops match is decided by the symbols."""
    symbols = dependency.index.free_symbols - set(dependency.var_names)
    index = dependency.index.subs({symbol: size_hint(symbol) for symbol in symbols})
    return dataclasses.replace(dependency, index=index)


def _walks_backwards(kernel: Any) -> bool:
    scans = _scans_of_kernel(kernel)
    if not any(scan.reverse for scan in scans):
        return False
    nodes = list(kernel.features.scheduler_nodes())
    if not (all(scan.reverse for scan in scans) and not any(map(_needs_natural_order, nodes))):
        raise AssertionError("scans in opposite directions were fused into one kernel")
    if kernel.cooperative_reduction or kernel.mix_order_reduction or kernel.num_reduction_dims != 1:
        raise AssertionError(
            "a scan from the last step to the first was fused into a kernel that cannot walk backwards"
        )
    return True


def _is_time_major(kernel: Any) -> bool:
    scans = _scans_of_kernel(kernel)
    return bool(scans) and all(scan.is_time_major for scan in scans)


def _scans_by_groups(kernel: Any) -> bool:
    """Whether a thread loads groups of successive steps: in rows that lie in memory step by step."""
    scans = _scans_of_kernel(kernel)
    if not scans or any(scan.is_time_major for scan in scans) or kernel.triton_tensor_ndim() != 2:
        return False
    if kernel.cooperative_reduction or kernel.mix_order_reduction or kernel.num_reduction_dims != 1:
        return False
    length = kernel.numels.get("r0_")
    return isinstance(length, int | sympy.Integer) and length % _STEPS_OF_A_THREAD == 0 and length >= 32


def _holds_whole_rows(kernel: Any) -> bool:
    """Whether a block of a batch-major kernel holds whole rows that are longer than Inductor's own limit."""
    scans = _scans_of_kernel(kernel)
    length = kernel.numels.get("r0_")
    return (
        bool(scans)
        and config.triton.persistent_reductions
        and not kernel.cooperative_reduction
        and isinstance(length, int | sympy.Integer)
        and length <= _LONGEST_WHOLE_ROW
    )


def _holds_whole_columns(kernel: Any) -> bool:
    """Whether a block of a time-major kernel holds all steps of its columns."""
    scans, length = _scans_of_kernel(kernel), kernel.numels.get("r0_")
    return (
        _is_time_major(kernel)
        and set(kernel.numels) == {"x", "r0_"}
        and config.triton.persistent_reductions
        and not kernel.cooperative_reduction
        and not any(map(_scans_otherwise, kernel.features.scheduler_nodes()))
        and all(scans_in_columns(scan.dtypes[-1], scan.number) and scan.number == scans[0].number for scan in scans)
        and holds_whole_columns(length, size_hint(kernel.numels["x"]))
    )


def holds_whole_columns(length: Any, columns: int) -> bool:
    """Whether blocks hold whole columns, of so many steps each."""
    shortest, longest = _heuristics.WHOLE_COLUMNS
    if not isinstance(length, int | sympy.Integer) or columns >= _heuristics.MANY_COLUMNS:
        return False
    return bool(shortest <= length <= longest)


def scans_in_columns(dtype: torch.dtype, number: float | None) -> bool:
    """All but pairs of float64 whose gates are not one known number: they need twice the registers."""
    return number is not None or dtype != torch.float64


def _steps_of_a_column(kernel: Any) -> int:
    nodes = list(kernel.features.scheduler_nodes())
    written = {dependency for node in nodes for dependency in node.read_writes.writes}
    operands = {dependency for node in nodes for dependency in node.read_writes.reads} - written
    return _STEPS_OF_A_COLUMN["few operands" if len(operands) <= _heuristics.FEW_OPERANDS else "many operands"]


def _scans_of_kernel(kernel: Any) -> list[DirectedScan]:
    features = getattr(kernel, "features", None)
    return [] if features is None else _scans(features.scheduler_nodes())


def _scans(nodes: Any) -> list[DirectedScan]:
    return [data for data in map(_loops, nodes) if isinstance(data, DirectedScan)]


def _loops(node: Any) -> Any:
    return getattr(getattr(node, "node", None), "data", None)


def _needs_natural_order(node: Any) -> bool:
    """Scans and sorts of others, and reductions to an index; sums, maxima and the like do not ask for an order."""
    data = _loops(node)
    if isinstance(data, ir.Scan):
        return not (isinstance(data, DirectedScan) and data.reverse)
    if isinstance(data, ir.Sort):
        return True
    return isinstance(data, ir.Reduction) and data.reduction_type in ("argmax", "argmin")


def _scans_otherwise(node: Any) -> bool:
    """Scans and sorts that are not this package's: their code knows no other order of steps than the natural one."""
    data = _loops(node)
    return isinstance(data, ir.Scan | ir.Sort) and not isinstance(data, DirectedScan)


def _walk_alike(node1: Any, node2: Any) -> bool:
    """Whether one kernel may hold both nodes, as far as it is about directed scans."""
    nodes = [*node1.get_nodes(), *node2.get_nodes()]
    scans = _scans(nodes)
    if not scans:
        return True
    if any(scan.reverse for scan in scans) and any(map(_needs_natural_order, nodes)):
        return False
    # Reductions over different axes share a kernel only by rearranging one of them, which a scan does not allow.
    return not (node1.is_reduction() and node2.is_reduction()) or node1.group == node2.group
