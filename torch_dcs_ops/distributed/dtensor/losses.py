"""The losses of a linear layer: rows may be sharded, or the classes of linear_weight.

An axis of the mesh that shards input's rows keeps them: a reduced loss and linear_weight's gradient are sums over it
(Partial). One that shards linear_weight's classes (Shard(0)) shares out the vocabulary: input is gathered there if it
must be, every rank gets the loss, and input's gradient is a sum (Partial), for its consumer to reduce or to scatter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from ... import _registry
from ...ops.linear_cross_entropy.kernel_ops import forward_gradient_dtype
from ...ops.linear_cross_entropy.scale import scaled
from ...ops.linear_cross_entropy.validate import normal_ignore_index
from ...reference.linear_cross_entropy.kl_div import NAMES, Divergence
from ...reference.linear_cross_entropy.loss import normalizer
from ...reference.linear_cross_entropy.rows import row_dtype
from ..linear_cross_entropy.autograd import Settings, divisor
from ..linear_cross_entropy.kernel_ops import STATISTICS, Numbers
from ..linear_cross_entropy.kl_kernel_ops import Numbers as DivergenceNumbers
from .rules import Placements, call, empty, lead_of, local, ranks_along, replicated, rule, sharded_dim, spread

# Operands with a value, or several, for every row, and what becomes of the results: a value a row, a sum over rows.
_OF_ROWS = ("input", "teacher_input", "target", "grad", "grad_loss", "grad_lse", "grad_entropy", "grad_log_probs")
_RESULTS = {
    "linear_cross_entropy_forward": "?rrrrssf",
    "linear_cross_entropy_backward": "rss",
    "linear_log_probs": "rrrrr",
    "linear_log_probs_forward": "rrr",
    "linear_log_probs_backward": "rss",
    "linear_top_k": "rr",
    "linear_kl_div": "r",
    "linear_kl_div_backward": "rsrsss",
}
_NEEDS_OF_HEADS = ("input", "weight", "teacher_input", "teacher_weight", "bias", "teacher_bias")


class _Axes(NamedTuple):
    """What every axis of the mesh shards: a dimension of rows, or the classes (on one axis)."""

    mesh: Any
    rows: tuple[int | None, ...]
    classes: int | None

    def layout(self, of_rows: Any, of_classes: Placement) -> Placements:
        """`of_rows` is a placement for an axis of rows, None for the axis's own."""
        return tuple(
            of_classes if axis == self.classes else Replicate() if dim is None else of_rows or Shard(dim)
            for axis, dim in enumerate(self.rows)
        )

    @property
    def operand(self) -> Placements:
        return self.layout(None, Replicate())

    @property
    def weights(self) -> Placements:
        return self.layout(Replicate(), Shard(0))


def _axes(
    name: str, bound: dict[str, Any], may_share_classes: bool, weights: tuple[str, ...] = ("linear_weight",)
) -> _Axes:
    input, heads = lead_of(name, bound, "input"), [lead_of(name, bound, of) for of in weights]
    dims = [sharded_dim(placement) for placement in input.placements]
    shards = [dim if dim is not None and dim < input.dim() - 1 else None for dim in dims]
    placements = zip(*(weight.placements for weight in heads), strict=True)
    of_classes = [axis for axis, of in enumerate(placements) if 0 in map(sharded_dim, of)]
    shared = of_classes if may_share_classes else []
    classes = shared[-1] if shared else None
    if classes is not None:
        shards[classes] = None
    return _Axes(input.device_mesh, tuple(shards), classes)


def _shares_classes(bound: dict[str, Any]) -> bool:
    return not (bound["grad_filter_eps"] or bound["logits_dtype"] or bound["target"].is_floating_point())


def _local_operands(name: str, bound: dict[str, Any], axes: _Axes) -> dict[str, Any]:
    found = dict(bound)
    for of, value in bound.items():
        if isinstance(value, Tensor):
            is_reduced = of == "grad_loss" and value.dim() == 0 and bound.get("reduction") != "none"
            layout = axes.weights if of not in _OF_ROWS else replicated(axes.mesh) if is_reduced else axes.operand
            found[of] = local(name, of, value, axes.mesh, layout)
    return found


