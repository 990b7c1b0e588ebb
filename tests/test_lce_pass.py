"""The pass that fuses linear + cross_entropy: what it finds, what it leaves alone, and that results stay the same.

The graphs are Dynamo's; what runs is the rewritten graph in eager mode, so that a case takes milliseconds. How the pass
gets into TorchInductor is in test_backend.py.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from torch_dcs_ops.compile import _steps
from torch_dcs_ops.compile import linear_cross_entropy as fusing

pytestmark = pytest.mark.usefixtures("fresh_compiler")

B, T, D, V = 2, 6, 5, 11
LOSS = torch.ops.dcs.linear_cross_entropy.default


@pytest.fixture(autouse=True)
def _nothing_said() -> Iterator[None]:
    for known in (fusing._said, _steps._softcaps):
        known.clear()
    yield
    for known in (fusing._said, _steps._softcaps):
        known.clear()


class Operands:
    def __init__(self, device: str, dtype: torch.dtype = torch.float64) -> None:
        self.head = nn.Linear(D, V, device=device, dtype=dtype)
        self.no_bias = nn.Linear(D, V, bias=False, device=device, dtype=dtype)
        self.x = torch.randn(B, T, D, device=device, dtype=dtype, requires_grad=True)
        self.w = torch.randn(V, D, device=device, dtype=dtype, requires_grad=True)
        self.b = torch.randn(V, device=device, dtype=dtype, requires_grad=True)
        self.y = torch.randint(0, V, (B, T), device=device)
        self.y[0, 1] = -100

    def leaves(self) -> list[Tensor]:
        return [self.x, self.w, self.b, *self.head.parameters(), *self.no_bias.parameters()]


def rewritten(function: Callable[..., Any], *, dynamic: bool | None = None, minimum_logits: int = 0) -> Any:
    """`function` as Dynamo traces it, rewritten, run in eager mode; `fused` counts, `graphs` are the rewritten ones."""
    record = SimpleNamespace(fused=0, graphs=[])

    def backend(module: fx.GraphModule, _: Any) -> Any:
        record.fused += fusing.fuse_linear_cross_entropy(module.graph, minimum_logits)
        module.graph.lint()
        module.recompile()
        record.graphs.append(module.graph)
        return module

    record.run = torch.compile(function, backend=backend, fullgraph=True, dynamic=dynamic)
    return record


def assert_same(
    function: Callable[..., Tensor], o: Operands, record: Any, tolerance: float = 1e-12, around: Any = nullcontext
) -> None:
    for x, y in ((o.x, o.y), (o.x[:, :4], o.y[:, :4])):
        with around():
            got, expected = record.run(o, x, y), function(o, x, y)
        assert (got.dtype, got.shape) == (expected.dtype, expected.shape)
        upstream = torch.randn_like(expected)
        gradients = [torch.autograd.grad(loss, o.leaves(), upstream, allow_unused=True) for loss in (got, expected)]
        for value, wanted in ((got, expected), *zip(*gradients, strict=True)):
            assert (value is None) == (wanted is None)
            if wanted is not None:
                scale = max(1.0, float(wanted.detach().abs().max()))
                torch.testing.assert_close(value, wanted, rtol=0, atol=tolerance * scale)


def rows(logits: Tensor) -> Tensor:
    return logits.reshape(-1, logits.size(-1))


def unpacked(o: Operands, x: Tensor, y: Tensor) -> Tensor:
    logits = o.head(x)
    batch, steps, classes = logits.shape
    return F.cross_entropy(logits.view(batch * steps, classes), y.reshape(batch * steps))


FUSED: dict[str, Callable[[Operands, Tensor, Tensor], Tensor]] = {
    "nn.Linear": lambda o, x, y: F.cross_entropy(o.head(x).view(-1, V), y.reshape(-1)),
    "F.linear": lambda o, x, y: F.cross_entropy(F.linear(x, o.w, bias=o.b).flatten(0, 1), y.flatten()),
    "nn.CrossEntropyLoss": lambda o, x, y: nn.CrossEntropyLoss(reduction="sum")(rows(o.no_bias(x)), y.flatten()),
    "rows only": lambda o, x, y: F.cross_entropy(o.head(x.flatten(0, 1)), y.flatten()),
    "@ w.T": lambda o, x, y: F.cross_entropy(rows(x @ o.w.T), y.flatten()),
    "@ w.mT": lambda o, x, y: F.cross_entropy(rows(x @ o.w.mT), y.flatten()),
    "matmul w.t()": lambda o, x, y: F.cross_entropy(rows(torch.matmul(x, o.w.t())), y.flatten()),
    "mm transpose + bias": lambda o, x, y: F.cross_entropy(torch.mm(rows(x), o.w.transpose(0, 1)) + o.b, y.flatten()),
    "addmm": lambda o, x, y: F.cross_entropy(torch.addmm(o.b, rows(x), o.w.permute(1, 0)), y.flatten()),
    "@ (D, V)": lambda o, x, y: F.cross_entropy(rows(x @ o.w.T.contiguous()), y.flatten()),
    "unpacked shape": unpacked,
    "shifted": lambda o, x, y: F.cross_entropy(rows(o.head(x)[:, :-1]), y[:, 1:].flatten()),
    "shifted, ellipsis": lambda o, x, y: F.cross_entropy(
        o.head(x)[..., :-1, :].contiguous().view(-1, V), y[..., 1:].contiguous().view(-1)
    ),
    "one sequence": lambda o, x, y: F.cross_entropy(o.head(x)[0], y[0]),
    "every second step": lambda o, x, y: F.cross_entropy(rows(o.head(x)[:, ::2]), y[:, ::2].flatten()),
    "classes in the middle": lambda o, x, y: F.cross_entropy(o.head(x).transpose(1, 2), y),
    "classes in the middle, permute": lambda o, x, y: F.cross_entropy(
        o.head(x.view(B, -1, 2, D)).permute(0, 3, 1, 2), y.reshape(B, -1, 2), reduction="none"
    ),
    "classes in the middle, movedim": lambda o, x, y: F.cross_entropy(o.head(x).movedim(-1, 1), y),
    "first classes": lambda o, x, y: F.cross_entropy(rows(o.head(x)[..., : V - 2]), y.flatten().clamp(max=V - 3)),
    "bias of first classes": lambda o, x, y: F.cross_entropy(
        rows(o.no_bias(x)[:, :, : V - 2] + o.b[: V - 2]), y.flatten().clamp(max=V - 3)
    ),
    "none": lambda o, x, y: F.cross_entropy(rows(o.head(x)), y.flatten(), reduction="none"),
    "ignore_index": lambda o, x, y: F.cross_entropy(rows(o.head(x)), y.flatten().clamp(min=3), ignore_index=3),
    "label smoothing": lambda o, x, y: F.cross_entropy(rows(o.head(x)), y.flatten(), label_smoothing=0.2),
    "class weights": lambda o, x, y: F.cross_entropy(rows(o.head(x)), y.flatten(), o.b.detach().exp()),
    "probabilities": lambda o, x, y: F.cross_entropy(rows(o.head(x)), rows(x.detach() @ o.w.detach().T).softmax(-1)),
    "temperature": lambda o, x, y: F.cross_entropy(rows(o.head(x) / 0.7), y.flatten()),
    "factors": lambda o, x, y: F.cross_entropy(rows(0.5 * o.head(x).mul(3)), y.flatten()),
    "factors in place": lambda o, x, y: F.cross_entropy(rows(o.head(x)).mul_(0.5).div_(3), y.flatten()),
    "classes in the middle, then upcast": lambda o, x, y: F.cross_entropy(
        o.head(x).transpose(1, 2).contiguous().to(x.dtype), y
    ),
    "slices of sizes": lambda o, x, y: F.cross_entropy(
        rows(o.head(x)[:, : x.shape[1] - 1]), y[:, : x.shape[1] - 1].flatten()
    ),
    "softcap": lambda o, x, y: F.cross_entropy(rows(2.0 * torch.tanh(o.head(x) / 2.0)), y.flatten()),
    "softcap of another slope": lambda o, x, y: F.cross_entropy(rows((o.head(x) * 0.3).tanh() * -2.0), y.flatten()),
    "log_softmax + nll_loss": lambda o, x, y: F.nll_loss(F.log_softmax(rows(o.head(x)), dim=-1), y.flatten()),
    "torch.log_softmax": lambda o, x, y: F.nll_loss(torch.log_softmax(rows(o.head(x)), 1), y.flatten(), o.b.detach()),
    "einsum": lambda o, x, y: F.cross_entropy(rows(torch.einsum("bsd,vd->bsv", x, o.w)), y.flatten()),
    "einsum, weight first": lambda o, x, y: F.cross_entropy(
        rows(torch.einsum("v d, ... d -> ... v", o.w, x) + o.b), y.flatten()
    ),
    "einsum of (D, V)": lambda o, x, y: F.cross_entropy(torch.einsum("nd,dv->nv", rows(x), o.w.T * 1), y.flatten()),
    "time-major": lambda o, x, y: F.cross_entropy(rows(o.head(x.transpose(0, 1)).transpose(0, 1)), y.flatten()),
    "one sequence of a batch of one": lambda o, x, y: F.cross_entropy(o.head(x[:1]).squeeze(0), y[0]),
    "a dimension more": lambda o, x, y: F.cross_entropy(o.head(x[0]).unsqueeze(0).flatten(0, 1), y[0]),
    "squeezed, then classes in the middle": lambda o, x, y: F.cross_entropy(
        o.head(x.unsqueeze(1)).squeeze(1).transpose(1, 2), y, reduction="sum"
    ),
    "log_softmax + view + nll_loss": lambda o, x, y: F.nll_loss(
        F.log_softmax(o.head(x), -1)[:, :-1].reshape(-1, V), y[:, 1:].flatten()
    ),
    "log_softmax of half logits": lambda o, x, y: F.nll_loss(
        rows(o.head(x)).log_softmax(-1, dtype=x.dtype).contiguous(), y.flatten(), reduction="sum"
    ),
    "log_softmax, then classes in the middle": lambda o, x, y: F.nll_loss(
        o.head(x).log_softmax(-1).transpose(1, 2), y, reduction="none"
    ),
    "classes in the middle, then log_softmax": lambda o, x, y: nn.NLLLoss()(
        F.log_softmax(o.head(x).permute(0, 2, 1), 1), y
    ),
    "gathered log-probabilities": lambda o, x, y: (
        o.head(x).log_softmax(-1).gather(-1, y.clamp(min=0).unsqueeze(-1)).squeeze(-1).mean(1)
    ),
    "gathered, by functions, shifted": lambda o, x, y: torch.gather(
        F.log_softmax(o.head(x)[:, :-1] / 0.7, dim=-1), 2, y[:, 1:, None].clamp(min=0)
    ),
    "part of a greater loss": lambda o, x, y: (
        F.cross_entropy(rows(o.head(x)), y.flatten(), reduction="sum") / 7 + x.square().mean()
    ),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", FUSED)
def test_fuses(device: str, name: str, dynamic: bool) -> None:
    o, function = Operands(device), FUSED[name]
    record = rewritten(function, dynamic=dynamic)
    assert_same(function, o, record)
    assert record.fused >= 1
    for graph in record.graphs:
        targets = [node.target for node in graph.nodes]
        assert LOSS in targets
        assert F.cross_entropy not in targets
        assert F.nll_loss not in targets
        assert torch._C._nn.linear not in targets


def test_two_losses_of_tied_weights(device: str) -> None:
    o = Operands(device)

    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        first = F.cross_entropy(rows(F.linear(x, o.w)), y.flatten())
        second = F.cross_entropy(rows(F.linear(x.flip(1) + F.embedding(y.clamp(min=0), o.w), o.w)), y.flatten())
        return first + 0.3 * second

    record = rewritten(function)
    assert_same(function, o, record)
    assert record.fused % 2 == 0


def test_float_constants_of_a_module_under_dynamic(device: str) -> None:
    """With dynamic=True Dynamo makes variables of them."""
    o = Operands(device)
    loss = nn.CrossEntropyLoss(label_smoothing=0.1)
    o.cap = 3.0  # type: ignore[attr-defined]

    def function(o: Any, x: Tensor, y: Tensor) -> Tensor:
        return loss(rows(torch.tanh(o.head(x) / o.cap) * o.cap), y.flatten())

    record = rewritten(function, dynamic=True)
    assert_same(function, o, record)
    assert record.fused


REFUSED: dict[str, tuple[Callable[[Operands, Tensor, Tensor], Any], str]] = {
    "returned": (
        lambda o, x, y: (lambda z: (F.cross_entropy(rows(z), y.flatten()), z))(o.head(x)),
        "the compiled function also returns",
    ),
    "used twice": (
        lambda o, x, y: (lambda z: F.cross_entropy(rows(z), y.flatten()) + z.mean())(o.head(x)),
        "`mean` uses too",
    ),
    "no linear map": (lambda o, x, y: F.cross_entropy(rows(x.exp()), y.flatten().clamp(max=D - 1)), "`exp`"),
    "an input": (lambda o, x, y: F.cross_entropy(x[0], y[0].clamp(max=D - 1)), "as they are into the graph"),
    "dropout": (lambda o, x, y: F.cross_entropy(F.dropout(rows(o.head(x)), 0.0), y.flatten()), "`dropout`"),
    "classes mixed": (
        lambda o, x, y: F.cross_entropy(o.head(x).view(-1, 1), y.new_zeros(B * x.size(1) * V)),
        "reshaped together",
    ),
    "classes among rows": (
        lambda o, x, y: F.cross_entropy(o.head(x).transpose(1, 2)[:, 0], y[:, 0].clamp(max=x.size(1) - 1)),
        "classes are moved to another dimension",
    ),
    "classes squeezed": (
        lambda o, x, y: F.cross_entropy(F.linear(x, o.w[:1]).squeeze(-1), y[:, 0].clamp(max=0)),
        "squeezed of the dimension of the classes",
    ),
    "all squeezed": (lambda o, x, y: F.cross_entropy(o.head(x[:1]).squeeze(), y[0]), "squeezed of every"),
    "behind the classes": (
        lambda o, x, y: F.cross_entropy(rows(o.head(x)).unsqueeze(-1).squeeze(-1), y.flatten()),
        "squeezed of the dimension of the classes",
    ),
    "einsum of a batch of matrices": (
        lambda o, x, y: F.cross_entropy(rows(torch.einsum("bsd,bvd->bsv", x, o.w.expand(B, V, D))), y.flatten()),
        "the einsum 'bsd,bvd->bsv'",
    ),
    "einsum with rows in another order": (
        lambda o, x, y: F.cross_entropy(rows(torch.einsum("bsd,vd->sbv", x, o.w)), y.T.flatten()),
        "the einsum 'bsd,vd->sbv'",
    ),
    "einsum that sums rows": (
        lambda o, x, y: F.cross_entropy(torch.einsum("bsd,vd->bv", x, o.w), y[:, 0]),
        "the einsum 'bsd,vd->bv'",
    ),
    "einsum of three": (
        lambda o, x, y: F.cross_entropy(rows(torch.einsum("bsd,vd,v->bsv", x, o.w, o.b)), y.flatten()),
        "the einsum 'bsd,vd,v->bsv'",
    ),
    "einsum that broadcasts": (
        lambda o, x, y: F.cross_entropy(rows(torch.einsum("bsd,vd->bsv", x, o.w[:, :1])), y.flatten()),
        "the einsum 'bsd,vd->bsv'",
    ),
    "log_softmax over rows": (
        lambda o, x, y: F.nll_loss(F.log_softmax(rows(o.head(x)), 0), y.flatten()),
        "over another dimension than that of the classes",
    ),
    "log_softmax over steps": (
        lambda o, x, y: F.nll_loss(F.log_softmax(o.head(x), 1).transpose(1, 2), y),
        "over another dimension than that of the classes",
    ),
    "log-probabilities cut": (
        lambda o, x, y: F.nll_loss(F.log_softmax(rows(o.head(x)), -1)[:, : V - 2], y.flatten().clamp(max=V - 3)),
        "of the first classes alone",
    ),
    "log-probabilities scaled": (
        lambda o, x, y: F.nll_loss(F.log_softmax(rows(o.head(x)), -1) * 2, y.flatten()),
        "`mul`, not from log_softmax",
    ),
    "log-probabilities used twice": (
        lambda o, x, y: (lambda p: p.gather(-1, y.clamp(min=0)[..., None]) - (p.exp() * p).sum(-1, keepdim=True))(
            o.head(x).log_softmax(-1)
        ),
        "`exp` uses too",
    ),
    "several classes gathered": (
        lambda o, x, y: o.head(x).log_softmax(-1).gather(-1, y.clamp(min=0)[..., None].expand(B, x.size(1), 2)),
        "something else than one class of every row",
    ),
    "rows gathered": (
        lambda o, x, y: o.head(x).log_softmax(-1).gather(1, y.clamp(min=0, max=1)[..., None]),
        "something else than one class of every row",
    ),
    "some rows gathered": (
        lambda o, x, y: o.head(x).log_softmax(-1).gather(-1, y.clamp(min=0)[:, :2, None]),
        "something else than one class of every row",
    ),
    "other classes": (
        lambda o, x, y: F.cross_entropy(rows(o.head(x)[..., 2:]), y.flatten().clamp(max=V - 3)),
        "other classes than the first",
    ),
    "mask": (lambda o, x, y: F.cross_entropy(rows(o.head(x))[torch.arange(3)], y.flatten()[:3]), "indexed"),
    "tensor temperature": (lambda o, x, y: F.cross_entropy(rows(o.head(x) * o.b.exp()[0]), y.flatten()), "scaled"),
    "scale before bias": (lambda o, x, y: F.cross_entropy(rows(o.no_bias(x) * 2 + o.b), y.flatten()), "before their"),
    "bias after tanh": (lambda o, x, y: F.cross_entropy(rows(o.no_bias(x).tanh() + o.b), y.flatten()), "after their"),
    "two biases": (lambda o, x, y: F.cross_entropy(rows(o.head(x) + o.b), y.flatten()), "two biases"),
    "two tanh": (lambda o, x, y: F.cross_entropy(rows(o.head(x).tanh().tanh()), y.flatten()), "two tanh"),
    "plus a number": (lambda o, x, y: F.cross_entropy(rows(o.head(x) + 1.0), y.flatten()), "plus a number"),
    "residual": (lambda o, x, y: F.cross_entropy(rows(o.head(x) + o.no_bias(x)), y.flatten()), "something else than"),
    "narrowed": (lambda o, x, y: F.cross_entropy(rows(o.head(x)).float(), y.flatten()), "converted from"),
    "other mode": (
        lambda o, x, y: (lambda z: torch.no_grad()(lambda: F.cross_entropy(z, y.flatten()))())(rows(o.head(x))),
        "another mode",
    ),
    "single row": (lambda o, x, y: F.cross_entropy(o.head(x)[0, 0], y[0, 0]), "single row"),
    "legacy reduction": (
        lambda o, x, y: F.cross_entropy(rows(o.head(x)), y.flatten(), size_average=False),
        "size_average",
    ),
    "probabilities in the middle": (
        lambda o, x, y: F.cross_entropy(o.head(x).transpose(1, 2), o.head(x.detach()).softmax(-1).transpose(1, 2)),
        "class probabilities",
    ),
    "nll of something else": (lambda o, x, y: F.nll_loss(rows(o.head(x)), y.flatten()), "log_softmax"),
    "product of matrices": (
        lambda o, x, y: F.cross_entropy((x @ o.w.T.expand(B, D, V)).flatten(0, 1), y.flatten()),
        "rows times one matrix",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_leaves_alone(device: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    o = Operands(device)
    function, reason = REFUSED[name]
    before: list[str] = []

    def backend(module: fx.GraphModule, _: Any) -> Any:
        before.append(str(module.graph))
        assert fusing.fuse_linear_cross_entropy(module.graph, 0) == 0
        assert str(module.graph) == before[-1]
        return module

    with caplog.at_level(logging.INFO, "torch_dcs_ops"):
        torch.compile(function, backend=backend, fullgraph=True)(o, o.x, o.y)
    assert before
    (record,) = caplog.records
    assert reason in record.getMessage()
    assert record.levelno == logging.WARNING


def changing(number: int) -> Callable[[Operands, Tensor, Tensor, float], Tensor]:
    def temperature(o: Operands, x: Tensor, y: Tensor, t: float) -> Tensor:
        return F.cross_entropy(rows(2.0 * o.head(x) / t), y.flatten())

    def cap(o: Operands, x: Tensor, y: Tensor, t: float) -> Tensor:
        return F.cross_entropy(rows((o.head(x) / t).tanh() * t), y.flatten())

    return (temperature, cap)[number]


@pytest.mark.parametrize("number", [0, 1], ids=["temperature", "cap"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_a_number_that_changes_is_no_constant(
    device: str, dynamic: bool | None, number: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Each of its values would be compiled anew, up to the recompile limit."""
    o, function = Operands(device), changing(number)
    record = rewritten(function, dynamic=dynamic)
    for t in (1.5, 1.25, 1.125, 1.0625, 1.75, 1.875, 2.0, 2.25, 2.5, 2.75, 3.0, 1.5):
        torch.testing.assert_close(record.run(o, o.x, o.y, t), function(o, o.x, o.y, t))
    if number == 0:
        # A variable of the graph, from the start or after its first value.
        assert len(record.graphs) == (1 if dynamic else 2)
        assert record.fused == len(record.graphs)
    else:
        # With dynamic=True every number is a variable, and some are constants all the same.
        assert record.fused == (_steps.SOFTCAPS_OF_A_LINE if dynamic else 1)
        assert len(record.graphs) == record.fused + 1
        assert "changes from call to call" in caplog.text


