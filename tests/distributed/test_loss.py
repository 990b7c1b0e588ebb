"""Vocabulary-parallel losses and log-probabilities against the same call in one process."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest
import torch
from torch import Tensor

from distributed import loss_cases
from distributed.loss_cases import Case
from distributed.team import Team
from support.selection import slow

# float64: sums of tens of terms, and of as many in another order.
BUDGET = 1e-13
ALL = {"return_lse": True, "z_loss": 0.1, "softcap": 3.0, "logit_scale": 1.7, "label_smoothing": 0.2}
CASES: list[Case] = [
    {"sizes": [4, 7]},
    {"sizes": [6, 6], "options": {"reduction": "sum"}, "bias": True},
    {"sizes": [4, 7], "options": {"reduction": "none", **ALL}, "bias": True, "weights": True},
    {"sizes": [4, 7], "options": {"reduction": "mean", **ALL}, "bias": True, "weights": True, "lead": (2, 5)},
    {"sizes": [3, 5], "options": {"reduction": "mean", "label_smoothing": 0.3}},
    {"sizes": [3, 5], "options": {"reduction": "mean"}, "weights": True},
    {"sizes": [0, 5], "options": {"return_predictions": True, **ALL}, "bias": True},
    {"sizes": [5, 0], "options": {"return_predictions": True, "return_lse": True, "reduction": "none"}},
    {"sizes": [1, 1], "options": {"ignore_index": 1, "reduction": "none"}},
    {"sizes": [5, 3], "sequence_parallel": True, "lead": (8,)},
    {"sizes": [5, 3], "sequence_parallel": True, "lead": (8, 2), "options": {"reduction": "none", **ALL}, "bias": True},
    {"sizes": [5, 3], "sequence_parallel": True, "lead": (8,), "weights": True, "options": {"return_lse": True}},
    {"sizes": [5, 3], "lead": (40,), "options": {"memory_budget": 300, **ALL}},  # several chunks
    {"sizes": [9, 3], "lead": (40,), "options": {"memory_budget": 300, "reduction": "none"}, "placed": True},
    {"sizes": [5, 3], "lead": (0,), "options": {"reduction": "sum", "return_lse": True}},
    {"sizes": [5, 3], "lead": (), "ignores": False},
    {"sizes": [5, 3], "grads": ()},
    {"sizes": [5, 3], "grads": ("input",)},
    {"sizes": [5, 3], "grads": ("linear_weight",), "options": {"reduction": "none"}},
    {"sizes": [4, 7], "log_probs": True},
    {"sizes": [4, 7], "log_probs": True, "ids": 3, "options": {"return_lse": True, "softcap": 3.0}, "bias": True},
    {"sizes": [0, 7], "log_probs": True, "ids": 2, "options": {"need_entropy": False}},
    {"sizes": [5, 2], "log_probs": True, "ids": 9, "options": {"logit_scale": 0.5, "ignore_index": 3}},
    {"sizes": [5, 3], "log_probs": True, "sequence_parallel": True, "lead": (8,), "options": {"return_lse": True}},
]


def rows_of(case: Case, values: Tensor, rank: int) -> Tensor:
    if not case.get("sequence_parallel") or values.dim() == 0:
        return values
    own = values.size(0) // len(case["sizes"])
    return values[rank * own : (rank + 1) * own]


def assert_equal_one_process(case: Case, found: list[Any], budget: float = BUDGET) -> None:
    """`found` are the (results, gradients) of the ranks."""
    results, gradients = loss_cases.in_one_process(case)
    for rank, (got, got_gradients) in enumerate(found):
        mine = loss_cases.bounds(case["sizes"], rank)
        names = list(case.get("grads", ("input", "linear_weight")))
        wanted = [rows_of(case, of, rank) if name == "input" else of[mine]
                  for name, of in zip([*names, "linear_bias"], gradients, strict=False)]  # fmt: skip
        for a, b in zip([*got, *got_gradients], [*(rows_of(case, r, rank) for r in results), *wanted], strict=True):
            torch.testing.assert_close(
                a, b, rtol=budget, atol=budget, equal_nan=True, msg=lambda said: f"{said} {case}"
            )
    if not case.get("sequence_parallel"):
        for results_of_rank, (input_gradient, *_) in ((r, [*g, torch.zeros(0)]) for r, g in found[1:]):
            for a, b in zip(results_of_rank, found[0][0], strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
            if "input" in case.get("grads", ("input",)):
                assert torch.equal(input_gradient, found[0][1][0])


def check(team: Team, cases: list[Case], budget: float = BUDGET) -> None:
    for case, *found in zip(cases, *team.run(loss_cases.many, cases), strict=True):
        assert_equal_one_process(case, found, budget)


@pytest.mark.parametrize("needs", [(True, True, True), (False, True, False), (False, False, False)])
@pytest.mark.parametrize(("classes", "input_sum"), [(5, ""), (0, "all"), (5, "own")])
def test_ops_are_what_their_schemas_and_fakes_say(needs: tuple[bool, ...], classes: int, input_sum: str) -> None:
    """Of a group of one rank, which communicates nothing; with a slice of all classes, and with none."""
    x, w, b = torch.randn(4, 3), torch.randn(classes, 3), torch.randn(classes)
    target = torch.tensor([[0], [-100], [4], [2]])
    numbers = (-100, 0.1, None, 1.0, 0.0, None, None, torch.float32, input_sum, 0, 5, "", 1, 0, *needs)
    forward = (x, w, target, b, None, None, None, *numbers, True, True)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.dcs._vocab_parallel_forward, forward, test_utils=tests)
    statistics = torch.ops.dcs._vocab_parallel_forward(*forward)[3]
    backward = (torch.ones(4), torch.ones(4, 1), None, torch.ones(4), x, w, target, b, None, None, statistics, *numbers)
    torch.library.opcheck(torch.ops.dcs._vocab_parallel_backward, backward, test_utils=tests)


def test_losses_are_those_of_one_process(two: Team) -> None:
    """Values, gradients, and the same bits on both ranks."""
    check(two, CASES)


def test_statistics_are_on_their_way_while_the_next_logits_are_made(two: Team) -> None:
    case: Case = {"sizes": [5, 3], "lead": (40,), "ignores": False, "bias": True, "options": {"memory_budget": 512}}
    for same_bits, order in two.run(loss_cases.chunk_by_chunk, case):
        assert same_bits
        assert len(order) > 6
        assert order == ["make"] + ["make", "end"] * (len(order) // 2 - 1) + ["end"]


HIDDEN = ["dW", "dW ends", "wait"]
OVERLAPPED: dict[str, tuple[Case, list[str]]] = {
    "sum": ({"sizes": [5, 3]}, ["dX", "sum", *HIDDEN]),
    "scatter": ({"sizes": [5, 3], "sequence_parallel": True, "lead": (8,)}, ["dX", "scatter", *HIDDEN]),
    "backward": ({"sizes": [5, 3], "options": {"reduction": "none"}}, ["logits", "dX", "sum", *HIDDEN]),
    "log_probs": ({"sizes": [5, 3], "log_probs": True, "ids": 3}, ["logits", "dX", "sum", *HIDDEN]),
    "chunks": (
        {"sizes": [5, 3], "lead": (12,), "ignores": False, "options": {"reduction": "none", "memory_budget": 200}},
        ["logits", "dX", "dW", "logits", "dX", "sum", *HIDDEN],
    ),
    "a narrow result": (
        {"sizes": [5, 3], "lead": (8,), "ignores": False, "dtype": torch.bfloat16},
        ["dX", "scatter", *HIDDEN, "gather", "wait"],
    ),
}


@pytest.mark.parametrize("name", OVERLAPPED)
def test_the_sum_of_inputs_gradient_is_on_its_way_under_the_last_product(two: Team, name: str) -> None:
    """Begun once input's gradient is whole, waited for behind linear_weight's: in one order on all ranks."""
    case, wanted = OVERLAPPED[name]
    orders = two.run(loss_cases.calls_in_order, case)
    assert orders[0] == orders[1]
    assert orders[0][-len(wanted) :] == wanted
    assert all(two.run(loss_cases.sums_by_themselves, case))


def test_the_sum_where_a_rank_has_no_classes(two: Team) -> None:
    """It has no products to hide it under, and sums in the same order."""
    case: Case = {"sizes": [0, 5]}
    collectives = ("gather", "sum", "scatter")
    none, all_classes = two.run(loss_cases.calls_in_order, case)
    assert not {"logits", "dX", "dW"} & set(none)
    assert [call for call in none if call in collectives] == [call for call in all_classes if call in collectives]
    assert all(two.run(loss_cases.sums_by_themselves, case))


def test_a_slice_may_change_alone(two: Team) -> None:
    check(two, [{"sizes": sizes, "lead": (6,)} for sizes in ([3, 9], [3, 8], [2, 8])])
    check(two, [{"sizes": sizes, "lead": (6,), "placed": True} for sizes in ([3, 9], [3, 9], [4, 8])])


def test_half_precision(two: Team) -> None:
    """Gradients are rounded to the dtype once more than in one process, input's where the parts meet."""
    for dtype, unit in ((torch.bfloat16, 2.0**-8), (torch.float16, 2.0**-11)):
        cases: list[Case] = [
            {"sizes": [4, 7], "dtype": dtype, "bias": True, "options": {"reduction": kind}} for kind in ("mean", "none")
        ]
        # Logits, their gradient and the result are rounded; logits of up to 8 amplify.
        check(two, cases, 16 * unit)


def test_autocast(two: Team) -> None:
    for loss, gradient, expected, expected_gradient in two.run(loss_cases.under_autocast):
        assert torch.equal(loss, expected)
        assert torch.equal(gradient, expected_gradient)


@pytest.mark.parametrize(
    "case",
    [
        {"sizes": [4, 7], "sequence_parallel": True, "lead": (8,), "weights": True},
        slow({"sizes": [4, 7], "bias": True, "options": {"return_lse": True}}),
    ],
    ids=["sequence parallel", "lse"],
)
def test_compiled(two: Team, case: Case) -> None:
    """In full graphs, one opaque call each."""
    check(two, [{**case, "compiler": "aot_eager"}])


@pytest.mark.slow
def test_compiled_by_inductor(two: Team) -> None:
    cases: list[Case] = [
        {"sizes": [4, 7], "bias": True, "options": {"return_lse": True}},
        {"sizes": [4, 7], "sequence_parallel": True, "lead": (8,), "options": {"reduction": "none"}},
        {"sizes": [4, 7], "log_probs": True, "ids": 2},
    ]
    check(two, [{**case, "compiler": "inductor"} for case in cases])


@pytest.mark.slow
def test_random_options_and_slices(two: Team, four: Team) -> None:
    draw = random.Random(0)
    for team, ranks in ((two, 2), (four, 4)):
        cases: list[Case] = []
        for seed in range(150):
            log_probs, sequence = draw.random() < 0.3, draw.random() < 0.3
            options: dict[str, Any] = {
                "softcap": draw.choice([None, 2.0]),
                "logit_scale": draw.choice([1.0, -0.7]),
                "memory_budget": draw.choice([None, 1, 500]),
                "return_lse": draw.random() < 0.5,
            }
            if not log_probs:
                options |= {
                    "reduction": draw.choice(["none", "mean", "sum"]),
                    "label_smoothing": draw.choice([0.0, 0.2, 1.0]),
                    "z_loss": draw.choice([0.0, 0.1]),
                    "return_predictions": draw.random() < 0.5,
                    "ignore_index": draw.choice([-100, 0, 2]),
                }
            sizes = [draw.randrange(7) for _ in range(ranks - 1)]
            case = {
                "sizes": [*sizes, draw.randrange(3, 9)],
                "seed": seed,
                "bias": draw.random() < 0.5,
                "weights": not log_probs and draw.random() < 0.5,
                "sequence_parallel": sequence,
                "lead": (ranks * draw.randrange(1, 4), draw.randrange(1, 4)),
                "log_probs": log_probs,
                "options": options,
            }
            cases.append(case | ({"ids": draw.randrange(1, 5)} if log_probs else {}))
        check(team, cases, 2 * BUDGET)


