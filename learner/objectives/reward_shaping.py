"""Rewards as the advantages see them: punished for length, normalized, clipped.

All arrays of rewards are float64 `[num_groups, group_size]`, one row per prompt.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.common.settings import SettingError
from offbeat.common.user_functions import load_function, located

LengthPenalty = Callable[[NDArray[np.int64], int], NDArray[np.float64]]
"""`(lengths [completions], max_new_tokens) -> what is added to their rewards [completions]`, usually not above 0."""

Population = Literal["none", "group", "batch", "running"]
"""The rewards that a moment is of: those of one prompt, of the optimizer step, or of the run so far."""


class RunningMoments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean and spread of all rewards of a run so far; part of its checkpoint."""

    count: int = 0
    """Rewards seen."""
    mean: float = 0.0
    """Their mean; 0 before the first."""
    squares: float = 0.0
    """The sum of their squared distances from the mean."""

    def updated(self, values: NDArray[np.float64]) -> "RunningMoments":
        """The moments after these too, whatever their shape: Chan, Golub and LeVeque's formula for two sets of numbers."""
        if not values.size:
            return self
        mean, squares = (moment.item() for moment in _moments(values.reshape(1, -1)))
        count = self.count + values.size
        distance = mean - self.mean
        return RunningMoments(
            count=count,
            mean=self.mean + distance * (values.size / count),
            squares=self.squares + squares + distance**2 * (self.count * values.size / count),
        )

    @property
    def std(self) -> float:
        """Unbiased standard deviation; 0 for fewer than two rewards."""
        return (self.squares / max(1, self.count - 1)) ** 0.5


class ShapedRewards(NamedTuple):
    """What `shape_rewards` makes of the rewards of one optimizer step."""

    rewards: NDArray[np.float64]
    """`[num_groups, group_size]`."""
    running: RunningMoments
    """The moments to continue with."""


def shape_rewards(
    rewards: NDArray[np.float64],
    lengths: NDArray[np.int64],
    *,
    max_new_tokens: int,
    overlong_buffer: int,
    overlong_penalty: float,
    length_penalty: LengthPenalty | None,
    norm_mean: Population,
    norm_std: Population,
    clip: float | None,
    running: RunningMoments,
) -> ShapedRewards:
    """The task's rewards, plus penalties, normalized, clipped: in this order.

    Penalties come first, because they are part of what the task rewards and are stated in its units: normalized rewards
    would make one and the same penalty weigh more in an easy batch than in a hard one. The clip comes last, because it
    bounds what the advantages are made of, whatever the normalization made of an outlier.

    `rewards`, `lengths`: `[num_groups, group_size]`, all completions of one optimizer step, of all ranks; `lengths` in
    completion tokens. An `overlong_buffer` of 0, no `length_penalty` and no `clip` mean none of it. Where `norm_mean` or
    `norm_std` is "running" the moments are updated before they are used, so that the first step's rewards are normalized too;
    otherwise `running` is handed back as it was.
    """
    rewards = rewards + overlong_punishment(
        lengths, max_new_tokens=max_new_tokens, buffer_tokens=overlong_buffer, penalty=overlong_penalty
    )
    if length_penalty is not None:
        rewards = rewards + length_penalty(lengths.reshape(-1), max_new_tokens).reshape(lengths.shape)
    if "running" in (norm_mean, norm_std):
        running = running.updated(rewards)
    rewards = normalize_rewards(rewards, mean_of=norm_mean, std_of=norm_std, running=running)
    if clip is not None:
        rewards = clip_rewards(rewards, limit=clip)
    return ShapedRewards(rewards, running)


