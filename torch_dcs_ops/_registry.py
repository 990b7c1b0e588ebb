"""The one ``Library("dcs", "DEF")`` and every schema string.

The C++ libraries only add implementations to these schemas, so this module is imported before any of them is loaded.
The library object lives at module scope: the registrations end with it.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("dcs", "DEF")

# The Tensor overload comes first: in the other order the dispatcher turns a 0-D or one-element tensor gamma into a
# float, which drops its gradient and reads it back from the GPU.
_SCHEMAS = (
    "discounted_cumsum.Tensor(Tensor input, Tensor gamma, *, int dim=-1, str direction='right', Tensor? initial=None, "
    "Tensor? reset=None, SymInt? window=None) -> Tensor",
    "discounted_cumsum(Tensor input, float gamma, *, int dim=-1, str direction='right', Tensor? initial=None, "
    "Tensor? reset=None, SymInt? window=None) -> Tensor",
    "cumsum(Tensor input, int dim=-1, *, bool reverse=False, ScalarType? dtype=None) -> Tensor",
    # What the kernels compute; the ops above are fronts of it. gamma None: gamma_value is the discount of every step.
    "_scan(Tensor input, Tensor? gamma, float gamma_value, int dim, bool reverse, bool shifted, Tensor? initial, "
    "Tensor? reset, SymInt? window) -> Tensor",
    # (grad_input, grad_gamma) of an unshifted _scan without a window, in one pass.
    "_scan_backward(Tensor grad, Tensor output, Tensor? gamma, float gamma_value, int dim, bool reverse, "
    "Tensor? initial, Tensor? reset) -> (Tensor, Tensor)",
)

for _schema in _SCHEMAS:
    LIBRARY.define(_schema, tags=(torch.Tag.pt2_compliant_tag,))

discounted_cumsum_tensor = torch.ops.dcs.discounted_cumsum.Tensor
discounted_cumsum_number = torch.ops.dcs.discounted_cumsum.default
cumsum = torch.ops.dcs.cumsum.default
scan = torch.ops.dcs._scan.default
scan_backward = torch.ops.dcs._scan_backward.default
