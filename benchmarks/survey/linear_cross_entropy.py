"""linear_cross_entropy beside torch's compiled F.cross_entropy of F.linear; the floor is one bare GEMM, or three."""

from __future__ import annotations

import torch
from torch import Tensor

from linear_cross_entropy.functions import eager
from survey.draw import Problem
from survey.work import Data, Work, public


def work(problem: Problem, data: Data, compiled: bool) -> Work:
    rows, features, classes = problem.shape
    x = data.normal((rows, features))
    w = data.normal((classes, features), scale=features**-0.5)
    target = torch.randint(classes, (rows,), device=data.device, generator=data.generator)
    if problem.options["ignored"]:
        drawn = torch.rand(rows, device=data.device, generator=data.generator)
        target[drawn < problem.options["ignored"]] = -100
    # Under backend="dcs" the loss is found in plain PyTorch.
    ours = eager if compiled else public("linear_cross_entropy")
    theirs = torch.compile(eager, dynamic=False) if data.device == "cuda" else eager

    def gemm() -> Tensor:
        return x.detach() @ w.detach().t()

    return Work(
        ours, (x, w, target), theirs=theirs, floor=gemm, floor_name="GEMM", floor_calls=3 if problem.backward else 1
    )
