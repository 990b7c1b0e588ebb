"""`dcs::linear_cross_entropy`: the cross entropy of a linear layer's logits, without holding the logits.

Here: the public function and the registrations of the op and of its `aux` overload. The work is that of the private ops
(kernel_ops.py over chunks.py), autograd's nodes are in autograd.py, vmap in vmap.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
from torch import Tensor

from ... import _registry
from ...reference.linear_cross_entropy.loss import Options, zeroed_if_empty
from ...reference.linear_cross_entropy.rows import row_dtype
from .._common import autocast, flops
from .._common.autograd import below, tracked
from . import vmap  # noqa: F401  (vmap registers)
from .arguments import (
    apply_scale,
    check_argument_types,
    check_flags,
    check_keyword_types,
    check_scale,
    class_indices,
)
from .autograd import differentiable
from .kernel_ops import gemm_flops
from .shift import Results, shifted
from .validate import check_call, check_dtypes, check_numbers, check_reduction, check_shift, normal_ignore_index
from .z_loss import z_loss_term

_OP = "linear_cross_entropy"
_op = _registry.linear_cross_entropy
_aux_op = _registry.linear_cross_entropy_aux

if TYPE_CHECKING:
    from typing_extensions import Unpack

    class LossKeywords(TypedDict, total=False):
        """The keywords that do not change what is returned, of the function and of nn.LinearCrossEntropyLoss."""

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
        options: None

    class Keywords(LossKeywords, total=False):
        linear_bias: Tensor | None


@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[False] = ...,
    return_predictions: Literal[False] = ..., return_z_loss: Literal[False] = ..., **keywords: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[True],
    return_predictions: Literal[False] = ..., return_z_loss: Literal[False] = ..., **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[False] = ...,
    return_predictions: Literal[True], return_z_loss: Literal[False] = ..., **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[True],
    return_predictions: Literal[True], return_z_loss: Literal[False] = ..., **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[False] = ...,
    return_predictions: Literal[False] = ..., return_z_loss: Literal[True], **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[True],
    return_predictions: Literal[False] = ..., return_z_loss: Literal[True], **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[False] = ...,
    return_predictions: Literal[True], return_z_loss: Literal[True], **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[True],
    return_predictions: Literal[True], return_z_loss: Literal[True], **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_z_loss: Literal[True], return_lse: bool = ...,
    return_predictions: bool = ..., **keywords: Unpack[Keywords],
) -> tuple[Tensor, ...]: ...  # fmt: skip
@overload
def linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: bool = ..., return_predictions: bool = ...,
    return_z_loss: bool = ..., **keywords: Unpack[Keywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


def linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
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
    options: None = None,
) -> Tensor | tuple[Tensor, ...]:
    """``F.cross_entropy(F.linear(input, linear_weight, linear_bias), target)`` without the logits in memory.

    With u = logit_scale·(input·linear_weightᵀ + linear_bias), z = softcap·tanh(u / softcap) and lse = logsumexp(z),
    the loss of a row with target t is ``weight[t]·(lse - z[t]) + z_loss·lse²``; label smoothing and class
    probabilities as in F.cross_entropy. Logits are formed for some rows at a time, in logits_dtype, and everything
    behind them is float32 (float64 for float64).

    Args:
        input: (..., D), any leading shape; float16, bfloat16, float32 or float64, any strides.
        linear_weight: (V, D), input's dtype. K-dimensional weights are not taken.
        target: class indices, int64 or uint8 (...), or class probabilities, floating-point (..., V).
        linear_bias: (V,), input's dtype.
        weight: (V,), a factor of every class, of any floating dtype.
        reduction: "mean" divides by the weights of the valid targets (of all rows for class probabilities), as
            F.cross_entropy; over no valid target it is nan. "sum", or "none" for a loss per row.
        ignore_index: a row with this target has the loss 0 and no gradient, and is left out of the work where possible.
            None is -100. Negative or None for class probabilities, for which it means nothing.
        label_smoothing: in [0, 1].
        softcap: bounds the logits to (-softcap, softcap).
        logit_scale: of the logits, before the softcap; 1 / temperature. A tensor of one element is differentiable: it
            multiplies input and linear_bias, in their dtype.
        z_loss: a factor of lse². Every valid row counts with weight 1 in the sum, which a mean divides as the loss.
        shift: input (..., T, D) at step t predicts target (..., T) at step t + shift; True is 1, False is 0. The last
            `shift` steps have no target: whatever has a value per row, has T - shift of them.
        grad_filter_eps: None or 0, the exact gradient. A number below 1, an approximation: a chunk of rows keeps the
            classes that any row gives a probability above it or has for its target; the others' part of a row's
            gradient keeps its mass in the mean shape of 32 rows. Results and some gradients stay exact (see the docs).
        memory_budget: bytes of logits to hold at a time, one row at least. None: 256 MiB on a GPU and at least 1024
            rows, 32 MiB and 64 rows on a CPU. linear_weight's gradient may take further memory (see the documentation).
        accumulate_dtype: of linear_weight's gradient across chunks. None is accurate: at least float32. torch.bfloat16,
            for bfloat16 input, rounds after every chunk and needs no memory. torch.float32 is what None is.
        logits_dtype: None is input's, to which logits are rounded. torch.float32, for half-precision input without a
            grad_filter_eps, keeps the products' sums as they are, in chunks of fewer rows.
        return_lse: also returns the lse of every row (differentiable), 0 for ignored rows.
        return_predictions: also returns the argmax of every row's logits, int64; ignored rows are not left out then.
        zero_if_empty: a mean over no valid target is 0 instead of nan.
        return_z_loss: also returns what z_loss adds to the loss, reduced as it is, without a gradient of its own.
        options: of torch.nn.functional.linear_cross_entropy; only None is taken.

    Returns:
        The loss: float32 for half-precision input, else input's dtype; 0-D, or input's leading shape for "none". With
        return_lse, return_predictions or return_z_loss a tuple (loss, lse, predictions, z-loss) of what was asked for.

    A mean or a sum forms the gradients that are needed in forward, and backward() scales them; of up to D rows it may
    keep the logits' gradient instead. Reduction "none" and the gradient of the lse make the logits a second time.
    Differentiable any number of times: derivatives beyond the first, forward mode, and gradients of class probabilities
    or weights hold full float32 logits, and are exact whatever grad_filter_eps is. Works under torch.func,
    torch.compile(fullgraph=True), torch.export and autocast (input, linear_weight and linear_bias as for F.linear).

    Raises:
        IndexError: a target is out of range, on a CPU. On CUDA that is a device-side assertion, as in F.cross_entropy.
        ValueError: reduction is none of the three, or target has not input's leading shape.
        TypeError, RuntimeError: an argument has a wrong type; a wrong dtype, shape, device or value.

    Example::

        >>> hidden, head, tokens = torch.randn(2, 5, 8), torch.randn(100, 8), torch.randint(100, (2, 5))
        >>> loss = torch_dcs_ops.linear_cross_entropy(hidden, head, tokens, shift=True)
    """
    _check_no_options(_OP, options)
    wanted = {"return_lse": return_lse, "return_predictions": return_predictions, "return_z_loss": return_z_loss}
    check_flags(_OP, zero_if_empty=zero_if_empty, **wanted)
    input, linear_bias, logit_scale = apply_scale(_OP, input, linear_bias, logit_scale)
    target = class_indices(target)
    results = _call(
        _aux_op if any(wanted.values()) else _op, input, linear_weight, target, linear_bias=linear_bias, weight=weight,
        reduction=reduction, ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=softcap, z_loss=z_loss,
        logit_scale=logit_scale, shift=shift, grad_filter_eps=grad_filter_eps, memory_budget=memory_budget,
        accumulate_dtype=accumulate_dtype, logits_dtype=logits_dtype, zero_if_empty=zero_if_empty,
    )  # fmt: skip
    if isinstance(results, Tensor):
        return results
    loss, *rows = results
    if return_z_loss:
        rows.append(z_loss_term(rows[0], target, weight, reduction, ignore_index, z_loss, shift, zero_if_empty))
    return (loss, *(values for values, want in zip(rows, wanted.values(), strict=False) if want))


def _call(op: Any, input: Tensor, linear_weight: Tensor, target: Tensor, **keywords: Any) -> Tensor | Results:
    """The op. It checks its arguments itself; only what it refuses is looked at again."""
    try:
        results: Tensor | Results = op(input, linear_weight, target, **keywords)
    except (AttributeError, RuntimeError, TypeError):
        tensors = {"input": input, "linear_weight": linear_weight, "target": target}
        check_argument_types(_OP, tensors, keywords)
        raise
    return results


def check_keywords(op: str, options: object, keywords: dict[str, Any]) -> None:
    """What is wrong with keywords whatever the tensors are."""
    _check_no_options(op, options)
    numbers = dict(keywords)
    check_reduction(op, numbers["reduction"])
    check_keyword_types(op, {name: value for name, value in keywords.items() if name != "reduction"})
    check_shift(op, numbers.pop("shift"))
    del numbers["zero_if_empty"]
    if isinstance(numbers["logit_scale"], Tensor):
        check_scale(op, numbers.pop("logit_scale"))
    check_numbers(op, _options(**numbers))
    check_dtypes(op, keywords["accumulate_dtype"], keywords["logits_dtype"])


def _check_no_options(op: str, options: object) -> None:
    if options is not None:
        raise RuntimeError(
            f"{op}: options must be None, got {type(options).__name__}: memory_budget and accumulate_dtype are what "
            "chooses the chunks here"
        )


def _options(
    *,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    grad_filter_eps: float | None = None,
    memory_budget: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    logits_dtype: torch.dtype | None = None,
) -> Options:
    return Options(
        reduction, normal_ignore_index(ignore_index), label_smoothing, softcap, logit_scale, z_loss, grad_filter_eps,
        memory_budget, accumulate_dtype, logits_dtype,
    )  # fmt: skip


def _register(name: str, op: Any, is_aux: bool) -> None:
    """The kernels of one overload; `aux` returns (loss, lse, predictions), the other one the loss."""

    count = 3 if is_aux else 1

    def results(values: Results) -> Any:
        return values if is_aux else values[0]

    def mended(values: Results, target: Tensor, options: Options, zero_if_empty: bool) -> Results:
        if not zero_if_empty or options.reduction != "mean":
            return values
        return zeroed_if_empty(values[0], target, options.ignore_index), *values[1:]

    def kernel(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        shift: int = 0,
        zero_if_empty: bool = False,
        **keywords: Any,
    ) -> Any:
        options = _options(**keywords)
        check_call(_OP, input, linear_weight, target, linear_bias, weight, options, shift=shift)

        def run(x: Tensor, y: Tensor) -> Results:
            every: Results = _registry.linear_cross_entropy_forward(
                x, linear_weight, y, linear_bias, weight, *options, False, False, False, is_aux, False
            )
            return mended(every[:count], y, options, zero_if_empty)

        with torch._C._AutoDispatchBelowAutograd():
            return results(shifted(shift, input, target, options, run))

    def fake(
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        shift: int = 0,
        zero_if_empty: bool = False,
        **keywords: Any,
    ) -> Any:
        options = _options(**keywords)
        check_call(_OP, input, linear_weight, target, linear_bias, weight, options, shift=shift)
        lead = (*input.shape[:-2], input.size(-2) - shift) if shift else input.shape[:-1]
        loss = input.new_empty(lead if options.reduction == "none" else (), dtype=row_dtype(input.dtype))
        return results((loss, loss.new_empty(lead), loss.new_empty(lead, dtype=torch.int64)))

    def autograd(
        keyset: torch._C.DispatchKeySet,
        input: Tensor,
        linear_weight: Tensor,
        target: Tensor,
        *,
        linear_bias: Tensor | None = None,
        weight: Tensor | None = None,
        shift: int = 0,
        zero_if_empty: bool = False,
        **keywords: Any,
    ) -> Any:
        if not tracked(input, linear_weight, target, linear_bias, weight):
            return below(
                op,
                keyset,
                input,
                linear_weight,
                target,
                linear_bias=linear_bias,
                weight=weight,
                shift=shift,
                zero_if_empty=zero_if_empty,
                **keywords,
            )
        options = _options(**keywords)
        check_call(_OP, input, linear_weight, target, linear_bias, weight, options, shift=shift)

        def run(x: Tensor, y: Tensor) -> Results:
            every = differentiable(keyset, x, linear_weight, y, linear_bias, weight, options, is_aux, False)
            return mended(every[:count], y, options, zero_if_empty)

        return results(shifted(shift, input, target, options, run))

    _registry.LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"dcs::{name}", fake, lib=_registry.LIBRARY)
    _registry.LIBRARY.impl(name, autograd, "Autograd", with_keyset=True)
    autocast.register_cast(name, op, autocast_operands)


def autocast_operands(args: tuple[Any, ...], keywords: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """input, linear_weight and linear_bias as F.linear has them; target and the class weights stay as they are."""
    input, linear_weight, *rest = args
    bias = {"linear_bias": autocast.lowered(keywords["linear_bias"])} if "linear_bias" in keywords else {}
    return (autocast.lowered(input), autocast.lowered(linear_weight), *rest), keywords | bias


_register("linear_cross_entropy", _op, False)
_register("linear_cross_entropy.aux", _aux_op, True)
flops.register(torch.ops.dcs.linear_cross_entropy, gemm_flops)
