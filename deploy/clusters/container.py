"""The inside of a container that runs a service: its paths, ports, keys and command; and the file for `docker compose`.

The YAML files are as people write them: keys in the order given, long texts as blocks, no aliases.
"""

import logging
import os
import shlex
import zlib
from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from offbeat.common.errors import SettingError
from offbeat.common.formats import write_private
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config, actors_wanted
from offbeat.common.settings.hub_keys import LEARNER, OPERATOR
from offbeat.common.settings.loading import load, refuse_masked
from offbeat.deploy.clusters.services import FLEET, NOTICE_S, moving_settings, notice_s, torchrun_options
from offbeat.deploy.local.keygen import ALLOWED_KEYS, make_keys

logger = logging.getLogger(__name__)

WORK = "/work"
"""The folder that the services are started in."""
CONFIG = "/etc/offbeat/run.toml"
KEYS = "/keys"
"""Folder of the service's own secret key and the learner's public key."""
ALLOWED = "/allowed"
"""Folder of the list of public keys that may connect, which the learner reads again when it changes."""
RUNS = "/runs"
"""The learner's volume."""
HUB_PORT = 5700
PULL_PORT = 5701
COLLECTIVE_PORT = 5702
PAGE_PORT = 9400
"""Port of the learner's page, and of each service's numbers and probes."""
USER = 1000
"""User and group of the image's processes."""
LEARNER_KEYS = (f"{LEARNER}.key", f"{LEARNER}.pub", f"{OPERATOR}.key")
"""Key files of the learner's container. The operator's is for commands that are run in it."""
ACTOR_KEYS = (f"{FLEET}.key", f"{LEARNER}.pub")


def run_folder(config: Config) -> str:
    """Return the run's folder in the learner's container: on its volume, and the same at each start."""
    name = PurePosixPath(config.run.dir).name.replace("{time}", "").strip("-_.")
    return f"{RUNS}/{name or 'run'}"


def load_in_container(path: Path, overrides: Sequence[str]) -> tuple[list[str], Config]:
    """Return the settings behind a TOML file in containers that reach the learner at its name, and the learner's config.

    Raises `SettingError` for settings that contradict each other there, and logs the warnings.
    """
    settings = [
        *overrides,
        # Behind the user's, and so they win: what differs between one machine and containers.
        f"run.dir={run_folder(load(path, overrides))}",
        f"hub.address=tcp://{LEARNER}:{HUB_PORT}",
        f"hub.bind=tcp://0.0.0.0:{HUB_PORT}",
        f"hub.learner_key={KEYS}/{LEARNER}.pub",
        f"hub.allowed_keys={ALLOWED}/{ALLOWED_KEYS}",
        f"weights.pull_port={PULL_PORT}",
        f"weights.port={COLLECTIVE_PORT}",
        f"metrics.bind=0.0.0.0:{PAGE_PORT}",
        f"metrics.actor_bind=0.0.0.0:{PAGE_PORT}",
    ]
    config = load(path, [*settings, f"hub.key={LEARNER}.key"])
    refuse_masked(config)
    for warning in check(config):
        logger.warning(warning)
    return settings, config


def learner_command(config: Config, settings: Sequence[str]) -> list[str]:
    """Return the command of the learner's container. A learner that is started again goes on where the last one was."""
    program = ["offbeat"]
    if config.launch.learner_processes > 1:
        program = ["torchrun", *torchrun_options(config), "-m", "offbeat.deploy.cli.main"]
    return [*program, "learner", CONFIG, *settings, f"hub.key={KEYS}/{{name}}.key", *moving_settings(config)]


def actor_command(settings: Sequence[str], name: str) -> list[str]:
    """Return the command of an actor's container."""
    return ["offbeat", "actor", CONFIG, *settings, f"hub.key={KEYS}/{FLEET}.key", f"actor.name={name}"]


def fleet_keys(folder: Path) -> dict[str, str]:
    """Return the texts of the key files in `folder` by name, made there unless it has some.

    Raises `SettingError` where the folder has keys but none for the actors.
    """
    if not (folder / ALLOWED_KEYS).exists():
        make_keys(folder, [f"{FLEET}-*"])
    names = (*LEARNER_KEYS, *ACTOR_KEYS, ALLOWED_KEYS)
    for name in names:
        if not (folder / name).exists():
            cure = f"Make it: offbeat keygen {folder} '{FLEET}-*'; or remove the folder, and it gets all keys."
            raise SettingError("--out", str(folder), f"there is no {name} in it", cure)
    return {name: (folder / name).read_text() for name in names}


# Files

Document = dict[str, Any]
WIDTH = 120


class _Dumper(yaml.SafeDumper):
    def ignore_aliases(self, data: object) -> bool:
        """Write equal parts out each time: people change one of them."""
        return True


