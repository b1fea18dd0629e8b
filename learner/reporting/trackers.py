"""Trackers: services or programs that keep the numbers of many runs. Weights & Biases, MLflow and trackio.

A tracker's run has the numbers of the step and evaluation rows over `policy_version`, under their names in TensorBoard. The
trackers' libraries are extras, imported where a run is opened.
"""

import re
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from itertools import takewhile
from pathlib import Path
from typing import Any, Literal, Protocol, get_args

import msgspec

from offbeat.common.records.rows import EvalRow, Row, SampleRow, StepRow, row_fields
from offbeat.common.records.writer import scalars_of

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
    """The run's folder."""
    settings: dict[str, str]
    """The value of each setting, without secrets."""

    @property
    def name(self) -> str:
        """The run's name: that of its folder, after the values that it has in a sweep: `max_staleness=4 seed=1`."""
        folder = Path(self.folder)
        values = [*takewhile(lambda part: "=" in part, reversed(folder.parts))]
        return " ".join(reversed(values)) or folder.name


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


def _path(opening: Opening) -> Path:
    return Path(opening.folder) / id_file(opening.kind)


MAX_TABLE_SAMPLES = 100
"""Rows of the table of samples; older ones leave it."""

_SAMPLE_COLUMNS = tuple(name for name in SampleRow.__struct_fields__ if name != "time")
PARAMETERS_AT_ONCE = 100
"""Largest number of parameters that MLflow takes in one request."""
MAX_NAME = 250
"""Most characters of a metric's name."""

_STATES = {"finished": "FINISHED", "stopped": "KILLED", "paused": "SCHEDULED"}
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")


class WandbTracker:
    """A run in Weights & Biases, with a table of its newest samples.

    The library chooses server and account by its own variables.
    """

    def __init__(self, opening: Opening) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        run_id = read_id(opening) or keep_id(opening, uuid.uuid4().hex[:16])
        config = {"offbeat": opening.settings}
        self._run = wandb.init(
            project=opening.project, name=opening.name, dir=opening.folder, id=run_id, resume="allow", config=config
        )
        self._run.define_metric("*", step_metric="policy_version")
        self._table: Any = wandb.Table
        self._samples: deque[SampleRow] = deque(maxlen=MAX_TABLE_SAMPLES)

    def add(self, row: Row) -> None:
        """Log the row's numbers, or replace the table of samples by one with this sample."""
        # Without `step=`: W&B drops rows behind its newest step, and an evaluation always is.
        if isinstance(row, StepRow | EvalRow):
            self._run.log({"policy_version": row.policy_version, **scalars_of(row)})
        elif isinstance(row, SampleRow):
            self._samples.append(row)
            cells = [[row_fields(sample).get(name) for name in _SAMPLE_COLUMNS] for sample in self._samples]
            table = self._table(columns=[*_SAMPLE_COLUMNS], data=cells)
            self._run.log({"policy_version": row.policy_version, "samples": table})

    def close(self, outcome: str | None) -> None:
        """Upload the rest; W&B knows runs that finished and runs that failed."""
        self._run.finish(exit_code=0 if outcome in ("finished", "stopped", "paused") else 1)


class MlflowTracker:
    """A run of an MLflow experiment, on the server of MLFLOW_TRACKING_URI."""

    def __init__(self, opening: Opening) -> None:
        from mlflow import MlflowClient  # pyright: ignore[reportMissingImports]
        from mlflow.entities import Metric, Param  # pyright: ignore[reportMissingImports]

        self._client = MlflowClient()
        self._metric_type, self._parameter_type = Metric, Param
        run_id = read_id(opening)
        if run_id is None:
            self._run_id = self._begin(opening)
        else:
            self._run_id = run_id
            self._client.update_run(run_id, status="RUNNING")

    def add(self, row: Row) -> None:
        """Log the row's numbers in one request."""
        if not isinstance(row, StepRow | EvalRow):
            return
        time_ms, step = int(row.time * 1000), row.policy_version
        numbers = scalars_of(row).items()
        metrics = [self._metric_type(accepted_name(name), number, time_ms, step) for name, number in numbers]
        self._client.log_batch(self._run_id, metrics=metrics)

    def close(self, outcome: str | None) -> None:
        """Set the state of the run."""
        self._client.set_terminated(self._run_id, status=_STATES.get(outcome or "", "FAILED"))

    def _begin(self, opening: Opening) -> str:
        experiment = self._client.get_experiment_by_name(opening.project)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(opening.project)
        run = self._client.create_run(experiment_id, run_name=opening.name)
        # Only here: MLflow refuses another value of a parameter, and settings may differ when the run goes on.
        parameters = [self._parameter_type(setting, value) for setting, value in opening.settings.items()]
        for start in range(0, len(parameters), PARAMETERS_AT_ONCE):
            self._client.log_batch(run.info.run_id, params=parameters[start : start + PARAMETERS_AT_ONCE])
        return keep_id(opening, run.info.run_id)


def accepted_name(name: str) -> str:
    """Return the name as MLflow takes it: without other signs than letters, digits and `_ . - : /`, and no path upwards.

    One name that it refuses would cost all metrics of a step. Names of sets and of the user's own numbers may be any.
    """
    parts = (_NOT_IN_NAMES.sub("_", part) for part in name.split("/"))
    return "/".join("_" * len(part) if not part.strip(".") else part for part in parts if part)[:MAX_NAME].rstrip("/")


class TrackioTracker:
    """A run in trackio: in its local database, or where TRACKIO_SERVER_URL or TRACKIO_SPACE_ID say. It is found by its name."""

    def __init__(self, opening: Opening) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        # Folders of equal names are runs of their own.
        name = read_id(opening) or keep_id(opening, f"{opening.name}-{uuid.uuid4().hex[:8]}")
        self._run = trackio.init(opening.project, name, config=dict(opening.settings), resume="allow", embed=False)

    def add(self, row: Row) -> None:
        """Log the row's numbers."""
        if isinstance(row, StepRow | EvalRow):
            self._run.log(scalars_of(row), step=row.policy_version)

    def close(self, outcome: str | None) -> None:
        """Write or send the rest; trackio knows no outcomes."""
        self._run.finish()


OPEN: Mapping[Kind, OpenTracker] = {"wandb": WandbTracker, "mlflow": MlflowTracker, "trackio": TrackioTracker}
