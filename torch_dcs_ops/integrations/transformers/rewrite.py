"""A forward of transformers with its logits deferred: the same source, where the head's product becomes `Logits`.

`rewritten` follows the logits from the head through the source of a forward. What it knows to do with logits that are
not formed (a scale, a softcap, a bias, a slice, a cross entropy, being returned) becomes a method of `Logits`; whatever
else happens to them refuses the forward. All other statements stay as they are: the router's loss, the shifted decoder
inputs, the output class.
"""

from __future__ import annotations

import ast
import copy
import inspect
import linecache
import textwrap
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional
from transformers.utils import ModelOutput

# They document the class's forward and do nothing in a call.
_DOCUMENTING = ("auto_docstring", "add_start_docstrings", "add_code_sample_docstrings", "replace_return_docstrings")
_KEPT = ("float", "contiguous")  # methods of Logits as they are of tensors
_BODY = {"body", "orelse"}


class Refused(Exception):
    """Why a forward is not understood, a part of a sentence."""


class Helpers(NamedTuple):
    """What the rewritten forward calls."""

    defer: Callable[..., Any]  # (head, hidden) -> Logits
    loss_function: Callable[..., Any]  # (model, *args of model.loss_function)
    criterion: Callable[..., Any]  # (nn.CrossEntropyLoss, logits, target)
    cross_entropy: Callable[..., Any]  # as functional.cross_entropy


class Found(NamedTuple):
    """What is in a forward that was rewritten."""

    heads: list[nn.Module]
    calls_loss_function: bool  # of the model; else only functions of torch


def rewritten(owner: nn.Module, head: nn.Module | None, helpers: Helpers) -> tuple[Callable[..., Any], Found]:
    """The forward of owner's class, unbound, with the logits of `head` deferred.

    Args:
        owner: a model or, within one, the module that ends in `head`.
        head: the module whose output the logits are. None: whichever nn.Linear makes what the loss is of.
        helpers: what the rewritten forward calls.

    Raises:
        Refused: the source cannot be read, or does with the logits what is not known.
    """
    function, rewriter = _rewritten(owner, head, helpers, is_model=True)
    return function, Found(rewriter.heads, "_dcs_loss_function" in rewriter.losses)


def _rewritten(
    owner: nn.Module, head: nn.Module | None, helpers: Helpers, is_model: bool
) -> tuple[Callable[..., Any], _Rewriter]:
    original: Any = inspect.unwrap(type(owner).forward)
    name = f"{type(owner).__name__}.forward"
    if original.__code__.co_freevars:
        raise Refused(
            f"{name} uses {', '.join(original.__code__.co_freevars)} of where it was defined, as super() does"
        )
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(original)))
    except (OSError, SyntaxError, TypeError) as error:
        raise Refused(f"the source of {name}, by which it knows what that does, cannot be read") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise Refused(f"the source of {name} is not that of a function")
    rewriter = _Rewriter(owner, head, helpers, original.__globals__, is_model)
    rewriter.function(definition)
    if is_model and not rewriter.losses:
        raise Refused(f"{name} computes no cross entropy of logits that its own head makes")

    names = ("_dcs_defer", "_dcs_loss_function", "_dcs_criterion", "_dcs_cross_entropy", "_dcs_parts")
    factory = ast.parse(f"def factory({', '.join(names)}):\n  pass\n  return {definition.name}")
    factory.body[0].body[0] = definition  # type: ignore[attr-defined]
    source = ast.unparse(ast.fix_missing_locations(factory))
    place = f"<fused_loss of {original.__module__}.{original.__qualname__}>"
    linecache.cache[place] = (len(source), None, source.splitlines(keepends=True), place)
    made: dict[str, Any] = {}
    exec(compile(source, place, "exec"), original.__globals__, made)  # noqa: S102  (transformers' own source)
    return made["factory"](*helpers, rewriter.parts), rewriter


