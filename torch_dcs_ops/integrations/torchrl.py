"""torchrl's value functions and estimators over torch_dcs_ops.returns, one pass instead of a loop over time.

`enable()` (or `patch()`) puts the functions below in the place of torchrl's in torchrl itself, so that every estimator
and loss module takes them; `disable()` (`unpatch()`) takes them out again. `GAE`, `TDLambdaEstimator` and `VTrace` are
torchrl's classes over these functions, with nothing replaced. The functions may also be called as they are.

torchrl computes in the default dtype what it makes of numbers and flags, so that float64 operands with numbers for
discounts have float32's accuracy there unless that is float64; here they have their own.

They have the names, arguments and results of torchrl.objectives.value.functional: tensors (*batch, T, *features), time
at `time_dim`, results of reward's shape. `next_state_value` is the value before a reset, `terminated` (default: `done`)
says where it does not count, `done` where nothing is carried across. gamma and lmbda are numbers or tensors that
broadcast against reward. A value that does not count may be NaN. `rolling_gamma=False` is left to torchrl's function.

torchrl >= 0.9 is imported by `enable()`, by the classes and for `rolling_gamma=False`; developed with 0.14.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from typing import TYPE_CHECKING, Any

import torch

from ._libraries import checked, version
from ._torchrl_functions import MODULE, OURS, replaced
from ._torchrl_functions import generalized_advantage_estimate as generalized_advantage_estimate
from ._torchrl_functions import td0_advantage_estimate as td0_advantage_estimate
from ._torchrl_functions import td0_return_estimate as td0_return_estimate
from ._torchrl_functions import td1_advantage_estimate as td1_advantage_estimate
from ._torchrl_functions import td1_return_estimate as td1_return_estimate
from ._torchrl_functions import td_lambda_advantage_estimate as td_lambda_advantage_estimate
from ._torchrl_functions import td_lambda_return_estimate as td_lambda_return_estimate
from ._torchrl_functions import vec_generalized_advantage_estimate as vec_generalized_advantage_estimate
from ._torchrl_functions import vec_td1_advantage_estimate as vec_td1_advantage_estimate
from ._torchrl_functions import vec_td1_return_estimate as vec_td1_return_estimate
from ._torchrl_functions import vec_td_lambda_advantage_estimate as vec_td_lambda_advantage_estimate
from ._torchrl_functions import vec_td_lambda_return_estimate as vec_td_lambda_return_estimate
from ._torchrl_functions import vtrace_advantage_estimate as vtrace_advantage_estimate

if TYPE_CHECKING:
    from ._torchrl_estimators import GAE as GAE
    from ._torchrl_estimators import TDLambdaEstimator as TDLambdaEstimator
    from ._torchrl_estimators import VTrace as VTrace

FUNCTIONS, ESTIMATORS = tuple(OURS), ("GAE", "TDLambdaEstimator", "VTrace")
__all__ = [*FUNCTIONS, *ESTIMATORS, "disable", "enable", "patch", "unpatch"]


def enable() -> None:
    """From here on torchrl computes its advantages and returns by these functions; a second call does nothing.

    They replace torchrl's in all of torchrl's modules that are imported, or will be. Names that other code has imported
    from torchrl before stay torchrl's own. So does, with a warning, V-trace of a torchrl before 0.14, which at the end
    of an episode takes the target of the next one.

    Raises:
        ImportError: torchrl is not installed.
        RuntimeError: a function of the installed torchrl is not there, or has other parameters. Nothing is replaced.
    """
    if replaced:
        return
    functional = importlib.import_module(MODULE)
    originals = {name: checked("torchrl", name, getattr(functional, name, None), ours) for name, ours in OURS.items()}
    if not vtrace_ends_with_episodes():
        del originals["vtrace_advantage_estimate"]
        warnings.warn(
            f"torchrl.enable: vtrace_advantage_estimate is left as it is, as torchrl {version('torchrl')}'s takes the "
            "next episode's target at the end of one; torchrl 0.14's does not",
            stacklevel=2,
        )
    _exchange({name: (original, OURS[name]) for name, original in originals.items()})
    replaced.update(originals)


def disable() -> None:
    """Gives torchrl its own functions back; without `enable()` it does nothing."""
    _exchange({name: (OURS[name], original) for name, original in replaced.items()})
    replaced.clear()


patch, unpatch = enable, disable


def vtrace_ends_with_episodes() -> bool:
    """Whether torchrl's own V-trace is 0.14's: a step that is done, but not terminated, has its own next value."""
    zero, after, done = torch.zeros(2, 1), torch.tensor([[1.0], [0.0]]), torch.tensor([[True], [False]])
    own = replaced.get("vtrace_advantage_estimate") or importlib.import_module(MODULE).vtrace_advantage_estimate
    advantage, _ = own(1.0, zero, zero, zero, after, zero, done, torch.zeros_like(done))
    return bool(advantage[0] == 1.0)


def _exchange(pairs: dict[str, tuple[Any, Any]]) -> None:
    """Puts the second of each pair wherever a module of torchrl has the first under that name."""
    for module_name, module in list(sys.modules.items()):
        if module_name == "torchrl" or module_name.startswith("torchrl."):
            for name, (old, new) in pairs.items():
                if getattr(module, "__dict__", {}).get(name) is old:
                    setattr(module, name, new)


def __getattr__(name: str) -> Any:
    if name in ESTIMATORS:
        return getattr(importlib.import_module("._torchrl_estimators", __package__), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
