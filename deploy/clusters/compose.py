"""The file of a run for `docker compose`: a learner and actors in containers, on one machine."""

import logging
import os
import shlex
from collections.abc import Sequence
from pathlib import Path

from offbeat.common.setting_text import write_private
from offbeat.common.settings.checks import check
from offbeat.common.settings.config import Config
from offbeat.common.settings.hub_keys import LEARNER
from offbeat.common.settings.loading import load
from offbeat.deploy.clusters import container
from offbeat.deploy.clusters.services import FLEET, NOTICE_S, notice_s

logger = logging.getLogger(__name__)

COMPOSE = "compose.yaml"
FOLDERS = ("keys", "runs", "cache")
HEALTH = f"import urllib.request as web; web.urlopen('http://127.0.0.1:{container.PAGE_PORT}/healthz', timeout=5)"


def write_compose(path: Path, overrides: Sequence[str], out: Path, image: str) -> str:
    """Write the compose file of the run in the TOML file `path`, and what it mounts, to `out`; return what the user does next.

    Raises `SettingError` for keys in `out` that are incomplete, and for settings that contradict each other in containers.
    """
    settings = [*overrides, *container.container_settings(load(path, overrides), LEARNER)]
    in_container = load(path, [*settings, f"hub.key={LEARNER}.key"])
    for warning in check(in_container):
        logger.warning(warning)
    for folder in FOLDERS:
        (out / folder).mkdir(parents=True, exist_ok=True)
    container.fleet_keys(out / "keys")
    write_private(out / "run.toml", path.read_text(encoding="utf-8"))
    user = _own_files(out)
    document = compose_document(in_container, settings, image, user)
    container.write_yaml(
        out / COMPOSE, "Written by `offbeat deploy compose`. Change it as you like. Start: docker compose up", [document]
    )
    file = shlex.quote(str(out / COMPOSE))
    return f"""\
made {COMPOSE}, run.toml and keys in {out}. To start the run:
  docker compose -f {file} up
To look at it: http://127.0.0.1:{container.PAGE_PORT}/ in a browser, or
  docker compose -f {file} exec {LEARNER} offbeat status {container.run_folder(in_container)} --watch
Relative paths in run.toml are relative to {container.WORK} in the image."""


def compose_document(config: Config, settings: Sequence[str], image: str, user: int) -> container.Document:
    """Return the compose file: a service for the learner, and one for each actor, which has a name of its own."""
    launch = config.launch
    learner = {
        **_service(image, user, container.learner_command(config, settings), NOTICE_S, launch.learner_gpus),
        "ports": [f"127.0.0.1:{container.PAGE_PORT}:{container.PAGE_PORT}"],
    }
    # The folder of the list of keys, not the file: an editor replaces files.
    learner["volumes"] += [f"./keys:{container.KEYS}:ro", f"./keys:{container.ALLOWED}:ro", f"./runs:{container.RUNS}"]
    services = {LEARNER: learner}
    for number in range(launch.num_actors):
        name = f"{FLEET}-{number}"
        gpus = launch.actor_gpus[number] if launch.actor_gpus else ()
        services[name] = _service(image, user, container.actor_command(settings, name), notice_s(config), gpus)
        services[name]["volumes"] += [f"./keys/{file}:{container.KEYS}/{file}:ro" for file in container.ACTOR_KEYS]
    return {"name": "offbeat", "services": services}


def _service(image: str, user: int, command: list[str], grace_s: int, gpus: Sequence[int]) -> container.Document:
    service: container.Document = {
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
        "volumes": [f"./run.toml:{container.CONFIG}:ro", "./cache:/cache"],
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
        os.chown(path, container.USER, container.USER)
    return container.USER
