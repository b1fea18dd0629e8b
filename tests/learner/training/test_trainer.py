"""The trainer with a real model under real DeepSpeed; the ranks of the last tests are processes."""

import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config, LaunchSection
from offbeat.common.settings.learning_sections import KlSection, LoraSection, RewardSection
from offbeat.common.weights.flat import WeightBuffer
from offbeat.deploy.local.memory import learner_need
from offbeat.deploy.local.model_sizes import model_sizes
from offbeat.learner.leases.groups import Group
from offbeat.learner.policy.logprobs import LogitRule
from offbeat.learner.training.checkpoints import find_damage
from tests.families import make_family
from tests.forked import context
from tests.late_copies import LateCopies
from tests.learner.training.rank_worker import run_rank
from tests.learner.training.trainer_cases import APART, GATHERED_NUMEL, MEMORY_CASES, RANK_CASES, SGD, make_config, make_groups

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

RANKS_S = 200.0
"""Longest time for all cases of two ranks."""
NOT_RESUMED = {"time/train_s", "time/prepare_s", "compute/mfu", "loss/grad_cosine"}
"""Metrics that differ in the first step after a checkpoint is loaded: times, and the cosine with the gradient before."""

OF_ONE_RANK = {"compute/flops", "compute/recomputed", "compute/peak"}
"""Metrics that two ranks do not share with one."""


@contextmanager
def running(config: Config) -> Iterator:
    from offbeat.learner.training.trainer import Trainer

    trainer = Trainer(config)
    try:
        yield trainer
    finally:
        trainer.close()


def weights_of(trainer) -> dict[str, torch.Tensor]:
    buffer = WeightBuffer(trainer.layout())
    trainer.snapshot(dict(buffer.views()))
    return dict(buffer.views())


def test_snapshot_is_over_when_a_gpus_copies_have_arrived(tiny_model, monkeypatch):
    with running(make_config(tiny_model)) as trainer:
        expected = weights_of(trainer)
        trainer.networks.place = trainer.networks.place._replace(device=torch.device("cuda"))
        with LateCopies() as stream:
            monkeypatch.setattr(torch.accelerator, "current_stream", {trainer.networks.place.device: stream}.__getitem__)
            copied = weights_of(trainer)
            assert (stream.most_late, stream.num_late) == (len(expected), 0), "the host does not wait for each"
        assert all(torch.equal(copied[name], weight) for name, weight in expected.items())


def with_own_logprobs(trainer, groups: list[Group]) -> list[Group]:
    """Return the groups as an engine with the trainer's own numerics would have sampled them."""

    def rescored(group: Group) -> Group:
        start = len(group.prompt_token_ids)
        rollouts = []
        for rollout in group.rollouts:
            logprobs = trainer.score([*group.prompt_token_ids, *rollout.token_ids]).logprobs[start - 1 :]
            rollouts.append(rollout._replace(behavior_logprobs=logprobs))
        return group._replace(rollouts=tuple(rollouts))

    return [rescored(group) for group in groups]


@pytest.fixture(scope="module")
def trainer(tiny_model):
    """Yield a trainer for tests that do not change its weights."""
    with running(make_config(tiny_model)) as trainer:
        yield trainer


@pytest.fixture(scope="module")
def policy(tiny_model):
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()


def test_layout_names_each_parameter_once_as_transformers_does(trainer, policy):
    layout = trainer.layout()
    assert [spec.name for spec in layout] == [name for name, _ in policy.named_parameters()]
    assert [spec.shape for spec in layout] == [tuple(parameter.shape) for parameter in policy.parameters()]
    assert {spec.dtype for spec in layout} == {"float32"}
    assert "lm_head.weight" not in {spec.name for spec in layout}, "tied to the embedding"


def test_snapshot_copies_the_weights(trainer, policy):
    weights = weights_of(trainer)
    assert all(torch.equal(weights[name], parameter) for name, parameter in policy.named_parameters())


def test_score_is_the_models_logprobs_at_temperature_one(trainer, policy):
    token_ids = [5, 9, 6, 6, 40]
    row = torch.tensor([token_ids])
    expected = policy(input_ids=row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None]).squeeze(-1)
    scored = trainer.score(token_ids).logprobs
    assert scored.dtype == np.float32
    np.testing.assert_allclose(scored, expected.detach().numpy(), atol=1e-5)


