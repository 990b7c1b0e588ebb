"""`dcs::discounted_cumsum`: the discounted cumulative sum, or first-order linear recurrence, along one dimension.

A first-order recurrence is a scan over pairs (discount, value), Blelloch, "Prefix sums and their applications", 1990,
section 1.4: that is what the parallel kernels compute.
"""

from __future__ import annotations

import numbers
from typing import Any

import torch
from torch import Tensor
from torch.compiler import is_compiling, is_dynamo_compiling, is_exporting

from ... import _registry
from ...reference.scan import ScanCall
from .._common import autocast, flops
from .._common.autograd import below, watched
from .._common.validate import check_integer
from .autograd import differentiable_scan, recorded_scan, tracked, unrecorded_scan
from .backends import BACKENDS, Backend
from .kernel_ops import scan_flops
from .packed import joined
from .validate import check_argument_types, check_direction, check_scan

_OP = "discounted_cumsum"
_tensor_op = _registry.discounted_cumsum_tensor
_number_op = _registry.discounted_cumsum_number

# Looked up once: an attribute of a module is 30 ns, and a call has 2 us for everything but the kernel.
_is_grad_enabled = torch.is_grad_enabled
_INT64 = torch.int64


def discounted_cumsum(
    input: Tensor,
    gamma: float | Tensor,
    *,
    dim: int = -1,
    direction: str = "right",
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    window: int | None = None,
    cu_seqlens: Tensor | None = None,
) -> Tensor:
    """Discounted cumulative sum along `dim`.

    With ``direction="right"`` every step sums what comes after it, ``y[t] = x[t] + g[t]·y[t+1]`` (returns of rewards);
    with ``"left"`` what came before it, ``y[t] = x[t] + g[t]·y[t-1]`` (an exponential average without its factor, a
    linear recurrence). Beyond the end y is `initial`, or 0.

    Args:
        input: x, of any shape ``(*batch, T, *batch)`` with T at `dim`; 0-D counts as T = 1, and T or a batch may be 0.
            float16, bfloat16, float32, float64, complex64 or complex128; any strides.
        gamma: the discount g, any real number: negative, 0, 1 and above 1 too. A tensor of

            * fewer dimensions than input broadcasts, aligned at the right, against input's shape without `dim`: one
              discount a row; a 0-D tensor is the same discount everywhere. Used in full float64 precision.
            * input's number of dimensions broadcasts against input: one discount per step, which makes this the linear
              recurrence. Converted to input's dtype (half-precision inputs with a wider gamma compute in float32).

            So **a (T,) gamma on a (B, T) input is one discount per row**, which raises unless T equals B and is not
            what was meant where it does: a discount for every step that all rows share is ``gamma.expand_as(input)`` or
            ``gamma[None, :]``. A tensor of any floating dtype goes with any input; a complex gamma is a tensor and
            needs a complex input. On input's device, except that a 0-D CPU tensor goes with a CUDA input.
        dim, direction: the dimension of time; ``"right"`` or ``"left"``.
        initial: the y beyond the end where the scan starts (after the last step for "right", before the first for
            "left"); input's dtype and device, broadcasts to input's shape without `dim`. Feeding the last y of one
            chunk to the next chunk's `initial` streams a sequence: the result is that of one call on all of it.
        reset: bool, input's shape and device. Where it is set, what is carried to that step is discarded (y[t] = x[t]):
            selected away, so that not even a NaN comes through.
        window: K >= 1 sums distances 0 ... K-1 only (None: all of them). `initial` counts as one step more beyond the
            end, and a reset inside the window cuts it short.
        cu_seqlens: offsets of packed sequences along `dim`, int32 or int64, 0 to T, on input's device, unchecked on a
            GPU: nothing is carried from one sequence to another, and `initial`, which goes with no window then, has
            one value a sequence in the place of time.

    Returns:
        A new tensor with input's shape and dtype and the strides of ``torch.empty_like(input)``, never a view of input.

    A NaN or an infinity reaches every position that it is carried to. Half-precision inputs accumulate in float32, and
    float32 on a CPU in float64. Results are the same bits from run to run, for any number of threads. Differentiable
    any number of times in input, gamma and initial, in both modes; works under torch.func, torch.export,
    torch.compile(fullgraph=True; another number as gamma does not compile again) and autocast (a half-precision input
    is then scanned in float32, as by torch.cumsum). The gradient of gamma needs no second scan; with a window it takes
    four in float64, and that of a per-step gamma plain PyTorch operations.

    Raises:
        IndexError, TypeError, RuntimeError: `dim` is out of range; an argument is of another type; its dtype, shape,
            device or value is wrong. The sentence names it.

    Example::

        >>> rewards = torch.ones(1, 4)
        >>> done = torch.tensor([[False, True, False, False]])  # an episode ends with step 1
        >>> torch_dcs_ops.discounted_cumsum(rewards, 0.5, reset=done)
        tensor([[1.5000, 1.0000, 1.5000, 1.0000]])
    """
    if cu_seqlens is not None:
        return _packed(input, gamma, dim, direction, initial, reset, window, cu_seqlens)
    if is_compiling():
        return _traced(input, gamma, dim, direction, initial, reset, window)
    if type(dim) is not int:
        check_integer(_OP, "dim", dim)
    try:
        if type(gamma) is float:
            rates, number = None, gamma
        elif isinstance(gamma, Tensor):
            rates, number = gamma, 1.0
        else:
            rates, number = None, as_number(gamma, _OP)
        if watched(input) or input.dtype is _INT64:
            return _op(input, rates, number, dim, direction, initial, reset, window)
        reverse = (type(direction) is str and direction == "right") or check_direction(_OP, direction)
        if _is_grad_enabled() and (
            input.requires_grad
            or (rates is not None and rates.requires_grad)
            or (initial is not None and initial.requires_grad)
        ):
            return recorded_scan(None, input, rates, number, dim, reverse, False, initial, reset, window)
        return unrecorded_scan(input, rates, number, dim, reverse, False, initial, reset, window)
    except (AttributeError, RuntimeError, TypeError):
        check_argument_types(_OP, input, gamma, dim, initial, reset, window)
        raise


