"""Claims of a model that is not on this machine: the hub is asked once, for a few seconds, before anything heavy starts."""

import socket
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import msgspec
import pytest

from offbeat.common.errors import SettingError
from offbeat.common.models.folders import find_config, hash_model, hub_obstacle, resolve_model
from offbeat.common.settings.loading import load
from offbeat.deploy.checks.findings import Finding
from offbeat.deploy.checks.inputs import check_hub_names

NAME = "owner/nothere"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    """Return the socket of an empty hub, to which requests go during the test."""
    hub_obstacle.cache_clear()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    with closing(socket.create_server(("127.0.0.1", 0))) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield server
    hub_obstacle.cache_clear()


def answer(server: socket.socket, status: str, content: bytes = msgspec.json.encode({"id": NAME})) -> None:
    """Answer each request with this status and this content, until the server is closed."""
    error = "X-Error-Code: RepoNotFound\r\n" if status.startswith("404") else ""
    head = f"HTTP/1.1 {status}\r\n{error}Content-Length: {len(content)}\r\nConnection: close\r\n\r\n"

    def serve() -> None:
        while True:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(65536)
                connection.sendall(head.encode() + content)

    threading.Thread(target=serve, daemon=True).start()


def findings(kind: str) -> list[Finding]:
    """Return what a preflight says of the name."""
    config = load(None, [f"model.path={NAME}", "data.train_data=train.jsonl"])
    return list(check_hub_names(config, "mistake" if kind == "train" else "warning"))


def test_model_that_the_hub_has_not_is_a_mistake_before_the_start_and_a_warning_of_check(hub: socket.socket) -> None:
    answer(hub, "404 Not Found")
    text = (
        f'model.path = "{NAME}": it is no folder here, and the model hub has no such model. '
        "Correct the path or the name; for a private model, set HF_TOKEN."
    )
    assert findings("train") == [Finding("mistake", text)]
    # The hub is asked once.
    hub.shutdown(socket.SHUT_RDWR)
    assert findings("check") == [Finding("warning", text)]
    assert find_config(NAME) is None
    with pytest.raises(SettingError) as raised:
        resolve_model(NAME)
    assert str(raised.value) == text


def test_reference_that_the_hub_has_not_is_found_as_the_model_is(hub: socket.socket, tmp_path: Path) -> None:
    answer(hub, "404 Not Found")
    config = load(None, [f"model.path={tmp_path}", "data.train_data=train.jsonl", f"kl.reference={NAME}", "kl.loss_coef=0.1"])
    (found,) = check_hub_names(config, "mistake")
    assert found.kind == "mistake"
    assert found.text.startswith(f'kl.reference = "{NAME}": it is no folder here, and the model hub has no such model')


def test_hub_that_is_unreachable_is_told_as_that_with_the_wait_before(
    hub: socket.socket, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO")
    hub.close()
    (finding,) = findings("train")
    assert finding.text.startswith(f'model.path = "{NAME}": it is no folder here, and the model hub cannot be reached (')
    assert finding.text.endswith("Give a model folder, or a hub name on a machine that reaches the hub.")
    assert [record.getMessage() for record in caplog.records] == [
        f"looking for the model {NAME} at the model hub, for at most 4 s"
    ]


def test_hub_that_is_silent_is_waited_for_a_few_seconds(hub: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    del hub
    monkeypatch.setattr("offbeat.common.models.folders.HUB_S", 0.2)
    (finding,) = findings("train")
    assert "the model hub cannot be reached (" in finding.text


def test_page_of_a_network_that_asks_to_log_in_is_no_hub(hub: socket.socket) -> None:
    answer(hub, "200 OK", b"<html>")
    (finding,) = findings("train")
    assert "the model hub cannot be reached (" in finding.text


def test_name_that_the_hub_cannot_have_is_told_without_asking(hub: socket.socket) -> None:
    hub.close()
    assert hub_obstacle("owner/name/more") == (
        "it is no folder here, and no name of a model hub",
        "Correct the path or the name.",
    )


@pytest.mark.parametrize("status", ["200 OK", "500 Internal Server Error", "429 Too Many Requests"])
def test_hub_that_answers_otherwise_is_left_to_the_services(hub: socket.socket, status: str) -> None:
    answer(hub, status)
    (finding,) = findings("train")
    assert finding.kind == "note"
    assert "will only be checked after the start" in finding.text


@pytest.mark.parametrize(
    "name", ["vocab.txt", "merges.txt", "tokenizer.model", "special_tokens_map.json", "chat_template.jinja"]
)
def test_tokenizer_without_a_file_of_its_own_format_is_known_by_those_it_is_made_from(name: str, tmp_path: Path) -> None:
    """Otherwise a run that is resumed with another vocabulary goes on, and its kept groups are other texts."""
    (tmp_path / name).write_text("a")
    before = hash_model(tmp_path)
    (tmp_path / name).write_text("b")
    assert hash_model(tmp_path) != before
    (tmp_path / name).write_text("a")
    assert hash_model(tmp_path) == before


def test_tokenizer_in_one_file_is_known_by_that_file(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text("{}")
    before = hash_model(tmp_path)
    (tmp_path / "tokenizer.model").write_text("read by nothing beside tokenizer.json")
    assert hash_model(tmp_path) == before


def test_hub_that_must_not_be_asked_is_not(hub: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    del hub
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    obstacle = hub_obstacle(NAME)
    assert obstacle is not None
    assert obstacle[1] == "Give a model folder, or unset HF_HUB_OFFLINE."
