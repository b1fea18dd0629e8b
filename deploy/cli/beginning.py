"""The beginning of a run: whether it is a new one, or goes on from its folder or from its mirror."""

from pathlib import Path

from offbeat.common.records.run_folder import decide_resume, holds_work, locked
from offbeat.common.settings.config import Config


def settle_resume(config: Config) -> Config:
    """Return the config with `run.resume` decided, after fetching a run from its mirror where the folder holds none."""
    folder = Path(config.run.dir)
    if config.run.mirror and config.run.resume and not holds_work(folder):
        from offbeat.learner.restart.mirror import fetch_run

        with locked(folder):
            fetch_run(folder, config.run.mirror)
    return decide_resume(config)
