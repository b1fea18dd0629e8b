"""Checks of what a run asks over the network: judges of rewards, and trackers of experiments."""

import importlib.util
import netrc
import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

from offbeat.common.errors import one_line
from offbeat.common.settings.config import Config, JudgeSection
from offbeat.common.settings.judge_checks import is_address
from offbeat.deploy.checks.findings import Finding, mistake
from offbeat.learner.reporting.trackers import SETTINGS
from offbeat.learner.reporting.tracking import wanted_trackers

DATABASE_PACKAGES = ("sqlalchemy", "alembic")
"""Packages that MLflow needs for a database, and not for a server."""


def check_trackers(config: Config) -> Iterator[Finding]:
    """Find trackers that are asked for but not installed, W&B without a login, and a place that MLflow refuses."""
    mlflow_place = os.environ.get("MLFLOW_TRACKING_URI", "")
    # Without a place MLflow makes a database of its own.
    is_database = not mlflow_place or mlflow_place.startswith(("sqlite", "postgresql", "mysql", "mssql"))
    for kind, project in wanted_trackers(config).items():
        packages = (kind, *(DATABASE_PACKAGES if kind == "mlflow" and is_database else ()))
        if any(importlib.util.find_spec(package) is None for package in packages):
            cure = f'Install it: pip install "offbeat[{kind}]"; or leave the setting empty.'
            yield mistake(SETTINGS[kind], project, f"{kind} is not installed", cure)
        elif kind == "wandb" and os.environ.get("WANDB_MODE", "online") == "online" and not _has_wandb_login():
            yield Finding("warning", f'metrics.wandb_project = "{project}": no login is known here; run `wandb login` first.')
        elif kind == "mlflow":
            yield from _check_mlflow_place(mlflow_place)


def _check_mlflow_place(place: str) -> Iterator[Finding]:
    """Find a folder: MLflow keeps runs in a folder no more unless it is told to."""
    is_folder = place.startswith("file:") or ("://" not in place and place not in ("", "databricks", "uc"))
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        cure = "Name a database, as in sqlite:////home/me/mlflow.db, or a server; or set MLFLOW_ALLOW_FILE_STORE=true."
        yield mistake("environment variable MLFLOW_TRACKING_URI", place, "MLflow keeps no runs in folders", cure)


def _has_wandb_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
        return any("wandb" in host for host in hosts)
    return False


ANSWER_S = 3.0
"""Longest wait for the server's list of models."""
_LONGEST_LIST = 1 << 22


def check_judge_server(config: Config) -> Iterator[Finding]:
    """Find a missing key and a cache that cannot be written; warn of a server that does not answer or lacks the model."""
    judge = config.judge
    # Other checks tell a wrong address.
    if not judge.url or not is_address(judge.url):
        return
    # Imported here: runs without a judge need no HTTP client.
    from offbeat.actor.judges.client import headers_of

    headers = headers_of(judge)
    yield from _check_cache(judge)
    problem = _problem(judge, headers)
    if problem:
        yield Finding("warning", f"judge.url: {problem}. Rewards wait until it answers.")


def _check_cache(judge: JudgeSection) -> Iterator[Finding]:
    if not judge.cache:
        return
    folder = Path(judge.cache).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        yield mistake("judge.cache", judge.cache, f"it cannot be made ({error.strerror})", "Name another folder.")
        return
    if not os.access(folder, os.W_OK):
        yield mistake("judge.cache", judge.cache, "it cannot be written", "Name another folder.")


def _problem(judge: JudgeSection, headers: dict[str, str]) -> str | None:
    """Return why the server seems unable to judge; None when its list has the model, or it has no list."""
    import httpx2

    try:
        with httpx2.stream("GET", f"{judge.url.rstrip('/')}/models", headers=headers, timeout=ANSWER_S) as response:
            if response.status_code in (401, 403):
                return f"{urlsplit(judge.url).netloc} refuses the key (HTTP {response.status_code})"
            content = b""
            for part in response.iter_bytes():
                content += part
                if response.status_code != 200 or len(content) > _LONGEST_LIST:
                    return None
    except httpx2.HTTPError as error:
        return f"{urlsplit(judge.url).netloc} does not answer ({one_line(error)})"
    is_listed = f'"{judge.model}"'.encode() in content
    return None if is_listed or not content else f"its list of models has no {judge.model!r}"
