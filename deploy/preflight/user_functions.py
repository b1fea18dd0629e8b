"""Checks of the functions that the settings name: imported, and the reward called once. They run apart."""

import asyncio
import inspect
import math
import numbers
from collections.abc import Iterator
from typing import Any

import numpy as np

from offbeat.actor.rewards import load_reward
from offbeat.common.config import Config
from offbeat.common.settings import SettingError
from offbeat.common.user_functions import located
from offbeat.deploy.preflight.findings import Finding, mistake
from offbeat.deploy.preflight.inputs import first_prompt
from offbeat.learner.objectives.reward_shaping import load_length_penalty

STAND_IN = "This text stands for a completion. The answer is 42."
"""The completion with which the reward is called."""


def check_length_penalty(config: Config) -> Iterator[Finding]:
    """Find a length penalty that cannot be imported or returns something else than numbers."""
    try:
        load_length_penalty(config.reward.length_penalty)
    except SettingError as error:
        yield Finding("mistake", str(error))


def check_reward(config: Config, *, calls: bool) -> Iterator[Finding]:
    """Find functions that cannot be imported; with `calls`, a reward that fails on the first row and a stand-in completion."""
    if config.reward.length_penalty:
        yield from check_length_penalty(config)
    try:
        function = load_reward(config.task.reward)
        prompt = first_prompt(config) if calls else None
    except SettingError as error:
        # Mistakes in the data are told twice, and shown once.
        yield Finding("mistake", str(error))
        return
    if prompt is None:
        return
    called = "called with the first row of task.train_data and a stand-in completion"
    try:
        value = function(prompt[0], STAND_IN, prompt[1])
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
    except OSError as error:
        # A judge that does not answer now may do so later.
        yield Finding("warning", f"task.reward: {called} it raised {located(error)}.")
        return
    except (Exception, SystemExit) as error:  # noqa: BLE001, the user's code
        problem = f"{called} it raised {located(error)}"
        yield mistake("task.reward", config.task.reward, problem, "Correct the function, or the fields of the rows.")
        return
    if not isinstance(value, numbers.Real | np.bool_) or not math.isfinite(float(value)):
        problem = f"{called} it returned {str(value)[:100]!r}"
        yield mistake("task.reward", config.task.reward, problem, "Return a finite number.")


async def _awaited(value: Any) -> Any:
    return await value
