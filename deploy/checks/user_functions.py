"""Checks of the functions that the settings name: imported, and called once on stand-ins. They run apart."""

import asyncio
import math
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np

from offbeat.actor.judges.client import handed_to_processes
from offbeat.actor.rewards.failures import Failure, failure_of, file_of
from offbeat.actor.rewards.functions import load_reward
from offbeat.actor.rewards.samples import Sample
from offbeat.common.errors import SettingError
from offbeat.common.settings.config import Config, environment_of, eval_sets
from offbeat.common.settings.corrections import own_functions
from offbeat.common.user_code.callback import load_callback
from offbeat.common.user_code.environment_function import load_environment, offer_tools
from offbeat.common.user_code.external_environment import check_external
from offbeat.deploy.checks.findings import Finding, mistake
from offbeat.deploy.checks.inputs import count_tasks, first_prompt
from offbeat.learner.curriculum import OwnCurriculum
from offbeat.learner.diagnostics.own_evaluation import EvaluatedCompletion, load_evaluation
from offbeat.learner.leases.groups import task_results
from offbeat.learner.objectives.own_functions import load_advantage, load_correction, load_loss
from offbeat.learner.objectives.reward_shaping import load_length_penalty

if TYPE_CHECKING:
    import torch

STAND_IN = "This text stands for a completion. The answer is 42."
"""The completion with which the reward is called."""


def learner_functions(config: Config) -> list[str]:
    """Return the settings that name functions that the learner calls."""
    return list(dict.fromkeys(setting for setting, path, _ in _learner_calls(config) if path))


def check_learner_functions(config: Config) -> Iterator[Finding]:
    """Find functions of the learner that cannot be imported, take other parameters, or fail on stand-ins."""
    for _, path, call in _learner_calls(config):
        try:
            if path:
                call(path)
        except SettingError as error:
            yield Finding("mistake", str(error))


def _learner_calls(config: Config) -> tuple[tuple[str, str, Callable[[str], object]], ...]:
    """Return each setting that may name a function or a file of the learner, what it names, if anything, and what tries it."""
    rewards = np.arange(2 * config.rollout.group_size, dtype=np.float64).reshape(2, -1)
    longest = config.rollout.max_new_tokens
    lengths = np.array([1, longest])
    return (
        ("data.curriculum", config.data.curriculum, lambda _: _call_curriculum(config)),
        ("reward.length_penalty", config.reward.length_penalty, lambda path: load_length_penalty(path)(lengths, longest)),
        ("loss.noise_floor", config.loss.noise_floor, _read_calibration),
        ("loss.function", config.loss.function, _call_loss),
        *(("loss.correction", path, _call_correction) for path in own_functions(config.loss.correction)),
        ("advantage.function", config.advantage.function, lambda path: load_advantage(path)(rewards)),
        ("evaluation.function", config.evaluation.function, lambda _: _call_evaluation(config)),
        # Not called: it may tell somebody.
        ("metrics.callback", config.metrics.callback, load_callback),
    )


def check_functions(config: Config) -> Iterator[Finding]:
    """Find functions of learner and actor that cannot be imported, or fail on stand-ins."""
    yield from check_learner_functions(config)
    with handed_to_processes(config):
        yield from check_reward(config, calls=True)


