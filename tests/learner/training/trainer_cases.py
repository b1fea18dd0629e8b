"""Groups and settings that trainer tests share with each other and with their rank processes."""

from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from offbeat.common.settings.completion import complete
from offbeat.common.settings.config import Config, ModelSection
from offbeat.common.settings.learning_sections import (
    AdvantageSection,
    CriticSection,
    KlSection,
    LoraSection,
    LossSection,
    RewardSection,
    TrainSection,
)
from offbeat.learner.leases.groups import Group, Rollout
from offbeat.protocols.payload import Segment

VOCABULARY = range(4, 44)
"""Token ids of the tiny models' alphabet."""

SGD = {"optimizer": {"type": "SGD", "params": {"lr": 1e9}}}
"""`train.deepspeed` under which weights show gradients: Adam's first step is the gradient's sign, rounding noise included.
The learning rate is still `train.learning_rate`."""

APART = ("stage-2", "stage-3")
"""Cases of `RANK_CASES` in which two ranks do not see each other's files, as on two machines."""


def make_groups(num_groups: int, *, group_size: int = 4, seed: int = 0, policy_version: int = 0) -> list[Group]:
    """Return random groups: prompts of 2 to 8 tokens, completions of 1 to 12, behavior log-probs near the uniform policy's."""
    random = np.random.default_rng(seed)
    return [
        Group(
            lease_id=index,
            prompt_id=index,
            prompt_token_ids=_tokens(random, int(random.integers(2, 9))),
            rollouts=tuple(_make_rollout(random, policy_version) for _ in range(group_size)),
            actor="actor-0",
            generate_s=0.1,
        )
        for index in range(num_groups)
    ]


def _make_rollout(random: np.random.Generator, policy_version: int) -> Rollout:
    length = int(random.integers(1, 13))
    return Rollout(
        token_ids=_tokens(random, length),
        behavior_logprobs=(-3.8 + 0.1 * random.standard_normal(length)).astype(np.float32),
        reward=float(random.integers(0, 4)),
        finish_reason="stop",
        segments=(Segment(policy_version, 0),),
        reward_parts={"format": 1.0},
    )


def _tokens(random: np.random.Generator, length: int) -> np.ndarray:
    return random.choice(np.array(VOCABULARY, dtype=np.int32), size=length)


def make_config(
    model: Path,
    *,
    dtype: Literal["float32", "bfloat16"] = "float32",
    loss: dict[str, Any] | None = None,
    reward: RewardSection | None = None,
    advantage: AdvantageSection | None = None,
    kl: KlSection | None = None,
    lora: LoraSection | None = None,
    critic: CriticSection | None = None,
    **train: Any,
) -> Config:
    """Return a config of 3 groups a step, a clip band of 0.5 and small micro-batches, unless overridden."""
    settings: dict[str, Any] = {"groups_per_step": 3, "micro_batch_tokens": 64, "learning_rate": 0.1, **train}
    return complete(
        Config(
            model=ModelSection(path=str(model), dtype=dtype),
            loss=LossSection(**{"clip_low": 0.5, "clip_high": 0.5, **(loss or {})}),
            reward=reward or RewardSection(),
            advantage=advantage or AdvantageSection(),
            kl=kl or KlSection(),
            lora=lora or LoraSection(),
            critic=critic or CriticSection(),
            train=TrainSection(**settings),
        )
    )


EXTRAS: dict[str, Any] = {
    "loss": {"objective": "m2po(1e-3)", "clip_low": None, "clip_high": None},
    "advantage": AdvantageSection(whiten=True, clip=1.5),
    "kl": KlSection(loss_coef=0.1, reward_coef=0.01),
    "on_policy_ess": 1.0,
}
"""Arguments of `make_config` that make ranks exchange tensors before the loss."""


class RankCase(NamedTuple):
    """Arguments of `make_config` for two ranks that take the steps of one."""

    of_step: dict[str, Any]
    """Those that one rank has too."""
    of_ranks: dict[str, Any]
    """Those that change how the steps are computed, not which."""


OWN_CRITIC = CriticSection(
    trunk="own", updates_per_step=2, learning_rate_factor=5, freeze_attention=True, target_lambda=1.0, value_clip=0.2
)
SAO: dict[str, Any] = {
    "loss": {"objective": "sao", "clip_low": 0.3, "clip_high": 5.0},
    "advantage": AdvantageSection(baseline="critic", gae_lambda="by_length"),
    "critic": OWN_CRITIC,
}
"""Arguments of `make_config` for SAO, whose critic has a trunk of its own."""

_PERSISTING_NOTHING = {**SGD, "zero_optimization": {"stage3_param_persistence_threshold": 0}}

RANK_CASES = {
    "stage-0": RankCase({"loss": {"anchor": "group"}}, {"zero_stage": 0}),
    "stage-1": RankCase(EXTRAS, {"zero_stage": 1}),
    "stage-2": RankCase(
        {"loss": {"objective": "grpo", "anchor": "interpolated", "correction": "token_tis"}}, {"zero_stage": 2}
    ),
    "stage-3": RankCase(EXTRAS, {"zero_stage": 3}),
    "own critic": RankCase(SAO, {"zero_stage": 2}),
    "own critic, stage 3": RankCase(SAO, {"zero_stage": 3, "deepspeed": _PERSISTING_NOTHING}),
    "shared packs": RankCase(EXTRAS, {"sequence_parallel_size": 2}),
    "shared packs, stage 3": RankCase(
        {},
        {
            "zero_stage": 3,
            "deepspeed": _PERSISTING_NOTHING,
            "sequence_parallel_size": 2,
            "activation_checkpointing": "offload",
        },
    ),
}

_SMALL_BUFFERS = {
    "reduce_bucket_size": 100_000,
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 1,
    "stage3_prefetch_bucket_size": 1,
}
MEMORY_CASES: dict[str, dict[str, Any]] = {
    f"{dtype}, stage {stage}": {"dtype": dtype, "zero_stage": stage, "deepspeed": {"zero_optimization": _SMALL_BUFFERS}}
    for dtype, stage in (("bfloat16", 1), ("bfloat16", 2), ("bfloat16", 3), ("float32", 0), ("float32", 1))
}
"""Arguments of `make_config` for two ranks whose memory is counted, with buffers that are small beside the tiny model."""

GATHERED_NUMEL = 40_000
"""Numbers gathered at once there: more than any weight of the tiny model has, and an eighth of all."""
