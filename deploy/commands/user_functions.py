"""The check of the functions that a config names: rewards and penalties of the user's own."""

from offbeat.actor.reward_functions import load_reward
from offbeat.common.config import Config
from offbeat.learner.objectives.reward_shaping import load_length_penalty


def check_functions(config: Config) -> None:
    """Raise `SettingError` for a function that cannot be imported, before any service starts.

    On other machines actor and learner check their own.
    """
    load_reward(config.task.reward)
    if config.reward.length_penalty:
        load_length_penalty(config.reward.length_penalty)
