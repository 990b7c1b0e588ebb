"""`vocab_parallel_linear_cross_entropy`: the loss of a linear layer whose classes are shared out among ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, TypedDict, overload

import torch
import torch.distributed as dist
from torch import Tensor
from torch.compiler import is_compiling

from ...ops._common import autocast
from ...ops._common.validate import check_dense, dtype_name, fail
from ...ops.linear_cross_entropy.arguments import check_argument_types
from ...ops.linear_cross_entropy.validate import check_call, normal_ignore_index
from ...reference.linear_cross_entropy.loss import Options
from ..common import Ranks, agreed, check_first_derivatives, check_plain, ranks_of
from .autograd import Settings, VocabParallel
from .kernel_ops import Numbers

_OP = "vocab_parallel_linear_cross_entropy"
_LARGEST_NUMBER = 1 << 24  # of a class that float32 holds

if TYPE_CHECKING:
    from typing_extensions import Required, Unpack

    class Keywords(TypedDict, total=False):
        """The keywords that do not change what is returned."""

        group: Required[dist.ProcessGroup]
        first_class: int | None
        classes: int | None
        linear_bias: Tensor | None
        weight: Tensor | None
        reduction: str
        ignore_index: int | None
        label_smoothing: float
        softcap: float | None
        logit_scale: float
        z_loss: float
        memory_budget: int | None
        accumulate_dtype: torch.dtype | None
        zero_if_empty: bool
        sequence_parallel: bool
        reduce_dtype: torch.dtype | None


@overload
def vocab_parallel_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[False] = ...,
    return_predictions: Literal[False] = ..., **keywords: Unpack[Keywords],
) -> Tensor: ...  # fmt: skip
@overload
def vocab_parallel_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[True],
    return_predictions: Literal[False] = ..., **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def vocab_parallel_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[False] = ...,
    return_predictions: Literal[True], **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip
@overload
def vocab_parallel_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: Literal[True],
    return_predictions: Literal[True], **keywords: Unpack[Keywords],
) -> tuple[Tensor, Tensor, Tensor]: ...  # fmt: skip
@overload
def vocab_parallel_linear_cross_entropy(
    input: Tensor, linear_weight: Tensor, target: Tensor, *, return_lse: bool = ...,
    return_predictions: bool = ..., **keywords: Unpack[Keywords],
) -> Tensor | tuple[Tensor, ...]: ...  # fmt: skip


def vocab_parallel_linear_cross_entropy(
    input: Tensor,
    linear_weight: Tensor,
    target: Tensor,
    *,
    group: dist.ProcessGroup,
    first_class: int | None = None,
    classes: int | None = None,
    linear_bias: Tensor | None = None,
    weight: Tensor | None = None,
    reduction: str = "mean",
    ignore_index: int | None = -100,
    label_smoothing: float = 0.0,
    softcap: float | None = None,
    logit_scale: float = 1.0,
    z_loss: float = 0.0,
    memory_budget: int | None = None,
    accumulate_dtype: torch.dtype | None = None,
    zero_if_empty: bool = False,
    sequence_parallel: bool = False,
    reduce_dtype: torch.dtype | None = None,
    return_lse: bool = False,
    return_predictions: bool = False,
) -> Tensor | tuple[Tensor, ...]:
    """:func:`torch_dcs_ops.linear_cross_entropy` where every rank of a group holds successive rows of linear_weight.

    All ranks call it alike, and get the same bits. They exchange one all-gather of three numbers a row (in input's row
    dtype, float32 or float64; more for label smoothing and predictions), and input's gradient. What a rank holds are
    the logits of its own classes for some rows, and the gradient of its own rows of linear_weight.

    Args:
        input: (..., D), the same on all ranks; with sequence_parallel every rank's own rows, as many on all ranks.
        linear_weight: (V_r, D), this rank's classes, any number of them, 0 too; together, in the order of the ranks,
            they are all V.
        target: class indices of all V, int64 (...), as input is shared out: else the same on all ranks.
        group: a torch.distributed.ProcessGroup.
        first_class, classes: the number of this rank's first class, and V. None: the ranks ask each other in every
            call, which waits for the device; under torch.compile they must be given.
        linear_bias, weight: (V_r,), of this rank's classes.
        reduction, ignore_index, label_smoothing, softcap, z_loss, zero_if_empty, accumulate_dtype: as of
            linear_cross_entropy; with sequence_parallel a mean or a sum is one over the rows of all ranks.
        logit_scale: a number.
        memory_budget: bytes of this rank's logits to hold at a time; see linear_cross_entropy.
        sequence_parallel: input's rows are gathered before, and its gradient is summed and scattered after.
        reduce_dtype: in which input's gradient is summed over the ranks. None is at least float32; torch.bfloat16, for
            bfloat16 input, takes half of the bytes and rounds every rank's part.
        return_lse: also returns the lse of every row (differentiable), 0 for ignored rows.
        return_predictions: also returns the argmax of every row's logits over all classes, int64.

    Returns:
        The loss, or a tuple (loss, lse, predictions) of what was asked for, on every rank; what has a value a row has
        input's leading shape.

    input's gradient is whole (with sequence_parallel of this rank's rows), linear_weight's and linear_bias's are this
    rank's. Differentiable once, in reverse mode. Works under torch.compile(fullgraph=True) and autocast.

    Raises:
        IndexError: a target is out of range, on a CPU, on all ranks. On CUDA that is a device-side assertion.
        RuntimeError, ValueError, TypeError: an argument is wrong, or ranks disagree (see the documentation).

    Example::

        >>> loss = torch_dcs_ops.distributed.vocab_parallel_linear_cross_entropy(
        ...     hidden, head_slice, tokens, group=mesh.get_group("tp")
        ... )
    """
    ignored = normal_ignore_index(ignore_index)
    options = Options(
        reduction, ignored, label_smoothing, softcap, logit_scale, z_loss, None, memory_budget, accumulate_dtype
    )
    input, linear_weight, linear_bias = lowered_operands(input, linear_weight, linear_bias)
    tensors = {"input": input, "linear_weight": linear_weight, "target": target}
    optional = {"linear_bias": linear_bias, "weight": weight}

    def check() -> None:
        flags = {"zero_if_empty": zero_if_empty, "sequence_parallel": sequence_parallel, "return_lse": return_lse}
        flags["return_predictions"] = return_predictions
        check_argument_types(_OP, tensors, {**options._asdict(), **optional, **flags})
        if isinstance(logit_scale, Tensor):
            fail(_OP, "logit_scale must be a number, got a tensor")
        if target.is_floating_point():
            fail(_OP, f"target must be int64 (class indices), got {dtype_name(target.dtype)}")
        check_call(_OP, input, one_class(linear_weight), target, one_class(linear_bias), one_class(weight), options)
        if weight is not None and weight.requires_grad:
            fail(_OP, "weight must not require a gradient")

    same = {**options._asdict(), "zero_if_empty": zero_if_empty, "return_predictions": return_predictions}
    numbers = agreed_numbers(
        _OP, group, tensors, optional, options, (first_class, classes), (sequence_parallel, reduce_dtype), same, check
    )
    if return_predictions and numbers.classes > _LARGEST_NUMBER and input.dtype != torch.float64:
        fail(_OP, f"classes must be at most 2**24 with return_predictions, got {numbers.classes}")
    settings = Settings(
        _OP, reduction, numbers, sequence_parallel, zero_if_empty, return_predictions, False, return_lse
    )
    loss, _, lse, predictions, _ = VocabParallel.apply(  # type: ignore[no-untyped-call]
        input, linear_weight, linear_bias, target, weight, settings
    )
    rows = [values for values, want in ((lse, return_lse), (predictions, return_predictions)) if want]
    return (loss, *rows) if rows else loss


def lowered_operands(input: Any, linear_weight: Any, linear_bias: Any) -> tuple[Any, Any, Any]:
    """As F.linear has them under autocast."""
    has_autocast = isinstance(input, Tensor) and input.device.type in ("cpu", "cuda")
    if has_autocast and torch.is_autocast_enabled(input.device.type):
        return autocast.lowered(input), autocast.lowered(linear_weight), autocast.lowered(linear_bias)
    return input, linear_weight, linear_bias


def one_class(tensor: Any) -> Any:
    """Something to check instead of an empty slice."""
    empty = isinstance(tensor, Tensor) and tensor.dim() > 0 and tensor.size(0) == 0
    return tensor.new_empty((1, *tensor.shape[1:])) if empty else tensor


def agreed_numbers(
    op: str,
    group: dist.ProcessGroup,
    tensors: dict[str, Tensor],
    optional: dict[str, Tensor | None],
    options: Options,
    own_slice: tuple[int | None, int | None],
    sums: tuple[bool, torch.dtype | None],
    same: dict[str, Any],
    check: Any,
) -> Numbers:
    """The ops' numbers, once all ranks have said the same; `own_slice` is (first_class, classes)."""
    of_rows = ("input", "target")
    ranks, first, classes = agreed_slice(op, group, tensors, optional, of_rows, own_slice, sums, same, check)
    o = options
    return Numbers(
        o.ignore_index, o.label_smoothing, o.softcap, o.logit_scale, o.z_loss, o.memory_budget, o.accumulate_dtype,
        wide_dtype(tensors["input"].dtype, sums[1]), "own" if sums[0] else "all", first, classes, *ranks, False, False,
        False,
    )  # fmt: skip


