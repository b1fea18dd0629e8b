"""The objective's own values of open settings, and contradictions between settings."""

import dataclasses
import itertools
import math
import re
from pathlib import Path
from typing import get_args

import pytest

from offbeat.common.errors import SettingError
from offbeat.common.settings.checks import check
from offbeat.common.settings.completion import complete
from offbeat.common.settings.corrections import CORRECTIONS, CorrectionName, parse_corrections, write_corrections
from offbeat.common.settings.loading import load, load_text, resolved_toml
from offbeat.common.settings.objective_checks import objective_warnings
from offbeat.common.settings.objectives import DEFAULTS, defaults_of, objective_parameters, parse_objective

GOOD = ("model.path=some/model", "data.train_data=train.jsonl")


def test_every_correction_has_its_defaults() -> None:
    assert set(CORRECTIONS) == set(get_args(CorrectionName))
    for name, own in CORRECTIONS.items():
        (choice,) = parse_corrections(load(None, [f"loss.correction={name}"]).loss.correction)
        assert choice == (name, own.low, own.high)


@pytest.mark.parametrize(
    ("given", "completed"),
    [
        ("none", "none"),
        ("token_tis", "token_tis(0, 2)"),
        ("token_tis(3)", "token_tis(0, 3)"),
        ("token_tis (0.5,3)", "token_tis(0.5, 3)"),
        ("geometric_mask+token_tis(1e+2)", "geometric_mask(0.999, 1.001) + token_tis(0, 100)"),
        ("opsm(2e-3) + my.code:own + icepop", "opsm(0.002) + my.code:own + icepop(0.5, 5)"),
    ],
)
def test_corrections_are_written_out_with_their_bounds(given: str, completed: str) -> None:
    assert load(None, [f"loss.correction={given}"]).loss.correction == completed
    assert load(None, [f"loss.correction={completed}"]).loss.correction == completed
    assert write_corrections(parse_corrections(given)) == completed


@pytest.mark.parametrize(
    "given",
    ["", "token", "token_tis(", "token_tis()", "opsm(1, 2, 3)", "opsm(-1)", "opsm(nan)", "opsm(1)(2)", "opsm + none", "opsm +"],
)
def test_text_that_names_no_corrections_is_refused(given: str) -> None:
    with pytest.raises(SettingError) as raised:
        load(None, [f"loss.correction={given}"])
    assert raised.value.setting == "loss.correction"


@pytest.mark.parametrize(
    ("given", "completed", "parameters"),
    [
        ("gspo", "gspo", {}),
        ("sapo", "sapo(1, 1.05)", {"tau_positive": 1.0, "tau_negative": 1.05}),
        ("sapo (2,1e-1)", "sapo(2, 0.1)", {"tau_positive": 2.0, "tau_negative": 0.1}),
        ("ce_gppo(0, 0)", "ce_gppo(0, 0)", {"preserved_below": 0.0, "preserved_above": 0.0}),
        ("minirl", "minirl(5)", {"weight_cap": 5.0}),
        ("aspo(2.5)", "aspo(2.5)", {"weight_cap": 2.5}),
        ("m2po", "m2po(0.04)", {"m2_threshold": 0.04}),
        (
            "vespo",
            "vespo(2, 3, 3, 2)",
            {"k_positive": 2.0, "lambda_positive": 3.0, "k_negative": 3.0, "lambda_negative": 2.0},
        ),
    ],
)
def test_objective_is_written_out_with_its_parameters(given: str, completed: str, parameters: dict[str, float]) -> None:
    loss = load(None, [f"loss.objective={given}"]).loss
    assert (loss.objective, objective_parameters(given)) == (completed, parameters)
    assert load(None, [f"loss.objective={completed}"]).loss == loss
    assert defaults_of(given) is DEFAULTS[completed.partition("(")[0]]


