"""A run in MLflow: the metrics and parameters of a run of the experiment, on the server of MLFLOW_TRACKING_URI."""

import re
from pathlib import Path

from offbeat.common.records.rows import EvalRow, Row, StepRow
from offbeat.common.records.writer import scalars_of
from offbeat.learner.reporting.trackers.tracker import Opening, keep_id, read_id

PARAMETERS_AT_ONCE = 100
"""Largest number of parameters that MLflow takes in one request."""
MAX_NAME = 250
"""Most characters of a metric's name."""

_STATES = {"finished": "FINISHED", "stopped": "KILLED", "paused": "SCHEDULED"}
_NOT_IN_NAMES = re.compile(r"[^\w.\- :/]")


class MlflowTracker:
    """The run of this id, made in the experiment where the run begins."""

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
        run = self._client.create_run(experiment_id, run_name=Path(opening.folder).name)
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
