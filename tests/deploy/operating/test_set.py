"""`offbeat set` asks for changes, prints the outcome, and refuses mistakes."""

import getpass
import io
import socket
from pathlib import Path

import msgspec
import numpy as np
import pytest

from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.formats import write_private
from offbeat.common.records.run_folder import CONFIG_FILE
from offbeat.common.settings.loading import load, resolved_toml
from offbeat.deploy.cli.operate import scale_command, set_command
from offbeat.deploy.operating import link as questions
from offbeat.deploy.operating.link import ask_status
from offbeat.deploy.operating.set import large_changes, refuse_large_changes, requested, say_who_follows, tune
from offbeat.learner.restart.run_identity import RunIdentity, write_identity
from offbeat.protocols.channels import Link
from offbeat.protocols.messages import LiveSettingsReport, LiveSettingsRequest, Refused, SettingChange, StatusRequest
from tests.deploy.operating.operator_desk import REPORT, Desk
from tests.deploy.services import Services, free_port, write_config

CHANGE = SettingChange("staleness.max_staleness", "4", "8", "me@host", 0.0, 12)


def test_settings_may_be_named_as_short_as_they_are_clear() -> None:
    assert requested(["max_staleness=8", "train.learning_rate = 1e-4", "max_inflight_groups=2"]) == {
        "staleness.max_staleness": "8",
        "train.learning_rate": "1e-4",
        "actor.max_inflight_groups": "2",
    }
    assert requested(["max_off_policy_steps=8"]) == {"staleness.max_staleness": "8"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["max_stalenes=8"], "max_staleness"),
        (["clip=3"], "Write reward.clip or advantage.clip"),
        (["max_staleness"], "no value is given"),
        (["max_staleness="], "no value is given"),
        (["max_staleness=8", "staleness.max_staleness=9"], "it is given twice"),
    ],
)
def test_what_is_no_setting_is_not_asked_for(arguments: list[str], said: str) -> None:
    with pytest.raises(SettingError, match=said):
        requested(arguments)


