"""Claims about `docs.study.exact_run`: the lag is exact, the trainer is the learner's, and runs are made anew by their seed."""

from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from docs.study import exact_run, probe
from docs.study.exact_run import RunResult, TaskPrompt, run_exactly
from docs.study.sampler import ExactSampler
from offbeat.common.settings.completion import complete
from offbeat.common.settings.config import Config
from offbeat.common.settings.learning_sections import LossSection, TrainSection
from offbeat.common.weights.flat import WeightBuffer
from offbeat.lab.sweep import plan as hopeless
from offbeat.learner.diagnostics.batch_metrics import Metrics
from offbeat.learner.leases.groups import Group
from offbeat.learner.training.trainer import Trainer

pytestmark = pytest.mark.slow

NUM_STEPS = 4


def reward(completion: str) -> float:
    """Reward the share of digits: a random model gets some, in every group another."""
    return sum(character.isdigit() for character in completion) / 6


PROMPTS = [TaskPrompt(np.array([4 + index % 10, 5, 43], dtype=np.int32), reward) for index in range(12)]


def make_config(model: Path, objective: str = "gspo", *, seed: int = 1) -> Config:
    config = Config(
        loss=LossSection(objective=objective),  # pyright: ignore[reportArgumentType]
        train=TrainSection(num_steps=NUM_STEPS, groups_per_step=3, learning_rate=3e-3),
    )
    return complete(
        msgspec.structs.replace(
            config,
            model=msgspec.structs.replace(config.model, path=str(model), dtype="float32"),
            run=msgspec.structs.replace(config.run, seed=seed),
            rollout=msgspec.structs.replace(config.rollout, group_size=4, max_new_tokens=6),
        )
    )


class Recorded:
    """Records the batches, metrics and weights of the trainer of a run."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[list[Group]] = []
        self.metrics: list[Metrics] = []
        self.weights: list[WeightBuffer] = []
        """The weights of every version from 0."""
        train_batch = Trainer.train_batch

        def recording(trainer: Trainer, groups: Sequence[Group]) -> list[Metrics]:
            self.keep(trainer)
            self.batches.append(list(groups))
            self.metrics += train_batch(trainer, groups)
            return self.metrics[-1:]

        monkeypatch.setattr(Trainer, "train_batch", recording)

    def keep(self, trainer: Trainer) -> None:
        buffer = WeightBuffer(trainer.layout())
        trainer.snapshot(dict(buffer.views()))
        self.weights.append(buffer)


def run(model: Path, objective: str = "gspo", *, lag: int = 2, noise: float = 0.0, seed: int = 1) -> RunResult:
    return run_exactly(make_config(model, objective, seed=seed), PROMPTS, PROMPTS[:4], lag=lag, noise=noise)


@pytest.fixture(scope="module")
def recorded(tiny_model: Path) -> Recorded:
    """A run at lag 2."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        recorded = Recorded(monkeypatch)
        run(tiny_model)
    return recorded


def test_every_group_lags_by_exactly_as_many_steps(recorded: Recorded) -> None:
    assert [metrics["lag/counts"] for metrics in recorded.metrics] == [{str(lag): 3} for lag in (0, 1, 2, 2)]


def test_behavior_logprobs_are_those_of_the_version_that_the_group_names(tiny_model: Path, recorded: Recorded) -> None:
    sampler = ExactSampler(str(tiny_model))
    for step, batch in enumerate(recorded.batches):
        version = batch[0].oldest_version
        assert version == max(0, step - 2)
        sampler.load(recorded.weights[version])
        for group in batch:
            for rollout in group.rollouts:
                token_ids = torch.from_numpy(np.concatenate([group.prompt_token_ids, rollout.token_ids]).astype(np.int64))
                with torch.no_grad():
                    logprobs = sampler._model(token_ids[None, :-1]).logits[0].log_softmax(-1)
                expected = logprobs.gather(-1, token_ids[1:, None])[len(group.prompt_token_ids) - 1 :, 0]
                np.testing.assert_allclose(rollout.behavior_logprobs, expected.numpy(), atol=2e-5)


def test_nothing_but_the_learners_trainer_changes_the_weights(tiny_model: Path, recorded: Recorded) -> None:
    """A trainer of the same settings, given the same groups, goes through the same weights to the bit."""
    trainer = Trainer(make_config(tiny_model))
    for batch, expected in zip(recorded.batches, recorded.weights, strict=True):
        buffer = WeightBuffer(trainer.layout())
        trainer.snapshot(dict(buffer.views()))
        assert torch.equal(buffer.flat, expected.flat)
        trainer.train_batch(batch)
    trainer.close()
    assert len({buffer.flat.numpy().tobytes() for buffer in recorded.weights}) == NUM_STEPS, "every step moves them"


def test_every_step_draws_anew(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps on one prompt, all under version 0."""
    seen = Recorded(monkeypatch)
    run_exactly(make_config(tiny_model), PROMPTS[:1], PROMPTS[:1], lag=2, noise=0.0)
    groups = [group for batch in seen.batches[:3] for group in batch]
    assert {(group.prompt_id, group.oldest_version) for group in groups} == {(0, 0)}
    assert len({tuple(tuple(rollout.token_ids) for rollout in group.rollouts) for group in groups}) == len(groups) == 9


def test_on_policy_ratios_are_one(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on_policy = Recorded(monkeypatch)
    run(tiny_model, lag=0)
    assert [metrics["ratio/token_log_abs_max"] for metrics in on_policy.metrics] == pytest.approx([0.0] * NUM_STEPS, abs=3e-5)
    assert [metrics["ess/sequence"] for metrics in on_policy.metrics] == pytest.approx([1.0] * NUM_STEPS, abs=1e-6)


def test_the_samplers_routing_is_replayed_where_it_is_asked_for(tiny_moe_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded = Recorded(monkeypatch)
    config = make_config(tiny_moe_model)
    config = msgspec.structs.replace(config, loss=msgspec.structs.replace(config.loss, routing_replay="sampled"))
    run_exactly(config, PROMPTS, PROMPTS[:2], lag=2, noise=0.0)
    changed = [metrics["loss/replay_changed_slots"] for metrics in recorded.metrics]
    assert changed[0] == 0, "on-policy the routers choose the same"
    assert max(float(share) for share in changed[1:] if isinstance(share, float)) > 0


def test_same_seed_same_result_and_same_random_numbers_for_other_methods(
    tiny_model: Path, recorded: Recorded, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = Recorded(monkeypatch)
    first = run(tiny_model, "grpo")
    assert run(tiny_model, "grpo") == first
    mine, theirs = again.batches[0], recorded.batches[0]
    assert [group.prompt_id for group in mine] == [group.prompt_id for group in theirs]
    assert [one.token_ids.tolist() for one in mine[0].rollouts] == [one.token_ids.tolist() for one in theirs[0].rollouts]


def test_groups_with_equal_rewards_are_replaced_where_the_objective_drops_them(
    tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts 0 to 3 always get a reward of 1, the others differ: `dapo` trains on the others alone."""

    def trained_on(objective: str, num_equal: int) -> list[set[int]]:
        with monkeypatch.context() as patched:
            seen = Recorded(patched)
            prompts = [PROMPTS[i]._replace(reward=lambda _: 1.0) if i < num_equal else PROMPTS[i] for i in range(12)]
            run_exactly(make_config(tiny_model, objective), prompts, PROMPTS[:4], lag=0, noise=0.0)
        return [{group.prompt_id for group in batch} for batch in seen.batches]

    assert all(min(chosen) >= 4 and len(chosen) == 3 for chosen in trained_on("dapo", 4))
    # Nothing else is left: the step is full all the same.
    assert all(len(chosen) == 3 for chosen in trained_on("dapo", 12))


def test_a_gradient_that_is_not_finite_ends_the_run(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(trainer: Trainer, groups: Sequence[Group]) -> list[Metrics]:
        raise FloatingPointError("the gradient norm is nan")

    monkeypatch.setattr(Trainer, "train_batch", fail)
    result = run(tiny_model)
    assert (result.outcome, result.num_steps, result.final_reward) == ("diverged", 0, 0.0)
    assert len(result.points) == 1


def test_a_hopeless_run_ends_with_the_reward_that_it_has(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_run, "EVALUATION_INTERVAL", 1)
    monkeypatch.setattr(hopeless, "HOPELESS_WINDOW", 1)
    monkeypatch.setattr(hopeless, "HOPELESS_AFTER", 2)
    monkeypatch.setattr(hopeless, "HOPELESS_MARGIN", -2.0)
    result = run(tiny_model, lag=1)
    assert (result.outcome, result.num_steps, len(result.points)) == ("hopeless", 3, 4)
    assert 0 < result.final_reward < 1


def test_evaluations_have_no_noise(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact_run, "EVALUATION_INTERVAL", 2)
    exact, noisy = run(tiny_model), run(tiny_model, noise=2.0)
    assert noisy.points[0] == exact.points[0]
    assert (noisy.points[1].kl or 0.0) > 10 * (exact.points[1].kl or 1.0)


def test_probe_finds_no_bias_where_nothing_is_stale(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`ppo` has parameters of its own beside the policy's, which are left out."""
    monkeypatch.setattr(probe, "NUM_BATCHES", 3)
    methods = {name: make_config(tiny_model, name) for name in ("gspo", "ppo")}
    stale = probe.probe("task", methods["gspo"], methods, PROMPTS, lag=2)
    fresh = probe.probe("task", methods["gspo"], {"gspo": methods["gspo"]}, PROMPTS, lag=0)
    assert [(row.method, row.lag, row.seed) for row in [*stale, *fresh]] == [("gspo", 2, 1), ("ppo", 2, 1), ("gspo", 0, 1)]
    assert fresh[0].total_variation == pytest.approx(0, abs=1e-4)
    assert fresh[0].chi_squared == pytest.approx(0, abs=1e-3)
    assert stale[0].total_variation > 0.01
    assert stale[0].total_variation == stale[1].total_variation