def test_a_score_is_of_the_weights_that_are_published_also_where_an_adapter_is_merged(tiny_model):
    """In bfloat16 merged weights are rounded, in the engine and here: else the canary would take that for wrong weights."""
    from transformers import AutoModelForCausalLM

    token_ids = list(range(4, 24))
    with running(make_config(tiny_model, dtype="bfloat16", lora=LoraSection(rank=4))) as trainer:
        trainer.train_batch(make_groups(3))
        published = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16).eval()
        trainer.snapshot({name: parameter.data for name, parameter in published.named_parameters()})
        score = trainer.score(token_ids).logprobs
    row = torch.tensor([token_ids])
    logits = published(input_ids=row).logits[0, :-1].float()
    expected = logits.log_softmax(-1).gather(-1, row[0, 1:, None]).squeeze(-1)
    np.testing.assert_allclose(score, expected.detach().numpy(), atol=1e-3)


def test_a_batch_of_the_wrong_size_is_refused(trainer):
    with pytest.raises(ValueError, match=r"got 2 groups; .* = 3"):
        trainer.train_batch(make_groups(2))
    with pytest.raises(ValueError, match=r"got 2 groups; .* = 3"):
        trainer.gradient(make_groups(2))


def test_on_policy_groups_have_ratio_one_and_the_policy_gradient(tiny_model, policy):
    """With SGD and no clipping the first step is `-learning_rate *` the gradient of `-mean_i A_i mean_t log pi`."""
    with running(make_config(tiny_model, deepspeed=SGD, max_grad_norm=1e9)) as trainer:
        groups = with_own_logprobs(trainer, make_groups(3))
        (metrics,) = trainer.train_batch(groups)
        weights = weights_of(trainer)
    assert metrics["ratio/first"] < 1e-5
    assert metrics["ratio/token_log_abs_max"] < 1e-5
    assert metrics["clip/fraction"] == 0.0
    assert metrics["loss/learning_rate"] == 0.1

    policy.zero_grad()
    num_completions = sum(len(group.rollouts) for group in groups)
    for group in groups:
        rewards = torch.tensor([rollout.reward for rollout in group.rollouts])
        advantages = (rewards - rewards.mean()) / (rewards.std() + 1e-6)
        for rollout, advantage in zip(group.rollouts, advantages, strict=True):
            row = torch.tensor([[*group.prompt_token_ids, *rollout.token_ids]])
            logprobs = policy(input_ids=row).logits[0, :-1].log_softmax(-1).gather(-1, row[0, 1:, None]).squeeze(-1)
            (-advantage * logprobs[-len(rollout.token_ids) :].mean() / num_completions).backward()
    gradients = {name: parameter.grad for name, parameter in policy.named_parameters()}
    norm = torch.stack([gradient.norm() for gradient in gradients.values()]).norm().item()
    assert metrics["loss/grad_norm"] == pytest.approx(norm, rel=1e-4)
    for name, parameter in policy.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach() - 0.1 * gradients[name], rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("float32", {}),
        ("float32", {"zero_stage": 2}),
        ("float32", {"zero_stage": 2, "deepspeed": {"zero_optimization": {"offload_optimizer": {"device": "cpu"}}}}),
        ("float32", {"zero_stage": 3}),
        ("bfloat16", {}),
        ("bfloat16", {"zero_stage": 2}),
    ],
    ids=str,
)
def test_gradient_without_a_step_is_the_steps_and_changes_nothing(tiny_model, dtype, settings):
    kl = KlSection(loss_coef=0.1, target=0.01)
    config = make_config(tiny_model, dtype=dtype, kl=kl, reward=RewardSection(norm_std="running"), **settings)
    groups = make_groups(3)
    with running(config) as trainer:
        before, adapted = weights_of(trainer), trainer._adaptive
        metrics, gradient = trainer.gradient(groups)
        assert trainer.policy_version == 0
        assert trainer._adaptive == adapted
        assert all(torch.equal(weight, before[name]) for name, weight in weights_of(trainer).items())
        other_metrics, other = trainer.gradient(make_groups(3, seed=1))
        again_metrics, again = trainer.gradient(groups)
        assert (again_metrics, other_metrics == metrics) == (metrics, False)
        assert torch.equal(again, gradient)
        assert not torch.allclose(other, gradient)
        (step,) = trainer.train_batch(groups)
        after = weights_of(trainer)
    with running(config) as trainer:
        (alone,) = trainer.train_batch(groups)
        assert all(torch.equal(weight, after[name]) for name, weight in weights_of(trainer).items())
    assert {name: step[name] for name in metrics} == metrics
    assert alone["loss/grad_norm"] == step["loss/grad_norm"]
    if dtype == "float32" and not settings:
        assert gradient.double().norm().item() == pytest.approx(step["loss/grad_norm"], rel=1e-5)