def test_learner_is_asked_under_the_operators_key_and_its_changes_are_printed(
    desks: list[Desk], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desks.append(Desk(tmp_path / "keys", LiveSettingsReport(policy_version=12, changed=(CHANGE,), warnings=("a narrow band",))))
    settings = {"staleness.max_staleness": "8"}
    assert tune(desks[0].open_link, desks[0].address, settings)
    assert desks[0].asked == [LiveSettingsRequest(settings=settings, who=f"{getpass.getuser()}@{socket.gethostname()}")]
    printed = capsys.readouterr()
    assert printed.out == "staleness.max_staleness: 4 -> 8 at policy version 12\n"
    assert printed.err == "warning: a narrow band\n"


def test_values_that_the_run_has_already_are_said_to_be_so(
    desks: list[Desk], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desks.append(Desk(tmp_path / "keys", LiveSettingsReport(policy_version=12)))
    assert tune(desks[0].open_link, desks[0].address, {"staleness.max_staleness": "8"})
    assert "nothing to change" in capsys.readouterr().out


def test_refusal_is_printed_as_the_learner_says_it(
    desks: list[Desk], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    desks.append(
        Desk(tmp_path / "keys", LiveSettingsReport(policy_version=12, error="train.num_steps = 3: it cannot be changed"))
    )
    assert not tune(desks[0].open_link, desks[0].address, {"train.num_steps": "3"})
    assert capsys.readouterr().err == "error: train.num_steps = 3: it cannot be changed\n"


def test_key_that_may_not_ask_ends_with_the_reason(desks: list[Desk], tmp_path: Path) -> None:
    desks.append(Desk(tmp_path / "keys", Refused(reason="an actor's key")))
    with pytest.raises(ServiceError, match="refused to answer: an actor's key"):
        tune(desks[0].open_link, desks[0].address, {"staleness.max_staleness": "8"})


def test_nobody_there_is_told_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(questions, "ANSWER_S", 0.5)
    address = f"tcp://127.0.0.1:{free_port()}"

    def open_link() -> Link:
        return Link(address, identity=b"ops", max_message_bytes=1 << 20)

    with pytest.raises(ServiceError, match=r"no answer from .* within 0.5 s: nothing listens there"):
        tune(open_link, address, {"staleness.max_staleness": "8"})


def test_values_that_change_by_a_factor_of_ten_are_large_whatever_the_direction_and_zero_counts_as_one() -> None:
    config = load(None, ["train.learning_rate=2e-5", "staleness.max_staleness=0", "loss.clip_low=0.5"])

    def large(**settings: str) -> dict[str, float]:
        return large_changes(config, {name.replace("__", "."): value for name, value in settings.items()})

    assert large(train__learning_rate="2e-4") == {"train.learning_rate": pytest.approx(10.0)}
    assert large(train__learning_rate="2e-6") == {"train.learning_rate": pytest.approx(10.0)}
    assert large(train__learning_rate="1.9e-4", loss__clip_low="0.06") == {}
    assert large(staleness__max_staleness="9") == {}
    assert large(staleness__max_staleness="10") == {"staleness.max_staleness": 10.0}
    assert large(staleness__auto="true", staleness__hard_max_staleness="64") == {}, "none is no number"
    with pytest.raises(SettingError, match="learning_rate"):
        large(train__learning_rate="fast")


def ask_back(desk: Desk, value: str, monkeypatch: pytest.MonkeyPatch, answer: str | None) -> None:
    """Ask for a learning rate as a user at a terminal, who gives this answer; None: without a terminal."""
    monkeypatch.setattr("sys.stdin", io.StringIO("" if answer is None else f"{answer}\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: answer is not None)
    config = load(None, ["train.learning_rate=1e-6"])
    status = ask_status(desk.open_link, desk.address, Path("no folder"))
    refuse_large_changes(status, config, {"train.learning_rate": value})


def test_large_change_is_asked_back_about_and_needs_yes_without_a_terminal(
    desks: list[Desk], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # In force is not what the config says: somebody has changed it.
    in_force = SettingChange("train.learning_rate", "1e-6", "1e-4", "me@host", 0.0, 12)
    desks.append(Desk(tmp_path / "keys", msgspec.structs.replace(REPORT, changed_settings=(in_force,))))
    ask_back(desks[0], "9e-4", monkeypatch, None)
    with pytest.raises(SettingError, match=r"value in force, 0.0001, by a factor of 1e\+04. Add --yes"):
        ask_back(desks[0], "1", monkeypatch, None)
    ask_back(desks[0], "1", monkeypatch, "yes")
    assert "by a factor of 1e+04" in capsys.readouterr().err
    with pytest.raises(SettingError, match="not changed"):
        ask_back(desks[0], "1", monkeypatch, "")
    assert desks[0].asked == [StatusRequest()] * 4, "nothing was changed by asking"


def test_learner_of_another_run_at_the_same_address_is_not_changed(desks: list[Desk], tmp_path: Path) -> None:
    desks.append(Desk(tmp_path / "keys", REPORT))
    run = tmp_path / "killed"
    run.mkdir()
    config = load(None, ["model.path=m", "data.train_data=d.jsonl", "task.reward=exact_match"])
    hub = msgspec.structs.replace(desks[0].hub_section, address=desks[0].address)
    write_private(run / CONFIG_FILE, resolved_toml(msgspec.structs.replace(config, hub=hub)))
    # As where the run was killed, and another one uses the default address now.
    write_identity(run, RunIdentity({}, {}, "def"), np.empty(0, np.uint64))
    with pytest.raises(ServiceError, match="the learner of another run"):
        set_command(str(run), ["max_staleness=8"], yes=True, operator="operator")
    with pytest.raises(ServiceError, match="the learner of another run"):
        scale_command(str(run), 4, operator="operator")
    assert desks[0].asked == [StatusRequest()] * 2, "no change was asked for"


def test_command_refuses_an_unknown_setting_before_it_looks_for_the_learner(
    services: Services, tmp_path: Path, tiny_model: Path
) -> None:
    config = write_config(tmp_path, tiny_model)
    result = services.run("set", config, "max_stalenes=8")
    assert result.returncode == 2
    assert result.stderr.splitlines()[-1].startswith("error: setting = ")


def test_number_of_actors_that_no_launcher_follows_is_said_to_need_somebody(capsys: pytest.CaptureFixture[str]) -> None:
    say_who_follows(2, 4)
    said = capsys.readouterr().err
    assert said.startswith("2 actors are connected, 4 are wanted")
    assert "`offbeat reconcile`" in said and "start 2 with `offbeat actor` yourself" in said
    say_who_follows(2, 2)
    assert capsys.readouterr().err == ""
