"""Every private part of torch that this folder uses, and what has to hold of it.

A version of torch that moves, renames or changes one of them is found here, before anything is wrapped or called; what
it changes without a trace in names and parameters, the generated code for one, is checked where it is used.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple


class Part(NamedTuple):
    """A module, or with `name` an attribute in it, and what it must have.

    `parameters`: of a function that is wrapped, exactly these. `takes`: parameters of a function or class that are
    given by name, or by position if nothing else is said. `attributes`: of a class, its instances or a module.
    `is_new`: versions without it need none of it.
    """

    module: str
    name: str = ""
    parameters: tuple[str, ...] | None = None
    takes: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()
    is_new: bool = False

    def __str__(self) -> str:
        return f"{self.module}.{self.name}" if self.name else self.module


_I = "torch._inductor"
_CONFIG = f"{_I}.config"
_IR = f"{_I}.ir"
_SIMD = f"{_I}.codegen.simd"
_TRITON = f"{_I}.codegen.triton"
_HEURISTICS = f"{_I}.runtime.triton_heuristics"

# fmt: off
PARTS: dict[str, tuple[Part, ...]] = {
    # configuration.py
    "backend": (
        Part(_CONFIG, attributes=("pre_grad_custom_pass",)),
        Part(f"{_I}.custom_graph_pass", "CustomGraphPass", attributes=("uuid", "__call__")),
        Part("torch", "_TorchCompileInductorWrapper", takes=("mode", "options", "dynamic"), attributes=("config",)),
    ),
    "listening": (
        Part("torch", "_TorchCompileInductorWrapper.__call__", takes=("model_", "inputs_")),
        Part("torch", "_TorchCompileInductorWrapper", attributes=("config",)),
    ),
    # dynamo.py, writes.py
    "passes": (
        Part("torch._dispatch.python", "enable_python_dispatcher", takes=()),
        Part("torch._dynamo.config", attributes=("assume_static_by_default",)),
        Part("torch._subclasses", "FakeTensor", attributes=("fake_mode",)),
        Part("torch._subclasses", "FakeTensorMode", attributes=("shape_env", "__enter__")),
        Part("torch.fx.experimental.sym_node", "SymNode", attributes=("hint",)),
        Part("torch.fx.experimental.symbolic_shapes", "ShapeEnv", attributes=("ignore_fresh_unbacked_symbols",)),
        Part("torch.fx.experimental.symbolic_shapes", "statically_known_true", takes=("x",)),
        Part("torch.amp.autocast_mode", "_enter_autocast"),
        Part("torch.amp.autocast_mode", "_exit_autocast", takes=("mode",)),
        Part("torch._C", "_set_grad_enabled"),
        Part("torch.utils._python_dispatch", "TorchDispatchMode", attributes=("__torch_dispatch__", "__enter__")),
        Part("torch._ops", "OpOverload", attributes=("_schema",)),
        Part("torch", "UntypedStorage", attributes=("_cdata",)),
    ),
    # breaks.py
    "breaks": (
        Part("torch._dynamo.output_graph", attributes=("graph_break_reasons",)),
        Part("torch._dynamo.output_graph", "GraphCompileReason", attributes=("reason", "user_stack")),
        Part("torch._dynamo.utils", attributes=("counters",)),
    ),
    # wrappers.py
    "wrappers": (
        Part("torch._dynamo.eval_frame", "OptimizedModule", attributes=("_orig_mod",)),
        Part("torch.nn", "Module", attributes=("_compiled_call_impl", "_call_impl")),
    ),
    # tracing.py
    "tracing": (
        Part("torch._guards", "TracingContext", attributes=("try_get",)),
    ),
    # lowering.py, codegen.py, plain_ops.py, heuristics.py
    "scans": (
        Part(_CONFIG, attributes=("pre_grad_custom_pass",)),
        Part(_CONFIG, "triton", attributes=(
            "persistent_reductions", "tile_reductions", "use_block_ptr", "use_tensor_descriptor")),
        Part(_IR, "Scan", takes=(
            "device", "dtype", "inner_fn", "ranges", "scan_ranges", "size", "combine_fn", "reindex", "reduction_hint",
            "output_index", "dtypes", "inner_fns")),
        Part(_IR, "Scan.store_reduction", parameters=("self", "output_name", "indexer", "vars", "scan_vars")),
        Part(_IR, "ir_dataclass"),
        Part(_IR, "Sort"),
        Part(_IR, "Reduction", attributes=("reduction_type",)),
        Part(_IR, "TensorBox", attributes=("create", "realize", "make_loader", "get_size", "get_dtype", "get_device")),
        Part(_IR, "Pointwise", takes=("device", "dtype", "inner_fn", "ranges"), attributes=("create",)),
        Part(_IR, "ExternKernel.require_stride_order", takes=("x", "order")),
        Part(_IR, "get_stride_order", takes=("seq", "shape_env")),
        Part(f"{_I}.lowering", attributes=("lowerings", "constrain_to_fake_tensors")),
        Part(f"{_I}.lowering", "register_lowering", takes=("aten_fn", "type_promotion_kind")),
        Part(f"{_I}.lowering", "fallback_handler", takes=("kernel", "add_to_fallback_set")),
        Part(f"{_I}.lowering", "tag_to_layout_constraint", takes=("tag",)),
        Part(f"{_I}.lowering", "get_constant_value", takes=("x",)),
        Part(f"{_I}.lowering", "to_dtype", takes=("x", "dtype")),
        Part("torch._library.utils", "get_layout_constraint_tag", takes=("fn", "with_default")),
        Part("torch._ops", "OpOverload", attributes=("is_view",)),
        Part(f"{_I}.virtualized", attributes=("V", "ops")),
        Part(f"{_I}.ops_handler", "OpsHandler", attributes=(
            "abs", "add", "constant", "eq", "gt", "index_expr", "le", "logical_and", "logical_not", "lt", "masked",
            "mul", "ne", "scan", "store", "to_dtype", "where")),
        Part(f"{_I}.graph", "GraphLowering", attributes=("sizevars", "current_node", "has_feature", "try_get_buffer")),
        Part(f"{_I}.sizevars", "SizeVarAllocator", attributes=("shape_env", "statically_known_equals")),
        Part(f"{_I}.sizevars", "SizeVarAllocator.optimization_hint", takes=("expr",)),
        Part(f"{_I}.codegen.common", "BackendFeature", attributes=("SCAN", "TUPLE_REDUCTION")),
        Part(f"{_I}.runtime.hints", "ReductionHint", attributes=("INNER", "OUTER")),
        Part(f"{_I}.runtime.hints", "HeuristicType", attributes=("REDUCTION", "PERSISTENT_REDUCTION")),
        Part(_SIMD, "SIMDScheduling.can_fuse", parameters=("self", "node1", "node2")),
        Part(_SIMD, "SIMDScheduling.can_fuse_vertical", parameters=("self", "node1", "node2")),
        Part(_SIMD, "SIMDScheduling.can_fuse_horizontal", parameters=("self", "node1", "node2")),
        Part(_SIMD, "SIMDScheduling._sub_parent_epilogue_plan",
             parameters=("self", "nodes", "parent_numel", "parent_rnumel"), is_new=True),
        Part(f"{_I}.scheduler", "NestedReduction._is_enabled_for",
             parameters=("outer_node", "grouped_node"), is_new=True),
        Part(f"{_I}.scheduler", "BaseSchedulerNode", attributes=("get_nodes", "is_reduction", "group", "read_writes")),
        Part(_TRITON, "TritonKernel", attributes=(
            "features", "numels", "persistent_reduction", "cooperative_reduction", "mix_order_reduction",
            "num_reduction_dims", "triton_tensor_ndim", "_has_constant_mask")),
        Part(_TRITON, "TritonKernel.iteration_ranges_codegen_header", parameters=("self", "entry", "code")),
        Part(_TRITON, "TritonKernel.codegen_kernel", parameters=("self", "name")),
        Part(_TRITON, "TritonKernel.should_use_persistent_reduction", parameters=("self",)),
        Part(_SIMD, "IterationRangesRoot", attributes=("name", "prefix", "tensor_dim", "is_reduction")),
        Part(f"{_I}.codegen.simd_kernel_features", "SIMDKernelFeatures", attributes=("scheduler_nodes",)),
        Part(f"{_I}.dependencies", "ReadWrites", attributes=("reads", "writes")),
        Part(f"{_I}.dependencies", "MemoryDep", attributes=("index", "name", "var_names")),
        Part(f"{_I}.dependencies", "MemoryDep.decide_loop_order_to_match", parameters=("self", "other")),
        Part(_HEURISTICS, "reduction", takes=("size_hints", "reduction_hint")),
        Part(_HEURISTICS, "persistent_reduction", takes=("size_hints", "reduction_hint")),
        Part(_HEURISTICS, "cached_autotune", takes=(
            "size_hints", "configs", "triton_meta", "inductor_meta", "heuristic_type", "filename")),
        Part(_HEURISTICS, "InductorConfig", takes=("dynamic_scale_rblock",)),
        Part(f"{_I}.compile_fx", "_InProcessFxCompile.codegen_and_compile",
             parameters=("self", "gm", "example_inputs", "inputs_to_check", "graph_kwargs")),
        Part("torch._guards", "TracingContext", attributes=("try_get",)),
    ),
}
# fmt: on

_found: dict[str, tuple[str, ...]] = {}


def missing(part: str) -> tuple[str, ...]:
    """What this torch lacks of what a part of the package needs, as clauses; imports the modules that it looks at."""
    if part not in _found:
        _found[part] = tuple(lack for need in PARTS[part] if (lack := lack_of(need)) is not None)
    return _found[part]


def found_missing(part: str) -> tuple[str, ...]:
    """`missing`, as far as it has been asked already."""
    return _found.get(part, ())


def lack_of(part: Part) -> str | None:
    """What is not there, or not as it was; None: nothing."""
    found = _resolved(part)
    if found is _NOTHING:
        return None if part.is_new else str(part)
    if part.parameters is not None or part.takes:
        given = _parameters(found)
        if given is None:
            return f"the parameters of {part}"
        if part.parameters is not None and given != part.parameters:
            return f"{part}({', '.join(part.parameters)}): it takes ({', '.join(given)})"
        unknown = [name for name in part.takes if name not in given]
        if unknown:
            return f"the parameter {unknown[0]} of {part}"
    lost = [name for name in part.attributes if not _has(found, name)]
    return f"{part}.{lost[0]}" if lost else None


_NOTHING = object()


def _resolved(part: Part) -> Any:
    try:
        found: Any = importlib.import_module(part.module)
    except ImportError:
        return _NOTHING
    for name in part.name.split(".") if part.name else ():
        found = (
            inspect.getattr_static(found, name, _NOTHING) if inspect.isclass(found) else getattr(found, name, _NOTHING)
        )
        if found is _NOTHING:
            return _NOTHING
    return found.__func__ if isinstance(found, staticmethod | classmethod) else found


def _parameters(function: Any) -> tuple[str, ...] | None:
    try:
        return tuple(inspect.signature(function).parameters)
    except (TypeError, ValueError):
        return None


def _has(found: Any, name: str) -> bool:
    """Whether a module or an object has an attribute, or a class or its instances."""
    if not inspect.isclass(found):
        return hasattr(found, name)
    return hasattr(found, name) or name in _set_by_instances(found)


def _set_by_instances(owner: type) -> frozenset[str]:
    return frozenset(name for base in owner.__mro__ for name in _set_by(base))


def _set_by(owner: type) -> Iterator[str]:
    """The attributes that a class declares for its instances, and those that its `__init__` names."""
    yield from vars(owner).get("__annotations__", ())
    code = getattr(vars(owner).get("__init__"), "__code__", None)
    if code is not None:
        yield from code.co_names