def test_trainer_goes_on_with_changed_settings_as_one_that_began_with_them(tiny_model):
    groups = make_groups(3)
    with running(make_config(tiny_model, deepspeed=SGD)) as trainer:
        trainer.tune(clip_low=0.01, clip_high=0.02, learning_rate=0.01)
        (tuned,) = trainer.train_batch(groups)
        weights = weights_of(trainer)
    loss = {"clip_low": 0.01, "clip_high": 0.02}
    with running(make_config(tiny_model, deepspeed=SGD, loss=loss, learning_rate=0.01)) as trainer:
        (begun,) = trainer.train_batch(groups)
        torch.testing.assert_close(weights_of(trainer), weights, rtol=0, atol=0)
    assert tuned["loss/learning_rate"] == 0.01
    assert tuned["clip/fraction"] == begun["clip/fraction"] > 0


def test_learning_rate_is_scaled_by_the_effective_sample_size_of_its_own_step(tiny_model):
    groups = make_groups(3)
    with running(make_config(tiny_model, deepspeed=SGD, on_policy_ess=0.9)) as trainer:
        (on_policy,) = trainer.train_batch(with_own_logprobs(trainer, groups))
    with running(make_config(tiny_model, deepspeed=SGD, on_policy_ess=0.9)) as trainer:
        (stale,) = trainer.train_batch(groups)
        weights = weights_of(trainer)
    assert on_policy["ess/sequence_truncated"] > 0.99
    assert on_policy["loss/learning_rate"] == 0.1
    scaled = 0.1 * (stale["ess/sequence_truncated"] / 0.9) ** 0.5
    assert scaled < 0.1
    assert stale["loss/learning_rate"] == pytest.approx(scaled)
    with running(make_config(tiny_model, deepspeed=SGD, learning_rate=scaled)) as trainer:
        trainer.train_batch(groups)
        torch.testing.assert_close(weights_of(trainer), weights, rtol=0, atol=1e-7)


def test_gradients_are_scaled_down_to_the_maximal_norm(tiny_model, policy):
    with running(make_config(tiny_model, deepspeed=SGD, max_grad_norm=0.01, learning_rate=1.0)) as trainer:
        (metrics,) = trainer.train_batch(make_groups(3))
        weights = weights_of(trainer)
    moved = torch.stack([(weights[name] - parameter).norm() for name, parameter in policy.named_parameters()]).norm()
    assert metrics["loss/grad_norm"] > 0.02
    assert moved.item() == pytest.approx(0.01, rel=1e-3)


@pytest.mark.parametrize(
    "settings",
    [
        {"micro_batch_tokens": 1},
        {"micro_batch_tokens": 10**6, "activation_checkpointing": True},
        {"zero_stage": 1},
        {"zero_stage": 2},
        {"zero_stage": 3, "micro_batch_tokens": 30, "activation_checkpointing": True},
    ],
    ids=str,
)
def test_micro_batches_zero_stage_and_checkpointing_do_not_change_the_step(tiny_model, tiny_weights, settings):
    with running(make_config(tiny_model, deepspeed=SGD, **settings)) as trainer:
        (metrics,) = trainer.train_batch(make_groups(3))
        weights = weights_of(trainer)
    expected_metrics, expected_weights = tiny_weights
    for name in ("loss/policy", "loss/grad_norm", "ratio/log_std", "clip/fraction"):
        assert metrics[name] == pytest.approx(expected_metrics[name], rel=1e-4), name
    for name, weight in expected_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=0, atol=1e-6)


