"""Checks of the trackers of experiments that a run shall use: installed, logged in, and at a place that they accept."""

import importlib.util
import netrc
import os
from collections.abc import Iterator
from contextlib import suppress

from offbeat.common.settings.config import Config
from offbeat.deploy.checks.findings import Finding, mistake
from offbeat.learner.reporting.trackers.tracker import SETTINGS
from offbeat.learner.reporting.trackers.tracking import wanted_trackers

DATABASE_PACKAGES = ("sqlalchemy", "alembic")
"""Packages that MLflow needs for a database, and not for a server."""


def check_trackers(config: Config) -> Iterator[Finding]:
    """Find trackers that are asked for but not installed, W&B without a login, and a place that MLflow refuses."""
    for kind, project in wanted_trackers(config).items():
        packages = (kind, *(DATABASE_PACKAGES if kind == "mlflow" and _is_database(_mlflow_place()) else ()))
        if any(importlib.util.find_spec(package) is None for package in packages):
            cure = f'Install it: pip install "offbeat[{kind}]"; or leave the setting empty.'
            yield mistake(SETTINGS[kind], project, f"{kind} is not installed", cure)
        elif kind == "wandb" and os.environ.get("WANDB_MODE", "online") == "online" and not _has_wandb_login():
            yield Finding("warning", f'metrics.wandb_project = "{project}": no login is known here; run `wandb login` first.')
        elif kind == "mlflow":
            yield from _check_mlflow_place(_mlflow_place())


def _check_mlflow_place(place: str) -> Iterator[Finding]:
    """Find a folder: MLflow keeps runs in a folder no more unless it is told to."""
    is_folder = place.startswith("file:") or ("://" not in place and place not in ("", "databricks", "uc"))
    if is_folder and os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() not in ("true", "1"):
        cure = "Name a database, as in sqlite:////home/me/mlflow.db, or a server; or set MLFLOW_ALLOW_FILE_STORE=true."
        yield mistake("environment variable MLFLOW_TRACKING_URI", place, "MLflow keeps no runs in folders", cure)


def _mlflow_place() -> str:
    return os.environ.get("MLFLOW_TRACKING_URI", "")


def _is_database(place: str) -> bool:
    # Without a place MLflow makes a database of its own.
    return not place or place.startswith(("sqlite", "postgresql", "mysql", "mssql"))


def _has_wandb_login() -> bool:
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        hosts = netrc.netrc(os.environ.get("NETRC")).hosts
        return any("wandb" in host for host in hosts)
    return False
