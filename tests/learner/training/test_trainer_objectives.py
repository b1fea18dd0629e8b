"""The trainer with objectives besides GSPO, KL, critic, adapter: against autograd, and over several steps."""

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from offbeat.common.settings.learning_sections import AdvantageSection, KlSection, LoraSection, RewardSection
from offbeat.learner.leases.groups import Group
from offbeat.learner.objectives.kl import KL_HORIZON
from offbeat.learner.objectives.objective import make_objective
from offbeat.learner.objectives.reward_shaping import RunningMoments
from offbeat.learner.training.preparation import Preparation
from tests.learner.training.test_trainer import running, weights_of
from tests.learner.training.trainer_cases import SGD, make_config, make_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

CRITIC = AdvantageSection(baseline="critic")


@pytest.fixture(scope="module")
def policy(tiny_model: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def completion_logits(policy: Any, group: Group, index: int) -> torch.Tensor:
    """Return log-probs `[tokens, vocabulary]` at one completion's positions, from a plain forward pass."""
    row = torch.tensor([[*group.prompt_token_ids, *group.rollouts[index].token_ids]])
    return policy(input_ids=row).logits[0, len(group.prompt_token_ids) - 1 : -1].log_softmax(-1)


@pytest.mark.parametrize("normalize", [False, True], ids=["plain", "self-normalized"])
def test_decoupled_token_objective_with_kl_and_entropy_has_the_gradient_of_its_formula(
    tiny_model: Path, policy: Any, normalize: bool
) -> None:
    """On-policy (`pi = pi_old = reference`): `sum_it w_it (-A_i log pi_it) - 0.01 H_it` over all tokens, k2's gradient 0.

    Self-normalized weights are divided by their mean over the tokens of all micro-batches.
    """
    groups = make_groups(3)
    config = make_config(
        tiny_model,
        deepspeed=SGD,
        max_grad_norm=1e9,
        loss={"objective": "grpo", "anchor": "decoupled", "correction": "token_tis(0, 1.02)"}
        | {"aggregation": "token-mean", "entropy_coef": 0.01, "normalize_correction": normalize},
        kl=KlSection(estimator="k2", loss_coef=0.5),
    )
    with running(config) as trainer:
        (metrics,) = trainer.train_batch(groups)
        weights = weights_of(trainer)
    policy.zero_grad()
    num_tokens = sum(len(rollout.token_ids) for group in groups for rollout in group.rollouts)
    kept: list[torch.Tensor] = []
    terms: list[torch.Tensor] = []
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for index, rollout in enumerate(group.rollouts):
            logits = completion_logits(policy, group, index)
            logprobs = logits.gather(-1, torch.tensor(rollout.token_ids, dtype=torch.int64)[:, None]).squeeze(-1)
            weight = (logprobs.detach() - torch.tensor(rollout.behavior_logprobs)).exp()
            kept.append(weight.clamp(max=1.02))
            entropy = -(logits.exp() * logits).sum(-1)
            terms.append(torch.stack([-advantages[index] * kept[-1] * logprobs, -0.01 * entropy]).sum(dim=-1))
    corrected, bonus = torch.stack(terms).sum(dim=0)
    mean = torch.cat(kept).mean() if normalize else 1.0
    ((corrected / mean + bonus) / num_tokens).backward()
    truncated = int((torch.cat(kept) == 1.02).sum())
    assert 0 < truncated < num_tokens
    assert metrics["correction/truncated"] == pytest.approx(truncated / num_tokens)
    assert not normalize or metrics["correction/weight_mean"] == pytest.approx(1)
    assert metrics["kl/reference"] == pytest.approx(0, abs=1e-9)
    assert metrics["ratio/first"] < 1e-6, "against the recomputed log-probs"
    assert metrics["kl/behavior_proximal_k3"] > 1e-4
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach() - 0.1 * parameter.grad, rtol=0, atol=2e-6)


