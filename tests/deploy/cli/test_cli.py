"""Mistakes on the command line are reported in one line that names the setting, the value and the cure."""

import socket
from pathlib import Path

import pytest

from offbeat.common.settings.config import Config
from tests.common.records.test_run_folder import held_by_another_process
from tests.deploy.services import SERVICES_S, Services, free_port, write_config


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.num_step=3", ["train.num_step", "num_steps"]),
        ("train.num_steps=0", ["train.num_steps", "0", "1"]),
        ("rollout.top_p=0.9", ["rollout.top_p", "rollout.temperature"]),
        ("loss.anchor=proximal", ["loss.anchor", "proximal", "steps_per_batch"]),
        ("model.path=/nowhere/model", ["model.path", "/nowhere/model"]),
        ("data.train_data=nowhere.jsonl", ["data.train_data", "nowhere.jsonl"]),
        ("task.reward=my_reward:absent", ["task.reward", "my_reward:absent"]),
        ("task.reward=no_such_module:f", ["task.reward", "no_such_module"]),
        ("reward.length_penalty=no_such_module:f", ["reward.length_penalty", "no_such_module"]),
        ("hub.address=tcp://192.0.2.1:5700", ["hub.address", "192.0.2.1", "offbeat keygen"]),
        ("rollout.max_new_tokens=4096", ["model.max_length", "4096"]),
    ],
)
def test_impossible_setting_is_refused_with_its_path_and_value(
    services: Services, tmp_path: Path, tiny_model: Path, override: str, said: list[str]
) -> None:
    config = write_config(tmp_path, tiny_model)
    result = services.run("check", config, override)
    assert result.returncode == 2
    errors = [line for line in result.stderr.splitlines() if line.startswith("error: ")]
    assert any(all(word in line for word in said) for line in errors), result.stderr
    assert "Traceback" not in result.stderr


def test_check_prints_a_config_that_check_accepts_again(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, tiny_model)
    first = services.run("check", config, "train.num_steps=7", is_real=True)
    (tmp_path / "again.toml").write_text(first.stdout)
    second = services.run("check", "again.toml")
    assert "num_steps = 7" in second.stdout
    # The notes above the settings tell how much memory is free, which changes.
    settings = [
        [line for line in printed.splitlines() if not line.startswith("#")] for printed in (first.stdout, second.stdout)
    ]
    assert settings[0] == settings[1]


def test_config_may_lie_in_a_folder_whose_name_looks_like_a_setting(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = Path(write_config(tmp_path, tiny_model))
    folder = tmp_path / "max_staleness=4"
    folder.mkdir()
    (tmp_path / config).rename(folder / "run.toml")
    result = services.run("check", "max_staleness=4/run.toml", "train.num_steps=7")
    assert result.returncode == 0, result.stderr
    assert "num_steps = 7" in result.stdout


def test_every_setting_is_explained(services: Services, tmp_path: Path) -> None:
    text = services.run("check", "--explain").stdout
    settings = [
        f"{section}.{key}" for section in Config.__struct_fields__ for key in getattr(Config(), section).__struct_fields__
    ]
    assert len(settings) > 60
    assert [setting for setting in settings if f"{setting} = " not in text] == []


def test_prompt_longer_than_the_limit_names_the_row(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, tiny_model)
    result = services.run("learner", config, "data.max_prompt_tokens=3")
    assert result.returncode == 2
    assert "train.jsonl:1" in result.stderr.splitlines()[-1]
    assert "data.max_prompt_tokens" in result.stderr.splitlines()[-1]


def test_port_in_use_is_said_before_the_model_is_loaded(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        config = write_config(tmp_path, tiny_model)
        address = f"tcp://127.0.0.1:{server.getsockname()[1]}"
        result = services.run("learner", config, f"hub.address={address}")
    assert result.returncode == 2
    assert address in result.stderr.splitlines()[-1]
    assert not (tmp_path / "run" / "model").exists()


def test_folder_that_holds_a_run_is_not_written_over(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, tiny_model)
    (tmp_path / "run").mkdir()
    rows = '{"kind": "step", "time": 1.0, "policy_version": 1}\n'
    (tmp_path / "run" / "metrics.jsonl").write_text(rows)
    result = services.run("train", config)
    assert result.returncode == 2
    assert "run.dir" in result.stderr.splitlines()[-1]
    assert "run.resume" in result.stderr.splitlines()[-1]
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == rows


@pytest.mark.parametrize("option", ["--preflight", "--no-preflight"])
def test_second_learner_without_a_log_is_refused_and_writes_nothing(
    services: Services, tmp_path: Path, tiny_model: Path, option: str
) -> None:
    config = write_config(tmp_path, tiny_model, log={"enabled": False})
    run = tmp_path / "run"
    with held_by_another_process(run) as holder:
        result = services.run("learner", config, option)
        assert result.returncode == 2
        assert f"another learner (process {holder.pid} on" in result.stderr
        assert "run.dir" in result.stderr
        assert [path.name for path in run.iterdir()] == ["learner.lock"]


def test_learner_without_actors_says_so_and_stops_by_a_setting(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, tiny_model)
    result = services.run("learner", config, "run.no_actor_timeout_s=2")
    assert result.returncode == 3
    assert "no actor for" in result.stderr.splitlines()[-1]
    assert "run.no_actor_timeout_s" in result.stderr.splitlines()[-1]


@pytest.mark.engine
def test_actor_without_a_learner_says_so_and_stops_by_a_setting(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(tmp_path, tiny_model, actor={"engine": "transformers", "engine_options": {}})
    address = f"hub.address=tcp://127.0.0.1:{free_port()}"
    result = services.run("actor", config, address, "actor.connect_timeout_s=2")
    assert result.returncode == 3
    assert "no learner answered" in result.stderr.splitlines()[-1]


@pytest.mark.engine
@pytest.mark.timeout(SERVICES_S)
def test_reward_that_always_raises_ends_the_run_with_the_line_that_raised(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        task={"reward": "broken_reward:reward"},
        actor={"engine": "transformers", "engine_options": {}},
        run={"max_failed_leases": 5},
    )
    (tmp_path / "broken_reward.py").write_text(
        "def reward(prompt, completion, row):\n    return 0.0 if 'stands for' in completion else row['no such field']\n"
    )
    train = services.start("train", config)
    assert services.wait(train, "train") == 3
    errors = [line for line in services.output("train").splitlines() if line.startswith("error: ")]
    assert "reward_error" in errors[0]
    assert "broken_reward.py:2" in errors[0]
    final = services.rows("run", "final")[-1]
    assert final["outcome"] == "failed"
    ledger = final["ledger"]
    assert ledger["trained"] == 0
    assert ledger["dropped"]["reward_error"] >= 5
    assert ledger["leased"] == sum(ledger["dropped"].values()) + ledger["expired"] + ledger["in_flight"]
