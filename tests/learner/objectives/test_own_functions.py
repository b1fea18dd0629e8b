"""The user's own loss, correction and advantages take the objective's place, and are refused in words when they are wrong."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.common.errors import SettingError
from offbeat.common.settings.completion import complete, complete_loss
from offbeat.common.settings.config import Config, DataSection, ModelSection, RolloutSection
from offbeat.common.settings.learning_sections import AdvantageSection, LossSection
from offbeat.common.settings.objective_checks import check_objective
from offbeat.deploy.checks.user_functions import check_learner_functions, learner_functions
from offbeat.learner.objectives.aggregation import aggregate
from offbeat.learner.objectives.objective import Evaluation, PolicyLogprobs, make_objective
from offbeat.learner.objectives.own_functions import load_advantage, load_loss
from offbeat.learner.training.preparation import completion_advantages

ROOT = Path(__file__).parents[3]
MASK = torch.tensor([[True, True], [True, False]])


@pytest.fixture(autouse=True)
def user_modules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples" / "own_code")
    monkeypatch.syspath_prepend(tmp_path)
    source = """
def raises(policy_logprobs, anchor_logprobs, completion_mask, advantages):
    return {}["missing"]

def summed(policy_logprobs, anchor_logprobs, completion_mask, advantages):
    return policy_logprobs.sum()

def not_a_number(policy_logprobs, anchor_logprobs, completion_mask, advantages):
    return policy_logprobs * float("nan")

def steep(policy_logprobs, anchor_logprobs, completion_mask, advantages):
    return (policy_logprobs - policy_logprobs.detach()).abs().sqrt()

def detached(policy_logprobs, anchor_logprobs, completion_mask, advantages):
    return policy_logprobs.detach() * advantages

def number(policy_logprobs, anchor_logprobs, completion_mask, advantages):
    return 0.0

def overwrites(log_rho, completion_mask, advantages):
    assert not advantages.isnan().any()
    return log_rho.clamp_(min=0.25).exp_() * (1 + advantages.abs())

def kept(log_rho, completion_mask, advantages):
    return log_rho.double() > 0

def near_the_largest(log_rho, completion_mask, advantages):
    return log_rho > log_rho[completion_mask].max() - 1

def of_largest(policy_logprobs, anchor_logprobs, completion_mask, advantages):
    return (policy_logprobs - policy_logprobs[completion_mask].max()) * advantages

def infinite(log_rho, completion_mask, advantages):
    return log_rho / 0

def negative(log_rho, completion_mask, advantages):
    return log_rho

def one_weight(log_rho, completion_mask, advantages):
    return log_rho.sum()

def listed(log_rho, completion_mask, advantages):
    return log_rho.tolist()

def fails(log_rho, completion_mask, advantages):
    return advantages[7]

def of_three(rewards):
    return rewards[:, :3]

def nans(rewards):
    return rewards * float("nan")

def flat(rewards):
    return rewards.ravel()

def two(a, b):
    return a
"""
    (tmp_path / "wrong_functions.py").write_text(source)


def evaluate(path: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the token losses of a loss of the user's on two rows with padding, and the gradient of their sum."""
    objective = make_objective(complete_loss(LossSection(objective="grpo", function=path), max_new_tokens=2))
    policy = torch.tensor([[-1.0, -2.0], [-0.5, -math.inf]], requires_grad=True)
    behavior = torch.tensor([[-1.5, -2.0], [-0.25, math.nan]])
    advantages = torch.tensor([[1.0, 1.0], [-2.0, math.nan]])
    evaluation = objective.evaluate(PolicyLogprobs(policy, behavior, None), MASK, advantages)
    evaluation.losses.sum().backward()
    assert policy.grad is not None
    assert evaluation.clipped_ratio is None
    assert not evaluation.clipped.any()
    return evaluation.losses.detach(), policy.grad


def test_own_loss_takes_the_objectives_place_and_never_sees_padding() -> None:
    losses, gradient = evaluate("own_objective:squared")
    # (0.5 - 0.1)^2, (0 - 0.1)^2; (-0.25 + 0.2)^2, padding. The gradient is twice the difference.
    torch.testing.assert_close(losses, torch.tensor([[0.16, 0.01], [0.0025, 0.0]]))
    torch.testing.assert_close(gradient, torch.tensor([[0.8, -0.2], [-0.1, 0.0]]))