@pytest.mark.parametrize(
    ("given", "parts"),
    [
        ("sappo", ["sappo is not a known name", "Did you mean sapo?"]),
        ("x", ["x is not a known name", "gspo, gspo_token"]),
        ("gspo(0.1)", ["gspo has no parameters", "Write gspo."]),
        ("sapo(1)", ["tau_positive, tau_negative", "gets 1", "sapo or sapo(1, 1.05)"]),
        ("sapo(1, two)", ["two is not a number", "Write numbers"]),
        ("sapo(1, -2)", ["-2 is not a number of at least 0"]),
        ("sapo(1, inf)", ["inf is not a number"]),
        ("sapo(1,)", ["nothing is not a number"]),
        ("sapo(0, 1)", ["tau_positive is 0", "above 0", "sapo(1, 1.05)"]),
        ("sapo(1, 1.05", ["NAME(NUMBER, NUMBER)"]),
    ],
)
def test_objective_that_is_none_is_refused_with_the_reason_and_the_cure(given: str, parts: list[str]) -> None:
    with pytest.raises(SettingError) as raised:
        load(None, [f"loss.objective={given}"])
    assert raised.value.setting == "loss.objective"
    for part in [f'loss.objective = "{given}"', *parts]:
        assert part in str(raised.value)


@pytest.mark.parametrize("objective", DEFAULTS)
def test_every_objective_passes_by_itself_and_completing_twice_changes_nothing(objective: str) -> None:
    config = load(None, [*GOOD, f"loss.objective={objective}"])
    check(config)
    assert complete(config) == config


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], (0.05, 0.05, "seq-mean-token-mean", "group", True, "count", 0)),
        (["loss.anchor=decoupled"], (3e-4, 4e-4, "seq-mean-token-mean", "group", True, "count", 0)),
        (["loss.objective=gspo_token"], (0.05, 0.05, "seq-mean-token-mean", "group", True, "count", 0)),
        (["loss.objective=grpo"], (0.2, 0.2, "seq-mean-token-mean", "group", True, "count", 0)),
        (["loss.objective=dr_grpo"], (0.2, 0.2, "seq-mean-token-sum-norm", "group", False, "count", 0)),
        (["loss.objective=dapo"], (0.2, 0.28, "token-mean", "group", True, "drop", 200)),
        (["loss.objective=sapo"], (None, None, "seq-mean-token-mean", "group", True, "count", 0)),
        (["loss.objective=cispo"], (1.0, 4.0, "token-mean", "group", True, "count", 0)),
        (["loss.objective=luspo"], (0.05, 0.05, "seq-mean-token-sum", "group", True, "count", 0)),
        (["loss.objective=luspo", "loss.anchor=proximal"], (2e-3, 2.5e-3, "seq-mean-token-sum", "group", True, "count", 0)),
        (
            ["loss.objective=ctpo"],
            (pytest.approx(1 - math.exp(-0.025)), pytest.approx(math.exp(0.05) - 1), "token-mean", "group", True, "count", 0),
        ),
        (
            ["loss.objective=gmpo"],
            (
                pytest.approx(1 - math.exp(-0.4)),
                pytest.approx(math.exp(0.4) - 1),
                "seq-mean-token-mean",
                "group",
                True,
                "count",
                0,
            ),
        ),
        (["loss.objective=ce_gppo"], (0.2, 0.2, "token-mean", "group", True, "count", 0)),
        (["loss.objective=sapo_sequence"], (None, None, "seq-mean-token-mean", "group", True, "count", 0)),
        (["loss.objective=aspo"], (0.2, 0.2, "token-mean", "group", True, "count", 0)),
        (["loss.objective=topr"], (None, None, "seq-mean-token-sum", "group", False, "count", 0)),
        (["loss.objective=vespo"], (None, None, "token-mean", "group", True, "count", 0)),
        (["loss.objective=minirl"], (0.2, 0.27, "seq-mean-token-sum", "group", False, "count", 0)),
        (["loss.objective=dppo_tv"], (0.15, 0.15, "seq-mean-token-sum-norm", "group", False, "count", 0)),
        (["loss.objective=dppo_kl"], (0.05, 0.05, "seq-mean-token-sum-norm", "group", False, "count", 0)),
        (["loss.objective=m2po"], (None, None, "token-mean", "group", True, "count", 0)),
        (["loss.objective=reinforce"], (None, None, "seq-mean-token-mean", "group", True, "count", 0)),
        (["loss.objective=sao"], (0.3, 5.0, "token-mean", "critic", False, "count", 0)),
        (["loss.objective=ppo"], (0.2, 0.2, "token-mean", "critic", False, "count", 0)),
        (["advantage.baseline=leave_one_out"], (0.05, 0.05, "seq-mean-token-mean", "leave_one_out", False, "count", 0)),
    ],
)
def test_what_is_left_open_is_the_papers(overrides: list[str], expected: tuple[object, ...]) -> None:
    config = load(None, ["rollout.max_new_tokens=1000", *overrides])
    loss, advantage = config.loss, config.advantage
    clip = (loss.clip_low, loss.clip_high)
    found = (*clip, loss.aggregation, advantage.baseline, advantage.divide_by_std, loss.zero_variance)
    assert (*found, config.reward.overlong_buffer) == expected


