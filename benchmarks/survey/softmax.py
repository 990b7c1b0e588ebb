"""softmax beside torch's."""

from __future__ import annotations

import torch

from survey.draw import Problem
from survey.work import Data, Work, public, size


def work(problem: Problem, data: Data, compiled: bool) -> Work:
    own, theirs, dim = public(problem.family), getattr(torch, problem.family), problem.dim
    x = data.normal()
    # The backward reads the output and its gradient.
    return Work(lambda x: own(x, dim), (x,), size(x), size(x), lambda x: theirs(x, dim))