def test_a_reason_is_given_once(device: str, caplog: pytest.LogCaptureFixture) -> None:
    o = Operands(device)
    function, reason = REFUSED["returned"]
    for _ in range(2):
        torch._dynamo.reset()
        rewritten(function).run(o, o.x, o.y)
    assert caplog.text.count(reason) == 1
    assert "test_lce_pass.py" in caplog.text  # The line that the loss comes from.


def test_few_logits_are_left_to_the_compiler(device: str, caplog: pytest.LogCaptureFixture) -> None:
    o = Operands(device)
    record = rewritten(FUSED["nn.Linear"], minimum_logits=B * T * V + 1)
    with caplog.at_level(logging.INFO, "torch_dcs_ops"):
        record.run(o, o.x, o.y)
    assert record.fused == 0
    assert f"{B * T * V} logits" in caplog.text
    torch._dynamo.reset()
    record = rewritten(FUSED["nn.Linear"], minimum_logits=B * T * V)
    record.run(o, o.x, o.y)
    assert record.fused == 1


def test_sizes_that_may_change_count_as_large(device: str) -> None:
    o = Operands(device)
    record = rewritten(FUSED["nn.Linear"], dynamic=True, minimum_logits=1000)
    record.run(o, o.x, o.y)
    assert record.fused == 1


