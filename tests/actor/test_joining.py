"""The options with which an actor joins: what they must hold, and the name that they give it."""

import importlib.metadata
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from offbeat.actor.joining import RunToJoin, joined
from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.settings.config import Config, RolloutSection
from offbeat.common.settings.loading import resolved_toml
from offbeat.deploy.local.keygen import make_keys
from offbeat.learner.dispatch.contract import JoinPayload, JoinServer
from offbeat.learner.dispatch.send_queue import SendQueue
from offbeat.protocols.channels import Hub, Received
from offbeat.protocols.keys import AllowList, HubKeys, read_key_pair
from offbeat.protocols.message_parts import JoinSettings, encode_join_settings
from offbeat.protocols.messages import RunRequest
from offbeat.protocols.wire import WireError
from tests.actor.served_hub import served

PROCESS = f"{socket.gethostname()}-{os.getpid()}"


@contextmanager
def serving(settings: JoinSettings, keys: HubKeys | None = None) -> Iterator[str]:
    """Run a hub that sends these join settings; yield its address."""
    hub = Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 20, keys=keys)
    queue = SendQueue()
    server = JoinServer(JoinPayload(encode_join_settings(settings)), queue)

    def handle(received: Received) -> None:
        assert not isinstance(received.packet, WireError)
        if isinstance(received.packet.message, RunRequest):
            server.answer(received.peer, received.packet.message.index)
        for one in queue.take():
            hub.send(one.peer, one.message, *one.arrays)

    with served(hub, handle) as address:
        yield address


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (RunToJoin("tcp://127.0.0.1:1", "a.key", ""), ("--learner-key", "go together")),
        (RunToJoin("tcp://127.0.0.1:1", "", "learner.pub"), ("--key", "go together")),
        (RunToJoin("tcp://learner:5700", "", ""), ("--join", "tcp://learner:5700", "keygen")),
        (RunToJoin("tcp://10.0.0.1:5700", "", ""), ("--join", "must know the learner")),
        (RunToJoin("tcp://127.0.0.1:1", "absent.key", "learner.pub"), ("--key", "absent.key")),
    ],
    ids=["no learner's key", "no key", "host name", "address", "no file"],
)
def test_actor_joins_no_learner_that_it_cannot_know(options: RunToJoin, words: tuple[str, ...]) -> None:
    with pytest.raises(SettingError) as raised, joined(options, []):
        pass
    assert [word for word in words if word not in str(raised.value)] == []


@pytest.mark.parametrize(
    ("key", "overrides", "name"),
    [("actor-0", [], "actor-0"), ("gpu-*", [], f"gpu-{PROCESS}"), ("gpu-*", ["actor.name=gpu-7"], "gpu-7"), ("", [], PROCESS)],
    ids=["own key", "fleet's key", "given", "no keys"],
)
def test_settings_are_the_learners_with_the_command_lines_over_them(
    tmp_path: Path, key: str, overrides: list[str], name: str
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ["actor-0", "gpu-*"])
    file = keys / f"{key.removesuffix('-*')}.key" if key else None
    own = HubKeys(read_key_pair(keys / "learner.key"), AllowList(keys / "allowed_keys")) if key else None
    settings = resolved_toml(Config(rollout=RolloutSection(temperature=0.7)))
    with serving(JoinSettings("0.1.0", settings, {"config.json": b"{}"}), own) as address:
        options = RunToJoin(address, str(file or ""), str(keys / "learner.pub") if key else "")
        with joined(options, [*overrides, "reward_workers=3"]) as config:
            assert config.actor.name == name
            assert (config.rollout.temperature, config.actor.reward_workers) == (0.7, 3)
            assert (config.hub.address, config.hub.key) == (address, str(file or ""))
            folder = Path(config.model.path)
            assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"config.json": b"{}"}
        assert not folder.exists()


@pytest.mark.parametrize(("software", "kind"), [("99.0", ServiceError), ("", SettingError)], ids=["another release", "same"])
def test_setting_of_another_release_is_told_from_a_mistake(software: str, kind: type[Exception]) -> None:
    settings = JoinSettings(software or importlib.metadata.version("offbeat"), "[rollout]\nfrom_tomorrow = 1\n", {})
    with serving(settings) as address, pytest.raises(kind, match="from_tomorrow"), joined(RunToJoin(address, "", ""), []):
        pass


@pytest.mark.slow
def test_actor_whose_key_is_not_allowed_says_within_five_seconds_which_line_to_add(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    keys = tmp_path / "keys"
    make_keys(keys, ["actor-0", "actor-1"])
    (keys / "allowed_keys").write_text((keys / "allowed_keys").read_text().partition("actor-1")[0].rpartition("\n")[0] + "\n")
    own = HubKeys(read_key_pair(keys / "learner.key"), AllowList(keys / "allowed_keys"))
    caplog.set_level("INFO")
    with serving(JoinSettings("0.1.0", resolved_toml(Config()), {}), own) as address:
        options = RunToJoin(address, str(keys / "actor-1.key"), str(keys / "learner.pub"))
        with pytest.raises(ServiceError, match="does not know the key"), joined(options, ["actor.connect_timeout_s=5"]):
            pass
    waits = [record.getMessage() for record in caplog.records if "did not answer for" in record.getMessage()]
    line = read_key_pair(keys / "actor-1.key").owner.line()
    assert len(waits) == 1 and f"add the line `{line}` to its hub.allowed_keys" in waits[0]