def test_completion_with_an_impossible_behavior_logprob_is_left_out_and_its_lease_is_named(tiny_model: Path) -> None:
    """A token that the engine gave e^-60, in a completion with A < 0: alone it would have a gradient of e^20 and more."""
    groups = make_groups(3)
    worst = min(groups[1].rollouts, key=lambda rollout: rollout.reward)
    broken = worst._replace(behavior_logprobs=np.full_like(worst.behavior_logprobs, -60.0))
    rollouts = tuple(broken if rollout is worst else rollout for rollout in groups[1].rollouts)
    with running(make_config(tiny_model, loss={"objective": "grpo"})) as trainer:
        sound, gradient = trainer.gradient(groups)
        metrics, gradient_without = trainer.gradient([groups[0], groups[1]._replace(rollouts=rollouts), groups[2]])
    assert (sound["broken/ratio"], metrics["broken/ratio"], metrics["broken/not_finite"]) == (0, 1, 0)
    assert metrics["broken/leases"] == {"1": 1} and "broken/leases" not in sound
    assert 0 < gradient_without.norm() < 2 * gradient.norm()
    assert not torch.equal(gradient_without, gradient)


def test_prompts_weigh_alike_however_long_their_completions_are_and_into_whatever_micro_batches_they_fall(
    tiny_model: Path,
) -> None:
    groups = make_groups(3)
    short = [
        rollout._replace(token_ids=rollout.token_ids[:1], behavior_logprobs=rollout.behavior_logprobs[:1])
        for rollout in groups[0].rollouts
    ]
    groups[0] = groups[0]._replace(rollouts=tuple(short))
    with running(
        make_config(tiny_model, loss={"objective": "grpo", "aggregation": "token-mean"}, groups_per_step=1)
    ) as trainer:
        alone = [trainer.gradient([group]) for group in groups]
    for_prompts = {"objective": "grpo", "aggregation": "prompt-mean-token-mean"}
    with running(make_config(tiny_model, loss=for_prompts, micro_batch_tokens=20)) as trainer:
        metrics, gradient = trainer.gradient(groups)
    torch.testing.assert_close(gradient, torch.stack([found for _, found in alone]).mean(dim=0), rtol=1e-4, atol=1e-6)
    assert metrics["loss/policy"] == pytest.approx(np.mean([of_group["loss/policy"] for of_group, _ in alone]))


@pytest.mark.parametrize("micro_batch_tokens", [20, 10_000])
def test_m2po_drops_over_the_whole_step_and_keeps_the_ratio_to_the_engine(
    tiny_model: Path, policy: Any, micro_batch_tokens: int
) -> None:
    """Two steps of one batch: each drops by the weights that it starts from, with the paper's loop."""
    groups = make_groups(6)
    config = make_config(
        tiny_model,
        deepspeed=SGD,
        max_grad_norm=1e9,
        micro_batch_tokens=micro_batch_tokens,
        steps_per_batch=2,
        loss={"objective": "m2po(4e-3)", "clip_low": None, "clip_high": None},
    )
    with running(config) as trainer:
        metrics = trainer.train_batch(groups)
        weights = weights_of(trainer)
    expected = copy.deepcopy(policy)
    dropped = [_take_m2po_step(expected, of_step, threshold=4e-3) for of_step in (groups[:3], groups[3:])]
    assert [row["clip_tokens/fraction"] for row in metrics] == pytest.approx(dropped)
    assert min(dropped) > 0.02
    for name, parameter in expected.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=0, atol=2e-6)


def test_skipped_completion_has_no_part_in_the_cutoff_of_m2po(tiny_model: Path) -> None:
    config = make_config(tiny_model, loss={"objective": "m2po(4e-3)", "clip_low": None, "clip_high": None})

    def gradient_with(behavior_logprob: float) -> torch.Tensor:
        """Return the gradient of a step that skips a bad completion, whose tokens but one had this log-prob in the engine."""
        groups = make_groups(3)
        good, bad, *others = groups[0].rollouts
        behavior = np.full_like(bad.behavior_logprobs, behavior_logprob)
        behavior[0] = -60.0
        groups[0] = groups[0]._replace(rollouts=(good, bad._replace(behavior_logprobs=behavior), *others))
        metrics, gradient = trainer.gradient(groups)
        assert metrics["broken/leases"] == {"0": 1}
        return gradient

    with running(config) as trainer:
        assert torch.equal(gradient_with(-3.7), gradient_with(-5.0)), "candidates of the mean, or none"