@pytest.fixture(scope="module")
def tiny_weights(tiny_model):
    """Return metrics and weights of the step that the settings above must not change."""
    with running(make_config(tiny_model, deepspeed=SGD)) as trainer:
        (metrics,) = trainer.train_batch(make_groups(3))
        return metrics, weights_of(trainer)


def test_a_mixture_of_experts_trains_and_is_saved_under_its_names(tiny_moe_model, tmp_path):
    from transformers import AutoModelForCausalLM

    with running(make_config(tiny_moe_model)) as trainer:
        (metrics,) = trainer.train_batch(make_groups(3))
        weights = weights_of(trainer)
        trainer.save_model(tmp_path)
    assert metrics["loss/grad_norm"] > 0
    saved = dict(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).named_parameters())
    assert saved.keys() == weights.keys()
    assert all(torch.equal(saved[name], weight) for name, weight in weights.items())


def test_bfloat16_steps_are_taken_on_float32_master_weights(tiny_model):
    """Ten steps of 1e-5 are each lost beside a bfloat16 weight of 1, and add up beside a float32 one."""
    with running(make_config(tiny_model, dtype="bfloat16", learning_rate=1e-3)) as trainer:
        before = {name: weight.clone() for name, weight in weights_of(trainer).items()}
        for seed in range(4):
            trainer.train_batch(make_groups(3, seed=seed))
        weights = weights_of(trainer)
        assert {spec.dtype for spec in trainer.layout()} == {"bfloat16"}
    norms = [name for name in weights if name.endswith("norm.weight")]
    # Norm weights start at 1, where bfloat16 numbers are 0.0078 apart: only sums of several steps reach the next one.
    assert any(not torch.equal(weights[name], before[name]) for name in norms)


def test_the_proximal_anchor_is_the_policy_before_the_first_step_of_the_batch(tiny_model):
    loss = {"anchor": "proximal"}
    with running(make_config(tiny_model, loss=loss, steps_per_batch=2, learning_rate=1e-3)) as trainer:
        first, second = trainer.train_batch(make_groups(6))
        assert trainer.policy_version == 2
    assert first["ratio/first"] < 1e-6
    assert "ratio/first" not in second
    assert second["ratio/log_std"] > 1e-4, "the second step is measured against the policy before the first"
    assert first["time/prepare_s"] > 0
    assert second["time/prepare_s"] == 0


@pytest.mark.parametrize("policy_version", [0, 1], ids=["", "groups that are newer than the learner"])
def test_epochs_repeat_the_steps_of_a_batch(tiny_model, policy_version):
    groups = make_groups(6, policy_version=policy_version)
    settings = {"loss": {"anchor": "interpolated", "correction": "token_tis"}, "steps_per_batch": 2, "learning_rate": 1e-3}
    with running(make_config(tiny_model, **settings, epochs_per_batch=2)) as trainer:
        epochs = trainer.train_batch(groups)
        weights = weights_of(trainer)
        assert trainer.policy_version == 4
    with running(make_config(tiny_model, **settings)) as trainer:
        once = trainer.train_batch(groups)
        twice = trainer.train_batch(groups)
        assert all(torch.equal(weights[name], weight) for name, weight in weights_of(trainer).items())
    for of_epochs, of_batches in zip(epochs, [*once, *twice], strict=True):
        assert of_epochs["loss/policy"] == of_batches["loss/policy"]
        assert of_epochs["lag/counts"] == of_batches["lag/counts"]
        lags = [{name for name in metrics if name.startswith("by_lag")} for metrics in (of_epochs, of_batches)]
        assert lags[0] == lags[1]


def test_the_proximal_policy_stays_that_before_the_first_epoch(tiny_model):
    with running(make_config(tiny_model, loss={"anchor": "proximal"}, epochs_per_batch=2, learning_rate=1e-3)) as trainer:
        first, second = trainer.train_batch(make_groups(3))
    assert first["ratio/first"] < 1e-6
    assert second["ratio/log_std"] > 1e-4


