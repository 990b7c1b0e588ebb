"""What the code generator of Inductor makes of a :class:`DirectedScan`, and the methods of it that are wrapped.

Inductor lowers a scan to `ir.Scan`, which its Triton generator turns into `tl.associative_scan`, with the pointwise
operations around it in the same kernel. To that is added, by wrapping methods and only for kernels that hold a
:class:`DirectedScan`:

* A scan from the last step to the first keeps the natural index, so that its producers and consumers read and write
  what they would beside any other kernel, and the kernel runs along the axis of time backwards. A flipped index instead
  would fuse with producers alone, as consumers want the other index.
* Two scans that run in opposite directions are kept out of one kernel.
* Under dynamic shapes consumers may loop over batch and time in the other order than the scan. Inductor changes the
  order to fuse them, but gives up at strides that are symbols; for scans the sizes of the example inputs decide.
* Where time is an outer dimension, a thread is given two neighboring rows and all their steps of a tile, so that the
  scan stays in its registers: the kernel loops over time, and Triton is told of no longer runs in memory than two.
  It lays a tile out for the widest loads otherwise (16 rows a thread beside a bool operand), has threads to spare, and
  spreads them over time: 30 shuffles an element for GAE. Of few rows there are not enough for the threads of a GPU:
  then a block holds all steps of its rows, and a thread successive ones.
* The launch configurations of such a kernel come from `heuristics`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import sympy
import torch
from torch._inductor import config, ir, scheduler
from torch._inductor.codegen.simd import SIMDScheduling
from torch._inductor.codegen.triton import TritonKernel
from torch._inductor.dependencies import MemoryDep
from torch._inductor.virtualized import V
from torch._inductor.virtualized import ops as ops

from . import generated_source, heuristics, plain_ops

_ROWS_OF_A_THREAD = 2
_STEPS_OF_A_THREAD = 4  # 16 bytes of float32
_LONGEST_WHOLE_ROW = 4096


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
        self, output_name: str | None, indexer: Callable[..., Any], vars: Sequence[Any], scan_vars: Sequence[Any]
    ) -> Any:
        index = self.reindex(vars, scan_vars)
        scanned = ops.scan(self.dtypes, self.combine_fn, tuple(inner_fn(index) for inner_fn in self.inner_fns))
        # Consumers in the same kernel take the stored value, and shall not compute in the wider dtype.
        value = ops.to_dtype(scanned[self.output_index], self.dtype)
        return ops.store(output_name or "unnamed", indexer(index), value)


def size_hint(size: Any) -> int:
    """The size that the example inputs had; compiled code does not depend on it being right.

    For sizes of Inductor's graph; passes/build.hint is for those of graphs before it.
    """
    return int(V.graph.sizevars.optimization_hint(size))


def wrap_methods() -> None:
    """Wraps methods of Inductor's; `probes` has the parameters that the wrappers rely on."""
    _wrap_kernel()
    _wrap_scheduling()


def _wrap_kernel() -> None:
    write_header = TritonKernel.iteration_ranges_codegen_header
    write_kernel = TritonKernel.codegen_kernel
    is_persistent: Callable[..., bool] = TritonKernel.should_use_persistent_reduction

    @functools.wraps(write_header)
    def iteration_ranges_codegen_header(self: Any, entry: Any, code: Any) -> None:
        write_header(self, entry, code)
        if plain_ops.generates_scans():
            _add_to_header(self, entry, code)

    @functools.wraps(write_kernel)
    def codegen_kernel(self: Any, name: str | None = None) -> str:
        source: str = write_kernel(self, name)
        return _rewritten(self, source) if plain_ops.generates_scans() else source

    @functools.wraps(is_persistent)
    def should_use_persistent_reduction(self: Any) -> bool:
        if not plain_ops.generates_scans():
            return is_persistent(self)
        if _is_time_major(self):
            return _holds_whole_columns(self)
        return is_persistent(self) or _holds_whole_rows(self)

    for method in (iteration_ranges_codegen_header, codegen_kernel, should_use_persistent_reduction):
        setattr(TritonKernel, method.__name__, method)