def correct(path: str, **loss: Any) -> Evaluation:
    """Return the objective `reinforce` with a correction of the user's, on two rows with padding: losses are -A log pi."""
    objective = make_objective(complete_loss(LossSection(objective="reinforce", correction=path, **loss), max_new_tokens=2))
    policy = torch.tensor([[-1.0, -2.0], [-0.5, -math.inf]], requires_grad=True)
    proximal = torch.tensor([[-1.0, -2.5], [-0.25, math.nan]]) if objective.needs_proximal else None
    behavior = torch.tensor([[-1.5, -2.0], [-0.25, math.nan]])
    advantages = torch.tensor([[1.0, 1.0], [-2.0, math.nan]])
    evaluation = objective.evaluate(PolicyLogprobs(policy, behavior, proximal), MASK, advantages)
    evaluation.losses.sum().backward()
    assert policy.grad is not None
    # The weights are constants: the gradient of -A log pi is -A times the weight, and nothing on padding.
    weights = (evaluation.correction or pytest.fail("no correction")).weights
    torch.testing.assert_close(policy.grad, -torch.tensor([[1.0, 1.0], [-2.0, 0.0]]) * weights)
    return evaluation


def weights_of(path: str, **loss: Any) -> list[list[float]]:
    evaluation = correct(path, **loss)
    assert evaluation.correction is not None
    return evaluation.correction.weights.tolist()


def test_own_correction_weighs_the_token_losses_by_the_anchors_ratio_and_never_sees_padding() -> None:
    # log pi / mu is 0.5, 0 and -0.25; log pi_old / mu is 0.5, -0.5 and 0.
    assert weights_of("own_objective:damped") == [[pytest.approx(math.exp(-0.5)), 1.0], [pytest.approx(math.exp(-0.25)), 0.0]]
    decoupled = weights_of("own_objective:damped", anchor="decoupled")
    assert decoupled == [[pytest.approx(math.exp(-0.5)), pytest.approx(math.exp(-0.5))], [1.0, 0.0]]


def test_own_correction_may_be_a_mask() -> None:
    assert weights_of("wrong_functions:kept") == [[1.0, 0.0], [0.0, 0.0]]


def test_own_correction_sees_advantages_and_may_write_to_its_arguments() -> None:
    evaluation = correct("wrong_functions:overwrites")
    assert evaluation.correction is not None
    low, high = math.exp(0.25), math.exp(0.5)
    torch.testing.assert_close(evaluation.correction.weights, torch.tensor([[2 * high, 2 * low], [3 * low, 0.0]]))
    assert evaluation.correction.log_rho.tolist() == [[0.5, 0.0], [-0.25, 0.0]], "measured as it was"


@pytest.mark.parametrize(
    "setting", [{"function": "wrong_functions:of_largest"}, {"correction": "wrong_functions:near_the_largest"}]
)
@pytest.mark.parametrize("num_rows", [0, 2], ids=["a rank without completions", "skipped completions"])
def test_own_function_is_not_called_where_there_are_no_tokens(setting: dict[str, str], num_rows: int) -> None:
    objective = make_objective(complete_loss(LossSection(objective="grpo", **setting), max_new_tokens=2))  # pyright: ignore[reportArgumentType]
    policy = torch.zeros(num_rows, 1, requires_grad=True)
    none = torch.zeros(num_rows, 1)
    objective.evaluate(PolicyLogprobs(policy, none, None), none.bool(), none).losses.sum().backward()
    assert policy.grad is not None and not policy.grad.any()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("infinite", "it returned weights that are not finite"),
        ("negative", "it returned a weight below 0: -0.25"),
        ("one_weight", "it returned the shape () for log-ratios of the shape (2, 2)"),
        ("listed", "it returned list, which is no tensor"),
        ("fails", "it raised IndexError"),
    ],
)
def test_correction_that_fails_or_weighs_no_loss_is_the_users_mistake(name: str, words: str) -> None:
    with pytest.raises(SettingError) as raised:
        correct(f"wrong_functions:{name}")
    assert words in str(raised.value)
    assert raised.value.setting == "loss.correction"


def test_own_advantages_take_the_place_of_baseline_and_deviation() -> None:
    settings = complete(Config(advantage=AdvantageSection(function="own_objective:ranks"))).advantage
    rewards = np.array([[0.0, 5.0, 1.0], [2.0, 2.0, -1.0]])
    own = load_advantage(settings.function)
    assert completion_advantages(rewards, settings, own).tolist() == [
        [-1.0, 1.0, 0.0],
        [0.5, 0.5, -1.0],
    ]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("raises", "it raised KeyError: 'missing'"),
        ("summed", "for log-probs of the shape (2, 2)"),
        ("number", "it returned no tensor"),
    ],
)
def test_loss_that_fails_or_has_another_shape_is_the_users_mistake(name: str, words: str) -> None:
    with pytest.raises(SettingError) as raised:
        evaluate(f"wrong_functions:{name}")
    assert words in str(raised.value)
    assert raised.value.setting == "loss.function"