def test_the_behavior_anchor_is_what_the_engine_sampled_with(tiny_model):
    groups = make_groups(3)
    with running(make_config(tiny_model)) as trainer:
        own = with_own_logprobs(trainer, groups)
        (metrics,) = trainer.train_batch(groups)
    expected = [
        float((exact.behavior_logprobs - stored.behavior_logprobs).mean())
        for exact_group, group in zip(own, groups, strict=True)
        for exact, stored in zip(exact_group.rollouts, group.rollouts, strict=True)
    ]
    assert metrics["ratio/log_mean"] == pytest.approx(np.mean(expected), abs=1e-5)
    assert metrics["ratio/log_min"] == pytest.approx(min(expected), abs=1e-5)


def test_lag_grows_with_the_steps_of_a_batch(tiny_model):
    with running(make_config(tiny_model, steps_per_batch=2, groups_per_step=1)) as trainer:
        first, second = trainer.train_batch(make_groups(2))
    assert (first["lag/counts"], second["lag/counts"]) == ({"0": 1}, {"1": 1})


@pytest.mark.parametrize(("zero_stage", "dtype"), [(0, "float32"), (2, "float32"), (0, "bfloat16"), (3, "bfloat16")])
def test_a_resumed_run_continues_bit_for_bit(tiny_model, tmp_path, zero_stage, dtype):
    schedule = {"learning_rate": 1e-3, "lr_schedule": "cosine", "warmup_steps": 2, "num_steps": 4}
    config = make_config(tiny_model, dtype=dtype, zero_stage=zero_stage, **schedule)
    folder = tmp_path / "step-00000002"
    with running(config) as trainer:
        for seed in range(2):
            trainer.train_batch(make_groups(3, seed=seed))
        torch.rand(3)
        trainer.save_checkpoint(folder, b"position")
        straight = [trainer.train_batch(make_groups(3, seed=seed))[0] for seed in (2, 3)]
        random_number = torch.rand(())
        expected = weights_of(trainer)
    with running(config) as trainer:
        assert trainer.load_checkpoint(folder) == b"position"
        assert trainer.policy_version == 2
        resumed = [trainer.train_batch(make_groups(3, seed=seed))[0] for seed in (2, 3)]
        assert torch.rand(()) == random_number
        weights = weights_of(trainer)
    assert all(torch.equal(weights[name], weight) for name, weight in expected.items())
    for before, after in zip(straight, resumed, strict=True):
        assert {name: before[name] for name in before.keys() - NOT_RESUMED} == {
            name: after[name] for name in after.keys() - NOT_RESUMED
        }


@pytest.mark.parametrize(("zero_stage", "dtype"), [(0, "float32"), (2, "float32"), (3, "float32"), (0, "bfloat16")])
def test_maximal_norm_of_a_resumed_run_is_that_of_its_settings(tiny_model, tmp_path, zero_stage, dtype):
    settings = {"dtype": dtype, "zero_stage": zero_stage, "deepspeed": SGD, "learning_rate": 10.0}
    with running(make_config(tiny_model, **settings)) as trainer:
        trainer.save_checkpoint(tmp_path / "step-00000000", b"")
    with running(make_config(tiny_model, max_grad_norm=0.01, **settings)) as trainer:
        trainer.load_checkpoint(tmp_path / "step-00000000")
        before = weights_of(trainer)
        trainer.train_batch(make_groups(3))
        after = weights_of(trainer)
    moved = torch.stack([(after[name].float() - weight.float()).norm() for name, weight in before.items()]).norm()
    assert moved.item() == pytest.approx(0.1, rel=0.05)


def test_a_checkpoint_of_other_settings_is_refused_with_what_to_do(tiny_model, tmp_path):
    with running(make_config(tiny_model)) as trainer:
        trainer.save_checkpoint(tmp_path / "step-00000000", b"")
    with (
        running(make_config(tiny_model, zero_stage=1)) as trainer,
        pytest.raises(ValueError, match=r"train\.zero_stage"),
    ):
        trainer.load_checkpoint(tmp_path / "step-00000000")


def test_a_saved_model_is_one_that_transformers_loads(trainer, tiny_model, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    trainer.save_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    weights = weights_of(trainer)
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())
    tokenizer, saved = (AutoTokenizer.from_pretrained(folder) for folder in (tiny_model, tmp_path))
    assert saved.encode("7+8") == tokenizer.encode("7+8")


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("zero_stage", [0, 1, 2, 3])
def test_a_gradient_that_is_not_finite_stops_the_run(tiny_model, zero_stage, dtype):
    groups = make_groups(3)
    poisoned = groups[0].rollouts[0]._replace(reward=float("inf"))
    groups[0] = groups[0]._replace(rollouts=(poisoned, *groups[0].rollouts[1:]))
    config = make_config(tiny_model, dtype=dtype, zero_stage=zero_stage)
    with running(config) as trainer, pytest.raises(FloatingPointError, match="optimizer step 0"):
        trainer.train_batch(groups)