def _wrap_scheduling() -> None:
    may_fuse: Callable[..., bool] = SIMDScheduling.can_fuse
    decide_order = MemoryDep.decide_loop_order_to_match

    @functools.wraps(may_fuse)
    def can_fuse(self: Any, node1: Any, node2: Any) -> bool:
        runs_alike = not plain_ops.generates_scans() or _runs_alike(node1, node2)
        return runs_alike and may_fuse(self, node1, node2)

    @functools.wraps(decide_order)
    def decide_loop_order_to_match(self: Any, other: Any) -> list[int] | None:
        if plain_ops.generates_scans() and _is_scanned(self.name):
            self, other = _with_strides_of_the_example(self), _with_strides_of_the_example(other)
        order: list[int] | None = decide_order(self, other)
        return order

    # The scheduler calls it by the two other names.
    for name in ("can_fuse", "can_fuse_vertical", "can_fuse_horizontal"):
        setattr(SIMDScheduling, name, can_fuse)
    MemoryDep.decide_loop_order_to_match = decide_loop_order_to_match  # type: ignore[method-assign]
    _keep_scans_out_of_staged_reductions()


def _keep_scans_out_of_staged_reductions() -> None:
    """From torch 2.15 on a consumer of every second or fourth element of a kernel's tile may take these out of the
    registers that hold them, by their place in the natural order, which the steps of a scan's tile need not have."""
    nested_reduction = getattr(scheduler, "NestedReduction", None)
    if nested_reduction is None:
        return
    is_enabled: Callable[[Any, Any], bool] = nested_reduction._is_enabled_for

    @functools.wraps(is_enabled)
    def _is_enabled_for(outer_node: Any, grouped_node: Any) -> bool:
        nodes = [*outer_node.get_nodes(), *grouped_node.get_nodes()]
        return not (plain_ops.generates_scans() and _scans(nodes)) and is_enabled(outer_node, grouped_node)

    nested_reduction._is_enabled_for = staticmethod(_is_enabled_for)
    make_plan: Callable[..., Any] | None = getattr(SIMDScheduling, "_sub_parent_epilogue_plan", None)
    if make_plan is None:
        return

    @functools.wraps(make_plan)
    def _sub_parent_epilogue_plan(self: Any, nodes: Any, parent_numel: Any, parent_rnumel: Any) -> Any:
        if plain_ops.generates_scans() and _scans(nodes):
            return None
        return make_plan(self, nodes, parent_numel, parent_rnumel)

    setattr(SIMDScheduling, make_plan.__name__, _sub_parent_epilogue_plan)


def _add_to_header(kernel: Any, entry: Any, code: Any) -> None:
    """Writes what the index of a dimension becomes, after Inductor's own lines for it."""
    if entry.prefix == "x" and entry.tensor_dim == 0 and kernel.triton_tensor_ndim() == 2 and _is_time_major(kernel):
        code.writeline(f"{entry.name} = tl.max_contiguous({entry.name}, [{_ROWS_OF_A_THREAD}, 1])")
    if not entry.is_reduction:
        return
    # The mask was made of the index that counts up, and so leaves out the same steps.
    backwards, length = _runs_backwards(kernel), f"{entry.prefix}numel"
    if kernel.persistent_reduction and _holds_whole_columns(kernel):
        steps = heuristics.COLUMNS[_columns(kernel)].steps
        code.writeline(f"{entry.name} = register_groups.column_order({entry.name}, {steps})")
        if not kernel._has_constant_mask(entry):
            code.writeline(f"{entry.prefix}mask = {entry.name} < {length}")
    if _scans_by_groups(kernel):
        if backwards:
            code.writeline(f"{entry.name} = register_groups.mirrored({entry.name}, {length}, {_STEPS_OF_A_THREAD})")
        # Else the narrowest operand, such as a bool, would decide how many steps a thread loads.
        code.writeline(f"{entry.name} = tl.max_contiguous({entry.name}, [1, {_STEPS_OF_A_THREAD}])")
    elif backwards:
        code.writeline(f"{entry.name} = {length} - 1 - {entry.name}")