def overlong_punishment(
    lengths: NDArray[np.int64], *, max_new_tokens: int, buffer_tokens: int, penalty: float
) -> NDArray[np.float64]:
    """What completions of these lengths lose, in the shape of `lengths`, between `-penalty` and 0.

    `penalty * clip((max_new_tokens - buffer_tokens - length) / buffer_tokens, -1, 0)`: DAPO's soft overlong punishment,
    https://arxiv.org/abs/2503.14476, eq. 13, whose penalty is 1. It begins where the buffer does and is whole at
    `max_new_tokens`, whether the completion was cut off there or ended by itself. A buffer of 0 punishes nothing.
    """
    tokens_to_buffer = max_new_tokens - buffer_tokens - lengths
    return penalty * np.clip(tokens_to_buffer / max(1, buffer_tokens), -1.0, 0.0)


def normalize_rewards(
    rewards: NDArray[np.float64],
    *,
    mean_of: Population,
    std_of: Population,
    epsilon: float = 1e-6,
    running: RunningMoments,
) -> NDArray[np.float64]:
    """`(R - mean) / (std + epsilon)`, the mean of one population and the unbiased standard deviation of the same or another.

    A population is each `group` by itself, the whole `batch` that `rewards` are, or `running`, which the caller has updated
    with these rewards. `none` subtracts nothing, or divides by nothing.

    Where all rewards that the standard deviation is of are equal there is nothing to scale by, and nothing is divided: shifted
    by their own mean they are exactly 0. No paper defines this step; popular code divides by epsilon there.
    """
    mean, _ = _mean_and_std(rewards, mean_of, running)
    _, std = _mean_and_std(rewards, std_of, running)
    return (rewards - mean) / np.where(std > 0, std + epsilon, 1.0)


def clip_rewards(rewards: NDArray[np.float64], *, limit: float) -> NDArray[np.float64]:
    """The rewards, none further from 0 than `limit`."""
    return np.clip(rewards, -limit, limit)


def load_length_penalty(path: str) -> LengthPenalty:
    """The user's function that `module:function` names; the current folder is on the import path.

    Raises `SettingError` about `reward.length_penalty` if there is no such function, and so does what it returns when it
    is called and the user's function fails, or returns anything but one finite number per completion.
    """
    function = load_function(path, setting="reward.length_penalty", parameters=("lengths", "max_new_tokens"))

    def length_penalty(lengths: NDArray[np.int64], max_new_tokens: int) -> NDArray[np.float64]:
        try:
            # A copy: the user's function may change what it is given.
            penalties = np.asarray(function(lengths.copy(), max_new_tokens), dtype=np.float64)
        except Exception as error:  # the user's code
            raise _setting_error(path, f"it raised {located(error)}", "Correct the function.") from error
        if penalties.shape != lengths.shape:
            problem = f"it returned the shape {penalties.shape} for lengths of the shape {lengths.shape}"
            raise _setting_error(path, problem, "Return one number per completion.")
        wrong = np.flatnonzero(~np.isfinite(penalties))
        if wrong.size:
            problem = f"it returned {penalties[wrong[0]]} for a completion of {lengths[wrong[0]]} tokens"
            raise _setting_error(path, problem, "Return finite numbers.")
        return penalties

    return length_penalty


def _setting_error(path: str, problem: str, cure: str) -> SettingError:
    return SettingError("reward.length_penalty", path, problem, cure)


def _mean_and_std(
    rewards: NDArray[np.float64], population: Population, running: RunningMoments
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Of each reward's population, both in a shape that goes with `rewards`; 0 for none."""
    match population:
        case "none":
            return np.zeros(()), np.zeros(())
        case "running":
            return np.array(running.mean), np.array(running.std)
        case "group":
            of_population = rewards
        case "batch":
            of_population = rewards.reshape(1, -1)
    mean, squares = _moments(of_population)
    return mean, np.sqrt(squares / max(1, of_population.shape[1] - 1))


def _moments(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Mean and summed squared distances from it of each row, both `[rows, 1]`."""
    # Relative to the first of a row: the mean of equal numbers is not always that number, but that of zeros is 0.
    first = values[:, :1]
    mean = first + (values - first).mean(axis=1, keepdims=True)
    return mean, np.square(values - mean).sum(axis=1, keepdims=True)
