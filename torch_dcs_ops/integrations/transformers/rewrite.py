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

from .expressions import Expressions, Helpers, Refused, assign, options_of, same
from .head import why_not_bypassed

# They document the class's forward and do nothing in a call.
_DOCUMENTING = ("auto_docstring", "add_start_docstrings", "add_code_sample_docstrings", "replace_return_docstrings")
_BODY = {"body", "orelse"}


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
    filename = f"<fused_loss of {original.__module__}.{original.__qualname__}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    made: dict[str, Any] = {}
    exec(compile(source, filename, "exec"), original.__globals__, made)
    return made["factory"](*helpers, rewriter.parts), rewriter


class _Rewriter(Expressions):
    """The statements."""

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
        argument = self.tanh_of(second)
        wanted = ast.BinOp(ast.Name(name, ast.Load()), ast.Mult(), first.right)
        if not (same(argument, ast.Name(name, ast.Load())) and same(third, wanted)):
            return None
        self._statement = three[0]
        inner = self.deferred(first.left)
        if inner is None:
            return None
        self._set(name, True)
        return assign(name, self.capped(inner, first.right))

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
            return assign(target.id, value)
        self._criteria.discard(target.id)
        options = self._criterion(target.id, node.value)
        node.value = self.visit(node.value)
        self._set(target.id, False)
        return node if options is None else [node, options]

    def _criterion(self, name: str, value: ast.expr) -> ast.stmt | None:
        """The options of an nn.CrossEntropyLoss beside it: Dynamo does not read them of one made within a graph."""
        if not isinstance(value, ast.Call) or self._global(value.func) is not nn.CrossEntropyLoss or value.args:
            return None
        self._criteria.add(name)
        return assign(options_of(name), ast.Call(ast.Name("dict", ast.Load()), [], copy.deepcopy(value.keywords)))

    def visit_AnnAssign(self, node: ast.AnnAssign) -> Any:
        if not isinstance(node.target, ast.Name):
            return self.generic_visit(node)
        return self.visit(assign(node.target.id, node.value)) if node.value else []

    def visit_AugAssign(self, node: ast.AugAssign) -> Any:
        if isinstance(node.target, ast.Name) and node.target.id in self._deferred:
            value = ast.BinOp(ast.Name(node.target.id, ast.Load()), node.op, node.value)
            return self.visit_Assign(assign(node.target.id, value))
        return self.generic_visit(node)

    def visit_Return(self, node: ast.Return) -> Any:
        if self._is_model or node.value is None:
            return self.generic_visit(node)
        value = self.deferred(node.value)
        if value is None:
            raise self.unknown(node)
        return ast.Return(value)

    def _part(self, module: nn.Module) -> Callable[..., Any]:
        name = type(module).__name__
        refused = why_not_bypassed(name, module)
        if refused:
            raise Refused(refused)
        function, rewriter = _rewritten(module, self._head, self.helpers, is_model=False)
        self._softcapped = self._softcapped or rewriter._softcapped
        self.heads.extend(rewriter.heads)

        def part(module: Any, *args: Any, **kwargs: Any) -> Any:
            changed = why_not_bypassed(name, module)
            if changed:
                raise RuntimeError(f"fused_loss: {changed}; restore() the model to run it so")
            return function(module, *args, **kwargs)

        return part


def _name_of_decorator(node: ast.expr) -> str:
    return ast.unparse(node.func if isinstance(node, ast.Call) else node).split(".")[-1]


def _assigned(node: ast.stmt) -> tuple[str, ast.expr] | None:
    if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
        return node.targets[0].id, node.value
    return None