def _packed(
    input: Tensor,
    gamma: float | Tensor,
    dim: int,
    direction: str,
    initial: Tensor | None,
    reset: Tensor | None,
    window: int | None,
    cu_seqlens: Tensor,
) -> Tensor:
    check_argument_types(_OP, input, gamma, dim, initial, reset, window)
    if not isinstance(gamma, Tensor):
        gamma = number_as_tensor(gamma, input.device, _OP) if is_compiling() else as_number(gamma, _OP)
    input, initial = autocast.autocast_operands(input, initial)
    whole, cuts = joined(_OP, input, gamma, dim, direction, initial, reset, window, cu_seqlens)
    output = discounted_cumsum(whole, gamma, dim=dim, direction=direction, reset=cuts, window=window)
    return output.to(input.dtype)


def discounted_cumsum_left(input: Tensor, gamma: float | Tensor) -> Tensor:
    """``y[b, t] = x[b, t] + gamma[b]·y[b, t-1]`` for a (B, T) input and a number or a (B,) tensor gamma.

    The name and the arguments of the package torch_discounted_cumsum; see :func:`discounted_cumsum` for all the rest.
    """
    return discounted_cumsum(input, gamma, direction="left")


def discounted_cumsum_right(input: Tensor, gamma: float | Tensor) -> Tensor:
    """``y[b, t] = x[b, t] + gamma[b]·y[b, t+1]`` for a (B, T) input and a number or a (B,) tensor gamma.

    The name and the arguments of the package torch_discounted_cumsum; see :func:`discounted_cumsum` for all the rest.
    """
    return discounted_cumsum(input, gamma, direction="right")


def _op(
    input: Tensor,
    gamma: Tensor | None,
    number: float,
    dim: int,
    direction: str,
    initial: Tensor | None,
    reset: Tensor | None,
    window: int | None,
) -> Tensor:
    output: Tensor
    if gamma is None:
        output = _number_op(input, number, dim=dim, direction=direction, initial=initial, reset=reset, window=window)
    else:
        output = _tensor_op(input, gamma, dim=dim, direction=direction, initial=initial, reset=reset, window=window)
    return output


def _traced(
    input: Tensor,
    gamma: float | Tensor,
    dim: int,
    direction: str,
    initial: Tensor | None,
    reset: Tensor | None,
    window: int | None,
) -> Tensor:
    """What torch.compile and torch.export see: the Tensor overload, as a float argument is a constant of the graph.

    Below Dynamo, where the formulas of another op are traced, a number is a constant already.
    """
    if not is_dynamo_compiling() and not is_exporting() and type(gamma) is float:
        return _op(input, None, gamma, dim, direction, initial, reset, window)
    if not isinstance(gamma, Tensor):
        gamma = number_as_tensor(gamma, input.device, _OP)
    return _op(input, gamma, 1.0, dim, direction, initial, reset, window)


