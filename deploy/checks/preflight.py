"""The preflight: all checks of a command (`join`: an actor with --join), whose mistakes are reported together.

| | `check` | `train` | `learner` | `actor` | `join` |
|---|---|---|---|---|---|
| settings against each other, the model's folder | x | x | x | x | |
| settings without effect, unless the run is resumed | x | x | x | | |
| reference, run folder, ports, Weights & Biases | x | x | x | | |
| data and tokenizer, which a learner alone reads before it loads the model | x | x | | | |
| your own functions that the learner calls, called once | x | x | x | | |
| engine options, the reward's function, the judge asked for its models, the sandbox tried | x | x | | x | x |
| the model under vLLM | x | x | | x | |
| the reward called once | x | x | | | |
| learner processes, in groups that share packs | x | x | | | |
| names that the Hugging Face Hub is asked for, and whether it has the model | x | x | | | |
| GPUs of this machine, and the plan of what works on which | x | x | | | |
| variables of a distributed launcher, which `train` sets itself | x | | x | | |
| builds of the packages beside torch | x | | | | |
"""

import ast
import importlib.util
import logging
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Literal

from offbeat.common.errors import SettingError, SeveralSettingsError, one_line
from offbeat.common.processes.shutdown import die_with_parent
from offbeat.common.records.rows import StepRow
from offbeat.common.records.writer import ROWS_FILE, read_rows_of
from offbeat.common.settings.checks import check, check_before_run
from offbeat.common.settings.config import Config, environment_of
from offbeat.common.settings.library_options import RESERVED
from offbeat.common.user_code.external_environment import interpreter
from offbeat.deploy.checks import machine
from offbeat.deploy.checks.findings import Finding, findings_of, mistake
from offbeat.deploy.checks.inputs import check_hub_names, check_inputs, check_rows
from offbeat.deploy.checks.model_folders import check_engine_model, check_model, check_reference
from offbeat.deploy.checks.remote_services import check_judge_server, check_trackers
from offbeat.deploy.checks.user_functions import check_functions, check_learner_functions, check_reward, learner_functions
from offbeat.deploy.local.plan import engine_here
from offbeat.learner.diagnostics.health import HISTORY, bound_starves

logger = logging.getLogger(__name__)

_SAY_INTERVAL_S = 5.0
"""Interval of the line that says which check is still running."""
_MOST_PATIENCE = 6.0


class Apart:
    """A check that runs in a forked process."""

    def __init__(self, name: str, check: Callable[[], Iterable[Finding]], limit_s: float) -> None:
        """Start the check; `name` is the setting that messages name. A machine with more work than processors has longer."""
        self._name = name
        self._started = time.monotonic()
        self._limit_s = limit_s * _patience()
        self._answer, theirs = multiprocessing.Pipe(duplex=False)
        parent = os.getpid()
        self._pid = os.fork()
        if self._pid == 0:
            self._answer.close()
            _run(check, theirs, parent)
        # Both processes set it: whichever is first, the group is there before it is needed.
        with suppress(PermissionError, ProcessLookupError):
            os.setpgid(self._pid, self._pid)
        theirs.close()

    def findings(self) -> list[Finding]:
        """Return what the check found; a warning where it died, did not work, or had not ended within its time."""
        said, ends = self._started, self._started + self._limit_s
        try:
            while not self._answer.poll(max(0.0, min(ends, said + _SAY_INTERVAL_S) - time.monotonic())):
                said = time.monotonic()
                if said >= ends:
                    cure = "Repeat it with `offbeat check`; a busy machine has more time there."
                    return [self._unchecked(f"it took longer than {self._limit_s:.0f} s", cure)]
                so_far_s = said - self._started
                logger.info("still checking %s, %.0f s so far, at most %.0f s", self._name, so_far_s, self._limit_s)
            found, failure = self._answer.recv()
        except EOFError:
            return [self._unchecked("the check's process ended", "")]
        finally:
            self._end()
        return found if failure is None else [*found, self._unchecked(failure, "")]

    def _unchecked(self, reason: str, cure: str) -> Finding:
        text = f"{self._name} could not be checked ({reason}): its mistakes will only show after the start."
        return Finding("warning", f"{text} {cure}".strip())

    def _end(self) -> None:
        self._answer.close()
        # The group: a reward may have started processes.
        with suppress(ProcessLookupError):
            os.killpg(self._pid, signal.SIGKILL)
        os.waitpid(self._pid, 0)


