"""Vocabulary-parallel divergences of two heads against the same call in one process."""

from __future__ import annotations

import functools
import itertools
import random
from typing import Any

import pytest
import torch

from distributed import kl_cases, loss_cases
from distributed.loss_cases import Case
from distributed.team import Team

BUDGET = 1e-13  # float64: sums of tens of terms, and of as many in another order
ALL: dict[str, Any] = {
    "softcap": 3.0, "logit_scale": 1.7, "teacher_softcap": 4.0, "teacher_logit_scale": 0.6, "temperature": 1.5,
    "beta": 0.3,
}  # fmt: skip
DIRECTIONS = ("forward", "reverse", "jsd")
CASES: list[Case] = [
    {"sizes": sizes, "options": {"direction": direction, "reduction": reduction, **(ALL if bias else {})}, "bias": bias}
    for direction, (sizes, reduction, bias) in itertools.product(
        DIRECTIONS, (([4, 7], "mean", True), ([0, 5], "none", True), ([6, 1], "sum", False))
    )
] + [
    {"sizes": [5, 3], "sequence_parallel": True, "lead": (8,), "options": {"direction": "jsd"}},
    {"sizes": [5, 3], "sequence_parallel": True, "lead": (4, 3), "options": {"reduction": "none"}},
    {"sizes": [5, 3], "lead": (40,), "options": {"memory_budget": 600, "direction": "reverse"}, "placed": True},
    {"sizes": [5, 3], "lead": (40,), "options": {"memory_budget": 600, "reduction": "none", "direction": "jsd"}},
    {"sizes": [5, 3], "grads": ("input", "linear_weight"), "ignores": False},
    {"sizes": [5, 3], "grads": ("teacher_input",), "options": {"reduction": "none"}},
    {"sizes": [5, 3], "grads": (), "options": {"direction": "jsd"}},
    {"sizes": [5, 3], "lead": (0,), "options": {"reduction": "sum"}},
    {"sizes": [5, 3], "lead": (), "ignores": False},
]  # fmt: skip

# Each kind of problem is a kernel that Triton compiles, on a GPU: 55 for all of these, 365 for the random ones.
ON_GPUS = [CASES[at] for at in (0, 4, 8, 9, 11, 14)]


def check(team: Team, cases: list[Case], budget: float = BUDGET) -> None:
    for case, *found in zip(cases, *team.run(kl_cases.many, cases), strict=True):
        loss, gradients = kl_cases.in_one_process(case)
        names = [name for name in case.get("grads", kl_cases._OPERANDS) if case.get("bias") or "bias" not in name]
        of_rows = loss.dim() > 0
        for rank, (got, got_gradients) in enumerate(found):
            wanted = [kl_cases.own_part(case, name, g, rank) for name, g in zip(names, gradients, strict=True)]
            expected = kl_cases.own_part(case, "input", loss, rank) if of_rows else loss
            for a, b in zip([got, *got_gradients], [expected, *wanted], strict=True):
                torch.testing.assert_close(
                    a, b, rtol=budget, atol=budget, msg=functools.partial("{1} {0}".format, case)
                )
        if not case.get("sequence_parallel"):
            assert all(torch.equal(got, found[0][0]) for got, _ in found)


def test_divergences_are_those_of_one_process(two: Team) -> None:
    check(two, CASES if two.backend == "gloo" else ON_GPUS)


@pytest.mark.slow
def test_random_options_and_slices(two: Team, four: Team) -> None:
    draw = random.Random(0)
    for team, ranks in ((two, 2), (four, 4)):
        cases: list[Case] = []
        for seed in range(100 if team.backend == "gloo" else 5):
            sizes = [draw.randrange(7) for _ in range(ranks - 1)]
            options: dict[str, Any] = {
                "direction": draw.choice(DIRECTIONS), "reduction": draw.choice(["none", "mean", "sum"]),
                "softcap": draw.choice([None, 2.0]), "teacher_softcap": draw.choice([None, 2.0]),
                "logit_scale": draw.choice([1.0, -0.7]), "temperature": draw.choice([1.0, 2.0]),
                "memory_budget": draw.choice([None, 1, 500]), "zero_if_empty": draw.random() < 0.5,
            }  # fmt: skip
            cases.append({
                "sizes": [*sizes, draw.randrange(3, 9)], "seed": seed, "options": options,
                "bias": draw.random() < 0.5, "sequence_parallel": draw.random() < 0.3,
                "lead": (ranks * draw.randrange(1, 4), draw.randrange(2, 4)), "ignores": draw.random() < 0.5,
            })  # fmt: skip
        check(team, cases, 2 * BUDGET)


