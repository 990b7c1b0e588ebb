"""Returns and advantages; nothing of torch's is beside them."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from survey.draw import Problem
from survey.work import Data, Work, public, size

# When each reads values, and how many tensors it returns.
READS_VALUES = {"td_lambda_returns": "bootstrap_value", "n_step_returns": "bootstrap_value"}
READS_VALUES |= dict.fromkeys(("gae", "vtrace"), "always")
OUTPUTS = {"gae": 2, "vtrace": 2}


def work(problem: Problem, data: Data, compiled: bool) -> Work:
    kind, options = problem.kind, problem.options
    function = public(f"returns.{kind}")
    tensors: dict[str, Tensor | None] = {"rewards": data.normal()}
    given = options["bootstrap"]
    if READS_VALUES.get(kind) in ("always", given):
        tensors["values"] = data.normal()
    if kind == "vtrace":
        tensors["rhos"] = data.normal(leaf=False).exp_()
    tensors[given] = data.normal(data.row_shape if given == "bootstrap_value" else None)
    for name in ("terminated", "truncated"):
        if options[name]:
            tensors[name] = data.flags()
    gamma = data.gamma(options["gamma"], leaf=False)
    if isinstance(gamma, Tensor):
        tensors["gamma"] = gamma
    names = list(tensors)
    fixed: dict[str, Any] = {"time_dim": problem.dim}
    if not isinstance(gamma, Tensor):
        fixed["gamma"] = gamma
    if kind != "discounted_returns" and not options["terminated"]:
        fixed["terminated"] = None
    if "n" in options:
        fixed["n"] = min(options["n"], problem.shape[problem.dim])

    def ours(*values: Tensor) -> Any:
        return function(**dict(zip(names, values, strict=True)), **fixed)

    outputs = OUTPUTS.get(kind, 1) * size(tensors["rewards"])
    # Linear in rewards and values: a backward reads only what these are multiplied with.
    again = size(*(tensors.get(name) for name in ("terminated", "truncated", "gamma", "rhos")))
    return Work(ours, list(tensors.values()), outputs, again)
