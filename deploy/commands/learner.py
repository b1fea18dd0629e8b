"""`offbeat learner`: the learner service alone."""

from offbeat.common.descriptors import raise_limit
from offbeat.common.environment import fast_imports, prepare_environment
from offbeat.common.logs import configure_logs
from offbeat.common.setting_checks import check_files
from offbeat.common.shutdown import StopRequest
from offbeat.deploy.commands.arguments import Arguments, read_config
from offbeat.deploy.quickstart.quickstart import expand


def command(arguments: Arguments = None) -> None:
    """Run the learner alone; actors find it at `hub.address`, in any starting order."""
    configure_logs("learner")
    config = expand(read_config(arguments))
    check_files(config)
    stop = StopRequest().install()
    raise_limit()
    # Imported last: torch takes seconds, reads the prepared environment, and a mistake in the config is reported before.
    with fast_imports():
        prepare_environment()
        from offbeat.learner.wiring import run_learner

    run_learner(config, stop)
