"""Where private names of torch may be used: the compiler's in compile/inductor alone, the others where a table says."""

from __future__ import annotations

import ast
import functools
import importlib.util
import re
from pathlib import Path

import pytest

import torch_dcs_ops

PACKAGE = Path(torch_dcs_ops.__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "internals" / "inductor.md"
ROOM = PACKAGE / "compile" / "inductor"
FOLDERS = ("compile", "distributed", "ops", "reference", "integrations", "cli")

PRIVATE = re.compile(r"torch(\.\w+)*\.(_[a-zA-Z]\w*|fx\.experimental)(\.\w+)*")
# What may be set or defined in this package too, and is torch's all the same.
NEVER_OWN = {"_call_impl", "_compiled_call_impl", "_orig_mod", "_schema", "_cdata", "_local_tensor"}
OF_NAMED_TUPLES = {"_asdict", "_fields", "_make", "_replace"}
ACCESSORS = ("getattr", "hasattr", "setattr", "delattr", "attrgetter")

_AUTOGRAD, _HEADS = "ops/_common/autograd.py", "integrations/transformers/head.py"
# What stays outside, and where: no public name says the same. docs/internals/inductor.md has the reasons.
DECLARED: dict[str, tuple[str, ...]] = {
    # Keys, levels and modes of the dispatcher.
    "torch._C.DispatchKey": ("ops", "distributed/dtensor"),
    "torch._C.DispatchKeySet": ("ops",),
    "torch._C._AutoDispatchBelowAutograd": ("ops", "distributed"),
    "torch._C._ExcludeDispatchKeyGuard": ("ops",),
    "torch._C._TorchDispatchModeKey": (_AUTOGRAD,),
    "torch._C._after_autograd_keyset": (_AUTOGRAD,),
    "torch._C._are_functorch_transforms_active": ("ops", "distributed/common.py"),
    "torch._C._dispatch_call_boxed": (_AUTOGRAD,),
    "torch._C._dispatch_keys": ("ops",),
    "torch._C._get_dispatch_mode": (_AUTOGRAD,),
    "torch._C._is_any_autocast_enabled": ("ops",),
    "torch._C._is_torch_function_mode_enabled": ("ops/scan/autograd.py",),
    "torch._C._is_tracing": ("ops/scan/autograd.py",),
    "torch._C._len_torch_dispatch_stack": ("ops", "distributed/scan/head.py"),
    # Autograd and functorch.
    "torch._C._autograd._get_current_graph_task_keep_graph": ("ops/linear_cross_entropy/scale.py",),
    "torch._C._autograd._top_saved_tensors_default_hooks": ("ops/linear_cross_entropy/scale.py",),
    "torch._C._functorch.TransformType": (_AUTOGRAD,),
    "torch._C._functorch.peek_interpreter_stack": (_AUTOGRAD,),
    "torch._C._functorch._add_batch_dim": ("ops/_common/vmap.py",),
    "torch._C._functorch._unwrap_batched": ("ops/_common/vmap.py",),
    "torch._VF._unpack_dual": (_AUTOGRAD,),
    "torch._functorch.pyfunctorch.retrieve_current_functorch_interpreter": ("ops/_common/vmap.py",),
    "torch._functorch.utils.enable_single_level_autograd_function": (_AUTOGRAD,),
    "torch.autograd.forward_ad._current_level": ("ops",),
    "torch.autograd.forward_ad._is_fwd_grad_enabled": (_AUTOGRAD,),
    "torch.autograd.forward_ad._set_fwd_grad_enabled": ("ops",),
    "torch.autograd.function._SingleLevelFunction": (_AUTOGRAD,),
    "._autograd_function_id": (_AUTOGRAD,),
    "._handle": (_AUTOGRAD,),
    # Operators, and what they are by their schemas.
    "torch._assert_async": ("reference", "triton_kernels", "distributed/linear_cross_entropy/targets.py"),
    "torch.fx.experimental.symbolic_shapes.guard_or_false": ("ops/_common/validate.py",),
    "torch.ops._c10d_functional": ("distributed/common.py",),
    "torch.ops.aten._softmax_backward_data": ("reference/softmax.py",),
    "._op_dk": ("distributed/dtensor",),
    "._schema": ("distributed/dtensor",),
    # A user's model, as transformers, PEFT, FSDP and torch.compile left it.
    "torch.utils._python_dispatch.is_traceable_wrapper_subclass": ("integrations/transformers/patch.py",),
    "._adapters": (_HEADS,),
    "._backward_hooks": (_HEADS,),
    "._backward_pre_hooks": (_HEADS,),
    "._forward_hooks": (_HEADS,),
    "._forward_pre_hooks": (_HEADS,),
    "._get_fsdp_state": ("integrations/transformers",),
    "._loss_function": ("integrations/transformers/patch.py",),
    "._orig_mod": ("integrations/transformers/patch.py",),
}


def triton_kernels() -> Path:
    spec = importlib.util.find_spec("torch_dcs_ops.triton_kernels")
    assert spec is not None
    return Path(str(spec.origin)).parent


def sources() -> dict[str, str]:
    """The files outside of compile/inductor, by their place in the package."""
    roots = [(PACKAGE, path) for folder in FOLDERS for path in (PACKAGE / folder).rglob("*.py")]
    roots += [(PACKAGE, path) for path in PACKAGE.glob("*.py")]
    kernels = triton_kernels()
    roots += [(kernels.parent, path) for path in kernels.rglob("*.py")]
    return {path.relative_to(root).as_posix(): path.read_text() for root, path in roots if ROOM not in path.parents}


def own_names(trees: list[ast.Module]) -> set[str]:
    """What modules define: functions, classes, and names that modules, classes and objects get."""
    found = set(OF_NAMED_TUPLES)
    for node in (node for tree in trees for node in ast.walk(tree)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.Module | ast.ClassDef):
            for line in node.body:
                targets = line.targets if isinstance(line, ast.Assign) else [getattr(line, "target", line)]
                found |= {target.id for target in targets if isinstance(target, ast.Name)}
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.add(node.attr)
    return found - NEVER_OWN


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


class Names(ast.NodeVisitor):
    """Line and name of what is private and not this package's own: of torch with its module, of objects as `.name`."""

    def __init__(self, tree: ast.Module, own: set[str]) -> None:
        self.own = own
        self.found: list[tuple[int, str]] = []
        self.modules: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                self.modules |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
            if isinstance(node, ast.Import):
                self.modules |= {alias.asname: alias.name for alias in node.names if alias.asname}
        self.visit(tree)

    def see(self, node: ast.AST, name: str) -> None:
        if PRIVATE.fullmatch(name) and not name.startswith("torch.ops.dcs."):
            self.found.append((getattr(node, "lineno", 0), name))

    def see_attribute(self, node: ast.AST, name: str) -> None:
        if is_private(name) and name not in self.own:
            self.found.append((getattr(node, "lineno", 0), f".{name}"))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self.see(node, alias.name)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in () if node.level else node.names:
            self.see(node, f"{node.module}.{alias.name}")

    def visit_Constant(self, node: ast.Constant) -> None:
        if isinstance(node.value, str):
            self.see(node, node.value)

    def visit_Call(self, node: ast.Call) -> None:
        function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        for argument in node.args if function in ACCESSORS else ():
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                self.see_attribute(node, argument.value)
        self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> None:
        parts, base = [node.attr], node.value
        while isinstance(base, ast.Attribute):
            parts.append(base.attr)
            base = base.value
        root = self.modules.get(base.id, base.id) if isinstance(base, ast.Name) else ""
        if root.split(".")[0] == "torch":
            self.see(node, ".".join([root, *reversed(parts)]))
            return
        for part in parts:
            self.see_attribute(node, part)
        self.visit(base)


def private_names(source: str) -> list[tuple[int, str]]:
    tree = ast.parse(source)
    return Names(tree, own_names([tree])).found


@functools.cache
def found_in_package() -> list[tuple[str, int, str]]:
    trees = {place: ast.parse(text) for place, text in sources().items()}
    own = own_names(list(trees.values()))
    return [(place, line, name) for place, tree in trees.items() for line, name in Names(tree, own).found]


def entries(place: str, name: str) -> list[str]:
    """The lines of the table by which a name may be used there."""
    return [
        entry
        for entry, rooms in DECLARED.items()
        if f"{name}.".startswith(f"{entry}.") and any(f"{place}/".startswith(f"{room}/") for room in rooms)
    ]


def test_private_names_are_used_in_one_folder_or_declared() -> None:
    assert len(sources()) > 100
    assert [f"{place}:{line}: {name}" for place, line, name in found_in_package() if not entries(place, name)] == []


def test_what_is_declared_is_used() -> None:
    used = [(place, name) for place, _, name in found_in_package()]
    unused = [
        f"{entry} in {room}"
        for entry, rooms in DECLARED.items()
        for room in rooms
        if not any(entry in entries(place, name) and f"{place}/".startswith(f"{room}/") for place, name in used)
    ]
    assert unused == []


def test_what_is_declared_is_documented() -> None:
    if not PAGE.exists():
        pytest.skip("not a source checkout")
    text = PAGE.read_text()
    assert [name for name in DECLARED if f"{name.split('.')[-1]}`" not in text] == []


def test_private_names_are_seen() -> None:
    planted = """
import torch._inductor.config
from torch._dynamo import config
from torch import _guards
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils._python_dispatch import TorchDispatchMode
from torch.autograd import forward_ad
value = torch._inductor.config.triton, forward_ad._current_level
generated = "torch._inductor.runtime.hints"
public = torch.compiler.is_compiling(), torch.ops.dcs._scan, torch.__version__
class Own:
    _limit = 1
    def _method(self, model, module):
        self._state = call()._replace(a=1)
        return self._method(), other._limit, other._state, getattr(other, "_state")
inner = getattr(model, "_orig_mod", model)
called = module.layers[0]._call_impl, hasattr(module, "_compiled_call_impl"), function._schema.arguments
"""
    assert {name for _, name in private_names(planted)} == {
        *("torch._inductor.config", "torch._dynamo.config", "torch._guards", "torch._inductor.config.triton"),
        *("torch.fx.experimental.symbolic_shapes.ShapeEnv", "torch.utils._python_dispatch.TorchDispatchMode"),
        *("torch.autograd.forward_ad._current_level", "torch._inductor.runtime.hints"),
        *("._orig_mod", "._call_impl", "._compiled_call_impl", "._schema"),
    }