def test_the_share_of_a_gpu_is_taken_when_the_models_are_loaded(tiny_model, monkeypatch):
    from offbeat.learner.policy import loading, process_group
    from offbeat.learner.training import trainer

    order: list[str] = []
    check_policy = loading.check_policy
    monkeypatch.setattr(loading, "check_policy", lambda *args: (check_policy(*args), order.append("loaded")))
    monkeypatch.setattr(process_group, "take_memory", lambda device: order.append(f"taken on {device.type}"))

    class OnGpu(trainer.Trainer):
        """A trainer that believes to be on a GPU at its end."""

        device = property(lambda self: torch.device("cuda"), lambda self, device: None)

    assert process_group.join_process_group().device.type == "cpu"
    OnGpu(make_config(tiny_model)).close()
    assert order == ["loaded", "taken on cuda"]


def test_a_model_whose_logprobs_the_learner_would_not_compute_is_refused(tmp_path, tiny_model, monkeypatch):
    make_family(tmp_path, "Granite", tiny_model)
    monkeypatch.setattr("offbeat.learner.policy.logprobs.logit_rule", lambda config: LogitRule())
    with (
        pytest.raises(SettingError, match=r"differ by .* from those of the model's own forward pass"),
        running(make_config(tmp_path)),
    ):
        pass


@pytest.mark.parametrize(
    "settings",
    [{"micro_batch_tokens": 40}, {"zero_stage": 3}, {"activation_checkpointing": True}],
)
def test_whole_rows_take_the_same_step_however_they_are_computed(tmp_path, tiny_model, settings):
    make_family(tmp_path, "Qwen3.5-MoE", tiny_model)
    steps: list[dict[str, torch.Tensor]] = []
    for changed in ({}, settings):
        with running(make_config(tmp_path, deepspeed=SGD, learning_rate=1.0, **changed)) as trainer:
            trainer.train_batch(make_groups(3))
            steps.append(weights_of(trainer))
    torch.testing.assert_close(*steps, rtol=1e-5, atol=1e-5)


def test_replayed_experts_reach_their_tokens_in_whole_rows(tmp_path, tiny_model):
    make_family(tmp_path, "Qwen3.5-MoE", tiny_model)
    loss = {"anchor": "proximal", "routing_replay": "recomputed"}
    with running(make_config(tmp_path, loss=loss, learning_rate=1e-4)) as trainer:
        (metrics,) = trainer.train_batch(make_groups(3))
    # Before the first step the routers choose what is replayed.
    assert metrics["loss/replay_changed_slots"] == 0


@pytest.fixture(scope="module")
def two_ranks(tiny_model, tmp_path_factory):
    """Return the results of two processes of `tests.learner.training.rank_worker`."""
    folder = tmp_path_factory.mktemp("ranks")
    run_ranks(2, tiny_model, folder / "result.pt")
    return folder, torch.load(folder / "result.pt", weights_only=True)