def test_what_is_set_wins() -> None:
    overrides = ["loss.objective=dapo", "loss.clip_high=0.3", "loss.zero_variance=count", "reward.overlong_buffer=7"]
    config = load(None, [*overrides, "loss.aggregation=seq-mean-token-mean", "advantage.divide_by_std=false"])
    assert (config.loss.clip_low, config.loss.clip_high, config.loss.zero_variance) == (0.2, 0.3, "count")
    assert (config.reward.overlong_buffer, config.loss.aggregation) == (7, "seq-mean-token-mean")
    assert config.advantage.divide_by_std is False


@pytest.mark.parametrize("objective", ["gspo", "gspo_token", "luspo"])
def test_band_of_a_run_narrows_with_the_length_between_its_limits(objective: str) -> None:
    def band(max_new_tokens: int, *overrides: str) -> tuple[float | None, float | None]:
        config = load(None, [f"loss.objective={objective}", f"rollout.max_new_tokens={max_new_tokens}", *overrides])
        assert config.loss.clip_by == "run"
        return config.loss.clip_low, config.loss.clip_high

    # 0.3 / (0.4 N) up to 183 tokens, 0.035 / sqrt(0.4 N) beyond.
    lengths = (1, 8, 15, 16, 100, 152, 183, 185, 1024, 32768)
    widths = [0.05, 0.05, 0.05, 0.047, 0.0075, 0.0049, 0.0041, 0.0041, 0.0017, 0.00031]
    assert [band(length, "loss.clip_by=run") for length in lengths] == [(width, width) for width in widths]
    assert {
        band(length, "loss.clip_by=run", "loss.anchor=interpolated", "loss.correction=token_tis") for length in (8, 100)
    } == {
        (0.05, 0.05),
        (0.0075, 0.0075),
    }
    assert band(8, "loss.anchor=proximal", "train.steps_per_batch=2") == DEFAULTS[objective].band
    assert band(100, "loss.clip_low=0.3") == (0.3, 0.0075)


@pytest.mark.parametrize(
    ("overrides", "clip_by"),
    [
        ([], "own_length"),
        (["loss.objective=luspo", "loss.anchor=interpolated", "loss.correction=token_tis"], "own_length"),
        (["loss.clip_high=0.1"], "run"),
        (["loss.clip_by=own_length", "loss.clip_high=0.1"], "own_length"),
        (["loss.anchor=proximal"], "run"),
        (["loss.anchor=group"], "run"),
        (["loss.objective=grpo"], "run"),
        (["loss.function=my:loss"], "run"),
    ],
)
def test_band_goes_by_the_completions_own_length_where_its_ratio_has_engine_noise(overrides: list[str], clip_by: str) -> None:
    assert load(None, overrides).loss.clip_by == clip_by


@pytest.mark.parametrize("max_new_tokens", [1, 8, 100, 1024, 32768])
def test_default_band_is_not_warned_of(max_new_tokens: int) -> None:
    config = load(None, [*GOOD, f"rollout.max_new_tokens={max_new_tokens}"])
    assert not [warning for warning in objective_warnings(config) if "numerical noise" in warning]


def test_own_loss_has_no_clip_band_and_the_objectives_other_values() -> None:
    loss = load(None, ["loss.function=my:loss", "loss.objective=dapo"]).loss
    assert (loss.clip_low, loss.clip_high, loss.aggregation, loss.zero_variance) == (None, None, "token-mean", "drop")


def test_constant_length_is_that_of_the_longest_completion() -> None:
    config = load(None, ["loss.objective=dr_grpo", "rollout.max_new_tokens=123"])
    assert config.loss.aggregation_length == 123
    assert load(None, ["loss.aggregation_length=9", "loss.objective=dr_grpo"]).loss.aggregation_length == 9