class _Rewriter(ast.NodeTransformer):
    def __init__(
        self, owner: nn.Module, head: nn.Module | None, helpers: Helpers, names: dict[str, Any], is_model: bool
    ) -> None:
        self._owner = owner
        self._head = head
        self._helpers = helpers
        self._globals = names
        self._is_model = is_model
        self._deferred: set[str] = set()  # names that hold Logits here
        self._unsure: set[str] = set()  # names that hold Logits, or something else
        self._criteria: set[str] = set()  # names that hold an nn.CrossEntropyLoss
        self._softcapped = False
        self._statement: ast.AST | None = None
        self.parts: list[Callable[..., Any]] = []  # rewritten forwards of modules that end in the head
        self.heads: list[nn.Module] = []
        self.losses: set[str] = set()

    # --- statements -------------------------------------------------------------------------------------------------

    def function(self, definition: ast.FunctionDef) -> None:
        definition.decorator_list = [
            d for d in definition.decorator_list if not _name_of_decorator(d).startswith(_DOCUMENTING)
        ]
        arguments = definition.args
        every = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, arguments.vararg, arguments.kwarg]
        for argument in every:
            if argument is not None:
                argument.annotation = None
        definition.returns = None
        body = definition.body
        if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant):
            body = body[1:]
        definition.body = self._block(body)

    def _block(self, statements: list[ast.stmt]) -> list[ast.stmt]:
        done: list[ast.stmt] = []
        index = 0
        while index < len(statements):
            capped = self._softcap_at(statements, index)
            if capped is not None:
                done.append(capped)
                index += 3
                continue
            statement = statements[index]
            index += 1
            if not isinstance(statement, (ast.If, ast.For, ast.While, ast.With)):
                self._statement = statement
            new = self.visit(statement)
            done.extend(new if isinstance(new, list) else [new])
        return done

    def _softcap_at(self, statements: list[ast.stmt], index: int) -> ast.stmt | None:
        """x = x / c; x = tanh(x); x = x * c, as one statement."""
        three = statements[index : index + 3]
        if len(three) < 3 or any(_assigned(s) is None for s in three):
            return None
        (name, first), (second_name, second), (third_name, third) = map(_assigned, three)  # type: ignore[misc]
        if not (name == second_name == third_name and isinstance(first, ast.BinOp) and isinstance(first.op, ast.Div)):
            return None
        argument = self._tanh_of(second)
        wanted = ast.BinOp(ast.Name(name, ast.Load()), ast.Mult(), first.right)
        if not (_same(argument, ast.Name(name, ast.Load())) and _same(third, wanted)):
            return None
        self._statement = three[0]
        inner = self.deferred(first.left)
        if inner is None:
            return None
        self._set(name, True)
        return _assign(name, self._capped(inner, first.right))

    def visit_If(self, node: ast.If) -> Any:
        self._statement = node.test
        node.test = self.visit(node.test)
        before = (set(self._deferred), set(self._unsure))
        states: list[tuple[set[str], set[str]] | None] = []
        for block in (node.body, node.orelse):
            self._deferred, self._unsure = set(before[0]), set(before[1])
            block[:] = self._block(block)
            ends = bool(block) and isinstance(block[-1], (ast.Return, ast.Raise))
            states.append(None if ends else (self._deferred, self._unsure))
        chosen = self._choice(node.test)
        if chosen is not None and None not in states and states[0] != states[1]:
            # One head or another, chosen when the model was made.
            text = f"fused_loss: {ast.unparse(node.test)} was {chosen} and has changed"
            other = ast.parse(f"raise RuntimeError({text!r})").body
            node.body, node.orelse = (node.body, other) if chosen else (other, node.orelse)
            states[int(chosen)] = None
        self._merge([state for state in states if state is not None])
        return node

    def _choice(self, test: ast.expr) -> bool | None:
        """What `self.a` or `self.config.a` is, if that is a bool and not `self.training`."""
        path = ast.unparse(test).split(".") if isinstance(test, ast.Attribute) else []
        if not path or path[0] != "self" or path[-1] == "training":
            return None
        found: Any = self._owner
        for name in path[1:]:
            found = getattr(found, name, None)
        return found if isinstance(found, bool) else None

    def _loop(self, node: Any) -> Any:
        self._statement = node
        for name, value in ast.iter_fields(node):
            if name not in _BODY and isinstance(value, ast.AST):
                setattr(node, name, self.visit(value))
        before = (set(self._deferred), set(self._unsure))
        node.body = self._block(node.body)
        node.orelse = self._block(node.orelse)
        self._merge([before, (self._deferred, self._unsure)])
        return node

    visit_For = visit_While = _loop

    def visit_With(self, node: ast.With) -> Any:
        node.items = [self.visit(item) for item in node.items]
        node.body = self._block(node.body)
        return node

    def _merge(self, branches: list[tuple[set[str], set[str]]]) -> None:
        deferred = [held for held, _ in branches]
        self._deferred = set.intersection(*deferred) if deferred else set()
        either: set[str] = set().union(*deferred, *(unsure for _, unsure in branches))
        self._unsure = either - self._deferred

    def _set(self, name: str, is_deferred: bool) -> None:
        self._unsure.discard(name)
        (self._deferred.add if is_deferred else self._deferred.discard)(name)

    def visit_Assign(self, node: ast.Assign) -> Any:
        target = node.targets[0]
        if len(node.targets) != 1 or not isinstance(target, ast.Name):
            return self.generic_visit(node)
        value = self.deferred(node.value)
        if value is not None:
            self._set(target.id, True)
            return _assign(target.id, value)
        if isinstance(node.value, ast.Call) and self._global(node.value.func) is nn.CrossEntropyLoss:
            self._criteria.add(target.id)
        else:
            self._criteria.discard(target.id)
        node.value = self.visit(node.value)
        self._set(target.id, False)
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        return self.visit(_assign(node.target.id, node.value)) if node.value else []

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if isinstance(node.target, ast.Name) and node.target.id in self._deferred:
            value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            return self.visit_Assign(_assign(node.target.id, value))
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> Any:
        if self._is_model or node.value is None:
            return self.generic_visit(node)
        value = self.deferred(node.value)
        if value is None:
            self._refuse(node)
        return ast.Return(value)

    # --- expressions ------------------------------------------------------------------------------------------------

    def deferred(self, node: ast.expr) -> ast.expr | None:
        """`node` rewritten if its value is Logits, else None."""
        if isinstance(node, ast.Name):
            return node if node.id in self._deferred else None
        if isinstance(node, ast.BinOp):
            return self._operation(node)
        if isinstance(node, ast.Subscript):
            inner = self.deferred(node.value)
            return None if inner is None else ast.Subscript(inner, self._leading(node), ast.Load())
        if not isinstance(node, ast.Call):
            return None
        module = self._module(node.func)
        if module is not None:
            return self._call_of_module(node, module)
        if not isinstance(node.func, ast.Attribute):
            return None
        inner = self.deferred(node.func.value)
        if inner is None:
            return None
        method, arguments = node.func.attr, [ast.unparse(a) for a in node.args]
        if method in _KEPT and not (node.args or node.keywords):
            return _method(inner, method)
        if method in ("view", "reshape") and len(arguments) == 2 and arguments[0] == "-1":
            return _method(inner, "rows")
        keywords = {k.arg: ast.unparse(k.value) for k in node.keywords}
        if method == "to" and (arguments == ["torch.float32"] or keywords == {"dtype": "torch.float32"}):
            return _method(inner, "float")
        self._refuse(node)

    def _operation(self, node: ast.BinOp) -> ast.expr | None:
        left, right = self._tanh_of(node.left), self.deferred(node.left)
        if isinstance(node.op, ast.Mult) and isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div):
            inner = self.deferred(left.left)  # tanh(x / c) * c
            if inner is not None and _same(left.right, node.right):
                return self._capped(inner, node.right)
        inner, other = right, node.right
        if inner is None and isinstance(node.op, (ast.Mult, ast.Add)):
            inner, other = self.deferred(node.right), node.left
        if inner is None:
            return None
        method = {ast.Mult: "times", ast.Div: "over", ast.Add: "plus"}.get(type(node.op))
        if method is None or self._softcapped:
            self._refuse(node)
        return _method(inner, method, self.visit(other))

    def _capped(self, inner: ast.expr, cap: ast.expr) -> ast.expr:
        if self._softcapped:
            self._refuse(cap)
        self._softcapped = True
        return _method(inner, "softcapped", self.visit(copy.deepcopy(cap)))

    def _tanh_of(self, node: ast.expr) -> ast.expr | None:
        if isinstance(node, ast.Call) and len(node.args) == 1 and not node.keywords:
            called = self._global(node.func)
            if called is not None and getattr(called, "__name__", "") == "tanh":
                return node.args[0]
        return None

    def _leading(self, node: ast.Subscript) -> ast.expr:
        """An index that leaves the classes, the last dimension, alone."""
        index = node.slice
        if isinstance(index, ast.Tuple):
            before_classes = len(index.elts) < 3 and not any(_is_ellipsis(e) for e in index.elts)
            if not (before_classes or ast.unparse(index.elts[-1]) == ":"):
                self._refuse(node)
        return self.visit(index)  # type: ignore[no-any-return]

    def _call_of_module(self, node: ast.Call, module: nn.Module) -> ast.expr | None:
        is_head = module is self._head or (self._head is None and isinstance(module, nn.Linear))
        if is_head:
            if len(node.args) != 1 or node.keywords:
                self._refuse(node)
            inner = self.deferred(node.args[0])
            if inner is not None:
                self._refuse(node)
            self.heads.append(module)
            return _call("_dcs_defer", node.func, self.visit(node.args[0]))
        if self._head is None or not any(part is self._head for part in module.modules()):
            return None
        if not self._is_last(module):
            return None
        function, rewriter = _rewritten(module, self._head, self._helpers, is_model=False)
        self._softcapped = self._softcapped or rewriter._softcapped
        self.heads.extend(rewriter.heads)
        self.parts.append(function)
        part = ast.Subscript(ast.Name("_dcs_parts", ast.Load()), ast.Constant(len(self.parts) - 1), ast.Load())
        call = ast.Call(part, [node.func, *map(self.visit, node.args)], [self.visit(k) for k in node.keywords])
        return call

    def _is_last(self, module: nn.Module) -> bool:
        """Whether module is the part of the model that ends in its head, and not all of it but the loss."""
        return not any(isinstance(part, nn.Embedding) for part in module.modules())

    def visit_Call(self, node: ast.Call) -> Any:
        logits = [self.deferred(a) for a in node.args if not isinstance(a, ast.Starred)]
        named = [self.deferred(k.value) for k in node.keywords]
        if not any(v is not None for v in (*logits, *named)):
            return self.generic_visit(node)
        kind = self._loss_kind(node)
        if kind is not None:
            self.losses.add(kind)
            return _call(
                kind, *self._before(kind, node), *map(self._argument, node.args),
                keywords=[ast.keyword(k.arg, self._argument(k.value)) for k in node.keywords],
            )  # fmt: skip
        made = self._global(node.func)
        if isinstance(made, type) and issubclass(made, ModelOutput):
            node.args = [self._returned(a) for a in node.args]
            node.keywords = [ast.keyword(k.arg, self._returned(k.value)) for k in node.keywords]
            return node
        inner = self.deferred(node)
        if inner is not None:
            self._refuse(node)
        return self.generic_visit(node)

    def _loss_kind(self, node: ast.Call) -> str | None:
        text = ast.unparse(node.func)
        if text == "self.loss_function":
            return "_dcs_loss_function"
        is_criterion = text in self._criteria or type(self._module(node.func)) is nn.CrossEntropyLoss
        if is_criterion and len(node.args) == 2 and not node.keywords:
            return "_dcs_criterion"
        return "_dcs_cross_entropy" if self._global(node.func) is functional.cross_entropy else None

    def _before(self, kind: str, node: ast.Call) -> list[ast.expr]:
        if kind == "_dcs_loss_function":
            return [ast.Name("self", ast.Load())]
        return [node.func] if kind == "_dcs_criterion" else []

    def _argument(self, node: ast.expr) -> ast.expr:
        value = self.deferred(node)
        return self.visit(node) if value is None else value

    def _returned(self, node: ast.expr) -> ast.expr:
        value = self.deferred(node)
        return self.visit(node) if value is None else _method(value, "formed", _training())

    def visit_Tuple(self, node: ast.Tuple) -> Any:
        done: list[ast.expr] = []
        for element in node.elts:
            value = self.deferred(element)
            if value is None:
                done.append(self.visit(element))
            else:
                done.append(ast.Starred(_method(value, "as_tuple", _training()), ast.Load()))
        return ast.Tuple(done, node.ctx)

    def visit_Attribute(self, node: ast.Attribute) -> Any:
        if node.attr in ("device", "shape"):
            value = self.deferred(node.value)
            if value is not None:
                return ast.Attribute(value, node.attr, ast.Load())
        return self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> Any:
        if isinstance(node.ops[0], (ast.Is, ast.IsNot)) and self.deferred(node.left) is not None:
            return node
        return self.generic_visit(node)

    def visit_Name(self, node: ast.Name) -> Any:
        if isinstance(node.ctx, ast.Load) and node.id in self._deferred | self._unsure:
            self._refuse(node)
        return node

    # --- looking things up ------------------------------------------------------------------------------------------

    def _refuse(self, node: ast.AST) -> Any:
        line = ast.unparse(self._statement or node).split("\n")[0]
        line = line if len(line) < 120 else f"{line[:117]}..."
        raise Refused(f"{type(self._owner).__name__}.forward does with its logits what is not known: `{line}`")

    def _module(self, node: ast.expr) -> nn.Module | None:
        """What `self.a.b` is, if it is a module."""
        path = ast.unparse(node).split(".") if isinstance(node, ast.Attribute) else []
        if not path or path[0] != "self" or not all(name.isidentifier() for name in path):
            return None
        found: Any = self._owner
        for name in path[1:]:
            found = getattr(found, name, None)
            if not isinstance(found, nn.Module):
                return None
        return found  # type: ignore[no-any-return]

    def _global(self, node: ast.expr) -> Any:
        """What a dotted name of the forward's module is, None if it has none."""
        path = ast.unparse(node).split(".") if isinstance(node, (ast.Name, ast.Attribute)) else [""]
        found = self._globals.get(path[0])
        for name in path[1:]:
            found = getattr(found, name, None)
        return found


def _name_of_decorator(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


def _assigned(node: ast.stmt) -> tuple[str, ast.expr] | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return None


def _assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value, lineno=0)


def _call(name: str, *arguments: ast.expr, keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), keywords or [])


def _method(value: ast.expr, name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(value, name, ast.Load()), list(arguments), [])


def _training() -> ast.expr:
    return ast.Attribute(ast.Name("self", ast.Load()), "training", ast.Load())


def _same(first: ast.AST | None, second: ast.AST) -> bool:
    return first is not None and ast.dump(first) == ast.dump(second)


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis
