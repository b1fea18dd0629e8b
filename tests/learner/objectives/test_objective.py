"""Each setting chooses the function of its name, between the right policies."""

from typing import Any, cast

import pytest
import torch

from offbeat.common.settings.corrections import CORRECTIONS
from offbeat.common.settings.loading import load
from offbeat.common.settings.objectives import DEFAULTS
from offbeat.learner.objectives import corrections, losses, weighted_losses
from offbeat.learner.objectives.bands import USUAL_NOISE, ClipBand
from offbeat.learner.objectives.correction_rules import CorrectionRule, weigh
from offbeat.learner.objectives.objective import OBJECTIVES, Objective, PolicyLogprobs, StepConstants, make_objective
from tests.learner.objectives.loss_cases import inputs_of

generator = torch.Generator().manual_seed(0)
POLICY, BEHAVIOR, PROXIMAL = (-torch.rand(3, 4, generator=generator) for _ in range(3))
ADVANTAGES = torch.tensor([[1.0], [-1.0], [0.5]]).expand(3, 4)
MASK = torch.tensor([[True] * 4, [True, True, False, False], [True, False, True, True]])


def objective_of(*overrides: str) -> Objective:
    """Return the objective of these settings of the loss."""
    config = load(None, ["rollout.max_new_tokens=100", *(f"loss.{override}" for override in overrides)])
    return make_objective(config.loss)


EXPECTED = (
    {
        "gspo": lambda anchor: losses.gspo(inputs_of(POLICY, anchor, MASK, ADVANTAGES), clip_low=0.1, clip_high=0.2),
        "luspo": lambda anchor: losses.gspo(inputs_of(POLICY, anchor, MASK, ADVANTAGES), clip_low=0.1, clip_high=0.2),
        "gspo_token": lambda anchor: losses.gspo_token(
            inputs_of(POLICY, anchor, MASK, ADVANTAGES), clip_low=0.1, clip_high=0.2
        ),
        "gmpo": lambda anchor: losses.gmpo(inputs_of(POLICY, anchor, MASK, ADVANTAGES), clip_low=0.1, clip_high=0.2),
        "ctpo": lambda anchor: losses.ctpo(inputs_of(POLICY, anchor, MASK, ADVANTAGES), clip_low=0.1, clip_high=0.2),
        "ce_gppo": lambda anchor: losses.ce_gppo(
            inputs_of(POLICY, anchor, MASK, ADVANTAGES),
            clip_low=0.1,
            clip_high=0.2,
            dual_clip=None,
            preserved_below=0.75,
            preserved_above=1.0,
        ),
        "sapo": lambda anchor: losses.sapo(inputs_of(POLICY, anchor, MASK, ADVANTAGES), tau_positive=1.0, tau_negative=1.05),
        "sapo_sequence": lambda anchor: losses.sapo_sequence(
            inputs_of(POLICY, anchor, MASK, ADVANTAGES), tau_positive=1.0, tau_negative=1.05
        ),
        "aspo": lambda anchor: weighted_losses.aspo(
            inputs_of(POLICY, anchor, MASK, ADVANTAGES), clip_low=0.1, clip_high=0.2, weight_cap=3.0
        ),
        "sao": lambda anchor: weighted_losses.sao(inputs_of(POLICY, anchor, MASK, ADVANTAGES), clip_low=0.1, clip_high=0.2),
        "topr": lambda anchor: weighted_losses.topr(inputs_of(POLICY, anchor, MASK, ADVANTAGES)),
        "vespo": lambda anchor: weighted_losses.vespo(
            inputs_of(POLICY, anchor, MASK, ADVANTAGES),
            k_positive=2.0,
            lambda_positive=3.0,
            k_negative=3.0,
            lambda_negative=2.0,
        ),
        "cispo": lambda anchor: weighted_losses.cispo(inputs_of(POLICY, anchor, MASK, ADVANTAGES), clip_low=0.1, clip_high=0.2),
        "m2po": lambda anchor: losses.m2po(inputs_of(POLICY, anchor, MASK, ADVANTAGES), cutoff=0.01),
        "reinforce": lambda _: weighted_losses.reinforce(inputs_of(POLICY, POLICY, MASK, ADVANTAGES)),
    }
    | {
        name: lambda anchor, function=function, cap=cap: function(
            inputs_of(POLICY, anchor, MASK, ADVANTAGES, BEHAVIOR), clip_low=0.1, clip_high=0.2, weight_cap=cap
        )
        for name, function, cap in (
            ("minirl", weighted_losses.minirl, 5.0),
            ("dppo_tv", weighted_losses.dppo_tv, 20.0),
            ("dppo_kl", weighted_losses.dppo_kl, 20.0),
        )
    }
    | dict.fromkeys(
        ("grpo", "dr_grpo", "dapo", "ppo"),
        lambda anchor: losses.ppo_clip(
            inputs_of(POLICY, anchor, MASK, ADVANTAGES), clip_low=0.1, clip_high=0.2, dual_clip=None
        ),
    )
)