def test_values_that_were_filled_in_are_written_to_the_runs_config() -> None:
    text = resolved_toml(load(None, ["loss.objective=dapo", "loss.correction=icepop", "critic.value_clip=none"]))
    for line in ("clip_high = 0.28", 'aggregation = "token-mean"', 'correction = "icepop(0.5, 5)"', 'value_clip = "none"'):
        assert line in text.splitlines()


@pytest.mark.parametrize(("before", "after"), [("gspo", "grpo"), ("grpo", "dapo"), ("dapo", "dr_grpo"), ("dr_grpo", "gspo")])
def test_objective_in_a_runs_config_is_replaced_with_all_its_values_and_none_of_the_users(before: str, after: str) -> None:
    own = ("loss.dual_clip=4", "reward.overlong_buffer=7")
    written = resolved_toml(load(None, [f"loss.objective={before}", *own]))
    assert load_text(written, [f"loss.objective={after}"]) == load(None, [f"loss.objective={after}", *own])


@dataclasses.dataclass
class Refusal:
    """Overrides that contradict each other, and texts that the error must contain."""

    overrides: list[str]
    parts: list[str]


TO_GO = "advantage.turns=to_go"
REFUSALS = [
    Refusal(["rollout.group_size=1"], ["rollout.group_size = 1", "nothing would be learned", 'advantage.baseline="zero"']),
    # `none` is the default: the group's mean.
    Refusal(["rollout.group_size=1", "advantage.baseline=none"], ["with advantage.baseline = 'group'"]),
    Refusal(["loss.objective=sao", "rollout.group_size=1", "reward.norm_mean=group"], ['reward.norm_mean = "group"', "is 0"]),
    Refusal(["loss.anchor=proximal"], ['loss.anchor = "proximal"', "always 1", "steps_per_batch=2"]),
    Refusal(["loss.anchor=proximal", "loss.objective=reinforce", "train.steps_per_batch=2"], ["no importance ratio"]),
    Refusal(["loss.anchor=decoupled"], ['loss.anchor = "decoupled"', "token_tis"]),
    Refusal(
        ["loss.routing_replay=sampled", "task.environment=mine:play"],
        ["with task.environment", 'loss.routing_replay="recomputed"'],
    ),
    Refusal(["loss.routing_replay=recomputed"], ['loss.anchor = "behavior" recomputes nothing', 'loss.routing_replay="off"']),
    Refusal(
        [
            "loss.routing_replay=recomputed",
            "loss.anchor=decoupled",
            "loss.correction=token_tis",
            "train.sequence_parallel_size=2",
        ],
        ["a part of the tokens only", "train.sequence_parallel_size=1"],
    ),
    Refusal(["loss.anchor=group", "loss.objective=grpo"], ['loss.anchor = "group"', 'loss.objective="gspo"']),
    Refusal(["loss.anchor=group", "loss.function=my:loss"], ['loss.anchor = "group"', "without loss.function"]),
    Refusal(["loss.anchor=group", "loss.correction=sequence_tis"], ["corrects for staleness", 'loss.anchor="behavior"']),
    Refusal(["loss.anchor=interpolated"], ['loss.anchor = "interpolated"', "token_tis"]),
    Refusal(["loss.anchor=interpolated", "loss.objective=reinforce"], ["no importance ratio", 'loss.anchor="behavior"']),
    Refusal(["loss.anchor=interpolated", "loss.objective=m2po"], ["second moment", 'loss.anchor="behavior"']),
    Refusal(
        ["loss.anchor=interpolated", "loss.correction=token_tis", "loss.normalize_correction=true"],
        ["their mean is not known in advance"],
    ),
    Refusal(["loss.anchor=proximal", "loss.correction=icepop", "train.steps_per_batch=2"], ['loss.anchor="decoupled"']),
    Refusal(["loss.objective=sapo", "loss.clip_low=0.1"], ["loss.clip_low = 0.1", "does not clip"]),
    Refusal(["loss.objective=reinforce", "loss.clip_high=0.1"], ["loss.clip_high = 0.1", "does not clip"]),
    Refusal(["loss.clip_low=1.5"], ["loss.clip_low = 1.5", "no ratio is below 0"]),
    Refusal(["loss.objective=grpo", "loss.clip_by=own_length"], ['loss.clip_by = "own_length"', "gspo_token and luspo"]),
    Refusal(
        ["loss.anchor=decoupled", "loss.correction=token_tis", "loss.clip_by=own_length"],
        ['loss.clip_by = "own_length"', 'loss.anchor="behavior"'],
    ),
    Refusal(
        ["loss.objective=cispo", "loss.dual_clip=3"],
        ["loss.dual_clip = 3.0", "gspo, gspo_token, grpo, dr_grpo, dapo, luspo, ce_gppo, ppo"],
    ),
    Refusal(["loss.objective=sapo", "loss.dual_clip=3"], ["loss.dual_clip = 3.0", "'sapo(1, 1.05)' has none"]),
    Refusal(["loss.objective=reinforce", "loss.dual_clip=3"], ["loss.dual_clip = 3.0", "'reinforce' has none"]),
    *(
        Refusal(
            ["loss.function=my:loss", f"loss.objective={objective}", f"loss.{name}=0.5"],
            [f"loss.{name} = 0.5", "loss.function = 'my:loss'", "Remove it"],
        )
        for objective, name in (("gspo", "clip_low"), ("grpo", "clip_high"), ("sapo", "clip_low"))
    ),
    Refusal(["loss.aggregation_length=9"], ["loss.aggregation_length = 9", "seq-mean-token-sum-norm"]),
    Refusal(["loss.correction=opsm(0.1, 0.2)"], ['loss.correction = "opsm(0.1, 0.2)"', "no lower bound"]),
    Refusal(["loss.correction=icepop(6, 5)"], ["the bounds of icepop leave nothing between them"]),
    Refusal(["loss.correction=k3_mask(0)"], ["the bounds of k3_mask leave nothing between them"]),
    Refusal(["loss.correction=icepop + sequence_tis"], ["icepop and sequence_tis", "count twice"]),
    Refusal(["loss.correction=opsm + opsm(1)"], ["there twice"]),
    Refusal(["loss.anchor=decoupled", "loss.correction=opsm", "loss.normalize_correction=true"], ["no weights to divide"]),
    Refusal(["loss.correction=token_tis", "loss.normalize_correction=true"], ['loss.anchor="decoupled"']),
    Refusal(["data.curriculum=mine:f"], ["no field names the task of a row", "Set data.task_field"]),
    Refusal(["evaluation.function=mine:f", "data.eval_data=eval.jsonl"], ["there is no evaluation", "Set evaluation.interval"]),
    Refusal(
        ["loss.objective=m2po", "loss.anchor=decoupled", "loss.correction=token_tis"],
        ['loss.anchor = "decoupled"', 'loss.anchor="behavior"'],
    ),
    Refusal(["loss.objective=m2po", "loss.clip_low=0.2"], ["loss.clip_low = 0.2", "does not clip"]),
    Refusal(["loss.function=my:loss", "loss.objective=minirl(3)"], ['"minirl(3)"', "would read the parameters", '"minirl"']),
    *(
        Refusal(
            [f"loss.objective={objective}", "loss.anchor=decoupled", "loss.correction=token_tis"],
            ['loss.anchor = "decoupled"', f'"{objective}" has pi / mu as its weight already', 'loss.anchor="proximal"'],
        )
        for objective in ("minirl(5)", "dppo_tv(20)")
    ),
    Refusal(["loss.objective=minirl", "loss.function=my:loss", "loss.anchor=proximal"], ["always 1", "steps_per_batch=2"]),
    Refusal(["advantage.baseline=zero", "advantage.divide_by_std=true"], ["advantage.divide_by_std = true", "whiten"]),
    Refusal(
        ["loss.objective=sao", "rollout.group_size=1", "advantage.baseline=group"],
        ["rollout.group_size = 1", "advantage.baseline = 'group'"],
    ),
    Refusal(
        ["loss.objective=sao", "rollout.group_size=1", "loss.zero_variance=drop"],
        ['zero_variance = "drop"', "every group would be dropped", '"count"'],
    ),
    Refusal(
        ["loss.objective=sao", "critic.trunk=own", "train.sequence_parallel_size=2", "launch.learner_processes=2"],
        ['critic.trunk = "own"', "sequence_parallel_size"],
    ),
    Refusal(["advantage.baseline=critic"], ['loss.objective = "gspo"', "critic", "gspo_token"]),
    Refusal([TO_GO], ['loss.objective = "gspo"', 'advantage.turns = "to_go"', "gspo_token"]),
    Refusal(["advantage.turns=branch", "reward.clip=2"], ["reward.clip = 2.0", 'advantage.turns = "branch"', "other units"]),
    Refusal(["loss.objective=ppo", TO_GO], ['advantage.baseline = "critic"', "without a critic", 'advantage.turns="sum"']),
    Refusal([TO_GO, "advantage.baseline=length_weighted"], ["length_weighted", "by their length", 'advantage.turns="sum"']),
    Refusal(["rollout.group_size=1", "advantage.baseline=length_weighted"], ["nothing would be learned"]),
    Refusal([TO_GO, "advantage.function=a:b"], ['advantage.function = "a:b"', "does not support turns"]),
    Refusal([TO_GO, "advantage.divide_by_std=true"], ["advantage.divide_by_std = true", "as loud as others"]),
    Refusal([TO_GO, "reward.norm_std=batch"], ['reward.norm_std = "batch"', "other units"]),
    Refusal([TO_GO, "reward.clip=2"], ["reward.clip = 2.0", "other units"]),
    *(
        Refusal(["kl.reward_coef=0.1", f"loss.objective={objective}"], [f'loss.objective = "{objective}"', "gspo_token"])
        for objective in ("luspo", "gmpo", "sapo_sequence(1, 1.05)")
    ),
    Refusal(["kl.reward_coef=0.1"], ['loss.objective = "gspo"', "kl.reward_coef = 0.1", "gspo_token"]),
    Refusal(["reward.overlong_buffer=1024"], ["reward.overlong_buffer = 1024", "below 1024"]),
    Refusal(["kl.loss_coef=0.1", "kl.estimator=k1"], ['kl.estimator = "k1"', "noise"]),
    Refusal(["kl.unbiased=true"], ["kl.unbiased = true", "kl.loss_coef"]),
    Refusal(["kl.reference=some/model"], ["kl.reference", "nothing uses it"]),
    Refusal(["kl.target=0.1"], ["kl.target = 0.1", "exactly one"]),
    Refusal(["kl.target=0.1", "kl.loss_coef=1", "kl.reward_coef=1", "loss.objective=grpo"], ["kl.target = 0.1", "exactly one"]),
    Refusal(['lora.target_modules=["q_proj"]'], ["lora.target_modules", "lora.rank = 0"]),
    Refusal(["lora.rank=8", "train.zero_stage=3"], ["train.zero_stage = 3", "2 or less"]),
]


@pytest.mark.parametrize("refusal", REFUSALS, ids=lambda refusal: " ".join(refusal.overrides))
def test_contradiction_is_refused_with_its_reason_and_cure(refusal: Refusal) -> None:
    with pytest.raises(SettingError) as raised:
        check(load(None, [*GOOD, *refusal.overrides]))
    for part in refusal.parts:
        assert part in str(raised.value)


@pytest.mark.parametrize(
    ("overrides", "part"),
    [
        (["loss.clip_low=3e-4"], "numerical noise alone"),
        (["loss.objective=reinforce"], "has no importance ratio"),
        (["loss.anchor=decoupled", "loss.correction=token_tis"], "the ratio is 1 at the one step"),
        (["loss.correction=token_tis"], "counts twice"),
        (["loss.anchor=decoupled", "loss.correction=opsm", "train.steps_per_batch=2"], "pi_old / mu of it is not corrected"),
        (["loss.correction=opsm + token_tis"], "counts twice"),
        (["loss.objective=minirl", "loss.anchor=proximal"], "only the objective's weight pi / mu acts"),
    ],
)
def test_what_is_allowed_and_easily_misread_is_said_aloud(overrides: list[str], part: str) -> None:
    (warning,) = check(load(None, [*GOOD, *overrides]))
    assert part in warning


