"""Discounted scans and cumulative sums. torch's op is torch.cumsum, also beside a scan with a shared gamma."""

from __future__ import annotations

import torch
from torch import Tensor

from survey.draw import Problem
from survey.work import Data, Work, public, size


def work(problem: Problem, data: Data, compiled: bool) -> Work:
    x = data.normal()
    dim, options = problem.dim, problem.options

    def torch_cumsum(x: Tensor, *_: object) -> Tensor:
        return torch.cumsum(x, dim)

    if problem.family == "cumsum":
        cumsum, reverse = public("cumsum"), options["reverse"]
        return Work(lambda x: cumsum(x, dim, reverse=reverse), (x,), size(x), theirs=torch_cumsum)
    scan, direction = public("discounted_cumsum"), options["direction"]
    gamma = data.gamma(options["gamma"], leaf=True)
    reset = data.flags() if options["reset"] else None
    initial = data.normal(data.row_shape) if options["initial"] else None

    def ours(x: Tensor, gamma: float | Tensor, reset: Tensor | None, initial: Tensor | None) -> Tensor:
        result: Tensor = scan(x, gamma, dim=dim, direction=direction, reset=reset, initial=initial)
        return result

    # A backward reads the discounts and resets; with gamma's gradient the outputs, too.
    again = size(reset, gamma, x) if isinstance(gamma, Tensor) else size(reset)
    theirs = torch_cumsum if problem.kind == "plain" else None
    return Work(ours, (x, gamma, reset, initial), size(x), again, theirs)
