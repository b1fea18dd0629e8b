"""Contradicting settings are refused with reason and cure; odd ones only cause a warning."""

import re

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import check
from offbeat.common.settings.loading import load

KEYS = ("hub.key=keys/{name}.key", "hub.learner_key=keys/learner.pub", "hub.allowed_keys=keys/allowed_keys")
OWN_TRUNK = ("loss.objective=sao", "critic.trunk=own")
GOOD = ("model.path=some/model", "data.train_data=train.jsonl")


def test_defaults_with_a_model_and_data_pass_without_warnings() -> None:
    assert check(load(None, GOOD)) == []


@pytest.mark.parametrize("max_retries", [0, 1, 2])
def test_lease_timeout_that_a_refusal_names_is_accepted(max_retries: int) -> None:
    overrides = [*GOOD, "task.environment=a:b", "environment.episode_timeout_s=900", f"environment.max_retries={max_retries}"]
    with pytest.raises(SettingError, match=r"a lease would expire before its episodes") as refused:
        check(load(None, overrides))
    named = re.search(r"Set it to ([\d.]+),", str(refused.value))
    assert named is not None
    check(load(None, [*overrides, f"rollout.lease_timeout_s={named[1]}"]))


@pytest.mark.parametrize(
    ("overrides", "parts"),
    [
        (["data.image_field=image", "task.environment=a:b"], ["task.environment", "episodes cannot have images"]),
        (["data.image_field=image", "lora.rank=4"], ["lora.rank = 4", "whole model"]),
        (["data.image_field=image", "train.sequence_parallel_size=2"], ["train.sequence_parallel_size = 2", "share a pack"]),
        (["data.image_field=image", "actor.engine=transformers"], ["actor.engine", "only vLLM"]),
        (["data.image_field=image", "hub.max_message_mb=16"], ["may have 16 MB", "17"]),
        (["model.max_length=2000"], ["1024 + 1024 = 2048", "model.max_length=2048"]),
        (["hub.max_message_mb=1", "rollout.group_size=128"], ["up to 2 MB", "hub.max_message_mb=3"]),
        (
            ["train.steps_per_batch=4", "staleness.max_staleness=2"],
            ["staleness.max_staleness = 2", "3 + 0 = 3", "staleness.max_staleness=3"],
        ),
        (["weights.interval=4", "staleness.max_staleness=0"], ["0 + 3 = 3", "weights 3 steps old"]),
        (["train.steps_per_batch=2", "weights.interval=3", "staleness.max_staleness=2"], ["1 + 2 = 3"]),
        (["staleness.hard_max_staleness=3"], ["staleness.hard_max_staleness = 3", "only to be dropped"]),
        (["train.num_steps=10", "train.steps_per_batch=4"], ["train.num_steps = 10", "12"]),
        (
            ["train.epochs_per_batch=2", "train.steps_per_batch=2", "staleness.max_staleness=2"],
            ["steps_per_batch = 2 times train.epochs_per_batch = 2", "3 + 0 = 3", "staleness.max_staleness=3"],
        ),
        (["train.epochs_per_batch=3", "train.num_steps=10"], ["times train.epochs_per_batch = 3", "12"]),
        (
            ["staleness.staleness_policy=drop", "staleness.hard_max_staleness=8"],
            ["staleness.hard_max_staleness = 8", "max_staleness = 4 already"],
        ),
        (["staleness.auto=true"], ["staleness.auto = true", "how far the bound may rise", "staleness.hard_max_staleness"]),
        (["staleness.auto=true", "staleness.staleness_policy=drop"], ["staleness.auto = true", 'staleness_policy="gate"']),
        (["staleness.staleness_policy=abort", "staleness.lag_of=token_mean"], ["staleness.lag_of", "younger", "oldest_token"]),
        (["train.num_steps=10", "train.warmup_steps=11"], ["train.warmup_steps = 11"]),
        (
            [*OWN_TRUNK, "train.num_steps=10", "critic.alone_until=10"],
            ["critic.alone_until = 10", "train.num_steps = 10", "Set it below 10"],
        ),
        (["train.adam_betas=[0.9, 1.0]"], ["train.adam_betas"]),
        (["train.compile=on", "model.dtype=float32"], ['train.compile = "on"', "float32", '"auto" or "off"']),
        (["train.compile=on", "train.zero_stage=3"], ['train.compile = "on"', "train.zero_stage = 3"]),
        (["train.compile=on", "train.sequence_parallel_size=2"], ['train.compile = "on"', "sequence_parallel_size = 2"]),
        (["evaluation.interval=5"], ["evaluation.interval = 5", "data.eval_data"]),
        (["data.system_prompt=Think."], ["data.system_prompt", "data.chat_template=true"]),
        (["hub.dead_after_s=1"], ["hub.dead_after_s = 1.0", "5 or more"]),
        (["hub.address=tcp://10.0.0.1:5700"], ['hub.address = "tcp://10.0.0.1:5700"', "offbeat keygen", "127.0.0.1"]),
        (["hub.bind=tcp://*:5700"], ["hub.bind"]),
        (["hub.bind=tcp://eth0:5700"], ["hub.bind"]),
        (["hub.key=k"], ['hub.learner_key = ""', "hub.key is set", "offbeat keygen"]),
        (["hub.key=k", "hub.learner_key=l"], ['hub.allowed_keys = ""', "hub.key, hub.learner_key are set"]),
        (["hub.learner_key=l", "hub.allowed_keys=a"], ['hub.key = ""']),
        (["hub.bind=tcp://[::]:5700"], ["hub.bind"]),
        (["hub.address=tcp://localhost.example.org:1"], ["hub.address"]),
        (["hub.address=127.0.0.1:5700"], ["not an address", "tcp://HOST:PORT"]),
        (["hub.address=tcp://127.0.0.1"], ["not an address"]),
        (["hub.address=tcp://127.0.0.1:70000"], ["not an address"]),
        (["launch.num_actors=2", "launch.actor_gpus=[[0]]"], ["launch.actor_gpus = [[0]]", "1 entries", "num_actors = 2"]),
        (["launch.learner_gpus=[0, 1]"], ["launch.learner_gpus = [0, 1]"]),
        (["model.path="], ["model.path"]),
        (["hub.address="], ['hub.address = ""', "not an address"]),
        (["hub.address=file:/shared/a"], ['hub.bind = ""', "file:/shared/a", "tcp://*:0"]),
        (["hub.address=file:/shared/a", "hub.bind=tcp://*:0"], ['hub.bind = "tcp://*:0"', "offbeat keygen"]),
        (["hub.address=tcp://127.0.0.1:0", "hub.bind=file:/shared/a"], ['hub.bind = "file:/shared/a"', "not an address"]),
        (["hub.bind=tcp://127.0.0.1:0"], ['hub.bind = "tcp://127.0.0.1:0"', "looked for at tcp://127.0.0.1:5700"]),
        (["hub.address=tcp://127.0.0.1:0", "hub.bind=tcp://127.0.0.1:5700"], ["hub.address", "hub.bind has a port"]),
        (["weights.pull_port=5700"], ["weights.pull_port = 5700", "hub.address has the same port"]),
        (["weights.port=6000", "weights.pull_port=6000"], ["weights.pull_port = 6000", "weights.port has the same port"]),
        (["metrics.bind=127.0.0.1:5700"], ['metrics.bind = "127.0.0.1:5700"', "hub.address has the same port"]),
        (["metrics.bind=0.0.0.0:6000", "weights.port=6000"], ["metrics.bind", "weights.port has the same port"]),
        (["run.dir=runs/a", "run.mirror=runs/a/copy"], ['run.mirror = "runs/a/copy"', "it lies in run.dir"]),
        (["rollout.temperature=0.009"], ["rollout.temperature = 0.009", "vLLM samples at 0.01 instead"]),
        (["evaluation.temperature=1e-9"], ["evaluation.temperature = 1e-09", "Give 0.01 or more"]),
        (["launch.num_actors=2000"], ["launch.num_actors = 2000", "hub.max_actors = 1024"]),
        (["scale.actors=5", "hub.max_actors=4"], ["scale.actors = 5", "hub.max_actors = 4"]),
        (["scale.auto=true", "scale.max=5", "hub.max_actors=4"], ["scale.max = 5", "hub.max_actors = 4"]),
        (["launch.num_actors=100000000"], ["launch.num_actors = 100000000", "hub.max_actors"]),
        (["launch.learner_processes=2", "launch.learner_gpus=[0, 0]"], ["launch.learner_gpus = [0, 0]", "GPU 0", "twice"]),
        (["launch.actor_gpus=[[1, 1]]"], ["launch.actor_gpus = [1, 1]", "twice"]),
        (["launch.actor_gpus=[[0, 1]]"], ["launch.actor_gpus = [[0, 1]]", "an actor has 2 GPUs", "tensor_parallel_size is 1"]),
        (["launch.learner_gpus=[-1]"], ["launch.learner_gpus = [-1]", "below 0"]),
        (["rollout.lease_timeout_s=10"], ["rollout.lease_timeout_s = 10.0", "task.reward_timeout_s = 30.0"]),
        (["run.dir="], ['run.dir = ""', "no folder"]),
        (["run.dir=runs/{tme}"], ["run.dir", "{tme} is not a placeholder", "{time}"]),
        (["train.deepspeed.optimiser={}"], ["train.deepspeed.optimiser", "no such option"]),
        (["train.groups_per_step=100000000"], ["train.groups_per_step", "65536"]),
        (["train.deepspeed.train_batch_size=4"], ["train.deepspeed.train_batch_size = 4", "train.groups_per_step"]),
        (["train.deepspeed.fp16={enabled = true}"], ["train.deepspeed.fp16", "model.dtype"]),
        (["train.deepspeed.gradient_clipping=0.5"], ["train.deepspeed.gradient_clipping = 0.5", "train.max_grad_norm"]),
        (["train.deepspeed.zero_optimization=3"], ["train.deepspeed.zero_optimization = 3", "a table"]),
        (["train.deepspeed.dump_state={}"], ["train.deepspeed.dump_state", "a single value"]),
        (
            ["train.deepspeed.zero_optimization={stage = 3}"],
            ["train.deepspeed.zero_optimization.stage = 3", "train.zero_stage is 0"],
        ),
        (
            ["train.zero_stage=3", "train.deepspeed.zero_optimization.offload_param.device=nvme"],
            ['train.deepspeed.zero_optimization.offload_param.device = "nvme"', "checkpoints", 'Set it to "cpu".'],
        ),
        (
            ["train.zero_stage=2", 'train.deepspeed={zero_optimization = {offload_optimizer = {device = "nvme"}}}'],
            ['train.deepspeed.zero_optimization.offload_optimizer.device = "nvme"', 'Set it to "cpu".'],
        ),
        (["data.train_data="], ["data.train_data"]),
    ],
)
def test_contradiction_is_refused(overrides: list[str], parts: list[str]) -> None:
    with pytest.raises(SettingError) as raised:
        check(load(None, [*GOOD, *overrides]))
    for part in parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.anchor=proximal", "train.steps_per_batch=2"],
        ["train.steps_per_batch=4", "staleness.max_staleness=3"],
        [*OWN_TRUNK, "train.num_steps=10", "critic.alone_until=9"],
        # Weights are sent after every batch.
        ["train.steps_per_batch=4", "weights.interval=3", "staleness.max_staleness=3"],
        ["staleness.max_staleness=0", "staleness.hard_max_staleness=0"],
        ["staleness.auto=true", "staleness.hard_max_staleness=16"],
        ["hub.address=tcp://localhost:5700"],
        ["hub.address=tcp://127.0.0.2:0"],
        ["hub.address=tcp://[::1]:5700"],
        ["hub.bind=tcp://*:5700", "hub.address=tcp://learner.example:5700", *KEYS],
        ["hub.bind=tcp://*:0", "hub.address=file:/shared/hub.address", *KEYS],
        ["hub.bind=tcp://127.0.0.1:0", "hub.address=file:hub.address"],
        ["launch.num_actors=2", "launch.actor_gpus=[[0],[1]]"],
        ["train.zero_stage=3", "train.deepspeed.zero_optimization.offload_param.device=cpu"],
    ],
)
def test_settings_at_the_edge_pass(overrides: list[str]) -> None:
    assert check(load(None, [*GOOD, *overrides])) == []


