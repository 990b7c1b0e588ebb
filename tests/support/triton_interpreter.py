"""Triton's interpreter in less time, for the processes that run tests in it (conftest.py).

Before each launch, and each call of one device function by another, it searches all attributes of `triton.language` for
builtins to replace: a third of what the tests took. Here the names are searched for once, and the functions of one
module are seen to once a launch. Most of the rest is spent on the types of what an operation takes and gives, not on
its numbers: a type's attributes are found once here, and operands of the same type and shape are not promoted nor
broadcast. What is replaced by what, and all that kernels compute and the interpreter checks, stays as it is. Beside
that, triton 3.6 makes a number of an array of one element, which NumPy 2.4 refuses.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from typing import Any

from triton.runtime import interpreter


def install() -> None:
    """Replaces private functions of triton 3.6 and 3.7; a version without them stays as slow as it is."""
    if hasattr(interpreter, "_patch_lang_tensor"):
        _take_numbers_of_one_element(interpreter._patch_lang_tensor)
    for replace in (_patch_once, _keep_attributes_of_types, _pass_operands_that_agree, _skip_unused_checks):
        with contextlib.suppress(AttributeError, AssertionError):
            replace()


def _parameters(function: Any) -> list[str]:
    return list(inspect.signature(function).parameters)


def _patch_once() -> None:
    is_builtin, patch_attr = interpreter.tl.core.is_builtin, interpreter._patch_attr
    patch_lang, launch = interpreter._patch_lang, interpreter.GridExecutor.__call__
    np_dtype = interpreter._get_np_dtype
    assert _parameters(interpreter._patch_builtin)[:2] == ["pkg", "builder"]

    np_dtype_of_scalar = functools.cache(np_dtype)

    def np_dtype_of(tt_dtype: Any) -> Any:
        # Pointers and blocks have no hash; a block's is the one of its elements.
        scalar = tt_dtype.scalar
        return np_dtype(scalar) if scalar.is_ptr() else np_dtype_of_scalar(scalar)

    @functools.cache
    def builtins_of(package: Any) -> list[str]:
        return [name for name, member in inspect.getmembers(package) if is_builtin(member)]

    def patch_builtin(pkg: Any, builder: Any, *scope: Any) -> None:
        for name in builtins_of(pkg):
            member = getattr(pkg, name)
            if is_builtin(member):
                patch_attr(pkg, name, member, builder, *scope)

    # The namespaces of functions that are seen to until the launch that runs now ends; None: no launch runs.
    seen: set[int] | None = None

    def patch_lang_once(fn: Any) -> Any:
        if seen is None:
            return patch_lang(fn)
        if id(fn.__globals__) in seen:
            return None  # what a launch itself undoes at its end is that of its first call
        seen.add(id(fn.__globals__))
        return patch_lang(fn)

    def launched(*args: Any, **kwargs: Any) -> Any:
        nonlocal seen
        seen = set()
        try:
            return launch(*args, **kwargs)
        finally:
            seen = None

    interpreter._get_np_dtype = np_dtype_of
    interpreter._patch_builtin = patch_builtin
    interpreter._patch_lang = patch_lang_once
    interpreter.GridExecutor.__call__ = launched


def _keep_attributes_of_types() -> None:
    """Blocks of one shape and type share their attributes, and so do the tensors of one type."""
    core = interpreter.tl.core
    block, tensor, constexpr = core.block_type, core.tensor, core.constexpr
    new_block, new_tensor, equal = block.__init__, tensor.__init__, core.dtype.__eq__
    assert _parameters(new_block) == ["self", "element_ty", "shape"]
    assert _parameters(new_tensor) == ["self", "handle", "type"]

    shapes: dict[tuple[int, ...], Any] = {}
    blocks: dict[tuple[int, tuple[int, ...]], dict[str, Any]] = {}

    def block_of(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple([size.value if type(size) is constexpr else size for size in shape])
        attributes = blocks.get((id(element_ty), sizes))
        if attributes is not None and all(type(size) is int for size in sizes):
            self.__dict__.update(attributes)
            return
        new_block(self, element_ty, shape)
        self.shape, self.of_tensors = shapes.setdefault(sizes, self.shape), {}
        blocks[id(element_ty), sizes] = dict(vars(self))  # it holds element_ty: no other gets its id

    def tensor_of(self: Any, handle: Any, type: Any) -> None:
        attributes = type.__dict__.setdefault("of_tensors", {})
        if attributes:
            self.__dict__.update(attributes)
            self.handle, self.type = handle, type
        else:
            new_tensor(self, handle, type)
            attributes.update({name: vars(self)[name] for name in vars(self).keys() - {"handle", "type"}})

    def with_element_ty(self: Any, scalar_ty: Any) -> Any:
        return self if scalar_ty is self.element_ty else block(scalar_ty, self.shape)

    block.__init__ = block_of
    block.with_element_ty = with_element_ty
    tensor.__init__ = tensor_of
    core.dtype.__eq__ = lambda self, other: self is other or equal(self, other)


def _pass_operands_that_agree() -> None:
    """Tensors of one type that is no pointer are promoted to it, and of one shape broadcast to it: left as they are."""
    core, semantics = interpreter.tl.core, interpreter.TritonSemantic
    tensor = core.tensor
    promote, broadcast = semantics.binary_op_type_checking_impl, semantics.broadcast_impl_value
    names = ["self", "lhs", "rhs", "allow_lhs_ptr", "allow_rhs_ptr", "arithmetic_check", "div_or_mod"]
    assert _parameters(promote) == names
    assert _parameters(broadcast) == names[:3]

    def broadcast_unless_equal(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        blocks = left.is_block()
        if blocks == right.is_block() and (not blocks or left.shape is right.shape):
            return lhs, rhs
        return broadcast(self, lhs, rhs)

    def promote_unless_equal(
        self: Any, lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True, div_or_mod: bool = False,
    ) -> Any:  # fmt: skip
        if not div_or_mod and type(lhs) is tensor and type(rhs) is tensor:
            scalar = lhs.dtype
            if scalar is rhs.dtype and not scalar.is_ptr():
                return self.broadcast_impl_value(lhs, rhs)
        return promote(self, lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)

    semantics.broadcast_impl_value = broadcast_unless_equal
    semantics.binary_op_type_checking_impl = promote_unless_equal


def _skip_unused_checks() -> None:
    """Whether integers overflow is found out for an assertion that there is in debug mode alone."""
    semantics = interpreter.TritonSemantic
    check = semantics.binary_op_sanitize_overflow_impl
    assert _parameters(check) == ["self", "lhs", "rhs", "binary_op"]
    assert not interpreter.interpreter_builder.options.debug

    def check_to_assert(self: Any, lhs: Any, rhs: Any, binary_op: Any) -> None:
        if self.builder.options.debug:
            check(self, lhs, rhs, binary_op)

    semantics.binary_op_sanitize_overflow_impl = check_to_assert


def _take_numbers_of_one_element(patch_lang_tensor: Any) -> None:
    def patched(tensor: Any, *scope: Any) -> None:
        patch_lang_tensor(tensor, *scope)  # notes what `tensor` had, and puts it back after the launch
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched
