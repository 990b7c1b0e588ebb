"""integrations.torchrl beside torchrl: its 13 functions, its estimators, and what enable() puts in their place."""

from __future__ import annotations

import inspect
import pickle
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from torch_dcs_ops.integrations import torchrl as ours

functional = pytest.importorskip("torchrl.objectives.value.functional", reason="torchrl is not installed")
if not ours.vtrace_ends_with_episodes():
    pytest.skip(
        "torchrl is older than 0.14, whose V-trace and tensors as discounts these compare with", allow_module_level=True
    )
from tensordict import TensorDict  # noqa: E402
from tensordict.nn import TensorDictModule  # noqa: E402
from torchrl.objectives import value as estimators  # noqa: E402

GAMMA, LAMBDA = 0.9, 0.8
HORIZON = 1 / (1 - GAMMA)


@pytest.fixture
def enabled() -> Iterator[None]:
    ours.enable()
    yield
    ours.disable()


@pytest.fixture(params=[torch.float32, torch.float64], ids=["float32", "float64"])
def dtype(request: pytest.FixtureRequest) -> Iterator[torch.dtype]:
    """torchrl multiplies a number with integer flags, in the default dtype: the operands' is made the default."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(request.param)
    yield request.param
    torch.set_default_dtype(before)


def operands(shape: tuple[int, ...], terminated: str = "of done") -> dict[str, Any]:
    names = ("state_value", "next_state_value", "reward")
    tensors = {name: torch.randn(shape) for name in names}
    logarithms = {name: 0.3 * torch.randn(shape) for name in ("log_pi", "log_mu")}
    done, other = torch.rand(shape) < 0.15, torch.rand(shape) < 0.15
    flags = {"of done": done & (torch.rand(shape) < 0.5), "independent": other, "none": None}
    return {**tensors, **logarithms, "done": done, "terminated": flags[terminated]}


def arguments_of(name: str, given: dict[str, Any]) -> dict[str, Any]:
    taken = inspect.signature(getattr(functional, name)).parameters
    arguments = {key: value for key, value in given.items() if key in taken}
    if name == "td0_return_estimate":
        done = arguments.pop("done")
        arguments["terminated"] = done if given["terminated"] is None else given["terminated"]
    return arguments


def check(name: str, given: dict[str, Any]) -> None:
    arguments = arguments_of(name, given)
    got, expected = (getattr(module, name)(**arguments) for module in (ours, functional))
    got, expected = (result if isinstance(result, tuple) else (result,) for result in (got, expected))
    for one, other in zip(got, expected, strict=True):
        # Some HORIZON steps enter a sum, each rounded a few times by both; torchrl's vectorized functions leave powers
        # of the discounts below 1e-7 out, on either side.
        budget = 4 * torch.finfo(other.dtype).eps + (2e-7 if name.startswith("vec") else 0)
        torch.testing.assert_close(one, other, rtol=0, atol=budget * HORIZON * max(1.0, other.abs().max().item()))


def test_all_functions_that_torchrl_has() -> None:
    assert set(ours.FUNCTIONS) == set(functional.__all__)
    for name in ours.FUNCTIONS:
        own, theirs = (inspect.signature(getattr(module, name)).parameters for module in (ours, functional))
        # Without its name and annotations a parameter is a default and a kind. (torchrl hides some behind *args.)
        assert [(p.name, p.default) for p in own.values()] == [(p.name, p.default) for p in theirs.values()], name


@pytest.mark.parametrize(
    ("shape", "time_dim"),
    [((4, 30, 1), -2), ((30, 4, 2), 0), ((2, 3, 17, 5), 2), ((4, 30), -1), ((30, 1), -2)],
    ids=str,
)
@pytest.mark.parametrize("name", ours.FUNCTIONS)
def test_functions(name: str, shape: tuple[int, ...], time_dim: int, dtype: torch.dtype) -> None:
    for terminated in ("of done", "independent", "none"):
        check(name, {**operands(shape, terminated), "gamma": GAMMA, "lmbda": LAMBDA, "time_dim": time_dim})


@pytest.mark.parametrize("rate", ["0-D", "one", "integer", "step", "time", "features"])
@pytest.mark.parametrize("name", ours.FUNCTIONS)
def test_tensors_as_discounts(name: str, rate: str, dtype: torch.dtype) -> None:
    shape = (4, 30, 3)
    if name == "vec_td_lambda_return_estimate" or (rate == "features" and name.startswith("vec_td")):
        name = name.removeprefix("vec_")  # torchrl's own raises, or takes the first row's lambda for all
    rates: dict[str, tuple[Any, Any]] = {
        "0-D": (torch.tensor(GAMMA), torch.tensor(LAMBDA)),
        "one": (torch.tensor([GAMMA]), torch.tensor([LAMBDA])),
        "integer": (torch.tensor(1), torch.tensor(LAMBDA)),
        "step": (GAMMA * torch.rand(shape), torch.rand(shape)),
        "time": (GAMMA * torch.rand(30, 1), LAMBDA),
        "features": (GAMMA * torch.rand(3), LAMBDA),
    }
    gamma, lmbda = rates[rate]
    if name == "vec_td_lambda_advantage_estimate":
        lmbda = LAMBDA
    check(name, {**operands(shape), "gamma": gamma, "lmbda": lmbda})


@pytest.mark.parametrize("rewards", [torch.float64, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("name", ours.FUNCTIONS)
def test_dtypes_of_mixed_operands(name: str, rewards: torch.dtype) -> None:
    given = {**operands((4, 30, 1)), "gamma": GAMMA, "lmbda": LAMBDA}
    arguments = arguments_of(name, {**given, "reward": (2 * given["reward"]).to(rewards)})
    got, expected = (getattr(module, name)(**arguments) for module in (ours, functional))
    got, expected = (result if isinstance(result, tuple) else (result,) for result in (got, expected))
    assert [result.dtype for result in got] == [result.dtype for result in expected]
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=4e-7 * HORIZON * max(1.0, other.abs().max().item()))


@pytest.mark.parametrize("name", ours.FUNCTIONS)
def test_dtypes_of_half_operands_and_wide_discounts(name: str) -> None:
    given = {**operands((4, 30, 1)), "gamma": GAMMA, "lmbda": LAMBDA}
    arguments = arguments_of(name, given)
    narrow = {k: v.bfloat16() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in arguments.items()}
    wide = arguments | {"gamma": torch.full((4, 30, 1), GAMMA, dtype=torch.float64)}
    dtypes = []
    for module in (ours, functional):
        results = [getattr(module, name)(**narrow), getattr(module, name)(**wide)]
        dtypes.append([[r.dtype for r in (result if isinstance(result, tuple) else (result,))] for result in results])
    assert dtypes[0] == dtypes[1]


@pytest.mark.parametrize("name", ["generalized_advantage_estimate", "td_lambda_return_estimate", "td1_return_estimate",
                                  "vtrace_advantage_estimate"])  # fmt: skip
def test_gradients(name: str) -> None:
    given: dict[str, Any] = {**operands((2, 9, 1)), "gamma": torch.tensor(GAMMA), "lmbda": torch.tensor(LAMBDA)}
    given = {key: v.double() if isinstance(v, Tensor) and v.dtype == torch.float32 else v for key, v in given.items()}
    arguments = arguments_of(name, given)
    leaves = [key for key, value in arguments.items() if isinstance(value, Tensor) and value.is_floating_point()]
    results = []
    for module in (ours, functional):
        made = {key: arguments[key].clone().requires_grad_() for key in leaves}
        result = getattr(module, name)(**{**arguments, **made})
        total = sum((part * part.detach().cos()).sum() for part in (result if isinstance(result, tuple) else (result,)))
        results.append(torch.autograd.grad(total, list(made.values())))
    torch.testing.assert_close(results[0], results[1], rtol=1e-11, atol=1e-11)


def test_a_value_that_does_not_count_may_be_nan() -> None:
    given = operands((4, 30, 1), "independent")
    given["next_state_value"][given["terminated"]] = float("nan")
    arguments = arguments_of("generalized_advantage_estimate", {**given, "gamma": GAMMA, "lmbda": LAMBDA})
    assert all(result.isfinite().all() for result in ours.generalized_advantage_estimate(**arguments))


@pytest.mark.parametrize("name", ["td_lambda_return_estimate", "td1_return_estimate"])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_rolling_gamma(name: str, is_enabled: bool, request: pytest.FixtureRequest) -> None:
    given = {**operands((2, 9, 1)), "gamma": GAMMA * torch.rand(2, 9, 1), "lmbda": LAMBDA, "rolling_gamma": False}
    arguments = arguments_of(name, given)
    expected = getattr(functional, name)(**arguments)
    if is_enabled:
        request.getfixturevalue("enabled")
    torch.testing.assert_close(getattr(ours, name)(**arguments), expected, rtol=0, atol=0)
    with pytest.raises(RuntimeError, match="rolling_gamma=False is expected only with time-sensitive"):
        getattr(ours, name)(**{**arguments, "gamma": GAMMA})


@pytest.mark.parametrize("wrong", ["state_value", "next_state_value", "done", "terminated"])
def test_shapes_are_checked(wrong: str) -> None:
    given = {**operands((4, 30, 1)), "gamma": GAMMA, "lmbda": LAMBDA}
    given[wrong] = given[wrong][:, 1:]
    for name in ours.FUNCTIONS:
        arguments = arguments_of(name, given)
        if wrong in arguments:
            with pytest.raises(RuntimeError, match=rf"{wrong} must have reward's shape \(4, 30, 1\), got \(4, 29, 1\)"):
                getattr(ours, name)(**arguments)


def rollout(shape: tuple[int, ...] = (4, 30)) -> Any:
    given = operands((*shape, 1))
    after = {"reward": given["reward"], "done": given["done"], "terminated": given["terminated"]}
    observations = torch.randn(*shape, 3), torch.randn(*shape, 3)
    return TensorDict(
        {"observation": observations[0], "state_value": given["state_value"], "action_log_prob": given["log_mu"],
         "next": {"observation": observations[1], "state_value": given["next_state_value"], **after}},
        batch_size=shape,
    )  # fmt: skip


CASES: dict[str, dict[str, Any]] = {
    "GAE": {"gamma": GAMMA, "lmbda": LAMBDA},
    "GAE vectorized": {"gamma": GAMMA, "lmbda": LAMBDA, "vectorized": True},
    "GAE averaged": {"gamma": GAMMA, "lmbda": LAMBDA, "average_gae": True},
    "TDLambdaEstimator": {"gamma": GAMMA, "lmbda": LAMBDA},
    "TDLambdaEstimator in a loop": {"gamma": GAMMA, "lmbda": LAMBDA, "vectorized": False},
}


@pytest.mark.parametrize("with_network", [False, True], ids=["values", "network"])
@pytest.mark.parametrize("case", CASES)
def test_estimators(case: str, with_network: bool) -> None:
    name, options = case.split()[0], CASES[case]
    network = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["state_value"]) if with_network else None
    data, time_dims = rollout(), (None, 0)
    base = getattr(estimators, name)
    own, theirs = (cls(value_network=network, **options) for cls in (getattr(ours, name), base))
    assert isinstance(own, base)
    for time_dim in time_dims:
        own.time_dim = theirs.time_dim = time_dim
        got, expected = own(data.clone()), theirs(data.clone())
        for key in ("advantage", "value_target"):
            torch.testing.assert_close(got[key], expected[key], rtol=2e-6, atol=4e-6)
        torch.testing.assert_close(own.value_estimate(data.clone(), next_value=data["next", "state_value"]),
                                   theirs.value_estimate(data.clone(), next_value=data["next", "state_value"]),
                                   rtol=2e-6, atol=4e-6)  # fmt: skip


def test_vtrace_estimator() -> None:
    nn = pytest.importorskip("torchrl.modules", reason="torchrl is not installed")
    network = TensorDictModule(torch.nn.Linear(3, 1), ["observation"], ["state_value"])
    policy = TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["logits"])
    actor = nn.ProbabilisticActor(policy, in_keys=["logits"], distribution_class=torch.distributions.Categorical,
                                  return_log_prob=True)  # fmt: skip
    data = rollout().set("action", torch.randint(2, (4, 30))).set("sample_log_prob", -torch.rand(4, 30))
    data.set("action_log_prob", -torch.rand(4, 30))
    options: dict[str, Any] = {"gamma": GAMMA, "actor_network": actor, "value_network": network, "rho_thresh": 1.3}
    got, expected = (cls(**options)(data.clone()) for cls in (ours.VTrace, estimators.VTrace))
    for key in ("advantage", "value_target"):
        torch.testing.assert_close(got[key], expected[key], rtol=2e-6, atol=4e-6)


def test_the_estimators_call_our_functions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not torchrl's loop: the default GAE is the one that is not vectorized."""

    def fails(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("torchrl's own function was called")

    for name in ours.FUNCTIONS:
        monkeypatch.setattr(estimators.advantages, name, fails, raising=False)
    ours.GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=None)(rollout())
    ours.TDLambdaEstimator(gamma=GAMMA, lmbda=LAMBDA, value_network=None)(rollout())
    with pytest.raises(AssertionError, match="torchrl's own"):
        estimators.GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=None)(rollout())


def test_an_estimator_compiles_and_pickles(fresh_compiler: None) -> None:
    """torchrl's own is a loop there, whatever `vectorized` says."""
    estimator = ours.GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=None)
    data = rollout()
    compiled = torch.compile(lambda data: estimator(data)["advantage"], fullgraph=True, backend="aot_eager")
    expected = estimator(data.clone())["advantage"]
    torch.testing.assert_close(compiled(data.clone()), expected)
    torch.testing.assert_close(pickle.loads(pickle.dumps(estimator))(data.clone())["advantage"], expected)


def places() -> dict[tuple[str, str], Any]:
    modules = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchrl"}
    return {
        (m, name): vars(module)[name]
        for m, module in modules.items()
        for name in ours.FUNCTIONS
        if name in vars(module)
    }


def test_enable_and_disable() -> None:
    import torchrl.objectives  # every loss module

    assert torchrl.objectives
    before = places()
    assert not any(function is getattr(ours, name) for (_, name), function in before.items())
    try:
        ours.enable()
        ours.patch()
        assert all(function is getattr(ours, name) for (_, name), function in places().items())
        for name in ("generalized_advantage_estimate", "td_lambda_return_estimate", "vtrace_advantage_estimate"):
            assert ("torchrl.objectives.value.advantages", name) in before
        got = estimators.GAE(gamma=GAMMA, lmbda=LAMBDA, value_network=None)(rollout())
        assert "advantage" in got.keys()  # noqa: SIM118
    finally:
        ours.disable()
    ours.unpatch()
    assert places() == before


def test_another_torchrl_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    before = places()
    monkeypatch.setattr(functional, "td1_return_estimate", lambda gamma, reward: reward)
    sentence = r"^torchrl.enable: td1_return_estimate of torchrl .* must have the parameters \['gamma', "
    with pytest.raises(RuntimeError, match=sentence + r".* got \['gamma', 'reward'\]$"):
        ours.enable()
    monkeypatch.delattr(functional, "td1_return_estimate")
    with pytest.raises(RuntimeError, match=r"got None$"):
        ours.enable()
    monkeypatch.undo()
    assert places() == before


def test_an_older_vtrace_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def older(gamma, log_pi, log_mu, state_value, next_state_value, reward, done, terminated=None, rho_thresh=1.0,
              c_thresh=1.0, time_dim=-2):  # type: ignore[no-untyped-def]  # fmt: skip
        return torch.zeros_like(reward), reward

    monkeypatch.setattr(functional, "vtrace_advantage_estimate", older)
    try:
        with pytest.warns(UserWarning, match="vtrace_advantage_estimate is left as it is"):
            ours.enable()
        assert functional.vtrace_advantage_estimate is older
        assert functional.generalized_advantage_estimate is ours.generalized_advantage_estimate
    finally:
        ours.disable()


@pytest.mark.parametrize("way", ["enable", "class"])
def test_a_loss_module_takes_them(way: str, enabled: None) -> None:
    """PPO by make_value_estimator, and its gradients, equal to torchrl's own."""
    objectives = pytest.importorskip("torchrl.objectives")
    nn = pytest.importorskip("torchrl.modules")
    policy = TensorDictModule(torch.nn.Linear(3, 2), ["observation"], ["logits"])
    actor = nn.ProbabilisticActor(policy, in_keys=["logits"], distribution_class=torch.distributions.Categorical)
    critic = nn.ValueOperator(torch.nn.Linear(3, 1), in_keys=["observation"])
    loss = objectives.ClipPPOLoss(actor, critic)
    data = rollout().exclude("state_value", ("next", "state_value")).set("action", torch.randint(2, (4, 30)))
    data.set("action_log_prob", -torch.rand(4, 30))
    results = []
    for on in (True, False):
        (ours.enable if on and way == "enable" else ours.disable)()
        if on and way == "class":
            loss.make_value_estimator(ours.GAE, gamma=GAMMA, lmbda=LAMBDA, value_network=critic, differentiable=True)
        else:
            loss.make_value_estimator(objectives.ValueEstimators.GAE, gamma=GAMMA, lmbda=LAMBDA)
        losses = loss(data.clone())
        total = losses["loss_objective"] + losses["loss_critic"]
        results.append((total, *torch.autograd.grad(total, list(loss.parameters()))))
    torch.testing.assert_close(results[0], results[1], rtol=2e-6, atol=4e-6)
