"""Reward shaping: the task's rewards become those that advantages are made of: punished for length, normalized, clipped.

All arrays of rewards are float64 `[num_groups, group_size]`, one row per prompt.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from offbeat.common.errors import SettingError
from offbeat.common.settings.learning_sections import RewardSection
from offbeat.common.user_code.functions import load_function, mistakes_of

LengthPenalty = Callable[[NDArray[np.int64], int], NDArray[np.float64]]
"""`(lengths [completions], max_new_tokens) -> numbers to add to the rewards [completions]`, usually not above 0."""

Population = Literal["none", "group", "batch", "running"]
"""The rewards that a mean or a standard deviation is taken over: of one prompt, of the optimizer step, or of the run so far."""


class RunningMoments(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Mean and spread of a run's rewards so far; part of its checkpoint."""

    count: int = 0
    """Number of rewards."""
    mean: float = 0.0
    """Mean reward; 0 before the first."""
    squares: float = 0.0
    """Sum of the rewards' squared distances from the mean."""

    def add(self, values: NDArray[np.float64]) -> "RunningMoments":
        """Return the moments with these values of any shape added: the formula of Chan, Golub and LeVeque for two sets."""
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
    """The shaped rewards of one optimizer step."""

    rewards: NDArray[np.float64]
    """`[num_groups, group_size]`."""
    running: RunningMoments
    """The moments to continue with."""


def shape_rewards(
    rewards: NDArray[np.float64],
    lengths: NDArray[np.int64],
    settings: RewardSection,
    *,
    max_new_tokens: int,
    length_penalty: LengthPenalty | None,
    running: RunningMoments,
) -> ShapedRewards:
    """Add penalties to the task's rewards, normalize them and clip them, in this order.

    Penalties come first because they are part of the task and are stated in its units: after normalization the same penalty
    would weigh more in an easy batch than in a hard one. The clip comes last because it bounds the rewards that advantages
    are made of, even an outlier that the normalization made larger.

    `rewards`, `lengths`: `[num_groups, group_size]`, all completions of one optimizer step, of all ranks; `lengths` in
    completion tokens, of an episode those of its longest turn. `length_penalty`: the user's own, if any. Where `norm_mean` or
    `norm_std` is "running" the moments are updated before they are used, so the first step's rewards are normalized too;
    otherwise `running` is returned unchanged.
    """
    assert settings.overlong_buffer is not None, "the objective's value is filled in"
    rewards = rewards + overlong_punishment(
        lengths, max_new_tokens=max_new_tokens, buffer_tokens=settings.overlong_buffer, penalty=settings.overlong_penalty
    )
    if length_penalty is not None:
        rewards = rewards + length_penalty(lengths.reshape(-1), max_new_tokens).reshape(lengths.shape)
    if "running" in (settings.norm_mean, settings.norm_std):
        running = running.add(rewards)
    rewards = normalize_rewards(rewards, mean_of=settings.norm_mean, std_of=settings.norm_std, running=running)
    if settings.clip is not None:
        rewards = np.clip(rewards, -settings.clip, settings.clip)
    return ShapedRewards(rewards, running)


def overlong_punishment(
    lengths: NDArray[np.int64], *, max_new_tokens: int, buffer_tokens: int, penalty: float
) -> NDArray[np.float64]:
    """`penalty * clip((max_new_tokens - buffer_tokens - length) / buffer_tokens, -1, 0)`, in the shape of `lengths`.

    DAPO's soft overlong punishment, https://arxiv.org/abs/2503.14476, eq. 13, whose penalty is 1. The punishment starts at the
    first token of the buffer and reaches `-penalty` at `max_new_tokens`, for completions that were cut off there and for those
    that ended there. A buffer of 0 punishes nothing.
    """
    if not buffer_tokens:
        return np.zeros(lengths.shape)
    return penalty * np.clip((max_new_tokens - buffer_tokens - lengths) / buffer_tokens, -1.0, 0.0)


def normalize_rewards(
    rewards: NDArray[np.float64], *, mean_of: Population, std_of: Population, epsilon: float = 1e-6, running: RunningMoments
) -> NDArray[np.float64]:
    """`(R - mean) / (std + epsilon)`, the mean of one population and the unbiased standard deviation of the same or another.

    A population is each `group` by itself, the whole `batch` in `rewards`, or `running`, which the caller has updated with
    these rewards. `none` subtracts nothing, or divides by nothing.

    A standard deviation of 0 divides nothing: equal rewards shifted by their own mean are exactly 0. No paper defines this
    step; popular code divides by epsilon there.
    """
    mean, _ = _mean_and_std(rewards, mean_of, running)
    _, std = _mean_and_std(rewards, std_of, running)
    return (rewards - mean) / np.where(std > 0, std + epsilon, 1.0)


def load_length_penalty(path: str) -> LengthPenalty:
    """Return the user's function `module:function`, with its results checked; the current folder is on the import path.

    Raises `SettingError` about `reward.length_penalty` if there is no such function. The returned function raises the same
    error when the user's function fails, or returns anything but one finite number per completion.
    """
    function = load_function(path, setting="reward.length_penalty", parameters=("lengths", "max_new_tokens"))

    def length_penalty(lengths: NDArray[np.int64], max_new_tokens: int) -> NDArray[np.float64]:
        with mistakes_of("reward.length_penalty", path):
            # Pass a copy, because the user's function may write to its argument.
            penalties = np.asarray(function(lengths.copy(), max_new_tokens), dtype=np.float64)
        if penalties.shape != lengths.shape:
            problem = f"it returned the shape {penalties.shape} for lengths of the shape {lengths.shape}"
            raise SettingError("reward.length_penalty", path, problem, "Return one number per completion.")
        wrong = np.flatnonzero(~np.isfinite(penalties))
        if wrong.size:
            problem = f"it returned {penalties[wrong[0]]} for a completion of {lengths[wrong[0]]} tokens"
            raise SettingError("reward.length_penalty", path, problem, "Return finite numbers.")
        return penalties

    return length_penalty


def _mean_and_std(
    rewards: NDArray[np.float64], population: Population, running: RunningMoments
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return mean and standard deviation of each reward's population, both broadcastable to `rewards`; 0 for `none`."""
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
    """Return each row's mean and sum of squared distances from it, both `[rows, 1]`."""
    # Relative to the row's first value: the mean of equal numbers is not always that number, but the mean of zeros is 0.
    first = values[:, :1]
    mean = first + (values - first).mean(axis=1, keepdims=True)
    return mean, np.square(values - mean).sum(axis=1, keepdims=True)
