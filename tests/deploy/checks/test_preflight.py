"""Every wrong input is refused before anything heavy starts: setting, value, cure, all at once, never a traceback."""

import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.deploy.checks.findings import Finding
from offbeat.deploy.checks.preflight import (
    Command,
    _patience,  # pyright: ignore[reportPrivateUsage]
    look,
)

pytestmark = pytest.mark.slow  # each check runs in a process of its own

REWARDS = """
import asyncio, os, sys, time

def good(prompt, completion, row): return len(completion)
async def good_async(prompt, completion, row): return len(completion)
def wrong_field(prompt, completion, row): return row["solution"]
def wrong_kind(prompt, completion, row): return "7"
def not_finite(prompt, completion, row): return float("nan")
def leaves(prompt, completion, row): sys.exit(0)
def dies(prompt, completion, row): os._exit(0)
def hangs(prompt, completion, row): time.sleep(60)
async def waits(prompt, completion, row): await asyncio.sleep(60)
def judge_is_down(prompt, completion, row): raise ConnectionRefusedError("no judge")
"""


@pytest.fixture
def overrides(tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return the settings of a run that passes, whose files may be damaged: everything is in the test's folder."""
    monkeypatch.chdir(tmp_path)
    # For each test another module, because Python keeps what it has imported.
    Path("my_rewards.py").write_text(REWARDS)
    shutil.copytree(tiny_model, "model")
    Path("train.jsonl").write_text('{"prompt": "1+2>", "answer": "3"}\n{"prompt": "1+22>", "answer": "23"}\n')
    return [
        *("model.path=model", "model.dtype=float32", "model.max_length=64", "data.train_data=train.jsonl"),
        *("data.max_prompt_tokens=8", "rollout.max_new_tokens=8", "hub.address=tcp://127.0.0.1:0", "run.dir=run"),
    ]


def refused(overrides: list[str], command: Command = "train") -> tuple[str, ...]:
    with pytest.raises(SettingError) as raised:
        look(load(None, overrides), command)
    return raised.value.texts


def warned(overrides: list[str], caplog: pytest.LogCaptureFixture, command: Command = "train") -> list[str]:
    look(load(None, overrides), command)
    return [record.getMessage() for record in caplog.records]


def test_run_without_mistakes_passes_and_its_first_prompt_is_shown(
    overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    *_, note = look(load(None, overrides), "check")
    assert note == "data.train_data: 2 prompts of 4 to 5 tokens; the first as tokens: '1+2>'"
    assert caplog.records == []


def test_model_that_is_not_packed_is_noted_and_refused_where_processes_share_packs(overrides: list[str]) -> None:
    config = Path("model/config.json")
    fields = msgspec.json.decode(config.read_bytes()) | {"layer_types": ["linear_attention", "full_attention"]}
    config.write_bytes(msgspec.json.encode(fields))
    reason = "it has layers of type linear_attention"
    assert any(f"the model is not packed, because {reason}" in note for note in look(load(None, overrides), "check"))
    shared = [*overrides, "train.sequence_parallel_size=2", "launch.learner_processes=2"]
    assert any(f"cannot be packed: {reason}. Set it to 1." in text for text in refused(shared))


def test_setting_without_effect_is_refused_to_a_new_run_but_not_to_an_actor_or_a_resumed_run(overrides: list[str]) -> None:
    inert = [*overrides, "kl.estimator=k2"]
    for command in ("check", "train", "learner"):
        (text,) = refused(inert, command)
        assert text.startswith('kl.estimator = "k2": nothing reads it')
    look(load(None, inert), "actor")
    (text,) = refused([*inert, "run.resume=true"])
    assert text.startswith('run.dir = "run": there is no such folder to resume from')


@pytest.mark.parametrize("command", ["train", "learner"])
def test_callback_is_imported_but_not_called(command: Command, overrides: list[str], caplog: pytest.LogCaptureFixture) -> None:
    Path("my_callbacks.py").write_text("def on_row(row): open('called', 'w')\ndef two(row, other): pass\n")
    assert warned([*overrides, "metrics.callback=my_callbacks:on_row"], caplog, command) == []
    assert not Path("called").exists()
    (text,) = refused([*overrides, "metrics.callback=my_callbacks:two"], command)
    assert text.startswith('metrics.callback = "my_callbacks:two"')


def cut_weights() -> None:
    file = Path("model/model.safetensors")
    file.write_bytes(file.read_bytes()[:-1000])


def damage_header() -> None:
    file = Path("model/model.safetensors")
    file.write_bytes(file.read_bytes()[:100])


def change_config(folder: str = "model", **fields: object) -> None:
    file = Path(folder, "config.json")
    file.write_bytes(msgspec.json.encode({**msgspec.json.decode(file.read_bytes()), **fields}))


def shard_that_is_missing() -> None:
    Path("model/model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}')


def remove_tokenizer() -> None:
    for file in Path("model").glob("*token*"):
        file.unlink()


def write(text: str | bytes) -> Callable[[], object]:
    return lambda: Path("train.jsonl").write_bytes(text if isinstance(text, bytes) else text.encode())


def link_to_itself(name: str) -> Callable[[], object]:
    def link() -> None:
        Path(name).unlink(missing_ok=True)
        Path(name).symlink_to(name)

    return link


FILES: dict[str, tuple[Callable[[], object], str, str]] = {
    "weights cut": (cut_weights, 'model.path = "model"', "not fully covered"),
    "header cut": (damage_header, 'model.path = "model"', "invalid header length"),
    "no weights": (lambda: Path("model/model.safetensors").unlink(), 'model.path = "model"', "no weights"),
    "shard missing": (shard_that_is_missing, 'model.path = "model"', "the first is model-1.safetensors"),
    "no config": (lambda: Path("model/config.json").unlink(), 'model.path = "model"', "no config.json"),
    "config no JSON": (lambda: Path("model/config.json").write_text("{"), 'model.path = "model"', "no JSON object"),
    "config a list": (lambda: Path("model/config.json").write_text("[]"), 'model.path = "model"', "no JSON object"),
    "no type": (lambda: Path("model/config.json").write_text("{}"), 'model.path = "model"', "no model_type"),
    "unknown type": (lambda: change_config(model_type="qwen99"), 'model.path = "model"', "qwen99"),
    "no language model": (lambda: change_config(model_type="vit"), 'model.path = "model"', "not a language model"),
    "images wanted": (lambda: change_config(model_type="qwen3_vl"), 'data.image_field = ""', "without its vision tower"),
    "no tokenizer": (remove_tokenizer, 'model.path = "model"', "no tokenizer"),
    "bad tokenizer": (lambda: Path("model/tokenizer.json").write_text("{"), 'model.path = "model"', "cannot be loaded"),
    "tokenizer too large": (lambda: change_config(vocab_size=20), 'model.path = "model"', "and the model's vocabulary 20"),
    "few positions": (
        lambda: change_config(max_position_embeddings=32),
        "model.max_length = 64",
        "the model has 32 positions. Set model.max_length=32",
    ),
    "no data": (lambda: Path("train.jsonl").unlink(), 'data.train_data = "train.jsonl"', "cannot be read"),
    "empty data": (write(""), 'data.train_data = "train.jsonl"', "no rows"),
    "not UTF-8": (write('{"prompt": "é"}'.encode("latin-1")), 'data.train_data = "train.jsonl"', "Save the file as UTF-8"),
    "UTF-16": (write('{"prompt": "1"}'.encode("utf-16")), 'data.train_data = "train.jsonl"', "UTF-16"),
    "no JSON": (write("prompt,answer"), 'data.train_data = "train.jsonl"', "train.jsonl:1 is not a JSON object"),
    "no field": (write('{"question": "1"}'), 'data.prompt_field = "prompt"', "Its fields are: question"),
    "NaN": (write('{"prompt": "1", "answer": NaN}'), 'data.train_data = "train.jsonl"', "has NaN or Infinity, which JSON"),
    "no text": (write('{"prompt": 7}'), 'data.prompt_field = "prompt"', "it is of type int"),
    "conversation": (write('{"prompt": [{"role": "user", "content": "1"}]}'), "data.chat_template = false", "conversation"),
    "too long": (write('{"prompt": "123456789"}'), "data.max_prompt_tokens = 8", "train.jsonl:1 has 9 tokens"),
    "data a loop": (link_to_itself("train.jsonl"), 'data.train_data = "train.jsonl"', "Too many levels of symbolic links"),
    "run.dir a loop": (link_to_itself("run"), 'run.dir = "run"', "run is a symbolic link that leads nowhere"),
    "run.dir a file": (lambda: Path("run").write_text(""), 'run.dir = "run"', "is a file. Name a folder"),
    "no answer": (write('{"prompt": "1"}'), 'task.reward = "exact_match"', "KeyError: 'answer'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", FILES)
def test_file_that_cannot_be_used_is_refused(case: str, overrides: list[str]) -> None:
    damage, setting, problem = FILES[case]
    damage()
    texts = refused(overrides)
    assert any(text.startswith(setting) and problem in text for text in texts), texts


@pytest.mark.slow
@pytest.mark.parametrize(
    ("setting", "problem"),
    [
        ("model.path=/nowhere/model", "there is no such folder"),
        ("model.path=train.jsonl/model", "there is no such folder"),
        ("model.path=./train.jsonl", "this is a file"),
        ("train.sequence_parallel_size=3", "the model has 2 heads of keys and values: 2 / 3 is not whole"),
        ("train.sequence_parallel_size=2", "1 learner processes (launch.learner_processes) cannot be divided into groups of 2"),
        ("data.eval_data=absent.parquet", "cannot be read"),
        ("data.prompt_field=question", "Its fields are: prompt, answer"),
        ("data.weight_field=weight", "no such field"),
        ("data.chat_template=true", "no chat template"),
        ("task.reward=my_rewards:absent", "has no 'absent'"),
        ("task.reward=absent:reward", "no module 'absent'"),
        ("task.reward=my_rewards.py:good", "without the suffix: my_rewards:function"),
        ("task.reward=my_rewards:wrong_field", "KeyError: 'solution'"),
        ("task.reward=my_rewards:wrong_kind", "not a number"),
        ("task.reward=my_rewards:not_finite", "the reward is nan"),
        ("task.reward=my_rewards:leaves", "SystemExit"),
        ("actor.reward_calls_per_s=0.01", "before its rewards: rollout.lease_timeout_s = 600. Raise it, or set rollout."),
        ("reward.length_penalty=absent:penalty", "no module 'absent'"),
        ("metrics.callback=absent:on_row", "no module 'absent'"),
        ("metrics.callback=my_rewards:good", "cannot take (row)"),
        ("run.dir=train.jsonl/run", "train.jsonl is a file"),
        ("run.dir=/proc/run", "cannot be written"),
        ("log.min_free_mb=100000000", "no lease would ever be granted"),
        ("metrics.bind=127.0.0.1:80000", "there is no port 80000"),
        ("hub.bind=tcp://192.0.2.1:5700", "bind"),
        ("hub.address=tcp://no.such.host.invalid:5700", "hub.address"),
        ("train.deepspeed.optimiser={}", "no such option"),
        ("actor.engine_options.max_num_sequences=4", "no such option"),
        ("actor.engine_options.pipeline_parallel_size=2", "this is not an option, because a step of another stage"),
        ('actor.engine_options.max_num_seqs="four"', "the engine wants None or int"),
        ("launch.learner_gpus=[99]", "no GPU 99"),
        ("launch.actor_gpus=[[99]]", "no GPU 99"),
        ("metrics.wandb_project=mine", 'wandb is not installed. Install it: pip install "offbeat[wandb]"'),
        ("metrics.mlflow_experiment=mine", 'mlflow is not installed. Install it: pip install "offbeat[mlflow]"'),
        ("metrics.trackio_project=mine", 'trackio is not installed. Install it: pip install "offbeat[trackio]"'),
    ],
)
def test_setting_that_this_machine_cannot_meet_is_refused(
    setting: str, problem: str, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for package in ("wandb", "mlflow", "trackio"):
        monkeypatch.setitem(__import__("sys").modules, package, None)
    texts = refused([*overrides, setting])
    named = setting.partition("=")[0]
    assert any(named in text and problem in text for text in texts), texts


@pytest.mark.parametrize("setting", ["hub.address", "weights.port", "weights.pull_port", "metrics.bind", "metrics.actor_bind"])
def test_port_in_use_is_refused_by_its_own_setting(setting: str, overrides: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        value = {"hub.address": f"tcp://127.0.0.1:{port}", "metrics.bind": f"127.0.0.1:{port}"}.get(setting, port)
        value = f"127.0.0.1:{port}" if setting == "metrics.actor_bind" else value
        (text,) = refused([*overrides, f"{setting}={value}"])
    assert text.startswith(setting)
    assert f"port {port} is in use" in text


@pytest.mark.parametrize(
    ("others", "said"),
    [
        (["launch.num_actors=2"], "2 actors cannot share one port"),
        (["scale.actors=3"], "3 actors cannot share one port"),
        (["scale.auto=true", "scale.max=4"], "4 actors cannot share one port"),
        (["metrics.bind=0.0.0.0:19401"], "metrics.bind has the same port"),
    ],
)
def test_port_for_actors_numbers_that_processes_of_a_run_would_share_is_refused(
    others: list[str], said: str, overrides: list[str]
) -> None:
    (text,) = refused([*overrides, "metrics.actor_bind=127.0.0.1:19401", *others], "train")
    assert said in text
    look(load(None, [*overrides, "metrics.actor_bind=127.0.0.1:0", *others]), "train")


@pytest.mark.parametrize(
    ("target", "said"),
    [("v_proj2", "'v_proj2' fits no linear layer"), ("lm_head", "'lm_head' fits no linear layer"), ("q_proj", "")],
)
def test_adapters_layers_are_looked_up_in_the_model(target: str, said: str, overrides: list[str]) -> None:
    overrides = [*overrides, "lora.rank=4", f'lora.target_modules=["{target}"]']
    if not said:
        look(load(None, overrides), "train")
        return
    (text,) = refused(overrides)
    assert said in text
    assert "There are: down_proj, gate_proj, k_proj, o_proj, q_proj, up_proj, v_proj" in text


def test_missing_reference_is_refused(overrides: list[str]) -> None:
    (text,) = refused([*overrides, "kl.reference=/nowhere", "kl.loss_coef=0.1"])
    assert text.startswith("kl.reference")


def test_reference_whose_tokens_are_others_is_refused(overrides: list[str]) -> None:
    """A KL between two vocabularies is a number without a meaning, and a smaller one ends the run in its first step."""
    overrides += ["kl.reference=reference", "kl.loss_coef=0.1"]
    shutil.copytree("model", "reference")
    look(load(None, overrides), "train")
    tokenizer = Path("reference/tokenizer.json")
    fields = msgspec.json.decode(tokenizer.read_bytes())
    words = fields["model"]["vocab"]
    words["1"], words["2"] = words["2"], words["1"]
    tokenizer.write_bytes(msgspec.json.encode(fields))
    (text,) = refused(overrides)
    assert text.startswith("kl.reference = \"reference\": 2 tokens of model.path are others there, such as '1'")
    for file in Path("reference").glob("tokenizer*"):
        file.unlink()
    look(load(None, overrides), "train")
    change_config("reference", vocab_size=20)
    (text,) = refused(overrides)
    assert text.startswith('kl.reference = "reference": the tokenizer has')


@pytest.mark.parametrize("command", ["check", "learner"])
@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "first"}, 'environment variable RANK = "first"'),
        ({"WORLD_SIZE": "-1"}, 'environment variable WORLD_SIZE = "-1"'),
        ({"LOCAL_RANK": "x"}, 'environment variable LOCAL_RANK = "x"'),
        ({"RANK": "2", "WORLD_SIZE": "2"}, "WORLD_SIZE is 2"),
        ({"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": ""}, 'environment variable MASTER_ADDR = "": it is not set'),
    ],
)
def test_launchers_variables_that_no_launcher_sets_are_refused(
    variables: dict[str, str], said: str, command: Command, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    (text,) = refused(overrides, command)
    assert said in text


@pytest.mark.parametrize("command", ["train", "actor"])
def test_launchers_variables_are_nothing_to_commands_that_do_not_read_them(
    command: Command, overrides: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "first")
    look(load(None, overrides), command)


def test_all_mistakes_are_told_at_once(overrides: list[str]) -> None:
    cut_weights()
    wrong = ["loss.clip_low=1.5", "task.reward=absent:f", "actor.engine_options.foo=1", "data.prompt_field=q", "run.dir="]
    settings = [text.split(" = ")[0] for text in refused([*overrides, *wrong])]
    assert settings == [
        *("loss.clip_low", "run.dir", "model.path", "actor.engine_options.foo", "data.prompt_field", "task.reward")
    ]


@pytest.mark.parametrize(
    ("damage", "setting", "said"),
    [
        (write('{"prompt": "1"}\n' * 9 + '{"prompt": "123456789"}\n'), "data.long_prompts=drop", "1 of 10 prompts (10%)"),
        (write('{"prompt": "ÄÖÜ", "answer": ""}\n'), "data.max_prompt_tokens=8", "does not know 100%"),
        (write('{"prompt": "1"}'), "task.reward=my_rewards:judge_is_down", "ConnectionRefusedError: no judge"),
        (write('{"prompt": "1"}'), "task.reward=my_rewards:dies", "the check's process ended"),
        (
            write('{"prompt": "1"}'),
            "task.reward=my_rewards:hangs",
            "task.reward could not be checked (it took longer than",
        ),
    ],
)
def test_what_may_be_meant_is_only_warned_about(
    damage: Callable[[], object],
    setting: str,
    said: str,
    overrides: list[str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    damage()
    if "hangs" in setting:
        monkeypatch.setattr("offbeat.deploy.checks.preflight.REWARD_S", 0.3)
    overrides = [*overrides, "task.reward=my_rewards:good", setting]
    assert any(said in text for text in warned(overrides, caplog))


@pytest.mark.parametrize("reward", ["hangs", "waits"])
def test_reward_that_exceeds_its_time_limit_is_warned_about(
    reward: str, overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    settings = [*overrides, f"task.reward=my_rewards:{reward}", "task.reward_timeout_s=0.2"]
    (text,) = warned(settings, caplog)
    assert text.startswith("task.reward: called with the first row")
    assert "it took longer than task.reward_timeout_s = 0.2" in text


def test_hub_is_not_asked_for_a_model_that_is_a_file_here(overrides: list[str], caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert any("this is a file" in text for text in refused([*overrides, "model.path=train.jsonl"], "check"))
    assert not any("at the model hub" in record.getMessage() for record in caplog.records)


def test_names_that_only_the_hub_may_know_are_said_to_be_unchecked(
    overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    unchecked = "is taken for a dataset of the Hugging Face Hub: its rows will only be checked after the start."
    assert warned([*overrides, "data.train_data=train.josnl"], caplog) == [
        f'data.train_data = "train.josnl" is not on this machine and {unchecked} Did you mean train.jsonl?'
    ]
    notes = look(load(None, [*overrides, "data.train_data=owner/name"]), "check")
    assert f'data.train_data = "owner/name" is not on this machine and {unchecked}' in notes


@pytest.mark.parametrize("reward", ["good", "good_async"])
def test_plain_and_async_rewards_pass(reward: str, overrides: list[str], caplog: pytest.LogCaptureFixture) -> None:
    assert warned([*overrides, f"task.reward=my_rewards:{reward}"], caplog) == []


NO_SANDBOX = """
from offbeat.actor import sandbox
from offbeat.actor.sandbox import confine, local
local.find_bubblewrap = lambda: []
confine.landlock_version = lambda: 0
sandbox.use(sandbox.Local())
def reward(prompt, completion, row): return 0.0
async def play(chat, row): return 0.0
"""


@pytest.mark.parametrize("setting", ["task.reward=runs_code:reward", "task.environment=runs_code:play"])
@pytest.mark.parametrize("command", ["check", "actor"])
def test_machine_without_a_sandbox_is_told_before_the_start(setting: str, command: Command, overrides: list[str]) -> None:
    Path("runs_code.py").write_text(NO_SANDBOX)
    (mistake,) = refused([*overrides, setting], command)
    assert mistake.startswith(f"{setting.partition('=')[0]}: no sandbox works on this machine (bubblewrap is not installed")
    assert "pip install 'offbeat[sandbox]'" in mistake


@pytest.mark.parametrize("command", ["check", "train", "learner"])
def test_function_of_the_learner_that_fails_is_refused_for_all_but_an_actor(command: Command, overrides: list[str]) -> None:
    Path("my_correction.py").write_text("def below_zero(log_rho, completion_mask, advantages): return -log_rho.exp()")
    overrides = [*overrides, "loss.correction=my_correction:below_zero"]
    (text,) = refused(overrides, command)
    assert text.startswith('loss.correction = "my_correction:below_zero": it returned a weight below 0')
    assert look(load(None, overrides), "actor") == []


@pytest.mark.parametrize("command", ["check", "train", "learner"])
def test_length_penalty_is_called_and_a_noise_floor_is_read(command: Command, overrides: list[str]) -> None:
    Path("my_penalty.py").write_text("def endless(lengths, max_new_tokens): return 1 / (max_new_tokens - lengths)")
    (text,) = refused([*overrides, "reward.length_penalty=my_penalty:endless"], command)
    assert "it returned inf for a completion of" in text
    (text,) = refused([*overrides, "loss.noise_floor=train.jsonl"], command)
    assert text.startswith('loss.noise_floor = "train.jsonl": it is not a calibration')


@pytest.mark.parametrize("command", ["check", "train", "learner"])
def test_own_evaluation_is_called_on_the_first_held_out_row(command: Command, overrides: list[str]) -> None:
    Path("my_numbers.py").write_text("""
def right(completions): return {each.finish_reason: each.row["extra"] * each.reward for each in completions}
def wrong(completions): return {"share": completions[0].row["absent"]}
""")
    Path("eval.jsonl").write_text('{"prompt": "1+2>", "answer": "3", "extra": 7}')
    overrides = [*overrides, "data.eval_data.math=eval.jsonl", "evaluation.interval=1"]
    look(load(None, [*overrides, "evaluation.function=my_numbers:right"]), command)
    (text,) = refused([*overrides, "evaluation.function=my_numbers:wrong"], command)
    assert text.startswith("evaluation.function = \"my_numbers:wrong\": it raised KeyError: 'absent'")


def test_curriculum_is_called_on_the_tasks_of_the_data_without_results(overrides: list[str]) -> None:
    Path("my_levels.py").write_text("""
def right(results, policy_version): return {"sums": results["sums"].num_prompts, "sorting": results["sorting"].num_groups}
def wrong(results, policy_version): return {"sums": 1, "sort": 1}
""")
    names = ("sums", "sums", "sorting")
    Path("tasks.jsonl").write_text("".join(f'{{"prompt": "1+2>", "answer": "3", "task": "{name}"}}\n' for name in names))
    overrides = [*overrides, "data.train_data=tasks.jsonl", "data.task_field=task"]
    look(load(None, [*overrides, "data.curriculum=my_levels:right"]), "learner")
    (text,) = refused([*overrides, "data.curriculum=my_levels:wrong"], "learner")
    assert text.startswith("data.curriculum = \"my_levels:wrong\": it returned a weight for 'sort'")
    assert "did you mean 'sorting'?" in text


ROWS = """
import random

def good(split): return [{"prompt": "1+2>", "answer": "3"}]
def needs_torch(split):
    import torch
    return [{"prompt": "1+2>", "answer": str(torch.tensor(3).item())}]
def random_order(split): return [{"prompt": str(random.random())[2:8], "answer": ""} for _ in range(9)]
def wrong(split): return [{"prompt": "1+2>", "answer": "3"}, {"text": "1"}]
def none_held_out(split): return [] if split == "test" else good(split)
"""


def test_rows_of_a_function_pass_and_the_reward_is_called_on_the_first(
    overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path("my_rows.py").write_text(ROWS)
    overrides = [*overrides, "data.train_data=my_rows:good"]
    *_, note = look(load(None, overrides), "check")
    assert note.startswith("data.train_data: 1 prompts of 4 to 4 tokens")
    assert caplog.records == []
    (text,) = refused([*overrides, "task.reward=my_rewards:wrong_field"])
    assert "KeyError: 'solution'" in text


def write_data(rows: list[dict[str, str]]) -> None:
    """Write rows in every format: `data.json`, `data.csv`, `data.parquet`, `data.arrow`, and `data.folder` of `datasets`."""
    # Not above: every process that collects tests would import it, for half a second.
    import datasets
    from datasets.arrow_writer import ArrowWriter

    Path("data.json").write_bytes(msgspec.json.encode(rows))
    Path("data.csv").write_text("prompt,answer\n" + "".join(f"{row['prompt']},3\n" for row in rows))
    dataset = datasets.Dataset.from_list(rows)
    dataset.to_parquet("data.parquet")
    dataset.save_to_disk("data.folder")
    with ArrowWriter(path="data.arrow") as writer:
        for row in rows:
            writer.write(row)
        writer.finalize()


def check_apart(overrides: list[str]) -> subprocess.CompletedProcess[str]:
    """Run `offbeat check` in a process of its own, which has not imported torch."""
    Path("run.toml").touch()
    command = [sys.executable, "-m", "offbeat.deploy.cli.main", "check", "run.toml", *overrides]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


@pytest.mark.slow
def test_rows_of_every_format_are_checked_by_a_process_of_its_own(overrides: list[str]) -> None:
    write_data([{"prompt": "1+2>", "answer": "3"}, {"prompt": "12345678>", "answer": "3"}])
    # `datasets`, unlike the reader of JSON, imports torch.
    others = [f"data.eval_data.{suffix}=data.{suffix}" for suffix in ("json", "parquet", "arrow", "folder")]
    done = check_apart([*overrides, "data.train_data=data.csv", *others])
    assert done.stderr.count("has 9 tokens") == 1 + len(others), done.stderr
    assert "could not be checked" not in done.stderr
    assert done.returncode == 2


def test_check_that_fails_names_its_setting_and_what_will_only_show_later(
    overrides: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(config: Config) -> Iterator[Finding]:
        yield Finding("note", "found before")
        raise RuntimeError("no such library")

    monkeypatch.setattr("offbeat.deploy.checks.preflight.check_inputs", broken)
    assert "found before" in look(load(None, overrides), "check")
    (warning,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warning == (
        "data.train_data could not be checked (RuntimeError: no such library): its mistakes will only show after the start."
    )


def test_wait_for_a_check_says_what_it_waits_for(
    overrides: list[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("offbeat.deploy.checks.preflight._SAY_INTERVAL_S", 0.1)
    monkeypatch.setattr("offbeat.deploy.checks.preflight.REWARD_S", 0.5)
    caplog.set_level("INFO")
    said = warned([*overrides, "task.reward=my_rewards:hangs"], caplog)
    assert any(re.match(r"still checking task\.reward, \d+ s so far, at most", text) for text in said)


def test_busy_machine_gives_its_checks_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    for load_average, factor in ((0.5, 1.0), (8.0, 4.0), (400.0, 6.0)):
        monkeypatch.setattr("os.getloadavg", lambda load_average=load_average: (load_average, 0.0, 0.0))
        assert _patience() == factor


@pytest.mark.slow
def test_function_may_import_torch_although_the_check_of_the_data_does_without_it(overrides: list[str]) -> None:
    Path("my_rows.py").write_text(ROWS)
    done = check_apart([*overrides, "data.train_data=my_rows:needs_torch"])
    assert "data.train_data: 1 prompts of 4 to 4 tokens" in done.stderr + done.stdout
    assert done.returncode == 0


def test_function_whose_rows_differ_between_calls_is_warned_about(
    overrides: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    Path("my_rows.py").write_text(ROWS)
    (text,) = warned([*overrides, "data.train_data=my_rows:random_order"], caplog)
    assert text.startswith("data.train_data: called twice, the function returned other rows")


def test_wrong_rows_of_a_function_are_refused_for_training_and_evaluation(overrides: list[str]) -> None:
    Path("my_rows.py").write_text(ROWS)
    (text,) = refused([*overrides, "data.train_data=my_rows:wrong"])
    assert "row 1 of my_rows:wrong" in text
    (text,) = refused([*overrides, "data.eval_data.held_out=my_rows:none_held_out"])
    assert text.startswith('data.eval_data.held_out = "my_rows:none_held_out": there are no rows')


def test_actor_needs_no_data_and_no_port(overrides: list[str]) -> None:
    Path("train.jsonl").unlink()
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"hub.address=tcp://127.0.0.1:{server.getsockname()[1]}"
        assert look(load(None, [*overrides, address]), "actor") == []