def run_ranks(world_size: int, model: Path, result: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    processes = [
        context.Process(target=run_rank, args=({**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)}, model, result))
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    try:
        deadline = time.monotonic() + RANKS_S
        for process in processes:
            process.join(max(0.0, deadline - time.monotonic()))
        assert [process.exitcode for process in processes] == [0] * world_size
    finally:
        for process in processes:
            process.kill()
            process.join()


@pytest.mark.parametrize("case", RANK_CASES)
def test_two_ranks_take_the_steps_of_one(tiny_model, two_ranks, case):
    _, results = two_ranks
    outcome = results[case]
    with running(make_config(tiny_model, deepspeed=SGD, **RANK_CASES[case].of_step)) as trainer:
        expected_metrics = [*trainer.train_batch(make_groups(3, seed=1)), *trainer.train_batch(make_groups(3, seed=2))]
        expected = weights_of(trainer)
        score = trainer.score([5, 6, 7, 8]).logprobs
    for name, weight in expected.items():
        torch.testing.assert_close(outcome["weights"][name], weight, rtol=0, atol=2e-6)
    np.testing.assert_allclose(outcome["score"], score, atol=1e-5)
    for metrics, expected_step in zip(outcome["metrics"], expected_metrics, strict=True):
        assert metrics.keys() | NOT_RESUMED == expected_step.keys() | NOT_RESUMED
        # Ranks may run a prompt once each.
        assert metrics["compute/flops"] == pytest.approx(expected_step["compute/flops"], rel=0.1)
        for name in expected_step.keys() - NOT_RESUMED - OF_ONE_RANK:
            assert metrics[name] == pytest.approx(expected_step[name], rel=1e-3, abs=1e-6), name


@pytest.mark.parametrize("case", [*RANK_CASES, *MEMORY_CASES])
def test_snapshot_is_the_same_whoever_writes_it_and_ranks_share_the_work(two_ranks, case):
    _, results = two_ranks
    flats = (results[case] if case in RANK_CASES else results["memory"][case])["snapshots"]
    whole = flats["gathered"]
    assert torch.equal(flats["sent"], whole)
    assert torch.equal(flats["shared"], whole)
    parts = flats["first"], flats["second"]
    assert torch.equal(parts[0] | parts[1], whole)
    assert not ((parts[0] > 0) & (parts[1] > 0)).any()
    for part in parts:
        assert 0.35 <= part.count_nonzero() / whole.count_nonzero() <= 0.65


@pytest.mark.parametrize("case", RANK_CASES)
def test_disk_that_is_full_for_one_rank_costs_a_checkpoint_on_all_and_training_goes_on(two_ranks, case):
    _, results = two_ranks
    assert results[case]["failure"] == "rank 1: File too large"


def test_rank_on_another_machine_has_its_part_of_a_checkpoint_on_rank_0(two_ranks):
    folder, _ = two_ranks
    assert list((folder / "machine-1").iterdir()) == []
    for case in APART:
        checkpoint = folder / f"machine-0/run/{case}/step-00000001"
        assert find_damage(checkpoint) is None
        assert (checkpoint / "rank-00001.safetensors").exists()


@pytest.mark.parametrize("case", ["stage-0", "stage-3"])
def test_two_ranks_save_one_model_and_one_checkpoint(two_ranks, case):
    from transformers import AutoModelForCausalLM

    folder, results = two_ranks
    folder /= "machine-0/run" if case in APART else "run"
    assert results[case]["extra"] == b"position"
    assert [path.name for path in (folder / case).iterdir()] == ["step-00000001"]
    model = AutoModelForCausalLM.from_pretrained(folder / f"model-{case}", dtype=torch.float32)
    weights = results[case]["weights"]
    assert all(torch.equal(weights[name], parameter) for name, parameter in model.named_parameters())


@pytest.mark.parametrize("case", MEMORY_CASES)
def test_a_ranks_memory_in_a_step_is_that_of_the_device_plan(tiny_model, two_ranks, case):
    _, results = two_ranks
    config = make_config(tiny_model, **MEMORY_CASES[case])
    sizes = model_sizes(str(tiny_model))
    assert sizes is not None
    need = learner_need(msgspec.structs.replace(config, launch=LaunchSection(learner_processes=2)), sizes)
    planned = sum(part.num_bytes for part in need.parts if part.name in ("weights", "optimizer", "gradients"))
    if config.train.zero_stage >= 2:
        # The plan has the larger one of optimizer step and activations, whose part for the head is too large for a tiny model.
        planned += 4 * sizes.num_parameters / 2
    assert 0.88 <= results["memory"][case]["in_step"] / planned <= 1.05


def test_rank_that_takes_the_snapshot_gathers_one_bucket_of_weights_at_a_time(two_ranks):
    _, results = two_ranks
    for case, counted in results["memory"].items():
        dtype_bytes = 2 if case.startswith("bfloat16") else 4
        # A bucket, and the ranks' parts of it that arrive.
        most = 2 * GATHERED_NUMEL * dtype_bytes if case.endswith("stage 3") else 0
        assert most / 2 < counted["gathered"] <= most or counted["gathered"] == most == 0