def _patience() -> float:
    """Return by how much a check may take longer here: the number of processes that want a processor, for each processor."""
    return min(max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), _MOST_PATIENCE)


def _run(check: Callable[[], Iterable[Finding]], answer: Connection, parent: int) -> None:
    """Run a check in the forked process, send what it found, and end the process without any cleaning up.

    Sends the findings, and the error that ended the check early, None without one.
    """
    os.setpgid(0, 0)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    findings: list[Finding] = []
    failure = None
    try:
        die_with_parent(parent)
        findings.extend(findings_of(check))
    except BaseException as error:  # noqa: BLE001, the user's code runs here, and the fork must end here
        failure = one_line(error)
    answer.send((findings, failure))
    os._exit(0)


_DECLARATIONS = {
    "vllm": ("engine/arg_utils.py", "EngineArgs"),
    "transformers": ("generation/configuration_utils.py", "ContinuousBatchingConfig"),
}
"""The file and class, by package, whose fields are the engine's options."""
_SIMPLE = {"int": int, "float": (int, float), "str": str, "bool": bool}


def check_engine_options(config: Config) -> Iterator[Finding]:
    """Find options that are unknown or not for users, values of a wrong type, and an engine that is not installed."""
    name = config.actor.engine
    engine = engine_here(config)
    if name == "vllm" != engine:
        cure = 'Install offbeat[cpu] or offbeat[cuda], or set it to "transformers".'
        raise SettingError("actor.engine", name, "vLLM is not installed", cure)
    if not config.actor.engine_options:
        return
    declared = declared_options(engine)
    for option, value in config.actor.engine_options.items():
        setting = f"actor.engine_options.{option}"
        if option in RESERVED[engine]:
            yield mistake(setting, value, f"this is not an option, because {RESERVED[engine][option]}", "Remove it.")
        elif option not in declared:
            yield mistake(setting, value, "the engine has no such option", "Remove it or correct its name.")
        elif not _fits(value, declared[option]):
            yield mistake(setting, value, f"the engine wants {' or '.join(sorted(declared[option]))}", "Give such a value.")