def test_certain_targets_keep_their_digits(two: Team) -> None:
    """A loss far below float32's spacing at 1 is the other rank's share: log1p of it, not the logarithm of a sum."""
    for rank_of_target, gap in itertools.product((0, 1), (20.0, 45.0)):
        loss, gradient = two.run(loss_cases.certain, rank_of_target, gap)[0]
        exact = torch.log1p(3 * torch.exp(torch.tensor(-gap, dtype=torch.float64)))
        # exp of a float32 sum of `gap`: gap units of 2**-24.
        budget = 4 * gap * 2.0**-24
        assert abs(float(loss) / float(exact) - 1) < budget
        assert abs(float(gradient.double().norm()) / float(exact) - 1) < budget


def test_a_bias_of_minus_infinity_masks_a_whole_slice(two: Team) -> None:
    for loss, gradient, expected, expected_gradient in two.run(loss_cases.masked_slice):
        torch.testing.assert_close(loss, expected, rtol=BUDGET, atol=BUDGET)
        torch.testing.assert_close(gradient, expected_gradient, rtol=BUDGET, atol=BUDGET)


DIFFERENCES = {
    "input": "the shape of input must be the same on all ranks, got (4, 5) on rank 0 and (3, 5) on rank 1",
    "dtype": "the dtype of input must be the same on all ranks, got float32 on rank 0 and float64 on rank 1",
    "softcap": "softcap must be the same on all ranks, got None on rank 0 and 2.0 on rank 1",
    "gradients": "gradients must be the same on all ranks, got (True, False, False, False) on rank 0 and "
                 "(True, True, False, False) on rank 1",
    "target": "target must be int64 (class indices) or floating-point (class probabilities), got int32 (on rank 1)",
    "function": "call must be the same on all ranks, got vocab_parallel_linear_cross_entropy on rank 0 and "
                "vocab_parallel_linear_log_probs on rank 1",
    "first_class": "first_class must follow the classes of the ranks before, 3 on rank 1, got 4",
    "classes": "classes must be the same on all ranks, got 6 on rank 0 and 7 on rank 1",
    "range": "target must be in [0, 5] or ignore_index (-100), got 6",
    "values": "target must be the same on all ranks, got other values on rank 1",
    "ignored": "target must be the same on all ranks, got other values on rank 1",
    "range of one": "target must be in [0, 5] or ignore_index (-100), got 7 (on rank 1)",
    "none": "linear_weight must have one class at least on some rank, got none",
}  # fmt: skip


OF_VALUES = ("range", "values", "ignored", "range of one")  # on a GPU device-side assertions, which end the process


def test_a_difference_is_the_same_sentence_on_all_ranks(two: Team) -> None:
    """Nobody hangs: the group goes on to work."""
    for difference, sentence in DIFFERENCES.items():
        if two.backend == "nccl" and difference in OF_VALUES:
            continue
        for rank, (returned, answer) in enumerate(two.answers(loss_cases.differs, difference)):
            assert not returned, difference
            said = answer[1]
            assert sentence.removesuffix(" (on rank 1)") in said, (difference, rank, said)
            if rank == 0:
                assert said.endswith(sentence), (difference, said)
    check(two, CASES[:1])


def test_wrong_calls(two: Team) -> None:
    for sentence, (kind, said) in two.run(loss_cases.refusals)[0].items():
        assert sentence in said, (kind, said)
