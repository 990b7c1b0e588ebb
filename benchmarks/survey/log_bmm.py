"""Log-semiring products; the floor is the unsafe product of exponentials, torch's the sum over all terms in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from log_bmm.functions import naive, unsafe
from survey.draw import Problem
from survey.work import Data, Work, passes, public

# All terms at once are formed up to this number.
NAIVE_TERMS = 2e8


def naive_max(a: Tensor, b: Tensor) -> Any:
    return torch.max(a.unsqueeze(-1) + b.unsqueeze(-3), -2)


def work(problem: Problem, data: Data, compiled: bool) -> Work:
    batch, rows, terms, columns = problem.shape
    scale = problem.options["scale"]
    a, b = data.normal((batch, rows, terms), scale=scale), data.normal((batch, terms, columns), scale=scale)
    theirs = {"log_bmm": naive, "max_bmm": naive_max}.get(problem.family) if problem.elements <= NAIVE_TERMS else None
    work = Work(public(problem.family), (a, b), theirs=theirs, floor_name="unsafe product")
    work.floor = passes(unsafe, work, problem.backward)
    return work