def number_as_tensor(number: Any, device: torch.device, op: str, name: str = "gamma") -> Tensor:
    """What a compiled graph is given in place of a number: another number is then no other graph."""
    if not isinstance(number, float):
        if is_dynamo_compiling() and not isinstance(number, int | complex | str | list | tuple | dict | None):
            # Dynamo shows a NumPy scalar as an array.
            return torch.as_tensor(number).to(device=device, dtype=torch.float64)
        number = as_number(number, op, name)
    # A product, as that is what the compiler makes a tensor of: torch.full would compile again for every number.
    tensor: Tensor = torch.ones((), dtype=torch.float64, device=device) * number
    return tensor


def as_number(number: Any, op: str, name: str = "gamma") -> float:
    if isinstance(number, numbers.Real) and not isinstance(number, bool):
        try:
            return float(number)
        except OverflowError:
            raise RuntimeError(
                f"{op}: {name} must be within the range of a float, got a larger {type(number).__name__}"
            ) from None
    if isinstance(number, torch.SymFloat | torch.SymInt):
        return number  # type: ignore[return-value]
    if isinstance(number, numbers.Complex) and not isinstance(number, bool):
        raise RuntimeError(f"{op}: {name} must be a tensor to be complex, got the number {number}")
    raise TypeError(f"{op}: {name} must be a real number or a tensor, got {type(number).__name__}")


def _register(backend: Backend) -> None:
    def tensor_kernel(
        input: Tensor,
        gamma: Tensor | None,
        *,
        dim: int = -1,
        direction: str = "right",
        initial: Tensor | None = None,
        reset: Tensor | None = None,
        window: int | None = None,
        number: float = 1.0,
    ) -> Tensor:
        reverse = check_direction(_OP, direction)
        dim = check_scan(_OP, input, gamma, dim, initial, reset, window)
        return backend.scan(input, ScanCall(gamma, number, dim, reverse, False, initial, reset, window))

    def number_kernel(input: Tensor, gamma: float, **options: Any) -> Tensor:
        return tensor_kernel(input, None, number=gamma, **options)

    _registry.LIBRARY.impl("discounted_cumsum.Tensor", tensor_kernel, backend.dispatch_key)
    _registry.LIBRARY.impl("discounted_cumsum", number_kernel, backend.dispatch_key)


def _tensor_fake(
    input: Tensor,
    gamma: Tensor | None,
    *,
    dim: int = -1,
    direction: str = "right",
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    check_direction(_OP, direction)
    check_scan(_OP, input, gamma, dim, initial, reset, window)
    return torch.empty_like(input)


def _number_fake(input: Tensor, gamma: float, **options: Any) -> Tensor:
    return _tensor_fake(input, None, **options)


def _record(
    run: Any,
    input: Tensor,
    gamma: Tensor | None,
    number: float,
    *,
    dim: int = -1,
    direction: str = "right",
    initial: Tensor | None = None,
    reset: Tensor | None = None,
    window: int | None = None,
) -> Tensor:
    reverse = check_direction(_OP, direction)
    return differentiable_scan(run, input, gamma, number, dim, reverse, False, initial, reset, window)


def _tensor_autograd(keyset: torch._C.DispatchKeySet, input: Tensor, gamma: Tensor, **options: Any) -> Tensor:
    if tracked(input, gamma, options.get("initial")):
        return _record(lambda: below(_tensor_op, keyset, input, gamma, **options), input, gamma, 1.0, **options)
    output: Tensor = below(_tensor_op, keyset, input, gamma, **options)
    return output


def _number_autograd(keyset: torch._C.DispatchKeySet, input: Tensor, gamma: float, **options: Any) -> Tensor:
    if tracked(input, None, options.get("initial")):
        return _record(lambda: below(_number_op, keyset, input, gamma, **options), input, None, gamma, **options)
    output: Tensor = below(_number_op, keyset, input, gamma, **options)
    return output


for _backend in BACKENDS:
    _register(_backend)
for _name, _overload, _fake, _autograd in (
    ("discounted_cumsum.Tensor", _tensor_op, _tensor_fake, _tensor_autograd),
    ("discounted_cumsum", _number_op, _number_fake, _number_autograd),
):
    torch.library.register_fake(f"dcs::{_name}", _fake, lib=_registry.LIBRARY)
    _registry.LIBRARY.impl(_name, _autograd, "Autograd", with_keyset=True)
    autocast.register(_name, _overload)
flops.register(torch.ops.dcs.discounted_cumsum, scan_flops)
