"""Losses of linear maps in forms that the linear + cross_entropy pass fuses, and near misses that it leaves alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

B, T, D, V = 2, 6, 5, 11


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


# With a part of the reason that the log gives.
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
    "wider bias": (
        lambda o, x, y: F.cross_entropy(rows(x.float() @ o.w.float().T + o.b), y.flatten()),
        "a bias converts to torch.float64",
    ),
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
