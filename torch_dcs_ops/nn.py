"""Modules over the ops."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Literal, cast, overload

import torch
from torch import Tensor, nn
from typing_extensions import TypeVar

from .ops._common.validate import check_floating_dtype
from .ops.linear_cross_entropy.arguments import check_argument_types, check_keyword_types
from .ops.linear_cross_entropy.loss import check_keywords, linear_cross_entropy

if TYPE_CHECKING:
    from typing_extensions import Unpack

    from .ops.linear_cross_entropy.loss import LossKeywords

    class Keywords(LossKeywords, total=False):
        out_features: tuple[int, ...]
        bias: bool
        device: torch.device | str | int | None
        dtype: torch.dtype | None


_OP = "LinearCrossEntropyLoss"
__all__ = ["LinearCrossEntropyLoss"]

# What a call returns: the loss, or a tuple that begins with it.
_Results = TypeVar("_Results", default=Tensor)


class LinearCrossEntropyLoss(nn.Module, Generic[_Results]):
    """A linear layer to `num_classes` logits and the cross entropy of them, as one op that never holds the logits.

    :class:`torch.nn.LinearCrossEntropyLoss` (torch >= 2.13), whose calls run unchanged and whose state dict loads, with
    the options of :func:`torch_dcs_ops.linear_cross_entropy`: those documented there are keywords here, checked at
    once, and attributes, which every call reads. `out_features` and `options` are torch's and taken only as () and
    None.

    Args:
        in_features: D, the last dimension of input.
        num_classes: V.
        bias: whether the linear layer has a bias.
        weight: (V,), a factor of every class; a buffer of the module.
        device, dtype: of the linear layer's parameters.
        logit_scale: a number, a tensor of one element, or an :class:`torch.nn.Parameter`, which becomes the module's.

    Shapes: input (..., D); target (...) of class indices or (..., V) of class probabilities; the loss 0-D, or (...) for
    reduction "none".

    Example::

        >>> loss = torch_dcs_ops.nn.LinearCrossEntropyLoss(8, 100, shift=True)
        >>> loss(torch.randn(2, 5, 8), torch.randint(100, (2, 5))).backward()
    """

    weight: Tensor | None
    reduction: str
    ignore_index: int | None
    label_smoothing: float
    softcap: float | None
    logit_scale: float | Tensor
    z_loss: float
    shift: bool | int
    grad_filter_eps: float | None
    memory_budget: int | None
    accumulate_dtype: torch.dtype | None
    logits_dtype: torch.dtype | None
    zero_if_empty: bool

    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Tensor], in_features: int, num_classes: int, *,
        return_lse: Literal[False] = ..., return_predictions: Literal[False] = ...,
        return_z_loss: Literal[False] = ..., **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor]], in_features: int, num_classes: int, *,
        return_lse: Literal[True], return_predictions: Literal[False] = ...,
        return_z_loss: Literal[False] = ..., **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor]], in_features: int, num_classes: int, *,
        return_lse: Literal[False] = ..., return_predictions: Literal[True],
        return_z_loss: Literal[False] = ..., **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor, Tensor]], in_features: int, num_classes: int, *,
        return_lse: Literal[True], return_predictions: Literal[True],
        return_z_loss: Literal[False] = ..., **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor]], in_features: int, num_classes: int, *,
        return_lse: Literal[False] = ..., return_predictions: Literal[False] = ...,
        return_z_loss: Literal[True], **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor, Tensor]], in_features: int, num_classes: int, *,
        return_lse: Literal[True], return_predictions: Literal[False] = ...,
        return_z_loss: Literal[True], **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor, Tensor]], in_features: int, num_classes: int, *,
        return_lse: Literal[False] = ..., return_predictions: Literal[True],
        return_z_loss: Literal[True], **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, Tensor, Tensor, Tensor]], in_features: int, num_classes: int, *,
        return_lse: Literal[True], return_predictions: Literal[True],
        return_z_loss: Literal[True], **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[tuple[Tensor, ...]], in_features: int, num_classes: int, *,
        return_z_loss: Literal[True], return_lse: bool = ..., return_predictions: bool = ...,
        **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip
    @overload
    def __init__(
        self: LinearCrossEntropyLoss[Tensor | tuple[Tensor, ...]], in_features: int, num_classes: int, *,
        return_lse: bool = ..., return_predictions: bool = ..., return_z_loss: bool = ..., **keywords: Unpack[Keywords],
    ) -> None: ...  # fmt: skip

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        out_features: tuple[int, ...] = (),
        bias: bool = False,
        device: torch.device | str | int | None = None,
        dtype: torch.dtype | None = None,
        reduction: str = "mean",
        weight: Tensor | None = None,
        ignore_index: int | None = None,
        label_smoothing: float = 0.0,
        options: None = None,
        softcap: float | None = None,
        logit_scale: float | Tensor = 1.0,
        z_loss: float = 0.0,
        shift: bool | int = False,
        grad_filter_eps: float | None = None,
        memory_budget: int | None = None,
        accumulate_dtype: torch.dtype | None = None,
        logits_dtype: torch.dtype | None = None,
        zero_if_empty: bool = False,
        return_lse: bool = False,
        return_predictions: bool = False,
        return_z_loss: bool = False,
    ) -> None:
        super().__init__()
        if not isinstance(out_features, (tuple, list)) or len(out_features):
            raise RuntimeError(f"{_OP}: out_features must be (), got {out_features}")
        flags = {"return_lse": return_lse, "return_predictions": return_predictions, "return_z_loss": return_z_loss}
        check_keyword_types(_OP, {"in_features": in_features, "num_classes": num_classes, "bias": bias, **flags})
        check_argument_types(_OP, {}, {"weight": weight})
        for name, size, least in (("in_features", in_features, 0), ("num_classes", num_classes, 1)):
            if size < least:
                raise RuntimeError(f"{_OP}: {name} must be at least {least}, got {size}")
        if dtype is not None:
            if not isinstance(dtype, torch.dtype):
                raise TypeError(f"{_OP}: dtype must be a torch.dtype or None, got {type(dtype).__name__}")
            check_floating_dtype(_OP, "dtype", dtype)
        if weight is not None and weight.shape != (num_classes,):
            raise RuntimeError(
                f"{_OP}: weight must have the shape ({num_classes},), one entry a class, got {tuple(weight.shape)}"
            )
        keywords: dict[str, Any] = {
            "reduction": reduction,
            "ignore_index": ignore_index,
            "label_smoothing": label_smoothing,
            "softcap": softcap,
            "logit_scale": logit_scale,
            "z_loss": z_loss,
            "shift": shift,
            "grad_filter_eps": grad_filter_eps,
            "memory_budget": memory_budget,
            "accumulate_dtype": accumulate_dtype,
            "logits_dtype": logits_dtype,
            "zero_if_empty": zero_if_empty,
        }
        check_keywords(_OP, options, keywords)
        self.num_classes = num_classes
        self.register_buffer("weight", weight)
        self.linear = nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        # A logit_scale that is a parameter becomes one of the module's.
        for name, value in (keywords | flags).items():
            setattr(self, name, value)
        self._options = (*keywords, *flags)

    def forward(self, input: Tensor, target: Tensor) -> _Results:
        options = {name: getattr(self, name) for name in self._options}
        results = linear_cross_entropy(
            input, self.linear.weight, target, linear_bias=self.linear.bias, weight=self.weight, **options
        )
        return cast("_Results", results)

    if TYPE_CHECKING:

        def __call__(self, input: Tensor, target: Tensor) -> _Results: ...

    def extra_repr(self) -> str:
        values = {name: getattr(self, name) for name in self._options}
        shown = {
            name: value
            for name, value in values.items()
            if not isinstance(value, Tensor) and value is not None and value is not False
        }
        return ", ".join((f"num_classes={self.num_classes}", *(f"{name}={value!r}" for name, value in shown.items())))