def _text(dumper: _Dumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def write_yaml(path: Path, comment: str, documents: Sequence[Document]) -> None:
    """Write the documents below a comment into a private file: it may hold keys, and settings may hold secrets."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    text = yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)
    write_private(path, lines + text)


def read_mapping(option: str, path: Path) -> Document:
    """Return the mapping in a file of YAML; raise `SettingError` for anything else."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        problem = f"the file cannot be read ({error.strerror})"
        cure = f"Give the path of a YAML file, or a quantity: {option} memory=32Gi."
        raise SettingError(option, str(path), problem, cure) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise SettingError(option, str(path), f"the file is not valid YAML: {error}", "Correct that line.") from error
    if not isinstance(content, dict):
        raise SettingError(option, str(path), "the file holds no mapping", "Write fields, such as nodeSelector: {...}.")
    return content


COMPOSE = "compose.yaml"
FOLDERS = ("keys", "runs", "cache")
HEALTH = f"import urllib.request as web; web.urlopen('http://127.0.0.1:{PAGE_PORT}/healthz', timeout=5)"


def write_compose(path: Path, overrides: Sequence[str], out: Path, image: str) -> str:
    """Write the compose file of the run in the TOML file `path`, and what it mounts, to `out`; return what the user does next.

    Raises `SettingError` for keys in `out` that are incomplete, and for settings that contradict each other in containers.
    """
    settings, in_container = load_in_container(path, overrides)
    for folder in FOLDERS:
        (out / folder).mkdir(parents=True, exist_ok=True)
    fleet_keys(out / "keys")
    write_private(out / "run.toml", path.read_text(encoding="utf-8"))
    user = _own_files(out)
    # Compose would take the services of a run in another folder for these, and replace them.
    project = f"offbeat-{zlib.crc32(os.fsencode(out.absolute())):08x}"
    document = compose_document(in_container, settings, image, user, project)
    write_yaml(
        out / COMPOSE, "Written by `offbeat deploy compose`. Change it as you like. Start: docker compose up", [document]
    )
    file = shlex.quote(str(out / COMPOSE))
    return f"""\
made {COMPOSE}, run.toml and keys in {out}. To start the run:
  docker compose -f {file} up
To look at it: http://127.0.0.1:{PAGE_PORT}/ in a browser, or
  docker compose -f {file} exec {LEARNER} offbeat status {shlex.quote(run_folder(in_container))} --watch
Relative paths in run.toml are relative to {WORK} in the image."""


def compose_document(config: Config, settings: Sequence[str], image: str, user: int, project: str) -> Document:
    """Return the compose file: a service for the learner, and one for each actor, which has a name of its own.

    Where `launch.actor_gpus` is set, there are no more actors than it has places. `project` is the name by which compose
    recognizes the containers of the run.
    """
    launch = config.launch
    learner = {
        **_service(image, user, learner_command(config, settings), NOTICE_S, launch.learner_gpus),
        "ports": [f"127.0.0.1:{PAGE_PORT}:{PAGE_PORT}"],
    }
    # The folder of the list of keys, not the file: an editor replaces files.
    learner["volumes"] += [f"./keys:{KEYS}:ro", f"./keys:{ALLOWED}:ro", f"./runs:{RUNS}"]
    services = {LEARNER: learner}
    num_wanted = actors_wanted(config)
    for number, gpus in enumerate(launch.actor_gpus[:num_wanted] or [()] * num_wanted):
        name = f"{FLEET}-{number}"
        services[name] = _service(image, user, actor_command(settings, name), notice_s(config), gpus)
        services[name]["volumes"] += [f"./keys/{file}:{KEYS}/{file}:ro" for file in ACTOR_KEYS]
    return {"name": project, "services": services}


def _service(image: str, user: int, command: list[str], grace_s: int, gpus: Sequence[int]) -> Document:
    service: Document = {
        "image": image,
        # Compose replaces variables.
        "entrypoint": [word.replace("$", "$$") for word in command],
        "user": f"{user}:{user}",
        "read_only": True,
        "cap_drop": ["ALL"],
        "security_opt": ["no-new-privileges:true"],
        "tmpfs": ["/tmp"],
        "shm_size": "2gb",
        "environment": {"HF_HOME": "/cache/huggingface", "XDG_CACHE_HOME": "/cache"},
        "volumes": [f"./run.toml:{CONFIG}:ro", "./cache:/cache"],
        "healthcheck": {"test": ["CMD", "python3", "-c", HEALTH], "interval": "10s", "retries": 6, "start_period": "30m"},
        # A run that has ended stays so.
        "restart": "on-failure",
        "stop_grace_period": f"{grace_s}s",
    }
    if gpus:
        device = {"driver": "nvidia", "device_ids": [str(gpu) for gpu in gpus], "capabilities": ["gpu"]}
        service["deploy"] = {"resources": {"reservations": {"devices": [device]}}}
    return service


def _own_files(out: Path) -> int:
    """Return the user that the containers run as, who owns the files in `out`: the caller, unless that is root."""
    user = os.getuid()
    if user:
        return user
    for path in [*(out / folder for folder in FOLDERS), *(out / "keys").iterdir(), out / "run.toml"]:
        os.chown(path, USER, USER)
    return USER