class Stateful(nn.Module):
    """Statements whose results nobody uses, around a loss that is fused."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.head = nn.Linear(D, V, device=device)
        self.norm = nn.BatchNorm1d(D, device=device)
        self.register_buffer("steps", torch.zeros((), device=device))
        self.register_buffer("average", torch.zeros(D, device=device))
        self.register_buffer("cache", torch.zeros(B, T, D, device=device))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.steps.add_(1)
        self.average.lerp_(x.detach().mean((0, 1)), 0.1)
        h = x * 2
        h.mul_(3)
        h.clamp_(-4, 4)
        self.norm(h.detach().flatten(0, 1))
        self.cache.copy_(h.detach())
        h = h + self.cache
        F.relu(h, inplace=True)
        torch.mul(self.steps, 2, out=self.steps)
        loss = F.cross_entropy(rows(self.head(h)), y.flatten())
        self.steps += 1
        return loss


def test_statements_around_the_loss_are_kept(device: str) -> None:
    torch.manual_seed(0)
    eager, traced = Stateful(device), Stateful(device)
    traced.load_state_dict(eager.state_dict())
    x, y = torch.randn(B, T, D, device=device), torch.randint(0, V, (B, T), device=device)
    record = rewritten(traced)
    for _ in range(2):
        torch.testing.assert_close(record.run(x, y), eager(x, y))
    assert record.fused == 1
    torch.testing.assert_close(traced.state_dict(), eager.state_dict())
    assert int(traced.steps) == 9


@torch.library.custom_op("dcs_tests::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


@double_.register_fake
def _(x: Tensor) -> None: ...


# Statements after the logits were made of h.
CHANGES: dict[str, Callable[[Tensor], Any]] = {
    "method": lambda h: h.add_(1),
    "view": lambda h: h[0].zero_(),
    "operator": lambda h: h.__imod__(0.5),
    "inplace argument": lambda h: F.relu(h, inplace=True),
    "inplace module": nn.ReLU(inplace=True),
    "random": lambda h: F.dropout(h, 0.5, True, True),
    "out": lambda h: torch.mul(h, 2, out=h),
    "aten": lambda h: torch.ops.aten.copy_.default(h, h * 2),
    "custom op": double_,
    "running mean": lambda h: F.batch_norm(h.flatten(0, 1).exp(), h[0, 0], h[0, 1], training=True),
    "foreach": lambda h: torch._foreach_add_([h], 1.0),
}


@pytest.mark.parametrize("name", CHANGES)
def test_operands_that_change(device: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        h = x.detach() * 1.5
        logits = F.linear(h, o.w)
        CHANGES[name](h)
        return F.cross_entropy(rows(logits), y.flatten())

    o = Operands(device)
    record = rewritten(function)
    torch.manual_seed(1)
    got = record.run(o, o.x, o.y)
    torch.manual_seed(1)
    torch.testing.assert_close(got, function(o, o.x, o.y))
    assert record.fused == 0
    assert "may change what its logits were made of" in caplog.text


def test_other_uses_of_the_operands(device: str) -> None:
    """They only read, and what they change is something else."""

    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        h = x * 2
        logits = F.linear(h, o.w)
        auxiliary = (h.square().mean() + o.w.norm()) * 0.1
        other = F.relu(h + 1, inplace=True).sum()
        return F.cross_entropy(rows(logits), y.flatten()) + auxiliary + other

    o = Operands(device)
    record = rewritten(function)
    assert_same(function, o, record)
    assert record.fused


@pytest.mark.parametrize("transform", ["grad", "grad_and_value", "jacrev", "vmap", "jvp", "hessian"])
def test_transforms(device: str, transform: str) -> None:
    o = Operands(device)
    x, w, y = o.x.detach()[0], o.w.detach(), o.y.clamp(min=0)[0]

    def loss(x: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(x, w), y)

    def function(x: Tensor) -> Any:
        if transform == "jvp":
            return torch.func.jvp(loss, (x,), (torch.ones_like(x),))
        if transform == "vmap":
            return torch.func.vmap(loss)(torch.stack([x, x * 2]))
        return getattr(torch.func, transform)(loss)(x)

    torch.testing.assert_close(rewritten(function).run(x), function(x))


def test_an_error_leaves_the_graph(device: str, monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("planted")

    o = Operands(device)
    monkeypatch.setattr(fusing._registry, "linear_cross_entropy", fails)
    record = rewritten(FUSED["shifted"])
    torch.testing.assert_close(record.run(o, o.x, o.y), FUSED["shifted"](o, o.x, o.y))
    assert record.fused == 0
    assert F.cross_entropy in [node.target for node in record.graphs[0].nodes]
    assert "ZeroDivisionError: planted" in caplog.text


AUTOCAST: dict[str, Callable[[Operands, Tensor, Tensor], Tensor]] = {}


def autocast_case(
    function: Callable[[Operands, Tensor, Tensor], Tensor],
) -> Callable[[Operands, Tensor, Tensor], Tensor]:
    AUTOCAST[function.__name__] = function
    return function


@autocast_case
def all_inside(o: Operands, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.cross_entropy(rows(o.head(x)), y.flatten())


@autocast_case
def head_inside(o: Operands, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        logits = o.head(x)
    return F.cross_entropy(rows(logits).float(), y.flatten())


@autocast_case
def head_in_float32(o: Operands, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.bfloat16):
        with torch.autocast(x.device.type, enabled=False):
            logits = o.head(x)
        return F.cross_entropy(rows(logits), y.flatten())


@autocast_case
def other_half_dtype(o: Operands, x: Tensor, y: Tensor) -> Tensor:
    with torch.autocast(x.device.type, torch.float16):
        logits = o.head(x)
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.cross_entropy(rows(logits), y.flatten())


@pytest.mark.parametrize("name", AUTOCAST)
def test_autocast(device: str, name: str) -> None:
    """The linear map keeps its dtype: what autocast made half is half, what was float32 is not made half."""
    o = Operands(device, torch.float32)
    function = AUTOCAST[name]
    record = rewritten(function)
    # Half logits are rounded to 2**-9 of themselves, and their gradients too.
    budgets = {"head_in_float32": 2e-6, "other_half_dtype": 2**-10}
    assert_same(function, o, record, tolerance=budgets.get(name, 2**-7))
    assert record.fused


@pytest.mark.parametrize("head_in_float32", [False, True])
def test_autocast_around_the_call(device: str, head_in_float32: bool) -> None:
    o = Operands(device, torch.float32)

    def function(o: Operands, x: Tensor, y: Tensor) -> Tensor:
        if head_in_float32:
            with torch.autocast(x.device.type, enabled=False):
                return F.cross_entropy(rows(o.head(x)), y.flatten())
        return F.cross_entropy(rows(o.head(x)), y.flatten())

    record = rewritten(function)
    assert_same(function, o, record, 2e-6 if head_in_float32 else 2**-7, lambda: torch.autocast(device, torch.bfloat16))
    assert record.fused


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_models(device: str, dtype: torch.dtype) -> None:
    o = Operands(device, dtype)
    for name in ("nn.Linear", "shifted", "softcap"):
        torch._dynamo.reset()
        record = rewritten(FUSED[name])
        assert_same(FUSED[name], o, record, tolerance=4 * torch.finfo(dtype).eps)
        assert record.fused