def test_all_contradictions_are_told_at_once() -> None:
    with pytest.raises(SettingError) as raised:
        check(load(None, [*GOOD, "model.max_length=10", "train.warmup_steps=2000", "hub.dead_after_s=1"]))
    assert [text.split(" = ")[0] for text in raised.value.texts] == [
        "model.max_length",
        "train.warmup_steps",
        "hub.dead_after_s",
    ]


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (['train.deepspeed={optimizer = {type = "SGD"}}'], "train.deepspeed.optimizer replaces AdamW"),
        (["train.groups_per_step=3", "launch.learner_processes=2"], "train.groups_per_step = 3 is not a multiple"),
        (["task.environment=games:play", "staleness.staleness_policy=abort"], "long ones may never reach a batch"),
        (["data.eval_data=held_out.jsonl"], "nothing is evaluated on data.eval_data. Set evaluation.interval"),
    ],
)
def test_odd_settings_are_warned_about(overrides: list[str], part: str) -> None:
    (warning,) = check(load(None, [*GOOD, *overrides]))
    assert part in warning


@pytest.mark.parametrize(("num_groups", "num_warnings"), [(6, 0), (7, 1)])
def test_processes_that_share_each_pass_share_the_groups_as_one(num_groups: int, num_warnings: int) -> None:
    settings = ["launch.learner_processes=8", "train.sequence_parallel_size=4", f"train.groups_per_step={num_groups}"]
    assert len(check(load(None, [*GOOD, *settings]))) == num_warnings


def test_band_narrower_than_the_engine_noise_is_warned_about() -> None:
    (warning,) = check(load(None, [*GOOD, "loss.clip_low=3e-4", "loss.clip_high=4e-4"]))
    assert "offbeat calibrate" in warning


def test_greedy_evaluation_in_groups_is_warned_about() -> None:
    settings = ["data.eval_data=e.jsonl", "evaluation.interval=5", "evaluation.group_size=4"]
    (warning,) = check(load(None, [*GOOD, *settings]))
    assert "evaluation.group_size" in warning