@pytest.mark.parametrize(
    "overrides",
    [
        ["loss.anchor=proximal", "train.steps_per_batch=2"],
        ["loss.objective=m2po(0.1)", "train.steps_per_batch=2"],
        ["loss.objective=reinforce", "loss.correction=token_tis"],
        ["loss.objective=minirl(3)", "loss.anchor=proximal", "train.steps_per_batch=4"],
        ["loss.objective=dppo_kl", "loss.clip_low=0.01", "loss.correction=opsm"],
        ["loss.correction=opsm"],
        [
            "loss.anchor=decoupled",
            "loss.correction=k2_mask + token_tis",
            "loss.normalize_correction=true",
            "train.steps_per_batch=2",
        ],
        ["loss.anchor=decoupled", "loss.correction=opsm + my:weights", "train.steps_per_batch=2"],
        ["loss.clip_low=3e-4", "loss.noise_floor=measured.json"],
        ["loss.objective=grpo", "loss.dual_clip=3", "loss.clip_low=3e-4"],
        ["loss.dual_clip=1.4"],
        ["loss.function=my:loss"],
        ["loss.function=my:loss", "loss.objective=dapo", "loss.zero_variance=count"],
        ["loss.objective=gspo_token", "loss.dual_clip=1.4"],
        ["loss.aggregation=prompt-mean-token-mean", "advantage.baseline=length_weighted", "advantage.divide_by_std=true"],
        ["reward.norm_mean=group"],
        ["reward.norm_std=running"],
        ["reward.norm_mean=group", "reward.norm_std=batch"],
        ["loss.objective=gspo_token", "advantage.baseline=critic"],
        ["loss.objective=gspo_token", TO_GO, "task.environment=my_task:play", "reward.norm_mean=batch"],
        ["rollout.group_size=1", "loss.objective=ppo"],
        ["kl.loss_coef=0.1", "kl.estimator=k1", "kl.unbiased=true", "kl.target=0.1", "kl.reference=some/model"],
        ["lora.rank=8", 'lora.target_modules=["q_proj"]', "train.zero_stage=2"],
    ],
)
def test_what_belongs_together_passes_in_silence(overrides: list[str]) -> None:
    assert check(load(None, [*GOOD, *overrides])) == []