@rule("_linear_cross_entropy_forward", "_linear_cross_entropy_backward")
def losses(name: str, op: Any, bound: dict[str, Any]) -> Any:
    axes = _axes(name, bound, _shares_classes(bound))
    shards = _local_operands(name, bound, axes)
    if axes.classes is not None:
        return _shared_classes(name, bound, shards, axes)
    if bound["reduction"] != "mean" or all(dim is None for dim in axes.rows):
        return _rows(name, op, bound, shards, axes)
    dtype = row_dtype(shards["input"].dtype)
    count = _over_rows(normalizer(shards["target"], shards["weight"], bound["ignore_index"], dtype), axes)
    shards["reduction"] = "sum"
    if "grad_loss" in shards:
        loss = shards["grad_loss"]
        return _rows(name, op, bound, shards | {"grad_loss": None if loss is None else loss / count}, axes)
    loss, lse, predictions, entropy, *gradients, grad_scale = call(op, shards)
    if grad_scale.numel():
        grad_scale = grad_scale / count
    else:
        # Over no valid target the gradients are 0.
        factor = torch.where(count == 0, 1, count).reciprocal()
        gradients = [scaled(gradient, factor, gradient.dtype, True) for gradient in gradients]
    return _spread_rows(name, bound, (loss / count, lse, predictions, entropy, *gradients, grad_scale), axes)


@rule("linear_log_probs.full", "_linear_log_probs_backward")
def log_probs(name: str, op: Any, bound: dict[str, Any]) -> Any:
    axes = _axes(name, bound, not (bound.get("need_predictions") or bound["logits_dtype"]))
    shards = _local_operands(name, bound, axes)
    if axes.classes is not None:
        return _shared_log_probs(name, bound, shards, axes)
    return _rows(name, op, bound, shards, axes)


@rule("linear_kl_div", "_linear_kl_div_backward")
def divergences(name: str, op: Any, bound: dict[str, Any]) -> Any:
    axes = _axes(name, bound, True, ("linear_weight", "teacher_weight"))
    shards = _local_operands(name, bound, axes)
    return _rows(name, op, bound, shards, axes) if axes.classes is None else _shared_divergence(bound, shards, axes)


@rule("linear_top_k", "_linear_log_probs_forward")
def of_rows(name: str, op: Any, bound: dict[str, Any]) -> Any:
    axes = _axes(name, bound, False)
    return _rows(name, op, bound, _local_operands(name, bound, axes), axes)


@rule("linear_cross_entropy", "linear_cross_entropy.aux", "linear_log_probs", "linear_kl_div.reduced")
def made_of_private_ones(name: str, op: Any, bound: dict[str, Any]) -> Any:
    """A call that nothing differentiates: the op's own kernel, which calls the private op."""
    schema = op._schema.arguments
    positional = [bound[argument.name] for argument in schema if not argument.kwarg_only]
    keywords = {argument.name: bound[argument.name] for argument in schema if argument.kwarg_only}
    return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *positional, **keywords)


@rule("_tied")
def tied(name: str, op: Any, bound: dict[str, Any]) -> Any:
    """Of what is taken the value alone is needed."""
    value, operand = bound["value"], bound["operand"]
    if isinstance(operand, DTensor):
        operand = operand.to_local()
    if not isinstance(value, DTensor):
        return op(value, operand)
    return spread(op(value.to_local(), operand), value.device_mesh, value.placements, tuple(value.shape))


def _rows(name: str, op: Any, bound: dict[str, Any], shards: dict[str, Any], axes: _Axes) -> Any:
    found = call(op, shards)
    if isinstance(found, Tensor):
        return _spread_rows(name, bound, (found,), axes)[0]
    return _spread_rows(name, bound, found, axes)


def _spread_rows(name: str, bound: dict[str, Any], found: tuple[Tensor, ...], axes: _Axes) -> tuple[DTensor, ...]:
    lead = tuple(bound["input"].shape[:-1])
    results = []
    for shard, kind, asked in zip(found, _RESULTS[name], _asked(name, bound), strict=True):
        kind = ("r" if bound["reduction"] == "none" else "s") if kind == "?" else kind
        if kind == "f" or not asked:
            results.append(empty(shard, axes.mesh))
        elif kind == "r":
            trailing = tuple(shard.shape[len(lead) :])
            results.append(spread(shard.contiguous(), axes.mesh, axes.operand, lead + trailing))
        else:
            layout = axes.layout(Partial(), Replicate())
            results.append(spread(shard.contiguous(), axes.mesh, layout, tuple(shard.shape)))
    return tuple(results)


def _asked(name: str, bound: dict[str, Any]) -> list[bool]:
    """Which results of an op hold anything."""
    gradients = [bound[of] for of in bound if of.startswith("need_") and of.endswith("_grad")]
    if name == "linear_cross_entropy_forward":
        return [True, True, bound["need_predictions"], bound["need_entropy"], *gradients, True]
    if name == "linear_log_probs":
        return [True, bound["need_entropy"], True, bound["need_predictions"], bound["need_predictions"]]
    return gradients or [True] * len(_RESULTS[name])


def _over_rows(value: Tensor, axes: _Axes) -> Tensor:
    """The sum over the axes of the mesh that shard rows."""
    for axis, dim in enumerate(axes.rows):
        if dim is not None:
            value = ranks_along(axes.mesh, axis).total(value)
    return value