def _take_m2po_step(policy: Any, groups: list[Group], *, threshold: float) -> float:
    """Take a step of M2PO as the paper has it; return the share of tokens that it dropped."""
    ratios, advantages = [], []
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts])
        for index, rollout in enumerate(group.rollouts):
            logprobs = completion_logits(policy, group, index).gather(
                -1, torch.tensor(rollout.token_ids, dtype=torch.int64)[:, None]
            )
            ratios.append((logprobs.squeeze(-1) - torch.tensor(rollout.behavior_logprobs)).exp())
            advantages.append(((rewards - rewards.mean()) / (rewards.std() + 1e-6))[index].expand(len(rollout.token_ids)))
    ratio, advantage = torch.cat(ratios), torch.cat(advantages)
    region = ((advantage > 0) & (ratio > 1)) | ((advantage < 0) & (ratio < 1))
    squares = torch.where(region, ratio.detach().log().square(), 0.0)
    mask = torch.ones(len(ratio), dtype=torch.bool)
    while squares[region & mask].mean() > threshold:
        mask[torch.where(region & mask, squares, -1.0).argmax()] = False
    policy.zero_grad()
    (-(mask * ratio * advantage).sum() / len(ratio)).backward()
    with torch.no_grad():
        for parameter in policy.parameters():
            parameter -= 0.1 * parameter.grad
    return float((~mask).float().mean())


def test_entropy_is_measured_without_a_bonus(tiny_model: Path, policy: Any) -> None:
    groups = make_groups(3)
    with running(make_config(tiny_model)) as trainer:
        (metrics,) = trainer.train_batch(groups)
    with torch.no_grad():
        logits = torch.cat([completion_logits(policy, group, index) for group in groups for index in range(4)])
    assert metrics["entropy/mean"] == pytest.approx(-(logits.exp() * logits).sum(-1).mean().item(), rel=1e-5)


def test_weight_of_a_group_scales_its_gradient(tiny_model: Path, policy: Any) -> None:
    light, heavy = make_groups(3), make_groups(3)
    heavy[1] = heavy[1]._replace(weight=3.0)
    light[1] = light[1]._replace(weight=0.0)
    steps = []
    for groups in (make_groups(3), light, heavy):
        with running(make_config(tiny_model, deepspeed=SGD, max_grad_norm=1e9)) as trainer:
            trainer.train_batch(groups)
            weights = weights_of(trainer)
        steps.append({name: weights[name] - parameter.detach() for name, parameter in policy.named_parameters()})
    plain, without, triple = steps
    for name in plain:
        torch.testing.assert_close(triple[name], without[name] + 3 * (plain[name] - without[name]), rtol=0, atol=3e-6)
    assert any((plain[name] - without[name]).abs().max() > 1e-4 for name in plain)


def test_critic_learns_its_returns_and_stays_at_home(tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(tiny_model, learning_rate=3e-3, loss={"objective": "ppo"}, advantage=CRITIC)
    groups = make_groups(3)
    with running(config) as trainer:
        assert not any("value_head" in spec.name for spec in trainer.layout())
        losses = [trainer.train_batch(groups)[0]["loss/value"] for _ in range(4)]
        trainer.save_checkpoint(tmp_path / "step-00000004", b"")
        losses.append(trainer.train_batch(groups)[0]["loss/value"])
    rewards = [rollout.reward for group in groups for rollout in group.rollouts for _ in rollout.token_ids]
    # A head of zeros says 0, and with lambda < 1 what should have been said at t is lambda^(T - t - 1) R.
    assert 0 < losses[0] <= np.mean(np.square(rewards)) / 2
    assert losses[-1] < losses[0]
    with running(config) as trainer:
        trainer.load_checkpoint(tmp_path / "step-00000004")
        assert trainer.train_batch(groups)[0]["loss/value"] == losses[-1]
    with running(make_config(tiny_model)) as trainer, pytest.raises(ValueError, match="lora and critic"):
        trainer.load_checkpoint(tmp_path / "step-00000004")


def test_rewards_are_normalized_by_the_mean_and_the_standard_deviation_of_the_settings(tiny_model: Path) -> None:
    groups = make_groups(3)
    rewards = np.array([[rollout.reward for rollout in group.rollouts] for group in groups])
    config = make_config(tiny_model, reward=RewardSection(norm_mean="group", norm_std="batch"))
    preparation = Preparation(config, make_objective(config.loss))
    rows, _ = preparation.make_rows(groups, 0, RunningMoments())
    shaped = [row.reward for row in rows]
    expected = (rewards - rewards.mean(axis=1, keepdims=True)) / rewards.std(ddof=1)
    np.testing.assert_allclose(shaped, expected.ravel(), rtol=1e-5)


def test_kl_coefficient_and_reward_moments_go_on_after_a_restart(tiny_model: Path, tmp_path: Path) -> None:
    config = make_config(
        tiny_model,
        learning_rate=1e-2,
        loss={"objective": "gspo_token"},
        kl=KlSection(reward_coef=0.1, estimator="k1", target=1e-3),
        reward=RewardSection(norm_mean="running", norm_std="running"),
    )
    with running(config) as trainer:
        first = trainer.train_batch(make_groups(3, seed=0))[0]
        trainer.save_checkpoint(tmp_path / "step-00000001", b"")
        second = trainer.train_batch(make_groups(3, seed=1))[0]
        moments = trainer._adaptive.rewards
    assert first["kl/coefficient"] == 0.1
    change = min(0.2, max(-0.2, first["kl/reward"] / 1e-3 - 1)) * 12 / KL_HORIZON
    assert second["kl/coefficient"] == pytest.approx(0.1 * (1 + change))
    assert abs(change) > 0
    rewards = [rollout.reward for seed in range(2) for group in make_groups(3, seed=seed) for rollout in group.rollouts]
    assert moments.count == len(rewards)
    assert moments.mean == pytest.approx(np.mean(rewards))
    with running(config) as trainer:
        trainer.load_checkpoint(tmp_path / "step-00000001")
        resumed = trainer.train_batch(make_groups(3, seed=1))[0]
        assert resumed["kl/coefficient"] == second["kl/coefficient"]
        assert resumed["loss/policy"] == second["loss/policy"]
        assert trainer._adaptive.rewards == moments


def test_kl_in_the_reward_has_its_own_coefficient_beside_one_in_the_loss(tiny_model: Path) -> None:
    def advantages(kl: KlSection) -> torch.Tensor:
        config = make_config(tiny_model, loss={"objective": "grpo"}, kl=kl)
        with running(config) as trainer:
            rows, _ = trainer._preparation.make_rows(make_groups(3), 0, trainer._adaptive.rewards)
            return torch.cat([one.advantages[one.micro_batch.completion_mask] for one in trainer._prepare(rows)])

    charged = advantages(KlSection(reward_coef=0.01))
    assert not torch.allclose(charged, advantages(KlSection()))
    torch.testing.assert_close(advantages(KlSection(loss_coef=0.1, reward_coef=0.01)), charged)


def test_kl_coefficient_that_does_not_adapt_is_that_of_the_settings(tiny_model: Path, tmp_path: Path) -> None:
    with running(make_config(tiny_model, kl=KlSection(loss_coef=0.1))) as trainer:
        trainer.save_checkpoint(tmp_path / "step-00000000", b"")
    with running(make_config(tiny_model, kl=KlSection(loss_coef=0.2))) as trainer:
        trainer.load_checkpoint(tmp_path / "step-00000000")
        assert trainer.train_batch(make_groups(3))[0]["kl/coefficient"] == 0.2


@pytest.mark.parametrize("lora", [LoraSection(), LoraSection(rank=2)], ids=["copy", "without adapter"])
def test_reference_is_the_initial_policy_whatever_was_trained_since(tiny_model: Path, lora: LoraSection) -> None:
    config = make_config(tiny_model, learning_rate=1e-2, kl=KlSection(loss_coef=1e-3, estimator="k3"), lora=lora)
    with running(config) as trainer:
        assert (trainer.networks.reference is None) == bool(lora.rank), "an adapter needs no second model"
        divergences = [trainer.train_batch(make_groups(3))[0]["kl/reference"] for _ in range(3)]
    assert divergences[0] == pytest.approx(0, abs=1e-9)
    assert divergences[2] > divergences[1] > 1e-6


def test_adapter_is_trained_and_its_merged_weights_are_sent(tiny_model: Path, policy: Any, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    config = make_config(tiny_model, learning_rate=1e-2, lora=LoraSection(rank=2, target_modules=("q_proj", "down_proj")))
    with running(config) as trainer:
        assert [spec.name for spec in trainer.layout()] == [name for name, _ in policy.named_parameters()]
        trainer.train_batch(make_groups(3))
        weights = weights_of(trainer)
        scored = trainer.score([5, 9, 6, 6, 40]).logprobs
        trainer.save_model(tmp_path / "model")
        trainer.save_checkpoint(tmp_path / "step-00000001", b"")
    changed = {name for name, parameter in policy.named_parameters() if not torch.equal(weights[name], parameter)}
    assert changed == {name for name in weights if name.split(".")[-2] in ("q_proj", "down_proj")}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model", dtype=torch.float32).eval()
    row = torch.tensor([[5, 9, 6, 6, 40]])
    expected = model(input_ids=row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None]).squeeze(-1)
    np.testing.assert_allclose(scored, expected.detach().numpy(), atol=1e-5)
    other = make_config(tiny_model, lora=LoraSection(rank=2, alpha=1, target_modules=("q_proj", "down_proj")))
    with running(other) as trainer, pytest.raises(ValueError, match="lora and critic"):
        trainer.load_checkpoint(tmp_path / "step-00000001")


def test_routing_of_a_mixture_of_experts_comes_with_the_score(tiny_moe_model: Path) -> None:
    with running(make_config(tiny_moe_model)) as trainer:
        routing = trainer.score([5, 9, 6, 6, 40]).routing
        assert routing is not None
        assert routing.experts.shape[0] == 4
        assert routing.num_experts == 4


def test_replayed_routing_is_that_from_before_the_update(tiny_moe_model: Path) -> None:
    """At the first step of a batch nothing has moved, so replay changes nothing; later steps choose as at the first."""

    def train(replay: str) -> tuple[list[dict], np.ndarray]:
        loss = {"anchor": "decoupled", "correction": "token_tis", "routing_replay": replay}
        with running(make_config(tiny_moe_model, loss=loss, steps_per_batch=2)) as trainer:
            metrics = trainer.train_batch(make_groups(6))
            return metrics, np.array(trainer.score(range(4, 12)).logprobs)

    (first, second), replayed = train("recomputed")
    (first_alone, second_alone), alone = train("off")
    assert first["loss/replay_changed_slots"] == 0
    assert second["loss/replay_changed_slots"] > 0
    assert first["loss/grad_norm"] == pytest.approx(first_alone["loss/grad_norm"], rel=1e-4)
    assert second["loss/grad_norm"] != pytest.approx(second_alone["loss/grad_norm"], rel=1e-4)
    assert "loss/replay_changed_slots" not in first_alone
    # A score has other tokens than the batch, for which nothing is told.
    assert not np.allclose(replayed, alone)


def test_share_of_changed_slots_is_the_same_in_micro_batches_of_another_size(tiny_moe_model: Path) -> None:
    loss = {"anchor": "proximal", "routing_replay": "recomputed"}
    shares: list[float] = []
    # In the small ones a prompt is computed again, beside the rest of its completions.
    for size in (4096, 25):
        with running(make_config(tiny_moe_model, loss=loss, steps_per_batch=2, micro_batch_tokens=size)) as trainer:
            shares.append(trainer.train_batch(make_groups(6))[1]["loss/replay_changed_slots"])
    assert shares[0] == pytest.approx(shares[1], abs=0.002)