def table_lines(head: str, page: str = "objectives.md") -> dict[str, list[str]]:
    """Return the cells of the table of `docs/` whose heads begin like this, by the name in the first column."""
    lines = (Path(__file__).parents[3] / "docs" / page).read_text().splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith(head))
    rows = itertools.takewhile(lambda line: line.startswith("|"), lines[start + 2 :])
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    return {name.strip("`"): others for name, *others in cells}


def test_documentation_has_every_objective_and_correction_with_its_own_values() -> None:
    objectives, corrections = table_lines("| `loss.objective` | ratio"), table_lines("| `loss.correction` |")
    written = {str(parse_objective(name)): name for name in DEFAULTS}
    assert (objectives.keys(), corrections.keys()) == (written.keys(), CORRECTIONS.keys())
    for with_parameters, name in written.items():
        defaults = DEFAULTS[name]
        _, clip, aggregation, _ = objectives[with_parameters]
        assert aggregation == f"`{defaults.aggregation}`"
        if name == "m2po":
            assert clip.startswith("drops tokens")
        elif defaults.band is None:
            assert clip == "does not clip"
        elif name != "gspo_token":
            assert clip.startswith("by length") == defaults.is_sequence_ratio
            clip = clip.removeprefix("by length; ")
            assert clip.startswith(f"{defaults.band.low:g}, {defaults.band.high:g}")
    for name, bounds in CORRECTIONS.items():
        shown = [float(bound) for bound in corrections[name][-1].split("–")]
        assert shown == [bound for bound in bounds if bound is not None]


def test_recipes_have_every_objective_with_settings_that_belong_together() -> None:
    objectives, methods = (table_lines(f"| {head} | paper", "recipes.md") for head in ("objective", "method"))
    assert objectives.keys() == DEFAULTS.keys()
    for name, (_, settings) in (objectives | methods).items():
        config = load(None, [*GOOD, *settings.strip("`").split()])
        warnings = check(config)
        assert not warnings or (config.loss.objective == "reinforce" and "no importance ratio" in "".join(warnings)), name
        assert name in methods or parse_objective(config.loss.objective).name == name


def test_papers_of_the_recipes_are_those_that_the_code_names() -> None:
    rooms = Path(__file__).parents[3] / "learner"
    code = "".join(path.read_text() for path in sorted(rooms.rglob("*.py")))
    text = (Path(__file__).parents[3] / "docs" / "recipes.md").read_text()
    papers = set(re.findall(r"arxiv\.org/abs/(\d{4}\.\d{5})", text))
    assert len(papers) > 20
    assert {paper for paper in papers if paper not in code} == {"2505.24298", "2602.05261"}, "AReaL and LUSPO are in docs alone"
