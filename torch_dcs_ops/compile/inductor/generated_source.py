"""What the source of a generated kernel with scans is changed to, once Inductor has written it.

Both rewritings let a thread hold successive steps, which Inductor's one form of a scan, `tl.associative_scan` over a
tile of rows by steps, spreads over threads; the functions they call are in `triton_kernels/scan/register_groups.py`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable

IMPORTS = (
    "from torch_dcs_ops.compile.inductor import heuristics as triton_heuristics\n"
    "from torch_dcs_ops.triton_kernels.scan import register_groups"
)
_SCAN_CALL = re.compile(r"^( *)(\w+,[\w ,]*) = tl\.associative_scan\(\(([\w ,]+)\), 1, (\w+)\)$", re.MULTILINE)
_LAST_STEP = "rbase == (RBLOCK - 1)"
_DECORATOR = "\n@triton_heuristics."
# The kinds of kernel that `heuristics` has a decorator for.
_KNOWN_DECORATOR = re.compile(r"^@triton_heuristics\.(persistent_)?reduction\($", re.MULTILINE)


class UnknownSourceError(Exception):
    """Generated source has a form that is not known."""


def check_orders(source: str, orders: tuple[str, ...]) -> None:
    """That a kernel has the lines which put its steps into the order of its scans, by how these begin."""
    if not all(f" = {order}" in source for order in orders):
        raise UnknownSourceError("the steps of a scan are in an order that is not known")


def with_imports(source: str) -> str:
    if not _KNOWN_DECORATOR.search(source):
        raise UnknownSourceError("a kernel with a scan was generated with a decorator that is not known")
    # The name is Inductor's own, as it reads the kind of a kernel off that line.
    return source.replace(_DECORATOR, f"\n{IMPORTS}\n{_DECORATOR}", 1)


def with_turned_groups(source: str, steps: int, is_looped: bool) -> str:
    """The reversed scans of a kernel whose tiles have their groups, but not the groups' steps, in the scan's order."""

    def turned(values: Iterable[str]) -> str:
        return ", ".join(f"register_groups.turned({value}, {steps})" for value in values) + ","

    def statements(indent: str, results: list[str], operands: list[str], combine: str) -> str:
        scan = f"{', '.join(results)}, = tl.associative_scan(({turned(operands)}), 1, {combine})"
        return f"{indent}{scan}\n{indent}{', '.join(results)}, = {turned(results)}"

    # A loop carries each member of a scan from a tile to the next.
    carried = sum(len(_names(results)) for _, results, _, _ in _SCAN_CALL.findall(source)) if is_looped else 0
    if source.count(_LAST_STEP) != carried:
        raise UnknownSourceError("a scan was generated whose carry is taken in a form that is not known")
    # A tile's last step in the order of the scan is the first one of its last group.
    return _with_scans(source, statements).replace(_LAST_STEP, f"rbase == (RBLOCK - {steps})")


def with_columns(source: str, columns: str, steps: int, number: float | None) -> str:
    """The scans of a kernel whose tiles hold whole columns, `steps` successive steps in the registers of a thread.

    columns: which ones (see `heuristics.COLUMNS`), an argument of the decorator. number: the discount of all of them,
    if that is one and known.
    """
    helpers: dict[str, str] = {}

    def statements(indent: str, results: list[str], operands: list[str], combine: str) -> str:
        if number is not None:
            gate, value = operands
            return f"{indent}{results[-1]} = register_groups.discounted_columns({gate}, {value}, {number!r}, {steps})"
        if len(operands) == 1:
            return f"{indent}{results[0]} = register_groups.summed_columns({operands[0]}, {steps})"
        helpers[combine] = _JOINED_COLUMNS.format(combine=combine)
        return f"{indent}{results[-1]} = {combine}_columns({', '.join(operands)}, {steps})"

    source = _with_scans(source, statements)
    decorator = f"{_DECORATOR}persistent_reduction(\n"
    if decorator not in source:
        raise UnknownSourceError("a kernel of whole columns was generated as one of another kind")
    return source.replace(decorator, "\n".join(("", *helpers.values())) + f"{decorator}    columns={columns!r},\n", 1)


# `discounted_columns` for any gates. Triton calls a function that is an argument in its own scans only, so each way to
# join pairs gets its own. Scanned over the groups is a segment with what is carried to its last member, a pair as well.
_JOINED_COLUMNS = """
@triton.jit
def {combine}_exclusive(gate_0, value_0, gate_before_0, value_before_0, gate_1, value_1, gate_before_1, value_before_1):
    gate, value = {combine}(gate_0, value_0, gate_1, value_1)
    gate_before, value_before = {combine}(gate_0, value_0, gate_before_1, value_before_1)
    return gate, value, gate_before, value_before

@triton.jit
def {combine}_columns(gates, values, V: tl.constexpr):
    gate = register_groups.steps_of(gates, V)
    value = register_groups.steps_of(values, V)
    product = gate[0]
    total = value[0]
    for i in tl.static_range(1, V):
        product, total = {combine}(product, total, gate[i], value[i])
    one = tl.full(product.shape, 1, product.dtype)
    zero = tl.full(total.shape, 0, total.dtype)
    _, _, _, carry = tl.associative_scan((product, total, one, zero), 1, {combine}_exclusive)
    results = ()
    for i in tl.static_range(V):
        _, carry = {combine}(one, carry, gate[i], value[i])
        results = results + (carry,)
    return register_groups.tile_of(results, V)
"""


def _with_scans(source: str, statements: Callable[[str, list[str], list[str], str], str]) -> str:
    def replaced(match: re.Match[str]) -> str:
        indent, results, operands, combine = match.groups()
        return statements(indent, _names(results), _names(operands), combine)

    result, count = _SCAN_CALL.subn(replaced, source)
    if count != source.count("tl.associative_scan("):
        raise UnknownSourceError("a scan was generated in a form that is not known")
    return result


def _names(members: str) -> list[str]:
    return [name.strip() for name in members.split(",") if name.strip()]