def test_half_precision(two: Team) -> None:
    """Gradients are rounded to the dtype once more than in one process; float16 forms them in backward."""
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        cases: list[Case] = [
            {"sizes": [4, 7], "dtype": dtype, "bias": True, "options": {"reduction": kind}} for kind in ("mean", "none")
        ]
        # Both inputs' gradients are summed in two steps; one rank has no classes, and begins them without a product.
        cases.append({"sizes": [0, 7], "lead": (8,), "dtype": dtype, "bias": True})
        # Logits of up to 8, their gradient and the result are rounded.
        check(two, cases, 16 * unit)
    mixed: Case = {"sizes": [4, 7], "dtype": torch.float32, "teacher_dtype": torch.bfloat16}
    check(two, [mixed], 16 * 2.0**-8)


def test_a_common_offset_of_all_logits_costs_no_digits(two: Team) -> None:
    """What the ranks tell each other is the largest logit and the rest apart."""
    case: Case = {"sizes": [4, 7], "offset": 2.0**16, "dtype": torch.float32, "grads": ("input",)}
    exact, _ = kl_cases.in_one_process({**case, "dtype": torch.float64})
    alone = abs(float(kl_cases.in_one_process(case)[0]) / float(exact) - 1)
    (loss, _), _ = two.run(kl_cases.on_a_rank, case)
    # Logits around 2**16 are rounded to 2**-8 in either case.
    assert abs(float(loss) / float(exact) - 1) <= 2 * alone + 2.0**-20


def test_masked_slices(two: Team) -> None:
    """Biases of -inf in both heads mask a slice, or in one of them some classes."""
    masks = (slice(4, 11), slice(2, 6)) if two.backend == "gloo" else (slice(4, 11),)
    for direction, masked in itertools.product(DIRECTIONS, masks):
        case: Case = {
            "sizes": [4, 7], "bias": True, "masked": masked, "masked_heads": ("linear_bias", "teacher_bias"),
            "options": {"direction": direction}, "grads": ("input", "linear_weight"),
        }  # fmt: skip
        check(two, [case])
    for direction, head in (("forward", "teacher_bias"), ("reverse", "linear_bias"), ("jsd", "teacher_bias")):
        for masked in masks:
            case = {
                "sizes": [4, 7], "bias": True, "masked": masked, "masked_heads": (head,),
                "options": {"direction": direction}, "grads": ("input", "linear_weight"),
            }  # fmt: skip
            check(two, [case])


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_the_sums_of_both_inputs_gradients_are_on_their_way_under_products(two: Team, reduction: str) -> None:
    case: Case = {"sizes": [5, 3], "options": {"reduction": reduction}}
    orders = two.run(loss_cases.calls_in_order, case, kl_cases.on_a_rank)
    assert orders[0] == orders[1]
    assert orders[0][-10:] == ["dX", "sum", "dW"] * 2 + ["dW ends"] * 2 + ["wait"] * 2
    assert all(two.run(loss_cases.sums_by_themselves, case, kl_cases.on_a_rank))


@pytest.mark.slow
def test_compiled(two: Team) -> None:
    """By Inductor, in full graphs."""
    cases: list[Case] = [
        {"sizes": [4, 7], "bias": True, "options": {"direction": "jsd"}},
        {"sizes": [4, 7], "options": {"reduction": "none"}, "sequence_parallel": True, "lead": (8,)},
    ]
    check(two, [{**case, "compiler": "inductor"} for case in cases])


@pytest.mark.parametrize("direction", DIRECTIONS)
def test_op_is_what_its_schema_and_fake_say(direction: str) -> None:
    """Of a group of one rank, which communicates nothing."""
    x, w, y, v, b = torch.randn(4, 3), torch.randn(5, 3), torch.randn(4, 2), torch.randn(5, 2), torch.randn(5)
    target = torch.tensor([0, -100, 1, 1])
    options = (direction, 0.5, 1.0, None, 1.0, 3.0, 1.0, -100, None)
    some = (True, True, True, False, True, False)
    for grad, needs, input_sum in ((None, (False,) * 6, ""), (torch.ones(1), some, "all"), (torch.ones(1), some, "")):
        numbers = (torch.float32, torch.float32, input_sum, 5, "", 1, 0)
        call = (grad, x, w, y, v, b, None, target, None, *options, *numbers, *needs)
        torch.library.opcheck(torch.ops.dcs._vocab_parallel_kl_div, call, test_utils=("test_schema", "test_faketensor"))


def test_wrong_calls(two: Team) -> None:
    for found in two.run(kl_cases.refusals):
        for sentence, (kind, said) in found.items():
            assert sentence in said, (kind, said)
