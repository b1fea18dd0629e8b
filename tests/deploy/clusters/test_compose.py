"""Claims about the compose file of a run, its containers' words read back as our own command line reads them."""

import os
import re
import stat
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import check
from offbeat.deploy.cli.arguments import load_config
from offbeat.deploy.cli.main import make_app

SETTINGS = """\
[model]
path = "owner/model"
[data]
train_data = "owner/data"
[launch]
num_actors = 2
"""


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder in which `offbeat deploy` is started."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def write(*overrides: str) -> dict[str, dict[str, Any]]:
    """Write the file to `out`. Return its services."""
    Path("run.toml").write_text(SETTINGS)
    arguments = ["deploy", "compose", "run.toml", *overrides, "--out", "out", "--image", "offbeat"]
    CliRunner().invoke(make_app(), arguments, catch_exceptions=False)
    return yaml.safe_load(Path("out/compose.yaml").read_text())["services"]


def test_each_service_starts_with_a_config_that_fits_and_actors_have_names_of_their_own() -> None:
    services = write("run.seed=5", "data.prompt_field=$q")
    words = {name: service["entrypoint"] for name, service in services.items()}
    assert words["learner"][:3] == ["offbeat", "learner", "/etc/offbeat/run.toml"]
    # A lone $ would be a variable of compose.
    assert "data.prompt_field=$$q" in words["learner"]
    learner = load_config(["out/run.toml", *words["learner"][3:]])
    check(learner)
    assert learner.hub.address == "tcp://learner:5700"
    for name in ("actor-0", "actor-1"):
        assert words[name][:3] == ["offbeat", "actor", "/etc/offbeat/run.toml"]
        actor = load_config(["out/run.toml", *words[name][3:]])
        check(actor)
        assert (actor.actor.name, actor.run.seed, actor.hub.address) == (name, 5, learner.hub.address)
    assert set(services) == {"learner", "actor-0", "actor-1"}


def test_runs_in_two_folders_are_two_projects_whose_containers_do_not_replace_each_other(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []
    for run in ("a", "b", "a"):
        (folder / run).mkdir(exist_ok=True)
        monkeypatch.chdir(folder / run)
        write()
        names.append(yaml.safe_load(Path("out/compose.yaml").read_text())["name"])
    assert names[0] == names[2] != names[1], "files that are written again are of the same project"
    assert all(re.fullmatch(r"[a-z0-9][a-z0-9_-]*", name) for name in names), "what compose takes as a name"


def test_there_are_as_many_actors_as_the_run_wants_and_have_a_place() -> None:
    assert set(write("scale.actors=3")) == {"learner", "actor-0", "actor-1", "actor-2"}
    assert set(write("scale.actors=1")) == {"learner", "actor-0"}
    assert set(write("scale.actors=3", "launch.actor_gpus=[[1], [3]]")) == {"learner", "actor-0", "actor-1"}


def test_mounts_exist_for_the_containers_user_and_actors_see_their_own_key_only(folder: Path) -> None:
    services = write()
    for service in services.values():
        user = int(service["user"].partition(":")[0])
        assert user > 0 and service["read_only"] and service["cap_drop"] == ["ALL"]
        for volume in service["volumes"]:
            assert (folder / "out" / volume.split(":")[0]).stat().st_uid == user
    keys = {volume.split(":")[1] for volume in services["actor-0"]["volumes"] if "/keys" in volume}
    assert keys == {"/keys/actor.key", "/keys/learner.pub"}
    assert stat.S_IMODE((folder / "out/keys/learner.key").stat().st_mode) == 0o600
    assert (folder / "out/keys/learner.key").stat().st_uid == (os.getuid() or 1000)


def test_secret_that_is_masked_is_refused_before_anything_is_written(folder: Path) -> None:
    with pytest.raises(SettingError, match=r"actor\.engine_options"):
        write('actor.engine_options.hf_token="********"')
    assert not (folder / "out").exists()


@pytest.mark.parametrize("words", [["slurm"], ["compose", "--image", "offbeat"], ["kubernetes", "--image", "offbeat"]])
def test_folder_that_cannot_be_written_is_refused(words: list[str]) -> None:
    Path("run.toml").write_text(SETTINGS)
    with pytest.raises(SettingError, match=r"the folder cannot be written \(Not a directory\)"):
        CliRunner().invoke(make_app(), ["deploy", *words, "run.toml", "--out", "run.toml/out"], catch_exceptions=False)


def test_page_is_for_this_machine_and_gpus_are_those_of_the_settings() -> None:
    services = write("launch.learner_gpus=[0]", "launch.actor_gpus=[[1], [3]]")
    assert services["learner"]["ports"] == ["127.0.0.1:9400:9400"]
    gpus = [service["deploy"]["resources"]["reservations"]["devices"][0]["device_ids"] for service in services.values()]
    assert gpus == [["0"], ["1"], ["3"]]
    assert all("deploy" not in service for service in write().values())