@pytest.mark.parametrize(
    ("name", "words"), [("nans", "not finite"), ("flat", "the shape (4,) for rewards of the shape (2, 2)")]
)
def test_advantages_of_another_shape_or_not_finite_are_the_users_mistake(name: str, words: str) -> None:
    with pytest.raises(SettingError) as raised:
        load_advantage(f"wrong_functions:{name}")(np.ones((2, 2)))
    assert words in str(raised.value)


def test_functions_with_other_parameters_are_found_before_anything_starts() -> None:
    config = Config(
        loss=LossSection(function="wrong_functions:two"), advantage=AdvantageSection(function="wrong_functions:missing")
    )
    assert learner_functions(config) and not learner_functions(Config())
    found = [finding.text for finding in check_learner_functions(config)]
    assert "cannot take (policy_logprobs, anchor_logprobs, completion_mask, advantages)" in found[0]
    assert "has no 'missing'" in found[1]
    assert list(check_learner_functions(Config(loss=LossSection(function="own_objective:squared")))) == []
    with pytest.raises(SettingError, match=r"loss\.function"):
        load_loss("wrong_functions:two")


def test_functions_that_fail_when_called_are_found_before_anything_starts() -> None:
    config = Config(
        rollout=RolloutSection(group_size=4),
        loss=LossSection(function="wrong_functions:summed", correction="wrong_functions:negative"),
        advantage=AdvantageSection(function="wrong_functions:of_three"),
    )
    assert learner_functions(Config(loss=LossSection(correction="own_objective:damped")))
    assert not learner_functions(Config(loss=LossSection(correction="token_tis")))
    loss, correction, advantages = [finding.text for finding in check_learner_functions(config)]
    assert "for log-probs of the shape (2, 2)" in loss
    assert "a weight below 0: -0.25" in correction
    assert "the shape (2, 3) for rewards of the shape (2, 4)" in advantages
    good = Config(
        loss=LossSection(function="own_objective:squared", correction="own_objective:damped"),
        advantage=AdvantageSection(function="own_objective:ranks"),
    )
    assert list(check_learner_functions(good)) == []


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("not_a_number", "its losses are not all finite"),
        ("steep", "its gradients are not all finite"),
        ("detached", "its losses have no gradient with respect to policy_logprobs"),
    ],
)
def test_loss_from_which_nothing_can_be_learned_is_found_before_anything_starts(name: str, words: str) -> None:
    (found,) = check_learner_functions(Config(loss=LossSection(function=f"wrong_functions:{name}")))
    assert found.kind == "mistake" and words in found.text


def test_own_advantages_beside_a_critic_are_refused() -> None:
    config = Config(
        model=ModelSection(path="model"),
        data=DataSection(train_data="data.jsonl"),
        loss=LossSection(objective="ppo"),
        advantage=AdvantageSection(function="own_objective:ranks"),
    )
    with pytest.raises(SettingError, match=r"advantage\.function.*critic"):
        check_objective(complete(config))


def test_fspo_of_the_example_is_the_clip_of_summed_log_ratios_with_the_root_of_the_length() -> None:
    """Rows of 4 and 9 tokens, within and beyond `0.03 sqrt(n)`, 0.06 and 0.09; products weigh."""
    lengths, sums = [4, 9, 4, 9, 4, 9], [0.05, -0.08, 0.07, -0.1, 0.07, -0.1]
    signs = [1.0, -1.0, 1.0, -1.0, -1.0, 1.0]
    mask = torch.arange(9) < torch.tensor(lengths)[:, None]
    steps = torch.tensor([total / length for total, length in zip(sums, lengths, strict=True)])[:, None]
    policy = (-1.0 + steps).expand(6, 9).where(mask, -torch.inf).clone().requires_grad_()
    loss = LossSection(objective="gspo", function="own_objective:fspo")
    config = complete(Config(loss=loss))
    inputs = PolicyLogprobs(policy, torch.full((6, 9), -1.0), None)
    found = make_objective(config.loss).evaluate(inputs, mask, torch.tensor(signs)[:, None].expand(6, 9))
    aggregate(found.losses, mask, torch.ones(6), mode="seq-mean-token-mean").backward()
    kept = [True, True, False, False, True, True]
    # The gradient of `e^S A` with respect to each token's log-prob is `e^S A`.
    expected = [-math.exp(total) * sign * is_kept for total, sign, is_kept in zip(sums, signs, kept, strict=True)]
    assert policy.grad is not None
    torch.testing.assert_close(policy.grad, torch.tensor(expected)[:, None].expand(6, 9).where(mask, 0.0))
    # The decisions are those of a band of the mean, `c / sqrt(n)`; its weights are not.
    mean = steps.abs().squeeze() > 0.03 / torch.tensor(lengths).sqrt()
    assert mean.tolist() == [False, False, True, True, True, True]