def declared_options(package: str) -> dict[str, set[str]]:
    """Return the names in the annotation of each option of an engine's package; none where its source is not as expected."""
    file, class_name = _DECLARATIONS[package]
    spec = importlib.util.find_spec(package)
    assert spec is not None and spec.origin is not None
    tree = ast.parse((Path(spec.origin).parent / file).read_text(encoding="utf-8"))
    body = next(node.body for node in tree.body if isinstance(node, ast.ClassDef) and node.name == class_name)
    return {
        node.target.id: {part.strip() for part in ast.unparse(node.annotation).split("|")}
        for node in body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _fits(value: object, annotation: set[str]) -> bool:
    """Return False only where the annotation is made of simple types and the value is of none of them."""
    kinds = annotation - {"None"}
    if not kinds or not kinds <= set(_SIMPLE):
        return True
    if isinstance(value, bool):
        return "bool" in kinds
    return any(isinstance(value, _SIMPLE[kind]) for kind in kinds)


def check_episodes(config: Config) -> Iterator[Finding]:
    """Find what the run's own steps say of the bound; without any, note below which step time it is too small."""
    steps = list(read_rows_of(Path(config.run.dir) / ROWS_FILE, StepRow))
    if steps:
        starved = bound_starves(steps[-HISTORY:])
        if starved is not None:
            yield Finding("warning", starved)
        return
    bound = config.staleness.max_staleness
    if not config.task.environment or not bound:
        return
    longest_s = config.environment.episode_timeout_s
    yield Finding(
        "note",
        f"an episode may take {longest_s:g} s (environment.episode_timeout_s), and staleness.max_staleness = {bound} lets "
        f"{bound + 1} batches be under way: where groups take that long, the learner waits unless its steps take "
        f"{longest_s / (bound + 1):.3g} s; `offbeat status` says when the bound is too small",
    )


Command = Literal["check", "train", "learner", "actor", "join"]
Check = Callable[[Config], Iterable[Finding] | None]
LOOK_S = 120.0
"""Longest time for the checks that run apart. The quick start takes 3 s; much data takes longer."""
REWARD_S = 20.0
"""Longest time for one call of each function of the user's, with the import of its module."""
_LEARNER: tuple[Check, ...] = (check_model, check_reference, machine.check_folder, machine.check_ports, check_trackers)
_ACTOR: tuple[Check, ...] = (check_engine_options, check_engine_model, check_judge_server, machine.check_actor_port)
_CHECKS: dict[Command, tuple[Check, ...]] = {
    "check": (
        *_LEARNER,
        *_ACTOR,
        machine.check_groups_of_processes,
        machine.check_variables,
        machine.check_companions,
        partial(check_hub_names, kind_of_missing="warning"),
        check_episodes,
        machine.show_devices,
    ),
    "train": (
        *_LEARNER,
        *_ACTOR,
        partial(check_hub_names, kind_of_missing="mistake"),
        machine.check_shared_actor_port,
        machine.check_groups_of_processes,
        machine.check_devices,
    ),
    "learner": (*_LEARNER, machine.check_variables),
    "join": _ACTOR,
    "actor": (check_model, *_ACTOR),
}


def look(config: Config, command: Command) -> list[str]:
    """Check what `command` needs, log the warnings, and return the notes to show.

    Raises `SettingError` with the mistakes of all checks. What only a hub has is left to the services.
    """
    environment = environment_of(config)
    if environment.is_external and command != "learner":
        # Its packages may take minutes, the first time.
        interpreter(environment)
    # The slow ones first: they run beside the others.
    apart = (_start_inputs(config, command), _start_functions(config, command))
    findings = [*findings_of(partial(_contradictions, config, command))]
    for one in _CHECKS[command]:
        findings += findings_of(partial(one, config))
    for started in apart:
        findings += started.findings() if started is not None else ()
    for finding in findings:
        if finding.kind == "warning":
            logger.warning("%s", finding.text)
    # Two checks may find the same.
    mistakes = list(dict.fromkeys(finding.text for finding in findings if finding.kind == "mistake"))
    if mistakes:
        raise SeveralSettingsError(mistakes)
    return [finding.text for finding in findings if finding.kind == "note"]


def _contradictions(config: Config, command: Command) -> Iterator[Finding]:
    # The settings of `join` lack what only the learner has, and the learner has checked them.
    if command != "join":
        check_settings = check if command == "actor" else check_before_run
        yield from (Finding("warning", text) for text in check_settings(config))


def _start_inputs(config: Config, command: Command) -> Apart | None:
    """Start the check of data and tokenizer; a learner alone reads both itself, before it loads the model."""
    if command not in ("check", "train") or not config.data.train_data:
        return None
    is_local = Path(config.model.path).is_dir()
    return Apart("data.train_data", partial(check_inputs if is_local else check_rows, config), LOOK_S)


def _start_functions(config: Config, command: Command) -> Apart | None:
    of_learner, reward = learner_functions(config), "task.environment" if config.task.environment else "task.reward"
    if command == "learner":
        return Apart(", ".join(of_learner), partial(check_learner_functions, config), REWARD_S) if of_learner else None
    if command in ("actor", "join"):
        return Apart(reward, partial(check_reward, config, calls=False), REWARD_S)
    return Apart(", ".join([reward, *of_learner]), partial(check_functions, config), REWARD_S)
