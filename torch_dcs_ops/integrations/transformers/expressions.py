"""What a forward may do with logits that are not formed: its expressions, rewritten to methods of `Logits`."""

from __future__ import annotations

import ast
import copy
from collections.abc import Callable
from typing import Any, NamedTuple

from torch import nn
from torch.nn import functional
from transformers.utils import ModelOutput

_KEPT = ("float", "contiguous")  # methods of Logits as they are of tensors


class Refused(Exception):
    """Why a forward is not understood, a part of a sentence."""


class Helpers(NamedTuple):
    """What the rewritten forward calls."""

    defer: Callable[..., Any]  # (head, hidden) -> Logits
    loss_function: Callable[..., Any]  # (model, *args of model.loss_function)
    criterion: Callable[..., Any]  # (nn.CrossEntropyLoss, logits, target)
    cross_entropy: Callable[..., Any]  # as functional.cross_entropy


class Expressions(ast.NodeTransformer):
    """Rewrites the expressions of one forward; which names hold logits, the statements say."""

    def __init__(
        self, owner: nn.Module, head: nn.Module | None, helpers: Helpers, names: dict[str, Any], is_model: bool
    ) -> None:
        self._owner = owner
        self._head = head
        self.helpers = helpers
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
        raise self.unknown(node)

    def _operation(self, node: ast.BinOp) -> ast.expr | None:
        left, right = self.tanh_of(node.left), self.deferred(node.left)
        if isinstance(node.op, ast.Mult) and isinstance(left, ast.BinOp) and isinstance(left.op, ast.Div):
            inner = self.deferred(left.left)  # tanh(x / c) * c
            if inner is not None and same(left.right, node.right):
                return self.capped(inner, node.right)
        inner, other = right, node.right
        if inner is None and isinstance(node.op, (ast.Mult, ast.Add)):
            inner, other = self.deferred(node.right), node.left
        if inner is None:
            return None
        method = {ast.Mult: "times", ast.Div: "over", ast.Add: "plus"}.get(type(node.op))
        if method is None or self._softcapped:
            raise self.unknown(node)
        return _method(inner, method, self.visit(other))

    def capped(self, inner: ast.expr, cap: ast.expr) -> ast.expr:
        if self._softcapped:
            raise self.unknown(cap)
        self._softcapped = True
        return _method(inner, "softcapped", self.visit(copy.deepcopy(cap)))

    def tanh_of(self, node: ast.expr) -> ast.expr | None:
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
                raise self.unknown(node)
        return self.visit(index)  # type: ignore[no-any-return]

    def _call_of_module(self, node: ast.Call, module: nn.Module) -> ast.expr | None:
        is_head = module is self._head or (self._head is None and isinstance(module, nn.Linear))
        if is_head:
            if len(node.args) != 1 or node.keywords:
                raise self.unknown(node)
            inner = self.deferred(node.args[0])
            if inner is not None:
                raise self.unknown(node)
            self.heads.append(module)
            return _call("_dcs_defer", node.func, self.visit(node.args[0]))
        if self._head is None or not any(part is self._head for part in module.modules()):
            return None
        if not self._is_last(module):
            return None
        self.parts.append(self._part(module))
        part = ast.Subscript(ast.Name("_dcs_parts", ast.Load()), ast.Constant(len(self.parts) - 1), ast.Load())
        return ast.Call(part, [node.func, *map(self.visit, node.args)], [self.visit(k) for k in node.keywords])

    def _part(self, module: nn.Module) -> Callable[..., Any]:
        """The forward of a module that ends in the head, rewritten."""
        raise NotImplementedError

    def _is_last(self, module: nn.Module) -> bool:
        """Whether module is the part of the model that ends in its head, and not all of it but the loss."""
        return not any(isinstance(part, nn.Embedding) for part in module.modules())

    def visit_Call(self, node: ast.Call) -> Any:
        logits = [self.deferred(a) for a in node.args if not isinstance(a, ast.Starred)]
        named = [self.deferred(k.value) for k in node.keywords]
        if not any(v is not None for v in (*logits, *named)):
            return self.generic_visit(node)
        loss = self._loss(node)
        if loss is not None:
            return loss
        made = self._global(node.func)
        if isinstance(made, type) and issubclass(made, ModelOutput):
            node.args = [self._returned(a) for a in node.args]
            node.keywords = [ast.keyword(k.arg, self._returned(k.value)) for k in node.keywords]
            return node
        inner = self.deferred(node)
        if inner is not None:
            raise self.unknown(node)
        return self.generic_visit(node)

    def _loss(self, node: ast.Call) -> ast.Call | None:
        """The call of a known loss, of Logits."""
        text = ast.unparse(node.func)
        arguments, keywords = node.args, node.keywords
        if text == "self.loss_function":
            kind, arguments = "_dcs_loss_function", [ast.Name("self", ast.Load()), *arguments]
        elif text in self._criteria and len(arguments) == 2 and not keywords:
            kind, keywords = "_dcs_cross_entropy", [ast.keyword(None, ast.Name(options_of(text), ast.Load()))]
        elif type(self._module(node.func)) is nn.CrossEntropyLoss and len(arguments) == 2 and not keywords:
            kind, arguments = "_dcs_criterion", [node.func, *arguments]
        elif self._global(node.func) is functional.cross_entropy:
            kind = "_dcs_cross_entropy"
        else:
            return None
        self.losses.add(kind)
        named = [ast.keyword(k.arg, self._argument(k.value)) for k in keywords]
        return ast.Call(ast.Name(kind, ast.Load()), [*map(self._argument, arguments)], named)

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
            raise self.unknown(node)
        return node

    # --- looking things up ------------------------------------------------------------------------------------------

    def unknown(self, node: ast.AST) -> Refused:
        line = ast.unparse(self._statement or node).split("\n")[0]
        line = line if len(line) < 120 else f"{line[:117]}..."
        return Refused(f"{type(self._owner).__name__}.forward does with its logits what is not known: `{line}`")

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


def _call(name: str, *arguments: ast.expr, keywords: list[ast.keyword] | None = None) -> ast.Call:
    return ast.Call(ast.Name(name, ast.Load()), list(arguments), keywords or [])


def _method(value: ast.expr, name: str, *arguments: ast.expr) -> ast.Call:
    return ast.Call(ast.Attribute(value, name, ast.Load()), list(arguments), [])


def _training() -> ast.expr:
    return ast.Attribute(ast.Name("self", ast.Load()), "training", ast.Load())


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is Ellipsis


def options_of(criterion: str) -> str:
    return f"_dcs_options_of_{criterion}"


def assign(name: str, value: ast.expr) -> ast.Assign:
    return ast.Assign([ast.Name(name, ast.Store())], value, lineno=0)


def same(first: ast.AST | None, second: ast.AST) -> bool:
    return first is not None and ast.dump(first) == ast.dump(second)
