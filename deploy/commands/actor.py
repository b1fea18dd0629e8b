"""`offbeat actor`: one actor service."""

import logging
from typing import Literal

from offbeat.common.descriptors import raise_limit
from offbeat.common.environment import fast_imports, prepare_environment
from offbeat.common.logs import configure_logs, doing
from offbeat.common.settings import refuse_masked
from offbeat.common.shutdown import StopRequest
from offbeat.deploy.commands.arguments import Arguments, Preflight, load_config, say_start
from offbeat.deploy.preflight.preflight import look
from offbeat.deploy.quickstart.prepared import expand

logger = logging.getLogger(__name__)


def command(arguments: Arguments = None, preflight: Preflight = True) -> None:
    """Run one actor; it may be started and stopped at any time while the learner runs."""
    configure_logs("actor")
    say_start("actor")
    config = expand(load_config(arguments))
    refuse_masked(config)
    if config.actor.name:
        configure_logs(config.actor.name)
    if preflight:
        look(config, "actor")
    stop = StopRequest().install()
    raise_limit()
    # Imported last: the engine takes seconds, reads the prepared environment, and a mistake in the config is reported before.
    with stop.at_once("the actor leaves before it has joined"), doing(logger, "importing the engine"), fast_imports():
        prepare_environment()
        from offbeat.actor.service import run_actor

    run_actor(config, stop)


def import_service(engine: Literal["auto", "vllm", "transformers"]) -> None:
    """Import what an actor with this engine needs, for a process that forks actors."""
    import offbeat.actor.service  # noqa: F401
    from offbeat.actor.engine_choice import engine_class

    engine_class(engine)
