"""A tracker: a service or program that keeps the numbers of many runs, such as Weights & Biases, MLflow or trackio.

A tracker's run has the numbers of the step and evaluation rows over `policy_version`, under their names in TensorBoard.
"""

import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal, Protocol, get_args

import msgspec

from offbeat.common.records.rows import Row

Kind = Literal["wandb", "mlflow", "trackio"]
"""The trackers, by the names of their packages and of offbeat's extras."""
KINDS: tuple[Kind, ...] = get_args(Kind)
SETTINGS: Mapping[Kind, str] = {
    "wandb": "metrics.wandb_project",
    "mlflow": "metrics.mlflow_experiment",
    "trackio": "metrics.trackio_project",
}
"""The setting that asks for each tracker, and names the project in it."""


class Opening(msgspec.Struct, frozen=True):
    """The run as a tracker gets to know it."""

    kind: Kind
    project: str
    folder: str
    """The run's folder, whose name is the run's."""
    settings: dict[str, str]
    """The value of each setting, without secrets."""


class Tracker(Protocol):
    """One run in a tracker. Its methods may wait for a network, and raise whatever the tracker's library raises."""

    def add(self, row: Row) -> None:
        """Keep the numbers of a step or of an evaluation; other rows as the tracker sees fit."""
        ...

    def close(self, outcome: str | None) -> None:
        """Say how the run ended (`finished`, `stopped`, `paused`, `failed`), None if it did not say, and hand over the rest."""
        ...


OpenTracker = Callable[[Opening], Tracker]
"""A function that begins a run in a tracker, or continues the run's own where the run goes on."""


def id_file(kind: Kind) -> str:
    """Return the name of the file in the run's folder that holds the id of its run in a tracker."""
    return f"{kind}_run_id.txt"


def read_id(opening: Opening) -> str | None:
    """Return the id of the run in the tracker; None before the first start."""
    path = _path(opening)
    return path.read_text().strip() if path.exists() else None


def keep_id(opening: Opening, run_id: str) -> str:
    """Write the id of the run in the tracker into the run's folder, for a later start; return it."""
    _path(opening).write_text(run_id)
    return run_id


def make_id() -> str:
    """Return a new id, for trackers that let the user choose."""
    return uuid.uuid4().hex[:16]


def _path(opening: Opening) -> Path:
    return Path(opening.folder) / id_file(opening.kind)
