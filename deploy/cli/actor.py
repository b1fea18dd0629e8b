"""`offbeat actor`: one actor service."""

import contextlib
import logging
from typing import Annotated, Literal

import typer

from offbeat.actor.joining import JoinOptions, joined
from offbeat.common.errors import SettingError
from offbeat.common.processes.environment import fast_imports, prepare_environment
from offbeat.common.processes.shutdown import StopRequest
from offbeat.common.records.logs import configure_logs, doing
from offbeat.common.settings.loading import refuse_masked
from offbeat.deploy.checks.preflight import look
from offbeat.deploy.cli.arguments import Arguments, Preflight, load_config, say_start, split_arguments
from offbeat.deploy.local.quickstart.prepared import expand

logger = logging.getLogger(__name__)

LEAVES = "the actor leaves before it has joined"

Join = Annotated[
    str, typer.Option(metavar="ADDRESS", help="The learner's tcp://HOST:PORT. The actor gets settings and model from it.")
]
Key = Annotated[str, typer.Option(metavar="FILE", help="With --join: this actor's secret key.")]
LearnerKey = Annotated[str, typer.Option(metavar="FILE", help="With --join: the learner's public key.")]


def command(
    arguments: Arguments = None, preflight: Preflight = True, join: Join = "", key: Key = "", learner_key: LearnerKey = ""
) -> None:
    """Run one actor. You may start and stop actors at any time while the learner runs."""
    configure_logs("actor")
    say_start("actor")
    stop = StopRequest().install()
    with contextlib.ExitStack() as stack:
        with stop.at_once(LEAVES):
            options = _join_options(arguments, join, key, learner_key)
            if options is None:
                config = expand(load_config(arguments))
            else:
                config = stack.enter_context(joined(options, arguments or []))
            refuse_masked(config)
            if config.actor.name:
                configure_logs(config.actor.name)
            if preflight:
                look(config, "actor" if options is None else "join")
        # Imported last: the engine takes seconds, reads the prepared environment, and a mistake in the config shows before.
        with stop.at_once(LEAVES), doing(logger, "importing the engine"), fast_imports():
            prepare_environment()
            from offbeat.actor.service import run_actor

        run_actor(config, stop)


def _join_options(arguments: list[str] | None, join: str, key: str, learner_key: str) -> JoinOptions | None:
    """Return whom to join, None without --join; raise `SettingError` for arguments that do not go with it."""
    if join:
        path, _ = split_arguments(arguments)
        if path is not None:
            raise SettingError("CONFIG", str(path), "with --join the settings come from the learner", "Leave the file out.")
        return JoinOptions(join, key, learner_key)
    if key or learner_key:
        option = "--key" if key else "--learner-key"
        raise SettingError(option, key or learner_key, "it belongs to --join", "Set hub.key and hub.learner_key instead.")
    return None


def import_service(engine: Literal["auto", "vllm", "transformers"]) -> None:
    """Import what an actor with this engine needs, for a process that forks actors."""
    import offbeat.actor.service  # noqa: F401
    from offbeat.actor.engines.choice import engine_class

    engine_class(engine)