def _rewritten(kernel: Any, source: str) -> str:
    """A kernel's source, with the scans that a thread does over successive steps of its own."""
    scans = _scans_of_kernel(kernel)
    if not scans:
        return source
    holds_columns = kernel.persistent_reduction and _holds_whole_columns(kernel)
    in_groups, backwards = _scans_by_groups(kernel), _runs_backwards(kernel)
    orders: tuple[str, ...] = ("register_groups.column_order(",) if holds_columns else ()
    orders += () if not backwards else ("register_groups.mirrored(",) if in_groups else ("r0_numel - 1 - ",)
    generated_source.check_orders(source, orders)
    source = generated_source.with_imports(source)
    if holds_columns:
        columns = _columns(kernel)
        steps = heuristics.COLUMNS[columns].steps
        return generated_source.with_columns(source, columns, steps, scans[0].number)
    if in_groups and backwards:
        return generated_source.with_turned_groups(source, _STEPS_OF_A_THREAD, not kernel.persistent_reduction)
    return source


def _is_scanned(buffer_name: str) -> bool:
    return isinstance(getattr(V.graph.try_get_buffer(buffer_name), "data", None), DirectedScan)


def _with_strides_of_the_example(dependency: Any) -> Any:
    """Good for choosing an order of loops; whether the reordered loops match is decided by the symbols."""
    symbols = dependency.index.free_symbols - set(dependency.var_names)
    index = dependency.index.subs({symbol: size_hint(symbol) for symbol in symbols})
    return dataclasses.replace(dependency, index=index)


def _runs_backwards(kernel: Any) -> bool:
    scans = _scans_of_kernel(kernel)
    if not any(scan.reverse for scan in scans):
        return False
    nodes = list(kernel.features.scheduler_nodes())
    if not (all(scan.reverse for scan in scans) and not any(map(_needs_natural_order, nodes))):
        raise AssertionError("scans in opposite directions were fused into one kernel")
    if kernel.cooperative_reduction or kernel.mix_order_reduction or kernel.num_reduction_dims != 1:
        raise AssertionError("a scan from the last step to the first was fused into a kernel that cannot run backwards")
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
    shortest, longest = heuristics.WHOLE_COLUMNS
    if not isinstance(length, int | sympy.Integer) or columns >= heuristics.MANY_COLUMNS:
        return False
    return bool(shortest <= length <= longest)


def scans_in_columns(dtype: torch.dtype, number: float | None) -> bool:
    """All but pairs of float64 whose gates are not one known number: they need twice the registers."""
    return number is not None or dtype != torch.float64


def _columns(kernel: Any) -> str:
    """Which of `heuristics.COLUMNS`. From the graph: the kernel's loads are counted when it is written, too late."""
    nodes = list(kernel.features.scheduler_nodes())
    written = {dependency for node in nodes for dependency in node.read_writes.writes}
    operands = {dependency for node in nodes for dependency in node.read_writes.reads} - written
    return heuristics.columns_of(len(operands))


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


def _is_strict(node: Any) -> bool:
    """Whether a reduction asks for the natural order of its operands (torch 2.15, ``config.numerics``)."""
    return hasattr(node, "has_strict_reduction") and bool(node.has_strict_reduction())


def _runs_alike(node1: Any, node2: Any) -> bool:
    """Whether one kernel may hold both nodes, as far as it is about directed scans."""
    nodes = [*node1.get_nodes(), *node2.get_nodes()]
    scans = _scans(nodes)
    if not scans:
        return True
    if any(scan.reverse for scan in scans) and any(map(_needs_natural_order, nodes)):
        return False
    if any(_is_strict(node) for node in nodes):
        return False
    # Reductions over different axes share a kernel only by rearranging one of them, which a scan does not allow.
    return not (node1.is_reduction() and node2.is_reduction()) or node1.group == node2.group