@pytest.mark.parametrize("proximal", [None, PROXIMAL], ids=["behavior", "proximal"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_objective_is_the_function_of_its_name_against_the_anchor(name: str, proximal: torch.Tensor | None) -> None:
    clip = ["clip_low=0.1", "clip_high=0.2"] if DEFAULTS[name].band else []
    logprobs = PolicyLogprobs(POLICY, BEHAVIOR, proximal)
    found = objective_of(f"objective={name}", *clip).evaluate(logprobs, MASK, ADVANTAGES, StepConstants(m2po_cutoff=0.01))
    expected = EXPECTED[name](BEHAVIOR if proximal is None else proximal)
    assert torch.equal(found.losses, expected.losses)
    assert torch.equal(found.clipped, expected.clipped)


def test_objectives_are_told_apart() -> None:
    anchors = (BEHAVIOR, POLICY + 0.3, POLICY - 0.3)
    distinct = {name: str([EXPECTED[name](anchor).losses.tolist() for anchor in anchors]) for name in EXPECTED}
    # GSPO-token is GSPO where advantages are equal along a row, and so is LUSPO; the clip's four names are one function.
    assert len(set(distinct.values())) == 17


@pytest.mark.parametrize("name", [name for name in DEFAULTS if DEFAULTS[name].dual_clip])
def test_dual_clip_caps_the_objectives_that_have_it(name: str) -> None:
    # Every ratio is at least 1, so that without the cap the losses of the negative row would be up to e times as large.
    logprobs = PolicyLogprobs(POLICY, POLICY - torch.linspace(0, 1, 12).view(3, 4), None)
    found = objective_of(f"objective={name}", "dual_clip=1.01").evaluate(logprobs, MASK, ADVANTAGES)
    assert found.losses[1, :2].tolist() == pytest.approx([1.01, 1.01])
    assert found.clipped[1].tolist() == [True, True, False, False]
    without = objective_of(f"objective={name}").evaluate(logprobs, MASK, ADVANTAGES)
    assert torch.equal(found.losses[[0, 2]], without.losses[[0, 2]])
    assert without.losses[1, :2].min() > 1.01


@pytest.mark.parametrize("proximal", [None, PROXIMAL], ids=["pi over mu", "pi_old over mu"])
@pytest.mark.parametrize("name", CORRECTIONS)
def test_correction_is_the_function_of_its_name_for_what_lies_outside_the_ratio(name: str, proximal) -> None:
    bounds = "1.1" if CORRECTIONS[cast(Any, name)].low is None else "0.9, 1.1"
    logprobs = PolicyLogprobs(POLICY, BEHAVIOR, proximal)
    evaluation = objective_of(f"correction={name}({bounds})").evaluate(logprobs, MASK, ADVANTAGES)
    found = evaluation.correction
    log_rho = torch.where(MASK, (POLICY if proximal is None else proximal) - BEHAVIOR, 0.0)
    expected = {
        "token_tis": lambda: corrections.token_tis(log_rho, MASK, low=0.9, high=1.1),
        "geometric_tis": lambda: corrections.geometric_tis(log_rho, MASK, low=0.9, high=1.1),
        "sequence_tis": lambda: corrections.sequence_tis(log_rho, MASK, low=0.9, high=1.1),
        "icepop": lambda: corrections.icepop(log_rho, MASK, low=0.9, high=1.1),
        "sequence_mask": lambda: corrections.sequence_mask(log_rho, MASK, low=0.9, high=1.1),
        "geometric_mask": lambda: corrections.geometric_mask(log_rho, MASK, low=0.9, high=1.1),
        "segment_mask": lambda: corrections.segment_mask(
            log_rho, MASK, torch.zeros(3, 4, dtype=torch.int64), low=0.9, high=1.1
        ),
        "k2_mask": lambda: corrections.k2_mask(log_rho, MASK, high=1.1),
        "k3_mask": lambda: corrections.k3_mask(log_rho, MASK, high=1.1),
        "opsm": lambda: corrections.opsm(log_rho, MASK, ADVANTAGES, threshold=1.1),
    }[name]()
    assert found is not None
    assert torch.equal(found.weights, expected)
    assert torch.equal(found.log_rho, log_rho)
    uncorrected = objective_of().evaluate(logprobs, MASK, ADVANTAGES)
    assert torch.equal(evaluation.losses, uncorrected.losses * expected)
    assert torch.equal(evaluation.clipped, uncorrected.clipped)


def test_a_mask_and_a_weight_together_are_their_product_in_any_order() -> None:
    logprobs = PolicyLogprobs(POLICY, BEHAVIOR, PROXIMAL)
    mask_alone, weight_alone, both, reversed_order = (
        objective_of("anchor=decoupled", f"correction={text}").evaluate(logprobs, MASK, ADVANTAGES).correction
        for text in (
            "geometric_mask(0.7, 1.4)",
            "token_tis(0.95, 1.05)",
            "geometric_mask(0.7, 1.4) + token_tis(0.95, 1.05)",
            "token_tis(0.95, 1.05) + geometric_mask(0.7, 1.4)",
        )
    )
    assert mask_alone is not None and weight_alone is not None and both is not None and reversed_order is not None
    kept = mask_alone.weights[MASK]
    assert 0 < kept.sum() < len(kept), "the case must reach the mask"
    assert weight_alone.truncated.any()
    assert torch.equal(both.weights, mask_alone.weights * weight_alone.weights)
    assert torch.equal(both.truncated, weight_alone.truncated)
    assert torch.equal(reversed_order.weights, both.weights)


def test_normalized_weights_are_divided_by_the_mean_of_the_step_and_masks_are_no_part_of_it() -> None:
    logprobs = PolicyLogprobs(POLICY, BEHAVIOR, PROXIMAL)
    objective = objective_of("anchor=decoupled", "correction=geometric_mask(0.7, 1.4) + token_tis")
    weights = weigh(objective.corrections, logprobs.log_rho, MASK)
    expected = torch.where(MASK, (PROXIMAL - BEHAVIOR).exp().clamp(max=2.0), 0.0)
    torch.testing.assert_close(weights, expected)
    plain = objective.evaluate(logprobs, MASK, ADVANTAGES)
    halved = objective.evaluate(logprobs, MASK, ADVANTAGES, StepConstants(mean_weight=2.0))
    torch.testing.assert_close(halved.losses, plain.losses / 2)


def test_truncated_are_the_weights_at_a_bound_above_zero() -> None:
    # rho = e^-2, 1, e^0.05, e^2 against bounds that float32 cannot hold exactly; the product is e^0.05, above 1.02.
    behavior, mask = torch.tensor([[2.0, 0.0, -0.05, -2.0]]), torch.ones(1, 4, dtype=torch.bool)
    logprobs = PolicyLogprobs(torch.zeros(1, 4), behavior, None)
    for text, expected in (
        ("token_tis(0.3, 1.1)", [True, False, False, True]),
        ("token_tis(1.1)", [False, False, False, True]),
        ("sequence_tis(1.02)", [True] * 4),
        ("sequence_tis(1.1)", [False] * 4),
        ("icepop(0.3, 1.1)", [False] * 4),
    ):
        correction = objective_of(f"correction={text}").evaluate(logprobs, mask, torch.ones(1, 4)).correction
        assert correction is not None and correction.truncated.tolist() == [expected]


def test_without_a_correction_there_are_no_weights() -> None:
    logprobs = PolicyLogprobs(POLICY, BEHAVIOR, None)
    assert objective_of().evaluate(logprobs, MASK, ADVANTAGES).correction is None


@pytest.mark.parametrize("proximal", [None, PROXIMAL], ids=["behavior", "proximal"])
@pytest.mark.parametrize("name", DEFAULTS)
def test_clipped_ratio_is_the_one_to_the_anchor_that_the_objective_clips(name: str, proximal: torch.Tensor | None) -> None:
    # With a gradient, as in training: the ratio that is reported has none.
    logprobs = PolicyLogprobs(POLICY.clone().requires_grad_(), BEHAVIOR, proximal)
    anchor = "behavior" if proximal is None else "proximal"
    found = objective_of(f"objective={name}", f"anchor={anchor}").evaluate(logprobs, MASK, ADVANTAGES).clipped_ratio
    if DEFAULTS[name].band is None or DEFAULTS[name].bounds_divergence:
        assert found is None
        return
    assert found is not None and not found.log_ratio.requires_grad
    log_ratio = POLICY - (BEHAVIOR if proximal is None else proximal)
    if DEFAULTS[name].is_sequence_ratio:
        means = [row[mask].mean().item() for row, mask in zip(log_ratio, MASK, strict=True)]
        torch.testing.assert_close(found.log_ratio, torch.tensor(means)[:, None].expand(3, 4))
    elif DEFAULTS[name].is_prefix_ratio:
        root = MASK.cumsum(dim=-1).sqrt()
        expected = torch.where(MASK, torch.where(MASK, log_ratio, 0.0).cumsum(dim=-1) / root, 0.0)
        torch.testing.assert_close(found.log_ratio, expected)
    else:
        assert torch.equal(found.log_ratio, torch.where(MASK, log_ratio, 0.0))
    loss = load(None, [f"loss.objective={name}", f"loss.anchor={anchor}", "rollout.max_new_tokens=100"]).loss
    if loss.clip_by == "run":
        assert (found.clip_low, found.clip_high) == (loss.clip_low, loss.clip_high)
        return
    # 0.05 up to six tokens, and the noise of a row of one token, which is larger.
    assert isinstance(found.clip_low, torch.Tensor) and isinstance(found.clip_high, torch.Tensor)
    noise = 2 * 0.035 / MASK.sum(dim=-1, keepdim=True).sqrt()
    torch.testing.assert_close(found.clip_high, noise.clip(min=0.05))
    torch.testing.assert_close(found.clip_low, (noise + 0.035**2 / 2).clip(min=0.05))


def test_bounds_of_a_correction_that_are_left_open_are_its_own() -> None:
    for correction, own in CORRECTIONS.items():
        (rule,) = objective_of(f"correction={correction}").corrections
        assert isinstance(rule, CorrectionRule)
        assert (rule.name, rule.low, rule.high) == (correction, own.low or 0.0, own.high)


def test_noise_of_the_engine_is_clipped_where_a_clip_takes_gradient_against_its_logprobs() -> None:
    assert objective_of("clip_low=0.1", "clip_high=0.2").engine_band == ClipBand(0.1, 0.2, is_sequence_ratio=True)
    assert objective_of("objective=dapo").engine_band == ClipBand(0.2, 0.28, is_sequence_ratio=False)
    assert objective_of("objective=minirl").engine_band == ClipBand(0.2, 0.27, is_sequence_ratio=False)
    assert objective_of("objective=luspo").engine_band == ClipBand(0.05, 0.05, is_sequence_ratio=True, by_length=USUAL_NOISE)
    assert objective_of("objective=ctpo", "clip_low=0.1", "clip_high=0.3").engine_band == ClipBand(
        0.1, 0.3, is_sequence_ratio=False, is_prefix_ratio=True
    )
    assert objective_of("objective=gmpo", "clip_low=0.1", "clip_high=0.3").engine_band == ClipBand(
        0.1, 0.3, is_sequence_ratio=False
    )
    for without in ("cispo", "ce_gppo", "sapo", "sapo_sequence", "m2po", "reinforce", "dppo_tv", "topr", "vespo"):
        assert objective_of(f"objective={without}").engine_band is None
    for objective in ("gspo", "minirl", "gmpo", "aspo"):
        assert objective_of(f"objective={objective}", "anchor=proximal").engine_band is None


def test_cap_of_the_settings_bounds_the_weight() -> None:
    logprobs = PolicyLogprobs(POLICY, POLICY - 3.0, POLICY - 0.01)
    for name in ("minirl", "dppo_tv", "dppo_kl"):
        plain = weighted_losses.reinforce(inputs_of(POLICY, POLICY, MASK, ADVANTAGES)).losses
        found = objective_of(f"objective={name}(2)", "anchor=proximal").evaluate(logprobs, MASK, ADVANTAGES)
        assert torch.equal(found.losses, 2 * plain)


def test_denominator_counts_the_constant_length_of_the_settings() -> None:
    open_length, own_length = objective_of("objective=dr_grpo"), objective_of("objective=dr_grpo", "aggregation_length=7")
    assert open_length.denominator(num_groups=2, num_rows=3, num_tokens=50) == 300.0
    assert own_length.denominator(num_groups=2, num_rows=3, num_tokens=50) == 21.0
    assert objective_of("objective=dapo").denominator(num_groups=2, num_rows=3, num_tokens=50) == 50.0
    of_prompts = objective_of("aggregation=prompt-mean-token-mean")
    assert of_prompts.denominator(num_groups=2, num_rows=3, num_tokens=50) == 2.0


def test_every_objective_has_a_row_in_both_tables_and_each_of_its_parameters_a_value() -> None:
    assert set(OBJECTIVES) == set(DEFAULTS)
    for name in OBJECTIVES:
        objective = objective_of(f"objective={name}")
        parameters = dict(objective.parameters)
        # None means that no cap is set.
        assert parameters.pop("dual_clip", None) is None
        assert None not in parameters.values(), name
        assert (DEFAULTS[name].band is not None) == ("clip_low" in parameters)
        assert (DEFAULTS[name].dual_clip) == ("dual_clip" in objective.parameters)
        own = [parameter for parameter in parameters if not parameter.startswith("clip_")]
        own += [] if objective.m2_threshold is None else ["m2_threshold"]
        assert own == [parameter.name for parameter in DEFAULTS[name].parameters]


@pytest.mark.parametrize("name", [name for name in DEFAULTS if DEFAULTS[name].parameters and name != "m2po"])
def test_each_parameter_of_an_objective_reaches_its_keyword_of_the_loss(name: str) -> None:
    numbers = [0.25 * (index + 1) for index in range(len(DEFAULTS[name].parameters))]
    found = objective_of(f"objective={name}({', '.join(map(str, numbers))})").parameters
    assert [found[parameter.name] for parameter in DEFAULTS[name].parameters] == numbers


def test_threshold_of_m2po_is_no_keyword_of_its_loss() -> None:
    objective = objective_of("objective=m2po(0.5)")
    assert (objective.m2_threshold, dict(objective.parameters)) == (0.5, {})
