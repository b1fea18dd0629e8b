"""`offbeat learner`: the learner service alone."""

import os

from offbeat.common.descriptors import raise_limit
from offbeat.common.environment import fast_imports, prepare_environment
from offbeat.common.logs import configure_logs
from offbeat.common.shutdown import StopRequest
from offbeat.deploy.commands.arguments import Arguments, Preflight, load_config
from offbeat.deploy.preflight.preflight import look
from offbeat.deploy.quickstart.quickstart import expand


def command(arguments: Arguments = None, preflight: Preflight = True) -> None:
    """Run the learner alone; actors find it at `hub.address`, in any starting order."""
    configure_logs("learner")
    config = expand(load_config(arguments))
    # Beside rank 0 the others would find its ports taken.
    if preflight and os.environ.get("RANK", "0") == "0":
        look(config, "learner")
    stop = StopRequest().install()
    raise_limit()
    # Imported last: torch takes seconds, reads the prepared environment, and a mistake in the config is reported before.
    with fast_imports():
        prepare_environment()
        from offbeat.learner.wiring import run_learner

    run_learner(config, stop)
