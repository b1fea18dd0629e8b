"""The inside of a container that runs a service: its paths, ports, keys and command; and the YAML files that tell of it.

The files are as people write them: keys in the order given, long texts as blocks, no aliases.
"""

from collections.abc import Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

from offbeat.common.errors import SettingError
from offbeat.common.setting_text import write_private
from offbeat.common.settings.config import Config
from offbeat.common.settings.hub_keys import LEARNER, OPERATOR
from offbeat.deploy.clusters.services import FLEET, moving_settings
from offbeat.deploy.local.keygen import ALLOWED_KEYS, make_keys

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


def container_settings(config: Config, host: str) -> list[str]:
    """Return the settings that differ between one machine and containers that reach the learner at `host`."""
    return [
        f"run.dir={run_folder(config)}",
        f"hub.address=tcp://{host}:{HUB_PORT}",
        f"hub.bind=tcp://0.0.0.0:{HUB_PORT}",
        f"hub.learner_key={KEYS}/{LEARNER}.pub",
        f"hub.allowed_keys={ALLOWED}/{ALLOWED_KEYS}",
        f"weights.pull_port={PULL_PORT}",
        f"weights.port={COLLECTIVE_PORT}",
        f"metrics.bind=0.0.0.0:{PAGE_PORT}",
        f"metrics.actor_bind=0.0.0.0:{PAGE_PORT}",
    ]


def learner_command(config: Config, settings: Sequence[str]) -> list[str]:
    """Return the command of the learner's container. A learner that is started again goes on where the last one was."""
    program = ["offbeat"]
    if config.launch.learner_processes > 1:
        processes = f"--nproc-per-node={config.launch.learner_processes}"
        program = ["torchrun", "--standalone", processes, "-m", "offbeat.deploy.cli.main"]
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


def yaml_text(comment: str, documents: Sequence[Document]) -> str:
    """Return the documents as YAML below a comment."""
    lines = "".join(f"# {line}\n" for line in comment.splitlines())
    return lines + yaml.dump_all(documents, Dumper=_Dumper, sort_keys=False, width=WIDTH, allow_unicode=True)


def write_yaml(path: Path, comment: str, documents: Sequence[Document]) -> None:
    """Write a private file: it may hold keys, and settings may hold secrets."""
    write_private(path, yaml_text(comment, documents))


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
