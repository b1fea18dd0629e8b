"""Checks of the functions that the settings name: imported, and the reward called once. They run apart."""

import asyncio
from collections.abc import Iterator

import numpy as np

from offbeat.actor.reward_failures import Failure
from offbeat.actor.reward_functions import load_reward
from offbeat.actor.samples import Sample
from offbeat.common.config import Config
from offbeat.common.settings import SettingError
from offbeat.deploy.preflight.findings import Finding, mistake
from offbeat.deploy.preflight.inputs import first_prompt
from offbeat.learner.objectives.own_functions import load_advantage, load_loss
from offbeat.learner.objectives.reward_shaping import load_length_penalty

STAND_IN = "This text stands for a completion. The answer is 42."
"""The completion with which the reward is called."""


def has_learner_functions(config: Config) -> bool:
    """Return whether the settings name functions that the learner calls."""
    return bool(config.reward.length_penalty or config.loss.function or config.advantage.function)


def check_learner_functions(config: Config) -> Iterator[Finding]:
    """Find a length penalty, a loss or advantages that cannot be imported or take other parameters."""
    functions = (
        (load_length_penalty, config.reward.length_penalty),
        (load_loss, config.loss.function),
        (load_advantage, config.advantage.function),
    )
    for load, path in functions:
        try:
            if path:
                load(path)
        except SettingError as error:
            yield Finding("mistake", str(error))


def check_reward(config: Config, *, calls: bool) -> Iterator[Finding]:
    """Find functions that cannot be imported; with `calls`, a reward that fails on the first row and a stand-in completion."""
    yield from check_learner_functions(config)
    try:
        reward = load_reward(config.task.reward)
        prompt = first_prompt(config) if calls else None
    except SettingError as error:
        # Mistakes in the data are told twice, and shown once.
        yield Finding("mistake", str(error))
        return
    if prompt is None:
        return
    sample = Sample(prompt[0], STAND_IN, prompt[1], np.arange(len(STAND_IN), dtype=np.int32), "stop", is_evaluation=False)
    samples = [sample] * (config.rollout.group_size if reward.takes_many else 1)
    weights = config.task.reward_weights
    outcomes = asyncio.run(reward.outcomes_async(samples, weights)) if reward.is_async else reward.outcomes(samples, weights)
    failure = next((outcome for outcome in outcomes if isinstance(outcome, Failure)), None)
    if failure is None:
        return
    problem = f"called with the first row of task.train_data and a stand-in completion, it failed: {failure.detail}"
    if failure.is_transient:
        # A judge that does not answer now may do so later.
        yield Finding("warning", f"task.reward: {problem}.")
    else:
        yield mistake("task.reward", config.task.reward, problem, "Correct the function, or the fields of the rows.")