def check_reward(config: Config, *, calls: bool) -> Iterator[Finding]:
    """Find a reward that cannot be imported; with `calls`, one that fails on the first row and a stand-in completion.

    An environment is only imported: it needs a model to play with.
    """
    if (environment := environment_of(config)).is_external:
        check_external(environment)
        return
    if config.task.environment:
        asyncio.run(offer_tools(load_environment(config.task.environment), config))
        yield from _check_sandbox("task.environment")
        return
    reward = load_reward(config.task.reward)
    lease_s, most = config.rollout.lease_timeout_s, reward.most_groups(config)
    if most < 1:
        problem = f"at this rate a group's lease expires before its rewards: rollout.lease_timeout_s = {lease_s:g}"
        cure = f"Raise it, or set rollout.lease_timeout_s={math.ceil(2 * lease_s / most)} or more."
        yield mistake("actor.reward_calls_per_s", config.actor.reward_calls_per_s, problem, cure)
    yield from (findings := list(_check_sandbox("task.reward")))
    # Mistakes in the data are told twice, and shown once.
    prompt = first_prompt(config) if calls and not findings else None
    if prompt is None:
        return
    sample = Sample(prompt[0], STAND_IN, prompt[1], np.arange(len(STAND_IN), dtype=np.int32), "stop", is_evaluation=False)
    samples = [sample] * (config.rollout.group_size if reward.takes_many else 1)
    weights = config.task.reward_weights
    try:
        with _time_limit("task.reward_timeout_s", config.task.reward_timeout_s):
            is_async = reward.is_async
            outcomes = asyncio.run(reward.outcomes_async(samples, weights)) if is_async else reward.outcomes(samples, weights)
    except TimeoutError as error:
        outcomes = [failure_of(error, file_of(reward.function))]
    failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    if failure is None:
        return
    problem = f"called with the first row of data.train_data and a stand-in completion, it failed: {failure.detail}"
    if failure.is_transient:
        # A judge that does not answer now may do so later.
        yield Finding("warning", f"task.reward: {problem}.")
    else:
        yield mistake("task.reward", config.task.reward, problem, "Correct the function, or the fields of the rows.")


@contextmanager
def _time_limit(setting: str, limit_s: float) -> Iterator[None]:
    """Raise `TimeoutError` in the code that runs once the limit of a setting is reached. Needs the main thread."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"it took longer than {setting} = {limit_s:g}")

    signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def _check_sandbox(setting: str) -> Iterator[Finding]:
    """Find that no sandbox works on this machine, where the module of the function has imported one."""
    if "offbeat.actor.sandbox" not in sys.modules:
        return
    from offbeat.actor import sandbox

    try:
        sandbox.check()
    except sandbox.NoSandboxError as error:
        yield Finding("mistake", f"{setting}: {error}")


def _read_calibration(path: str) -> None:
    # Imported here, as it imports torch.
    from offbeat.learner.calibration.calibration import load_calibration

    load_calibration(path)


def _call_loss(path: str) -> None:
    function = load_loss(path)
    # Imported here: torch takes two seconds, and most runs have no such function.
    import torch

    policy = torch.tensor([[-1.0, -2.0], [-0.5, 0.0]], requires_grad=True)
    mask, advantages = _stand_ins()
    losses = function(policy, torch.tensor([[-1.5, -2.0], [-0.25, 0.0]]), mask, advantages)
    losses.masked_fill(~mask, 0.0).sum().backward()
    for what, numbers in (("losses", losses), ("gradients", policy.grad)):
        if numbers is not None and not numbers[mask].isfinite().all():
            problem = f"for finite log-probs and advantages, its {what} are not all finite: {numbers[mask].tolist()}"
            raise SettingError("loss.function", path, problem, "Correct the function: such a step would be left out.")


def _call_correction(path: str) -> None:
    function = load_correction(path)
    import torch

    function(torch.tensor([[0.5, 0.0], [-0.25, 0.0]]), *_stand_ins())


def _stand_ins() -> "tuple[torch.Tensor, torch.Tensor]":
    """Return the mask and the advantages of two completions, of two tokens and of one."""
    import torch

    return torch.tensor([[True, True], [True, False]]), torch.tensor([[1.0, 1.0], [-1.0, 0.0]])


def _call_curriculum(config: Config) -> None:
    """Call the function as the learner does before the first batch."""
    function = OwnCurriculum(config.data.curriculum)
    if num_prompts := count_tasks(config):
        function(task_results(num_prompts, {}, {}), 0)


def _call_evaluation(config: Config) -> None:
    function = load_evaluation(config.evaluation.function)
    held_out = first_prompt(config, held_out=True)
    if held_out is None:
        return
    data_set = next(iter(eval_sets(config.data)))
    completion = EvaluatedCompletion(0, *held_out, data_set, STAND_IN, len(STAND_IN), "stop", reward=1.0, reward_parts={})
    function([completion, completion._replace(reward=0.0, finish_reason="length")])
