"""A run survives services that are killed, stopped, join and leave; strangers stay outside."""

import os
import signal
import urllib.request
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest

from offbeat.common.processes.shutdown import PAUSED_STATUS
from offbeat.common.settings.loading import load
from offbeat.lab.audit import audit
from offbeat.lab.tracing import read_trace
from offbeat.learner.leases.events import Accepted, Expired, Granted
from offbeat.learner.leases.log_reading import read_log
from offbeat.learner.training import checkpoints
from tests.deploy.services import SERVICES_S, SLOW_REWARD, Process, Services, free_port, write_config
from tests.lab.report.test_report import figure_titled

pytestmark = [pytest.mark.engine, pytest.mark.timeout(SERVICES_S)]

TRANSFORMERS = {"engine": "transformers", "engine_options": {}}
TUNED = {"staleness/bound": 2, "loss/learning_rate": 1e-4}
"""Of a step's row, after `offbeat set`."""


def test_killed_learner_goes_on_from_the_log_without_generating_anything_again(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        train={"num_steps": 32, "groups_per_step": 4, "learning_rate": 1e-3, "checkpoint_interval": 8},
        actor={"max_inflight_groups": 4, **TRANSFORMERS},
        launch={"num_actors": 2},
    )
    train = services.start("train", config, is_real=True)
    services.wait_for(lambda: len(services.rows("run", "step")) >= 13, "13 steps")
    kill(child_of(train, "learner"))
    assert services.wait(train, "train") == 0, services.output("train")
    (resumed,) = [row for row in services.rows("run", "event") if row["event"] == "resumed"]
    assert resumed["num_reused"] >= 4, resumed
    ledger = services.rows("run", "final")[-1]["ledger"]
    events = [record.event for record in read_log(tmp_path / "run" / "log")]
    expired = {event.lease_id: event.reason for event in events if isinstance(event, Expired)}
    # Both actors lived through it. A lease that the killed learner had logged and not sent yet never reached its actor.
    assert set(expired.values()) <= {"the actor no longer has it"}, expired
    assert len(expired) <= 8, "more than all actors may hold"
    assert ledger == {"leased": 128 + len(expired), "trained": 128, "dropped": {}, "expired": len(expired), "in_flight": 0}
    assert sum(isinstance(event, Granted) for event in events) == ledger["leased"]
    answered = [event.lease_id for event in events if isinstance(event, Accepted)]
    assert sorted(answered) == sorted(
        event.lease_id for event in events if isinstance(event, Granted) and event.lease_id not in expired
    )
    assert all(event.reward_s > 0 for event in events if isinstance(event, Accepted))
    trace = read_trace(tmp_path / "run", lease=None, step=None, slowest=1000)
    shown = [span for process in trace.processes for span in process.spans if span.name.startswith("lease ")]
    assert len(shown) == 128
    assert {child.name for span in shown for child in span.children} == {"wait", "generate", "reward", "queue", "train"}
    assert_audit_finds_nothing(tmp_path)