def _numbers(bound: dict[str, Any], shards: dict[str, Any], axes: _Axes, needs: tuple[bool, ...]) -> Numbers:
    assert axes.classes is not None
    team, classes = ranks_along(axes.mesh, axes.classes), bound["linear_weight"].size(0)
    share = -(-classes // team.size)  # as torch.chunk cuts
    return Numbers(
        bound["ignore_index"], bound.get("label_smoothing", 0.0), bound["softcap"], bound["logit_scale"],
        bound.get("z_loss", 0.0), bound["memory_budget"], bound.get("accumulate_dtype"),
        forward_gradient_dtype(shards["input"].dtype), "", min(team.rank * share, classes), classes, *team, *needs,
    )  # fmt: skip


class _Flat(NamedTuple):
    input: Tensor
    linear_weight: Tensor
    target: Tensor
    linear_bias: Tensor | None
    weight: Tensor | None
    weight_sum: Tensor | None


def _flat(shards: dict[str, Any], weight_sum: Tensor | None = None) -> _Flat:
    input, target = shards["input"], shards["target"]
    rows = input.shape[:-1].numel()
    ids = target.reshape(rows, 1 if target.dim() < input.dim() else target.size(-1))
    return _Flat(input.reshape(rows, input.size(-1)), shards["linear_weight"], ids, shards["linear_bias"],
                 shards.get("weight"), weight_sum)  # fmt: skip


def _shared_classes(name: str, bound: dict[str, Any], shards: dict[str, Any], axes: _Axes) -> Any:
    """The loss, or its backward, with the vocabulary shared out; a backward makes the statistics again."""
    reduction, is_forward = bound["reduction"], "grad_loss" not in bound
    input, dtype = shards["input"], row_dtype(shards["input"].dtype)
    needs = tuple(bound[f"need_{of}_grad"] for of in ("input", "weight", "bias"))
    numbers = _numbers(bound, shards, axes, needs)
    settings = Settings(name, reduction, numbers, False, False, False, False, False)
    flat = _flat(shards)
    mean, weight_sum = divisor(flat.target, flat.weight, settings, flat.linear_weight.size(0), dtype)
    flat = flat._replace(weight_sum=weight_sum)
    if mean is not None:
        mean = _over_rows(mean, axes)
    wants_entropy = bound["need_entropy"] if is_forward else bound["grad_entropy"] is not None
    given = numbers if is_forward else numbers.needing((False,) * 3)
    scale = None if mean is None else mean.reciprocal().reshape(1)
    loss, _, predictions, statistics, *gradients = _registry.vocab_parallel_forward(
        *flat, scale, *given, is_forward and bound["need_predictions"], wants_entropy
    )
    lead, mesh = tuple(bound["input"].shape[:-1]), axes.mesh

    def rows(values: Tensor, wanted: bool = True) -> DTensor:
        if not wanted:
            return empty(values.new_empty(0), mesh)
        return spread(values.reshape(input.shape[:-1]).clone(), mesh, axes.operand, lead)

    if not is_forward:
        grad_loss = shards["grad_loss"]
        grad_loss = None if grad_loss is None else grad_loss.reshape(-1).to(dtype)
        grad_loss = grad_loss if grad_loss is None or mean is None else grad_loss / mean
        upstream = [None if shards[of] is None else shards[of].reshape(-1).to(dtype)
                    for of in ("grad_lse", "grad_entropy")]  # fmt: skip
        gradients = _registry.vocab_parallel_backward(
            grad_loss, None, *upstream, *flat, statistics, *numbers._replace(grad_input_dtype=input.dtype)
        )
        return _spread_gradients(bound, shards, gradients, axes, needs)
    if reduction == "none":
        first = rows(loss)
    else:
        total = loss.sum() if mean is None else loss.sum() / mean
        first = spread(total, mesh, axes.layout(Partial(), Replicate()), ())
    kept = dict(zip(STATISTICS, statistics.unbind(0), strict=True))
    return (
        first,
        rows(kept["lse"]),
        rows(predictions, bound["need_predictions"]),
        rows(kept["entropy"], bound["need_entropy"]),
        *_spread_gradients(bound, shards, gradients, axes, needs),
        # float16's factor is in its gradients already, which are float32.
        empty(loss.new_ones(1 if input.dtype == torch.float16 and any(needs) else 0), mesh),
    )


def _shared_log_probs(name: str, bound: dict[str, Any], shards: dict[str, Any], axes: _Axes) -> Any:
    is_forward, dtype, input = "grad_log_probs" not in bound, row_dtype(shards["input"].dtype), shards["input"]
    needs = (False,) * 3 if is_forward else tuple(bound[f"need_{of}_grad"] for of in ("input", "weight", "bias"))
    numbers = _numbers(bound, shards, axes, (False,) * 3)
    numbers = numbers._replace(ignore_index=-100 if numbers.ignore_index is None else numbers.ignore_index)
    flat, mesh = _flat(shards), axes.mesh
    wants_entropy = bound["need_entropy"] if is_forward else bound["grad_entropy"] is not None
    _, found, _, statistics, *_ = _registry.vocab_parallel_forward(*flat, None, *numbers, False, wants_entropy)
    if is_forward:
        kept, lead = dict(zip(STATISTICS, statistics.unbind(0), strict=True)), tuple(bound["input"].shape[:-1])
        none = empty(found.new_empty(0), mesh)
        rows = [
            spread(kept[of].reshape(input.shape[:-1]).clone(), mesh, axes.operand, lead) for of in ("entropy", "lse")
        ]
        target = spread(found.reshape(shards["target"].shape), mesh, axes.operand, tuple(bound["target"].shape))
        integers = empty(found.new_empty(0, dtype=torch.int64), mesh)
        return target, rows[0] if wants_entropy else none, rows[1], integers, empty(found.new_empty(0), mesh)
    of_ids = shards["grad_log_probs"]
    of_ids = None if of_ids is None else of_ids.reshape(flat.target.shape).to(dtype)
    upstream = [None if shards[of] is None else shards[of].reshape(-1).to(dtype) for of in ("grad_lse", "grad_entropy")]
    numbers = numbers._replace(grad_input_dtype=input.dtype).needing(needs)
    gradients = _registry.vocab_parallel_backward(None, of_ids, *upstream, *flat, statistics, *numbers)
    return _spread_gradients(bound, shards, gradients, axes, needs)


def _shared_divergence(bound: dict[str, Any], shards: dict[str, Any], axes: _Axes) -> Any:
    """Of every row, or its gradients, with both vocabularies shared out; a backward makes the statistics again."""
    assert axes.classes is not None
    operands, lead = [shards[of] for of in NAMES], shards["input"].shape[:-1]
    is_forward = "grad" not in bound
    needs = (False,) * len(NAMES) if is_forward else tuple(bound[f"need_{of}_grad"] for of in _NEEDS_OF_HEADS)
    options = Divergence(**{of: bound[of] for of in Divergence._fields})
    options = options._replace(ignore_index=normal_ignore_index(options.ignore_index))
    for at in (NAMES.index("input"), NAMES.index("teacher_input")):
        operands[at] = operands[at].reshape(lead.numel(), operands[at].size(-1))
    target = None if shards["target"] is None else shards["target"].reshape(-1)
    dtypes = operands[0].dtype, operands[2].dtype
    team = ranks_along(axes.mesh, axes.classes)
    numbers = DivergenceNumbers(*dtypes, "", bound["linear_weight"].size(0), team, needs)
    grad = None if is_forward else shards["grad"].reshape(-1).to(row_dtype(dtypes[0]))
    rows, _, *gradients = _registry.vocab_parallel_kl_div(grad, *operands, target, None, *options, *numbers.flat())
    if is_forward:
        return spread(rows.reshape(lead), axes.mesh, axes.operand, tuple(bound["input"].shape[:-1]))
    of_input, of_weight = axes.layout(None, Partial()), axes.layout(Partial(), Shard(0))
    return tuple(
        spread(
            gradient.reshape(shards[of].shape) if of.endswith("input") else gradient, axes.mesh,
            of_input if of.endswith("input") else of_weight, tuple(bound[of].shape),
        )
        if need
        else empty(gradient.new_empty(0), axes.mesh)
        for gradient, of, need in zip(gradients, NAMES, needs, strict=True)
    )  # fmt: skip


def _spread_gradients(
    bound: dict[str, Any], shards: dict[str, Any], found: Any, axes: _Axes, needs: tuple[bool, ...]
) -> tuple[DTensor, ...]:
    grad_input, grad_weight, grad_bias = found
    if "grad_lse" in bound and bound["linear_bias"] is not None:
        grad_bias = grad_bias.to(bound["linear_bias"].dtype)
    grad_input = grad_input.reshape(shards["input"].shape) if needs[0] else grad_input
    classes, weight = axes.layout(Partial(), Shard(0)), tuple(bound["linear_weight"].shape)
    layouts = (axes.layout(None, Partial()), classes, classes)
    return tuple(
        spread(gradient, axes.mesh, layout, shape) if need else empty(gradient.new_empty(0), axes.mesh)
        for gradient, need, layout, shape in zip(
            (grad_input, grad_weight, grad_bias), needs, layouts, (tuple(bound["input"].shape), weight, weight[:1]),
            strict=True,
        )
    )  # fmt: skip
