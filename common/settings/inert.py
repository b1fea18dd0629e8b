"""Settings that nothing reads beside the others of a config.

A run's folder holds every setting, so nobody may have given a setting that is at its default: only other values are refused.
"""

from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from offbeat.common.errors import SettingError, collect_errors
from offbeat.common.settings.config import Config, EnvironmentSection, JudgeSection, TaskSection, environment_of
from offbeat.common.settings.learning_sections import CriticSection
from offbeat.common.settings.loading import setting_value

_DEFAULTS = Config()


class _Reader(NamedTuple):
    """The only reader of some settings."""

    settings: tuple[str, ...]
    is_there: bool
    """The config has the reader."""
    absence: str
    """The reason why there is no reader, told when there is none."""
    cure: str
    """The settings that would make one."""


def check_inert(config: Config) -> None:
    """Raise `SettingError` for all settings that are not at their defaults and change nothing; `config` is complete."""
    collect_errors(
        partial(_check_default, config, setting, reader)
        for reader in _readers(config)
        if not reader.is_there
        for setting in reader.settings
    )


def _check_default(config: Config, setting: str, reader: _Reader) -> None:
    value = setting_value(config, setting)
    if value != setting_value(_DEFAULTS, setting):
        raise SettingError(setting, value, f"nothing reads it, because {reader.absence}", f"Remove it, or {reader.cure}.")


def _readers(config: Config) -> Iterator[_Reader]:
    yield from _readers_of_tasks(config.task)
    if config.task.environment:
        yield _Reader(
            ("environment.arguments",),
            environment_of(config).is_external,
            "the function of task.environment runs in offbeat's own Python",
            "set environment.python or environment.requirements",
        )
    yield _Reader(
        tuple(f"judge.{name}" for name in JudgeSection.__struct_fields__),
        bool(config.judge.url),
        "judge.url names no server",
        "set judge.url",
    )
    yield _Reader(
        ("actor.leave_within_s",),
        config.actor.leave == "finish",
        "actor.leave = 'return' finishes nothing",
        'set actor.leave="finish"',
    )
    yield _Reader(
        ("weights.delta",),
        config.weights.backend == "pull",
        f"weights.backend = {config.weights.backend!r} broadcasts whole versions",
        'set weights.backend="pull"',
    )
    yield _Reader(("lora.alpha",), bool(config.lora.rank), "lora.rank = 0 trains all weights", "set lora.rank")
    yield _Reader(
        ("scale.min", "scale.max", "scale.max_actor_hours"),
        config.scale.auto,
        "scale.auto = false changes no number",
        "set scale.auto=true",
    )
    yield from _readers_of_objectives(config)


def _readers_of_tasks(task: TaskSection) -> Iterator[_Reader]:
    yield _Reader(
        tuple(f"environment.{name}" for name in EnvironmentSection.__struct_fields__),
        bool(task.environment),
        "task.environment names no function",
        "set task.environment",
    )
    yield _Reader(
        (
            *(f"task.{name}" for name in ("reward", "reward_weights", "reward_timeout_s")),
            *(f"actor.reward_{name}" for name in ("workers", "concurrency", "calls_per_s", "batch_size")),
        ),
        not task.environment,
        "the function of task.environment returns the reward",
        "remove task.environment",
    )


def _readers_of_objectives(config: Config) -> Iterator[_Reader]:
    loss, advantage, kl = config.loss, config.advantage, config.kl
    yield _Reader(
        ("advantage.turns",), bool(config.task.environment), "task.environment names no function", "set task.environment"
    )
    baseline = f"advantage.baseline = {advantage.baseline!r}"
    has_critic = advantage.baseline == "critic"
    yield _Reader(
        ("advantage.gamma",),
        has_critic or kl.reward_coef > 0,
        f"{baseline} has one advantage for a completion, and kl.reward_coef = 0",
        'set advantage.baseline="critic" or kl.reward_coef',
    )
    yield _Reader(
        ("advantage.gae_lambda", *(f"critic.{name}" for name in CriticSection.__struct_fields__)),
        has_critic,
        f"{baseline} has no critic",
        'set advantage.baseline="critic"',
    )
    trunk = config.critic.trunk
    yield _Reader(
        tuple(f"critic.{name}" for name in ("updates_per_step", "learning_rate_factor", "alone_until", "freeze_attention")),
        not has_critic or trunk == "own",
        'critic.trunk = "shared" is trained by the policy\'s optimizer',
        'set critic.trunk="own"',
    )
    alone_until = config.critic.alone_until
    yield _Reader(
        ("train.warmup_steps",),
        config.train.warmup_steps > alone_until,
        f"critic.alone_until = {alone_until} keeps the policy's learning rate at 0 until the warm-up is over",
        f"set it above {alone_until}",
    )
    yield _Reader(
        ("critic.loss_coef",),
        trunk == "shared",
        'critic.trunk = "own" has an optimizer of its own, whose steps do not depend on a factor of the loss',
        'set critic.trunk="shared", or critic.learning_rate_factor',
    )
    yield _Reader(
        ("reward.overlong_penalty",),
        bool(config.reward.overlong_buffer),
        "reward.overlong_buffer = 0 punishes no completion",
        "set reward.overlong_buffer",
    )
    yield _Reader(
        ("loss.dual_clip",), not loss.function, "loss.function takes the place of the objective", "remove loss.function"
    )
    yield _Reader(
        ("kl.estimator",),
        kl.loss_coef > 0 or kl.reward_coef > 0,
        "kl.loss_coef = 0 and kl.reward_coef = 0 compute no KL",
        "set one of them",
    )