def wide_dtype(dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> torch.dtype:
    """In which a gradient of `dtype` is summed over the ranks."""
    return torch.promote_types(dtype, torch.float32) if reduce_dtype is None else reduce_dtype


def agreed_slice(
    op: str,
    group: dist.ProcessGroup,
    tensors: dict[str, Tensor],
    optional: dict[str, Tensor | None],
    of_rows: tuple[str, ...],
    own_slice: tuple[int | None, int | None],
    sums: tuple[bool, torch.dtype | None],
    same: dict[str, Any],
    check: Any,
) -> tuple[Ranks, int, int]:
    """The ranks, first_class and classes, once all have said the same; `of_rows` are as long on all of them."""
    ranks, (first, classes), (sequence_parallel, reduce_dtype) = ranks_of(op, group), own_slice, sums
    check_plain(op, **tensors, **optional)
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        check()

    def check_all() -> None:
        check_dense(op, **tensors, **optional)
        check()
        check_first_derivatives(op)
        _check_slice(op, tensors["linear_weight"], own_slice)
        _check_reduce_dtype(op, tensors["input"].dtype, reduce_dtype)

    of = {name: t for name, t in (*tensors.items(), *optional.items()) if isinstance(t, Tensor)}
    needs = [
        isinstance(t, Tensor) and t.requires_grad
        for name, t in (*tensors.items(), *optional.items())
        if name not in ("target", "weight")
    ]
    found = [own_slice]

    def judge(of_ranks: list[dict[str, str]]) -> None:
        found[0] = _slice_among(op, of_ranks, ranks, own_slice)

    if is_compiling():
        check_all()
    else:
        asked: dict[str, object] = {f"the dtype of {name}": dtype_name(t.dtype) for name, t in of.items()}
        sized = {name: t for name, t in of.items() if not t.is_nested}  # `check_all` refuses the others
        asked |= {f"the shape of {name}": tuple(t.shape) for name, t in sized.items() if name in of_rows}
        asked |= {f"the device of {name}": t.device.type for name, t in of.items()}
        for name in ("linear_weight", "teacher_weight"):
            if name in sized and sized[name].dim() == 2:
                asked[f"the features of {name}"] = sized[name].size(1)
        asked |= {"optional tensors": sorted(of), "gradients": (torch.is_grad_enabled(), *needs), "classes": classes}
        asked |= {"sequence_parallel": sequence_parallel, "reduce_dtype": reduce_dtype, **same}
        count = sized["linear_weight"].size(0) if "linear_weight" in sized and sized["linear_weight"].dim() else 0
        own, device = {"count": count, "first_class": first}, tensors["input"].device
        agreed(op, group, device, asked, check_all, own, judge, always=first is None)
    first, classes = found[0]
    assert first is not None
    assert classes is not None
    return ranks, first, classes


def _check_slice(op: str, linear_weight: Tensor, own_slice: tuple[int | None, int | None]) -> None:
    first, classes = own_slice
    if (first is None) != (classes is None):
        fail(op, f"first_class and classes must be given together, got {first} and {classes}")
    if first is None or classes is None:
        if is_compiling():
            fail(op, "first_class and classes must be given under torch.compile, got None")
        return
    if first < 0 or first + linear_weight.size(0) > classes or classes < 1:
        fail(op, f"first_class must be in [0, classes - {linear_weight.size(0)}] for so many rows of linear_weight, "
                 f"got {first} of {classes}")  # fmt: skip


def _check_reduce_dtype(op: str, dtype: torch.dtype, reduce_dtype: torch.dtype | None) -> None:
    allowed = {torch.bfloat16: (torch.float32, torch.bfloat16), torch.float64: (torch.float64,)}
    accepted = allowed.get(dtype, (torch.float32,))
    if reduce_dtype is not None and reduce_dtype not in accepted:
        fail(op, f"reduce_dtype must be None or {' or '.join(map(dtype_name, accepted))} for {dtype_name(dtype)} "
                 f"input, got {reduce_dtype}")  # fmt: skip


def _slice_among(
    op: str, of_ranks: list[dict[str, str]], ranks: Ranks, own_slice: tuple[int | None, int | None]
) -> tuple[int, int]:
    """(first_class, classes), from the ranks' counts; what was given must be these."""
    counts = [int(of["count"]) for of in of_ranks]
    firsts = [sum(counts[:rank]) for rank in range(len(counts))]
    for rank, of in enumerate(of_ranks):
        if of["first_class"] not in ("None", str(firsts[rank])):
            fail(op, f"first_class must follow the classes of the ranks before, {firsts[rank]} on rank {rank}, got "
                     f"{of['first_class']}")  # fmt: skip
    total = sum(counts)
    if total < 1:
        fail(op, "linear_weight must have one class at least on some rank, got none")
    if own_slice[1] is not None and own_slice[1] != total:
        fail(op, f"classes must be the ranks' classes together, {total}, got {own_slice[1]}")
    return firsts[ranks.rank], total
