"""The preflight: all checks of a command (`join`: an actor with --join), their warnings logged, their mistakes told at once.

| | `check` | `train` | `learner` | `actor` | `join` |
|---|---|---|---|---|---|
| settings against each other, the model's folder | x | x | x | x | |
| settings without effect, unless the run is resumed | x | x | x | | |
| reference, run folder, ports, Weights & Biases | x | x | x | | |
| data and tokenizer, which a learner alone reads before it loads the model | x | x | | | |
| functions of yours that the learner calls, called once | x | x | x | | |
| engine options, the reward's function, the judge asked for its models, the sandbox tried | x | x | | x | x |
| the reward called once | x | x | | | |
| learner processes, in groups that share packs | x | x | | | |
| GPUs of this machine, and the plan of what works on which | x | x | | | |
| variables of a distributed launcher, which `train` sets itself | x | | x | | |
| builds of the packages beside torch | x | | | | |
"""

import logging
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Literal

from offbeat.common.errors import SettingError, SeveralSettingsError
from offbeat.common.settings.checks import check, check_before_run
from offbeat.common.settings.config import Config
from offbeat.deploy.checks.apart import Apart
from offbeat.deploy.checks.engine_options import check_engine_options
from offbeat.deploy.checks.episodes import check_episodes
from offbeat.deploy.checks.findings import Finding
from offbeat.deploy.checks.inputs import check_inputs, check_rows
from offbeat.deploy.checks.judge import check_judge_server
from offbeat.deploy.checks.machine import (
    check_actor_port,
    check_companions,
    check_devices,
    check_folder,
    check_groups_of_processes,
    check_ports,
    check_shared_actor_port,
    check_variables,
    show_devices,
)
from offbeat.deploy.checks.model_folders import check_model, check_reference
from offbeat.deploy.checks.trackers import check_trackers
from offbeat.deploy.checks.user_functions import (
    check_functions,
    check_learner_functions,
    check_reward,
    has_learner_functions,
)

logger = logging.getLogger(__name__)

Command = Literal["check", "train", "learner", "actor", "join"]
Check = Callable[[Config], Iterable[Finding]]

LOOK_S = 120.0
"""Longest time for the checks that run apart. The quick start takes 3 s; much data takes longer."""
REWARD_S = 10.0
"""Longest time for one call of the reward, with the import of its module."""

_LEARNER: tuple[Check, ...] = (check_model, check_reference, check_folder, check_ports, check_trackers)
_ACTOR: tuple[Check, ...] = (check_engine_options, check_judge_server, check_actor_port)
_CHECKS: dict[Command, tuple[Check, ...]] = {
    "check": (*_LEARNER, *_ACTOR, check_groups_of_processes, check_variables, check_companions, check_episodes, show_devices),
    "train": (*_LEARNER, *_ACTOR, check_shared_actor_port, check_groups_of_processes, check_devices),
    "learner": (*_LEARNER, check_variables),
    "join": _ACTOR,
    "actor": (check_model, *_ACTOR),
}


def look(config: Config, command: Command) -> list[str]:
    """Check what `command` needs, log the warnings, and return the notes to show.

    Raises `SettingError` with the mistakes of all checks. What only a hub has is left to the services.
    """
    started = time.monotonic()
    # The slow ones first: they run beside the others.
    inputs = _start_inputs(config, command)
    functions = _start_functions(config, command)
    findings = _contradictions(config, command)
    for one in _CHECKS[command]:
        findings += one(config)
    if inputs is not None:
        findings += inputs.findings(started + LOOK_S)
    if functions is not None:
        findings += functions.findings(started + REWARD_S)
    for finding in findings:
        if finding.kind == "warning":
            logger.warning("%s", finding.text)
    # Two checks may find the same.
    mistakes = list(dict.fromkeys(finding.text for finding in findings if finding.kind == "mistake"))
    if mistakes:
        raise SeveralSettingsError(mistakes)
    return [finding.text for finding in findings if finding.kind == "note"]


def _contradictions(config: Config, command: Command) -> list[Finding]:
    if command == "join":
        # They lack what only the learner has, and the learner has checked them.
        return []
    check_settings = check if command == "actor" else check_before_run
    try:
        return [Finding("warning", text) for text in check_settings(config)]
    except SettingError as error:
        return [Finding("mistake", text) for text in error.texts]


def _start_inputs(config: Config, command: Command) -> Apart | None:
    """Start the check of data and tokenizer; a learner alone reads both itself, before it loads the model."""
    if command not in ("check", "train") or not config.task.train_data:
        return None
    is_local = Path(config.model.path).is_dir()
    return Apart("task.train_data", partial(check_inputs if is_local else check_rows, config))


def _start_functions(config: Config, command: Command) -> Apart | None:
    if command == "learner" and not has_learner_functions(config):
        return None
    if command == "learner":
        return Apart("the learner's functions", partial(check_learner_functions, config))
    if command in ("actor", "join"):
        return Apart("task.reward", partial(check_reward, config, calls=False))
    return Apart("your functions", partial(check_functions, config))
