"""The card of an export says how the model was made, and a push brings both to a hub."""

import base64
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from huggingface_hub import HfApi, ModelCard
from msgspec.structs import replace

from offbeat.common.errors import ServiceError, SettingError
from offbeat.common.records.rows import EvalRow, StepRow
from offbeat.common.records.writer import MetricsWriter
from offbeat.common.settings.loading import load, resolved_toml
from offbeat.lab.export import CARD_FILE, check_push, push, write_card
from tests.learner.training.trainer_cases import make_config


class Hub(ThreadingHTTPServer):
    """Stands for a hub: the few answers of its API that an upload needs."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, bytes]] = {}
        self.is_private: dict[str, bool] = {}
        self.refusal: int | None = None
        super().__init__(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Answer(BaseHTTPRequestHandler):
    """The answer to one request."""

    server: Hub  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        if not self.path.startswith("/api/whoami"):
            self._answer(404, {"error": "Repository not found"})
            return
        known = self.headers.get("Authorization") == "Bearer secret"
        self._answer(200 if known else 401, {"name": "me", "type": "user", "orgs": []} if known else {"error": "Unauthorized"})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.server.refusal is not None:
            self._answer(self.server.refusal, {"error": "no room"})
        elif self.path == "/api/repos/create":
            asked = json.loads(body)
            name = f"{asked.get('organization') or 'me'}/{asked['name']}"
            self.server.models[name] = {}
            self.server.is_private[name] = asked.get("visibility") == "private" or bool(asked.get("private"))
            self._answer(200, {"url": f"{self.server.url}/{name}", "name": name, "id": "1"})
        elif "/preupload/" in self.path:
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in json.loads(body)["files"]
            ]
            self._answer(200, {"files": files})
        elif "/commit/" in self.path:
            name = self.path.removeprefix("/api/models/").partition("/commit/")[0]
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    self.server.models[name][entry["value"]["path"]] = base64.b64decode(entry["value"]["content"])
            url = f"{self.server.url}/{name}/commit/1"
            self._answer(200, {"success": True, "commitOid": "1", "commitUrl": url, "hookOutput": ""})
        else:
            self._answer(200, {})

    def _answer(self, status: int, value: object) -> None:
        content = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub() -> Iterator[Hub]:
    with Hub() as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def test_card_says_what_the_model_was_trained_on_and_reproduces_it(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    config = make_config(tmp_path / "home" / "models" / "mine")
    config = replace(
        config,
        train=replace(config.train, learning_rate=3e-5),
        hub=replace(config.hub, address="tcp://10.1.2.3:5700"),
    )
    (run / "config.toml").write_text(resolved_toml(config))
    with MetricsWriter(run) as metrics:
        for version in range(1, 31):
            metrics.write(StepRow(policy_version=version, metrics={"reward/mean": version / 100, "lag/mean": 1.5}))
    write_card(run, config, 20, tmp_path, is_adapter=False)
    card = ModelCard.load(tmp_path / CARD_FILE)
    data = card.data.to_dict()
    assert (data["library_name"], data.get("base_model")) == ("transformers", None)
    assert "gspo" in data["tags"]
    assert "| Base model | `models/mine` |" in card.text
    assert str(tmp_path) not in card.content
    assert "10.1.2.3" not in card.content
    assert "| 1 | 0.010 |  | 1.500 |" in card.text
    assert "| 20 | 0.200 |  | 1.500 |" in card.text
    assert "| 30 |" not in card.text, "the steps after the checkpoint are not in it"
    settings = card.text.partition("```toml\n")[2].partition("```")[0]
    (tmp_path / "again.toml").write_text(settings)
    again = load(tmp_path / "again.toml")
    assert replace(again.train, num_steps=config.train.num_steps) == config.train
    assert again.loss == config.loss


def test_paths_in_tables_and_lists_are_shortened_too(tmp_path: Path) -> None:
    home = tmp_path / "home" / "alice"
    settings = [
        f'data.eval_data.math="{home}/math/test.jsonl"',
        f'environment.arguments={{config = {{roots = ["{home}/shop/items"]}}, level = 2}}',
    ]
    (tmp_path / "config.toml").write_text(resolved_toml(load(None, settings)))
    write_card(tmp_path, make_config(Path("owner/base")), 20, tmp_path, is_adapter=False)
    card = (tmp_path / CARD_FILE).read_text()
    assert str(home) not in card
    assert "math/test.jsonl" in card
    assert "shop/items" in card
    assert '"level" = 2' in card


def test_text_that_begins_like_a_path_is_told_as_it_is(tmp_path: Path) -> None:
    settings = ["data.chat_template=true", 'data.system_prompt="/no_think Answer yes/no."', "data.train_data=/train.jsonl"]
    (tmp_path / "config.toml").write_text(resolved_toml(load(None, settings)))
    write_card(tmp_path, make_config(Path("owner/base")), 20, tmp_path, is_adapter=False)
    card = (tmp_path / CARD_FILE).read_text()
    assert 'system_prompt = "/no_think Answer yes/no."' in card
    assert 'train_data = "train.jsonl"' in card


def test_curve_is_that_of_the_evaluations_where_there_are_some(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path) as metrics:
        for version in (0, 10, 20):
            metrics.write(EvalRow(policy_version=version, reward=0.5, length=2.0, num_completions=4, num_failed=0))
    (tmp_path / "config.toml").write_text(resolved_toml(make_config(tmp_path)))
    write_card(tmp_path, make_config(Path("owner/base")), 20, tmp_path, is_adapter=True)
    card = ModelCard.load(tmp_path / CARD_FILE)
    data = card.data.to_dict()
    assert (data["library_name"], data["base_model"]) == ("peft", "owner/base")
    assert [line for line in card.text.splitlines() if "0.500" in line] == [f"| {at} |  | 0.500 |  |" for at in (0, 10, 20)]


def test_push_brings_every_file_of_the_export_to_the_hub(tmp_path: Path, hub: Hub) -> None:
    (tmp_path / CARD_FILE).write_text("# a model")
    (tmp_path / "model.safetensors").write_bytes(b"\0\1\2")
    api = HfApi(endpoint=hub.url, token="secret")
    check_push("me/model", api)
    assert push(tmp_path, "me/model", api, is_private=True) == f"{hub.url}/me/model"
    assert hub.models["me/model"] == {CARD_FILE: b"# a model", "model.safetensors": b"\0\1\2"}
    assert hub.is_private["me/model"]


def test_push_is_refused_early_without_a_name_or_a_login_and_late_by_the_hub(tmp_path: Path, hub: Hub) -> None:
    with pytest.raises(SettingError, match=r'--push = "model": it is not the name .* Write owner/name'):
        check_push("model", HfApi(endpoint=hub.url, token="secret"))
    with pytest.raises(SettingError, match=r"cannot be asked who you are .*hf auth login"):
        check_push("me/model", HfApi(endpoint=hub.url, token="wrong"))
    hub.refusal = 403
    with pytest.raises(ServiceError, match=r"the hub did not take it .*403"):
        push(tmp_path, "me/model", HfApi(endpoint=hub.url, token="secret"), is_private=False)
