"""Whole runs: real processes, real sockets, real vLLM, real collectives, on tiny models."""

import signal
import subprocess
from pathlib import Path

import msgspec
import pytest

from offbeat.common.processes import process_table as processes
from offbeat.common.processes.own_process import TURN_VARIABLE
from offbeat.common.settings.loading import load
from offbeat.lab.audit import audit
from offbeat.learner.calibration.calibration import save_calibration
from tests.deploy.services import SERVICES_S, SLOW_REWARD, Services, free_port, write_config
from tests.learner.calibration.test_calibration import make_calibration
from tests.learner.reporting.standins import write_trackio

pytestmark = [pytest.mark.engine, pytest.mark.timeout(SERVICES_S)]


def test_synchronous_run_never_trains_on_lag_and_leaves_nothing_behind(
    services: Services, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trackio(tmp_path)
    monkeypatch.setenv("NOTES", str(tmp_path / "notes"))
    # Of a learner in bfloat16, and another version of vLLM.
    noise_floor = str(save_calibration(make_calibration(), tmp_path))
    config = write_config(
        tmp_path,
        tiny_model,
        staleness={"max_staleness": 0},
        launch={"num_actors": 2},
        loss={"noise_floor": noise_floor, "clip_low": 3e-3, "clip_high": 3e-3},
        metrics={"trackio_project": "mine"},
    )
    train = services.start("train", config, is_real=True)
    assert services.wait(train, "train") == 0, services.output("train")
    groups = services.rows("run", "group")
    assert [group["policy_lag"] for group in groups] == [0] * 24
    assert {group["num_segments"] for group in groups} == {1}
    assert_books_balance(services, leased=24, trained=24)
    first = services.rows("run", "step")[0]
    # On-policy, float32 on both sides: the ratio of the run's first step is 1.
    assert first["ratio/first"] < 1e-5
    assert first["clip/fraction"] == 0
    assert first["clip/noise"] > 0.1, "in bfloat16 it would not be 0"
    assert first["clip/drift"] == -first["clip/noise"]
    events = services.rows("run", "event")
    joined = [row["actor"] for row in events if row["event"] == "actor_joined"]
    changed = {row.get("actor"): row["detail"] for row in events if row["event"] == "calibration_mismatch"}
    assert changed.keys() == {None, *joined}
    assert "dtype was bfloat16, and is float32" in changed[None]
    assert all("version was 1.0, and is " in changed[actor] for actor in joined)
    diffs = [row["max_abs_diff"] for row in services.rows("run", "canary")]
    assert len(diffs) >= 6
    assert max(diffs) < 1e-4
    floors = {row["actor"]: row["detail"] for row in events if row["event"] == "engine_noise"}
    assert floors.keys() == set(joined)
    assert all(detail.startswith("under the model's files") and "no floor" not in detail for detail in floors.values())
    assert not processes_that_mention(str(tmp_path))
    assert (tmp_path / "run" / "report.html").stat().st_size > 100_000
    assert list((tmp_path / "run" / "tensorboard").iterdir())
    tracked = [msgspec.json.decode(line) for line in (tmp_path / "notes").read_bytes().splitlines()]
    assert [note["call"] for note in tracked] == ["init", *["log"] * 6, "finish"]
    assert tracked[1]["metrics"]["reward/mean"] == first["reward/mean"]
    assert_loads_in_transformers(tmp_path / "run" / "model")


def test_actors_may_come_first_late_or_die_and_the_ledger_adds_up(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        train={"num_steps": 100_000, "groups_per_step": 4, "learning_rate": 1e-3},
        # The cores are left to the starting services.
        task=SLOW_REWARD,
        hub={"address": "tcp://127.0.0.1:0", "dead_after_s": 5.0},
    )
    address = f"hub.address=tcp://127.0.0.1:{free_port()}"
    early = services.start("actor", config, address, "actor.name=early", log="early")
    doomed = services.start("actor", config, address, "actor.name=doomed", log="doomed")
    learner = services.start("learner", config, address)
    services.wait_for(lambda: "doomed" in {row["actor"] for row in services.rows("run", "group")}, "its groups")
    processes.kill_group(doomed.pid)
    late = services.start("actor", config, address, "actor.name=late", log="late")
    there = {"early", "late"}
    services.wait_for(lambda: there <= {row["actor"] for row in services.rows("run", "group")}, f"groups of {there}")
    services.wait_for(lambda: ("actor_lost", "doomed") in services.events("run"), "the loss of the killed actor")
    learner.send_signal(signal.SIGTERM)
    assert services.wait(learner, "learner") == 0, services.output("learner")
    assert services.wait(early, "early") == 0
    assert services.wait(late, "late") == 0, services.output("late")
    assert {("actor_joined", "early"), ("actor_joined", "doomed"), ("actor_joined", "late")} <= services.events("run")
    steps = [row["policy_version"] for row in services.rows("run", "step")]
    assert steps == list(range(1, len(steps) + 1)) != []
    final = services.rows("run", "final")[-1]["ledger"]
    assert final["trained"] == 4 * len(steps)
    assert final["leased"] == final["trained"] + sum(final["dropped"].values()) + final["expired"] + final["in_flight"]


def test_completions_that_live_through_updates_carry_their_segments_and_those_past_the_bound_are_cancelled(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        model={"max_length": 320},
        rollout={"group_size": 2, "max_new_tokens": 300, "lease_timeout_s": 60.0},
        train={"num_steps": 12, "groups_per_step": 1, "learning_rate": 1e-3},
        staleness={"max_staleness": 2, "staleness_policy": "abort"},
        launch={"num_actors": 1},
    )
    train = services.start("train", config)
    assert services.wait(train, "train") == 0, services.output("train")
    trained = [group for group in services.rows("run", "group") if group["outcome"] == "trained"]
    assert max(group["policy_lag"] for group in trained) <= 2
    assert max(group["num_segments"] for group in trained) > 1
    final = services.rows("run", "final")[-1]["ledger"]
    assert final["dropped"].get("aborted", 0) > 0
    assert final["leased"] == final["trained"] + sum(final["dropped"].values()) + final["expired"]
    run = tmp_path / "run"
    assert not [check.violations for check in audit(run, load(run / "config.toml")) if check.violations]


def test_stopped_run_of_an_adapter_resumes_where_it_was(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        train={"num_steps": 16, "groups_per_step": 4, "checkpoint_interval": 2, "learning_rate": 1e-3},
        actor={"max_inflight_groups": 4, "engine": "transformers", "engine_options": {}},
        loss={"objective": "grpo"},
        kl={"loss_coef": 0.01},
        lora={"rank": 2},
    )
    train = services.start("train", config)
    services.wait_for(lambda: len(services.rows("run", "step")) >= 3, "three steps")
    train.send_signal(signal.SIGINT)
    assert services.wait(train, "train") == 130, services.output("train")
    reached = services.rows("run", "final")[-1]
    assert (reached["outcome"], reached["detail"]) == ("stopped", "SIGINT"), "the signal that the user sent"
    assert reached["policy_version"] < 16
    resumed = services.start("train", config, "run.resume=true", log="resumed")
    assert services.wait(resumed, "resumed") == 0, services.output("resumed")
    steps = services.rows("run", "step")
    assert [row["policy_version"] for row in steps] == list(range(1, 17))
    assert steps[-1]["kl/reference"] > 0, "the adapter has moved the policy away from the one below it"
    assert max(row["max_abs_diff"] for row in services.rows("run", "canary")) < 1e-4, "engines have the merged weights"
    final = services.rows("run", "final")[-1]["ledger"]
    assert final["trained"] == 64
    assert final["leased"] == final["trained"] + sum(final["dropped"].values()) + final["expired"] + final["in_flight"]


def test_rows_added_to_the_data_are_trained_on_from_the_next_epoch_on(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        train={"num_steps": 40, "groups_per_step": 4, "checkpoint_interval": 2, "learning_rate": 1e-3},
        actor={"max_inflight_groups": 4, "engine": "transformers", "engine_options": {}},
    )
    train = services.start("train", config)
    services.wait_for(lambda: len(services.rows("run", "step")) >= 3, "three steps")
    train.send_signal(signal.SIGINT)
    assert services.wait(train, "train") == 130, services.output("train")
    data = tmp_path / "train.jsonl"
    rows = data.read_text().splitlines(keepends=True)
    data.write_text("".join([*rows, *rows[:8]]))
    resumed = services.start("train", config, "run.resume=true", "data.appended_data=allow", log="resumed")
    assert services.wait(resumed, "resumed") == 0, services.output("resumed")
    (appended,) = [row for row in services.rows("run", "event") if row["event"] == "data_appended"]
    assert (appended["before"], appended["after"]) == ("64", "72")
    first = int(appended["detail"].removesuffix(" on").rpartition(" ")[2])
    assert first > 0
    changes = [row["setting"] for row in services.rows("run", "event") if row["event"] == "resumed_with_changes"]
    assert changes == ["data.appended_data", "data.train_data: prompts"]
    sizes = {row["epoch"]: row["num_trained"] for row in services.rows("run", "epoch")}
    assert sizes == {epoch: 64 if epoch < first else 72 for epoch in range(2)}
    checks = audit(tmp_path / "run", load(tmp_path / "run" / "config.toml"))
    assert [check.violations for check in checks] == [[]] * len(checks)
    assert any("of 64, then 72 prompts" in check.seen for check in checks)


@pytest.mark.vllm
def test_engines_that_sleep_while_the_learner_trains_sample_with_the_weights_that_they_say(
    services: Services, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # As the launcher sets it where a GPU is used in turns. On a CPU the engines stop, and give no memory back.
    monkeypatch.setenv(TURN_VARIABLE, str(tmp_path / "gpu.turn"))
    config = write_config(tmp_path, tiny_model, launch={"num_actors": 2}, train={"num_steps": 4, "groups_per_step": 4})
    train = services.start("train", config)
    assert services.wait(train, "train") == 0, services.output("train")
    assert_books_balance(services, leased=16, trained=16)
    slept = {row["actor"]: row["seconds"]["wait_gpu"] for row in services.rows("run", "actor")}
    # To ask whether the learner wants the GPU takes microseconds.
    assert sum(slept.values()) > 0.05
    checks = audit(tmp_path / "run", load(tmp_path / "run" / "config.toml"))
    assert [check.violations for check in checks] == [[]] * len(checks)


def test_two_learner_ranks_train_a_mixture_of_experts_with_a_critic(
    services: Services, tmp_path: Path, tiny_moe_model: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_moe_model,
        train={"num_steps": 3, "groups_per_step": 4, "zero_stage": 2, "learning_rate": 1e-3},
        launch={"num_actors": 1, "learner_processes": 2},
        loss={"objective": "ppo"},
        metrics={"routing_interval": 1},
    )
    train = services.start("train", config)
    assert services.wait(train, "train") == 0, services.output("train")
    assert_books_balance(services, leased=12, trained=12)
    assert all(row["loss/value"] > 0 for row in services.rows("run", "step"))
    # The engine's own rows, if it has any, have its name.
    routings = [row for row in services.rows("run", "routing") if "actor" not in row]
    assert [row["policy_version"] for row in routings] == [0, 1, 2, 3]
    assert all(row["routing/load_entropy"] > 0 for row in routings)
    assert all(0 < row["routing/update_overlap"] <= 1 for row in routings[1:])
    assert max(row["max_abs_diff"] for row in services.rows("run", "canary")) < 1e-4
    assert_loads_in_transformers(tmp_path / "run" / "model")


def test_two_learner_ranks_replay_the_experts_that_the_engine_chose(
    services: Services, tmp_path: Path, tiny_moe_model: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_moe_model,
        staleness={"max_staleness": 2},
        # Small micro-batches: groups are split.
        train={"num_steps": 5, "groups_per_step": 4, "learning_rate": 1e-2, "micro_batch_tokens": 48},
        launch={"num_actors": 2, "learner_processes": 2},
        loss={"routing_replay": "sampled"},
        actor={"engine": "transformers", "engine_options": {}},
    )
    train = services.start("train", config)
    assert services.wait(train, "train") == 0, services.output("train")
    assert_books_balance(services, leased=20, trained=20)
    steps = services.rows("run", "step")
    # On-policy, float32 on both sides: the routers would have chosen the same, but for a tie.
    assert steps[0]["loss/replay_changed_slots"] < 0.01
    assert steps[0]["ratio/first"] < 1e-4
    # Later steps train on what older weights have routed.
    assert max(row["loss/replay_changed_slots"] for row in steps) > 0.01
    checks = audit(tmp_path / "run", load(tmp_path / "run" / "config.toml"))
    assert [check.violations for check in checks] == [[]] * len(checks)


def assert_books_balance(services: Services, *, leased: int, trained: int) -> None:
    ledger = services.rows("run", "final")[-1]["ledger"]
    assert ledger == {"leased": leased, "trained": trained, "dropped": {}, "expired": 0, "in_flight": 0}


def assert_loads_in_transformers(folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder)
    token_ids = AutoTokenizer.from_pretrained(folder)("123>", return_tensors="pt").input_ids
    assert model(token_ids).logits.isfinite().all()


def processes_that_mention(text: str) -> list[str]:
    listing = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
    return [line for line in listing.splitlines() if text in line and "pytest" not in line and "ps -eo" not in line]
