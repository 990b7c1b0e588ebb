"""torchrl's estimators over the functions of integrations.torchrl, with nothing replaced in torchrl.

A method of torchrl's finds the functions that it calls among the globals of torchrl's module. Here it is made again of
the same code with this module's globals, which are torchrl's but for the functions.
"""

from __future__ import annotations

import inspect
from types import CellType, FunctionType
from typing import TYPE_CHECKING, Any

import torchrl
from torchrl.objectives.value import advantages as _theirs

from ._torchrl_functions import OURS as _OURS

__all__ = ["GAE", "TDLambdaEstimator", "VTrace"]

globals().update({name: value for name, value in vars(_theirs).items() if not name.startswith("__")})
globals().update(_OURS)


def _with_our_functions(method: Any) -> Any:
    """`method` with this module's globals; of a decorated one, what the decorators wrap."""
    inner = getattr(method, "__wrapped__", None)
    cells, namespace = method.__closure__, globals()
    if inner is not None:
        if not any(cell.cell_contents is inner for cell in cells or ()):
            raise ImportError(f"torchrl: a decorator must hold the {method.__qualname__} that it wraps in its closure")
        made = _with_our_functions(inner)
        cells = tuple(CellType(made) if cell.cell_contents is inner else cell for cell in cells)
        namespace = method.__globals__
    copy = FunctionType(method.__code__, namespace, method.__name__, method.__defaults__, cells)
    copy.__kwdefaults__ = method.__kwdefaults__
    copy.__dict__.update(method.__dict__)
    copy.__doc__, copy.__annotations__, copy.__qualname__ = method.__doc__, method.__annotations__, method.__qualname__
    if inner is not None:
        copy.__dict__["__wrapped__"] = made
    return copy


def _estimator(name: str) -> Any:
    """A subclass of torchrl's class of this name whose methods call our functions."""
    base: Any = getattr(_theirs, name, object)
    methods = {
        key: _with_our_functions(method)
        for key, method in vars(base).items()
        if inspect.isfunction(method) and not set(_OURS).isdisjoint(inspect.unwrap(method).__code__.co_names)
    }
    if not methods:
        raise ImportError(
            f"torchrl.{name}: a method of torchrl's {name} must call one of torchrl.objectives.value.functional's "
            f"functions, in torchrl {torchrl.__version__} none does"
        )
    doc = f"torchrl's {name}, computed by torch_dcs_ops.returns; the arguments and results are those of torchrl's."
    return type(base)(name, (base,), {**methods, "__module__": __name__, "__doc__": doc})


if TYPE_CHECKING:
    GAE: Any
    TDLambdaEstimator: Any
    VTrace: Any
else:
    GAE = _estimator("GAE")
    TDLambdaEstimator = _estimator("TDLambdaEstimator")
    VTrace = _estimator("VTrace")  # of a torchrl before 0.14 with 0.14's advantages where an episode ends
