"""The package torch_dcs_ops that lies beside this file, for the kernels library, under its own name.

A process can define the operators of torch.ops.dcs once, and graphs that are compiled with them import the package by
its name. So it becomes `torch_dcs_ops`, for whoever imports that later; where one has been imported already, it is
taken if it is of the same version.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

__all__ = ["discounted_cumsum", "linear_cross_entropy", "linear_log_probs", "torch_dcs_ops"]

_FOLDER = Path(__file__).resolve().parent


def _package() -> ModuleType:
    name = "torch_dcs_ops"
    (own,) = importlib.metadata.distributions(name=name, path=[str(_FOLDER)])
    if name in sys.modules:
        loaded = sys.modules[name]
        if loaded.__version__ != own.version:
            raise ImportError(
                f"torch_dcs_ops: a process must use one version, got {loaded.__version__} of {loaded.__file__}, "
                f"imported already, and {own.version} of {_FOLDER}"
            )
        return loaded
    spec = importlib.util.spec_from_file_location(name, _FOLDER / name / "__init__.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(_FOLDER))  # the package asks for the version that its metadata says
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    finally:
        sys.path.remove(str(_FOLDER))
    if not Path(module._native.__file__).is_relative_to(_FOLDER):
        raise ImportError(
            f"torch_dcs_ops: its modules must be those of {_FOLDER}, got {module._native.__file__} of an editable "
            "install; uninstall that, or import torch_dcs_ops first to use it"
        )
    return module


torch_dcs_ops = _package()
discounted_cumsum = torch_dcs_ops.discounted_cumsum
linear_cross_entropy = torch_dcs_ops.linear_cross_entropy
linear_log_probs = torch_dcs_ops.linear_log_probs