def test_separate_services_find_each_other_and_what_was_set_again_after_the_learners_death_without_a_checkpoint(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        train={"num_steps": 36, "groups_per_step": 4, "learning_rate": 1e-3},
        actor={"max_inflight_groups": 4, **TRANSFORMERS},
    )
    actors = [services.start("actor", config, f"actor.name={name}", log=name) for name in ("a", "b")]
    learner = services.start("learner", config)
    services.wait_for(lambda: len(services.rows("run", "step")) >= 5, "5 steps")
    wanted = ("max_staleness=2", "learning_rate=1e-4", "max_inflight_groups=3")
    assert services.wait(services.start("set", "run", "--yes", *wanted), "set") == 0, services.output("set")
    assert services.wait(services.start("set", "run", "max_staleness=1", "num_steps=9", log="refused"), "refused") == 2
    assert "train.num_steps" in services.output("refused")
    num_before = len(services.rows("run", "step"))
    services.wait_for(lambda: len(services.rows("run", "step")) >= num_before + 2, "2 steps more")
    assert TUNED.items() <= services.rows("run", "step")[-1].items()
    port = (tmp_path / "run" / "page.port").read_text()
    assert live_state(port)["status"]["ledger"]["trained"] >= 20
    kill(psutil.Process(learner.pid))
    num_before = len(services.rows("run", "step"))
    rows = (tmp_path / "train.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "reversed.jsonl").write_text("".join(reversed(rows)))
    before = (tmp_path / "run" / "config.toml").read_text()
    changed = services.start("learner", config, "run.resume=true", "data.train_data=reversed.jsonl", log="changed")
    assert services.wait(changed, "changed") == 2, services.output("changed")
    assert "data.train_data" in services.output("changed").splitlines()[-1]
    assert "the 64 prompts are in another order" in services.output("changed").splitlines()[-1]
    assert (tmp_path / "run" / "config.toml").read_text() == before
    learner = services.start("learner", config, "run.resume=true", "weights.bucket_mb=4")
    services.wait_for(lambda: len(services.rows("run", "step")) > num_before, "a step of the resumed learner")
    # The page is where it was, and its report has each step once, also those that were made again.
    services.wait_for(lambda: live_state(port)["report"] > 0, "the report on the live page")
    steps = figure_titled(live_page(port, "report.html").decode(), "Reward by step")["data"][0]["x"]
    assert steps == list(range(1, len(steps) + 1)) != []
    assert services.wait(learner, "learner") == 0, services.output("learner")
    assert [services.wait(actor, name) for actor, name in zip(actors, "ab", strict=True)] == [0, 0]
    assert services.rows("run", "final")[-1]["ledger"]["trained"] == 144
    # Settings changed during the run survive the restart.
    assert all(TUNED.items() <= row.items() for row in services.rows("run", "step")[num_before:])
    kept = {row["setting"]: row["value"] for row in services.rows("run", "event") if row["event"] == "setting_kept"}
    resumed = [row for row in services.rows("run", "event") if row["event"] == "resumed_with_changes"]
    changes = {row["setting"]: (row["before"], row["after"]) for row in resumed}
    assert changes == {"weights.bucket_mb": ("8", "4")}
    assert kept == {"staleness.max_staleness": "2", "train.learning_rate": "0.0001", "actor.max_inflight_groups": "3"}
    assert all("working on 3 groups at a time" in services.output(name) for name in "ab")
    assert_audit_finds_nothing(tmp_path)


def test_learner_that_makes_way_goes_on_at_another_address_with_the_actors_that_wait_for_it(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        run={"resume": "auto", "grace_s": 600.0},
        train={"num_steps": 24, "groups_per_step": 4, "learning_rate": 1e-3, "checkpoint_interval": 1000},
        hub={"address": f"file:{tmp_path}/hub.address", "bind": "tcp://127.0.0.2:0", "dead_after_s": 2.0},
        actor={"max_inflight_groups": 4, **TRANSFORMERS},
    )
    actor = services.start("actor", config, "actor.name=a", log="a")
    learner = services.start("learner", config)
    services.wait_for(lambda: len(services.rows("run", "step")) >= 5, "5 steps")
    learner.send_signal(signal.SIGTERM)
    assert services.wait(learner, "learner") == PAUSED_STATUS, services.output("learner")
    (paused,) = services.rows("run", "final")
    assert (paused["outcome"], paused["detail"]) == ("paused", "SIGTERM")
    assert checkpoints.newest(tmp_path / "run" / "checkpoints") is not None
    assert not (tmp_path / "run" / "model").exists()
    assert actor.poll() is None
    moved = services.start("learner", config, "hub.bind=tcp://127.0.0.3:0", log="moved")
    assert services.wait(moved, "moved") == 0, services.output("moved")
    assert services.wait(actor, "a") == 0, services.output("a")
    assert (tmp_path / "hub.address").read_text().startswith("tcp://127.0.0.3:")
    (resumed,) = [row for row in services.rows("run", "event") if row["event"] == "resumed"]
    assert resumed["detail"].startswith(f"at policy version {paused['policy_version']};")
    log = [record.event for record in read_log(tmp_path / "run" / "log")]
    # A lease that the first learner had logged and not sent yet never reached its actor.
    assert {event.reason for event in log if isinstance(event, Expired)} <= {"the actor no longer has it"}
    assert services.rows("run", "final")[-1]["ledger"]["trained"] == 96
    assert_audit_finds_nothing(tmp_path)


def test_ten_actors_that_come_and_go_cost_no_group_and_change_neither_the_sums_nor_the_number_of_steps(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(
        tmp_path,
        tiny_model,
        train={"num_steps": 100_000, "groups_per_step": 4, "learning_rate": 1e-4},
        # The cores are left to the starting services.
        task=SLOW_REWARD,
        rollout={"max_new_tokens": 4},
        actor={"max_inflight_groups": 4, **TRANSFORMERS},
    )
    learner = services.start("learner", config)
    steady = services.start("actor", config, "actor.name=steady", log="steady")
    services.wait_for(lambda: bool(services.rows("run", "step")), "a step")
    # Five at a time: each comes, works, and is asked to leave.
    for wave in range(2):
        guests = {f"guest-{5 * wave + index}" for index in range(5)}
        processes = [services.start("actor", config, f"actor.name={name}", log=name) for name in sorted(guests)]

        def worked(guests: set[str] = guests) -> bool:
            assert learner.poll() is None, services.output("learner")
            return guests <= workers(services)

        services.wait_for(worked, f"groups of {guests}")
        for process, name in zip(processes, sorted(guests), strict=True):
            process.terminate()
            assert services.wait(process, name) == 0, services.output(name)
    learner.send_signal(signal.SIGTERM)
    assert services.wait(learner, "learner") == 0, services.output("learner")
    assert services.wait(steady, "steady") == 0
    joined = {row["actor"] for row in services.rows("run", "event") if row["event"] == "actor_joined"}
    assert joined == {"steady", *(f"guest-{index}" for index in range(10))}
    # Every lease of an actor that was asked to leave came back at once, as a group or to be leased again.
    log = [record.event for record in read_log(tmp_path / "run" / "log")]
    theirs = {event.lease_id for event in log if isinstance(event, Granted) and event.actor != "steady"}
    answered = {event.lease_id for event in log if isinstance(event, Accepted)} & theirs
    expired = {event.lease_id: event.reason for event in log if isinstance(event, Expired) and event.lease_id in theirs}
    # A lease that was on its way to an actor without work, while that said goodbye, ends with the goodbye.
    assert set(expired.values()) <= {"handed back by the actor", "actor_left"}, expired
    assert answered | set(expired) == theirs
    # Late actors pulled the weights, and none of them delayed an update.
    assert not [row for row in services.rows("run", "event") if row["event"] == "actor_excluded"]
    steps = [row["policy_version"] for row in services.rows("run", "step")]
    assert steps == list(range(1, len(steps) + 1)) != []
    assert_audit_finds_nothing(tmp_path)


def test_keys_let_in_who_is_listed_and_a_revoked_key_ends_its_actor_not_the_run(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    keygen = services.start("keygen", "keys", "good", "doomed", log="keygen")
    assert services.wait(keygen, "keygen") == 0, services.output("keygen")
    other = services.start("keygen", "other", "stranger", log="other")
    assert services.wait(other, "other") == 0
    (tmp_path / "keys" / "stranger.key").write_bytes((tmp_path / "other" / "stranger.key").read_bytes())
    (tmp_path / "keys" / "stranger.key").chmod(0o600)
    config = write_config(
        tmp_path,
        tiny_model,
        task=SLOW_REWARD,
        # The hub binds beyond loopback, which needs keys; the weights are encrypted too.
        hub={
            "address": f"tcp://127.0.0.1:{(port := free_port())}",
            "bind": f"tcp://0.0.0.0:{port}",
            "key": "keys/{name}.key",
            "learner_key": "keys/learner.pub",
            "allowed_keys": "keys/allowed_keys",
            "dead_after_s": 5.0,
        },
        weights={"backend": "pull", "timeout_s": 20.0},
        train={"num_steps": 100_000, "groups_per_step": 4, "learning_rate": 1e-4},
        actor={"max_inflight_groups": 4, **TRANSFORMERS},
    )
    learner = services.start("learner", config)
    good = services.start("actor", config, "actor.name=good", log="good")
    doomed = services.start("actor", config, "actor.name=doomed", log="doomed")
    services.wait_for(lambda: {"good", "doomed"} <= workers(services), "both actors' groups")
    stranger = services.start("actor", config, "actor.name=stranger", "actor.connect_timeout_s=5", log="stranger")
    assert services.wait(stranger, "stranger") != 0
    assert "hub.allowed_keys" in services.output("stranger")
    status = ask_status(services, config)
    assert {member["name"] for member in status["members"]} == {"good", "doomed"}

    allowed = tmp_path / "keys" / "allowed_keys"
    allowed.write_text("".join(line for line in allowed.read_text().splitlines(keepends=True) if " doomed " not in line))
    services.wait_for(lambda: ("actor_lost", "doomed") in services.events("run"), "the revoked actor's leases go on to others")
    steps = len(services.rows("run", "step"))
    services.wait_for(lambda: len(services.rows("run", "step")) > steps + 3, "steps after the revocation")
    assert {member["name"] for member in ask_status(services, config)["members"]} == {"good"}
    doomed.terminate()
    learner.send_signal(signal.SIGTERM)
    assert services.wait(learner, "learner") == 0
    assert services.wait(good, "good") == 0
    assert_audit_finds_nothing(tmp_path)


def test_status_answers_while_the_learner_is_inside_a_long_step(services: Services, tmp_path: Path, tiny_model: Path) -> None:
    # One optimizer step over 512 completions takes this machine seconds.
    config = write_config(
        tmp_path,
        tiny_model,
        train={"num_steps": 4, "groups_per_step": 128, "micro_batch_tokens": 64, "learning_rate": 1e-4},
        actor={"max_inflight_groups": 64, **TRANSFORMERS},
    )
    learner = services.start("learner", config)
    services.start("actor", config, "actor.name=a", log="a")
    seen: list[dict[str, Any]] = []

    def in_mid_step() -> bool:
        seen.append(ask_status(services, config, must_answer=False))
        assert learner.poll() is None, services.output("learner")
        return seen[-1].get("doing", "").startswith("training step") and seen[-1]["doing_s"] > 0.2

    services.wait_for(in_mid_step, "an answer from inside a step")
    (member,) = seen[-1]["members"]
    assert (member["name"], member["state"]) == ("a", "working")
    assert seen[-1]["ledger"]["leased"] >= 128


def live_state(port: str) -> dict[str, Any]:
    return msgspec.json.decode(live_page(port, "state.json"))


def live_page(port: str, path: str) -> bytes:
    with urllib.request.urlopen(f"http://127.0.0.1:{port.strip()}/{path}", timeout=10) as answer:
        return answer.read()


def child_of(launcher: Process, service: str) -> psutil.Process:
    """Return the process id of a service that `offbeat train` started."""
    (child,) = [child for child in psutil.Process(launcher.pid).children() if service in child.cmdline()]
    return child


def kill(process: psutil.Process) -> None:
    os.kill(process.pid, signal.SIGKILL)
    psutil.wait_procs([process], timeout=10)


def workers(services: Services) -> set[str]:
    return {row["actor"] for row in services.rows("run", "group")}


def ask_status(services: Services, config: str, *, must_answer: bool = True) -> dict[str, Any]:
    """Run `offbeat status --json`; return the decoded output, or `{}` if the command may fail and does."""
    log = services.folder / "status.log"
    log.unlink(missing_ok=True)
    asked = services.start("status", config, "--json", log="status")
    status = services.wait(asked, "status")
    if not must_answer and status:
        return {}
    assert status == 0, services.output("status")
    return msgspec.json.decode(services.output("status"))


def assert_audit_finds_nothing(folder: Path) -> None:
    checks = audit(folder / "run", load(folder / "run.toml"))
    assert not [violation for check in checks for violation in check.violations]
