"""Row statistics and metrics against numbers worked by hand and against loops over tokens."""

import math
from statistics import fmean, pstdev
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm
from torch import Tensor

from offbeat.common.settings.objectives import Aggregation
from offbeat.learner.diagnostics.batch_metrics import LAG_BUCKETS, SEQUENCE_WEIGHT_CAP, EngineNoise, loss_metrics
from offbeat.learner.diagnostics.row_statistics import Column, row_statistics
from offbeat.learner.objectives.aggregation import aggregate
from offbeat.learner.objectives.bands import ClipBand, ClippedRatio, Correction
from offbeat.learner.objectives.corrections import token_tis
from offbeat.learner.objectives.losses import gspo, ppo_clip
from offbeat.learner.objectives.objective import Evaluation, PolicyLogprobs
from tests.learner.calibration.test_noise_floor import alike, normal_floor
from tests.learner.objectives.loss_cases import inputs_of

CLIP = {"clip_low": 0.1, "clip_high": 0.2}
PER_TOKEN = (
    "policy_logprobs",
    "behavior_logprobs",
    "proximal_logprobs",
    "advantages",
    "token_losses",
)


def make_inputs(lengths: list[int], *, width: int | None = None, seed: int = 0, spread: float = 0.3) -> dict[str, Any]:
    """Return random arguments of `statistics_of`: a clipped ratio to the proximal policy, corrected by `token_tis`."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), width or max(1, *lengths))
    normal = {name: torch.randn(shape, generator=generator) for name in PER_TOKEN}
    mask = torch.arange(shape[1]) < torch.tensor(lengths)[:, None]
    behavior = normal["behavior_logprobs"].abs().neg()
    proximal = behavior + spread * normal["proximal_logprobs"]
    policy = proximal + spread * normal["policy_logprobs"]
    advantages = normal["advantages"].clamp(min=-0.5).where(normal["advantages"] > -1, 0.0)
    weights = token_tis(proximal - behavior, mask, low=0.7, high=1.1)
    losses, clipped, _ = ppo_clip(inputs_of(policy, proximal, mask, advantages), **CLIP)
    return {
        "policy_logprobs": policy,
        "behavior_logprobs": behavior,
        "proximal_logprobs": proximal,
        "completion_mask": mask,
        "advantages": advantages,
        "token_losses": losses * weights,
        "clipped": clipped,
        "row_weights": torch.rand(len(lengths), generator=generator) + 0.5,
        "policy_lags": torch.randint(0, 12, (len(lengths),), generator=generator),
        "band": ClippedRatio(policy - proximal, **CLIP),
        "correction": Correction(weights, proximal - behavior, mask & ((weights == 0.7) | (weights == 1.1))),
    }


def plain_inputs(log_ratios: list[list[float]], advantages: list[float], **changes: Any) -> dict[str, Any]:
    """Return arguments for rows of given token log-ratios against a behavior policy that gave every token log-prob -1."""
    width = max(1, *map(len, log_ratios))
    mask = torch.tensor([[t < len(row) for t in range(width)] for row in log_ratios])
    log_ratio = torch.tensor([row + [math.nan] * (width - len(row)) for row in log_ratios], dtype=torch.float64)
    behavior = torch.full_like(log_ratio, -1.0)
    return {
        "policy_logprobs": behavior + log_ratio,
        "behavior_logprobs": behavior,
        "proximal_logprobs": None,
        "completion_mask": mask,
        "advantages": torch.tensor(advantages)[:, None].expand_as(mask),
        "token_losses": torch.zeros_like(log_ratio),
        "clipped": torch.zeros_like(mask),
        "row_weights": torch.ones(len(log_ratios)),
        "policy_lags": torch.zeros(len(log_ratios), dtype=torch.int64),
        "band": None,
        "correction": None,
        **changes,
    }


def anchor_of(inputs: dict[str, Any]) -> Tensor:
    """Return the denominator of the ratio."""
    return inputs["behavior_logprobs"] if inputs["proximal_logprobs"] is None else inputs["proximal_logprobs"]


def statistics_of(inputs: dict[str, Any]) -> Tensor:
    """Call `row_statistics` with arguments by name."""
    return row_statistics(
        PolicyLogprobs(inputs["policy_logprobs"], inputs["behavior_logprobs"], inputs["proximal_logprobs"]),
        Evaluation(inputs["token_losses"], inputs["clipped"], inputs["band"], inputs["correction"]),
        **{name: inputs[name] for name in ("completion_mask", "advantages", "row_weights", "policy_lags")},
        turns=torch.zeros_like(inputs["completion_mask"], dtype=torch.int64),
    )


def metrics_of(*tables: Tensor, aggregation: Aggregation = "seq-mean-token-mean", denominator: float = 1.0) -> dict[str, float]:
    return loss_metrics(torch.cat(tables), aggregation=aggregation, denominator=denominator)


def rows_of(inputs: dict[str, Any], index: Any) -> dict[str, Any]:
    """Return the arguments for some of the rows."""
    band, correction = inputs["band"], inputs["correction"]
    return {name: value[index] for name, value in inputs.items() if isinstance(value, Tensor)} | {
        "band": band._replace(log_ratio=band.log_ratio[index]),
        "correction": Correction(*(tensor[index] for tensor in correction)),
    }


def test_ratios_clips_and_sizes_of_two_rows_worked_by_hand():
    # log s = (0.1 + 0.5) / 2 = 0.3 and -0.2; W = e^0.6 and e^-0.2.
    log_sequence_ratio = torch.tensor([[0.3, 0.3], [-0.2, math.nan]])
    inputs = plain_inputs(
        [[0.1, 0.5], [-0.2]],
        [1.0, -1.0],
        token_losses=torch.tensor([[-1.0, -2.0], [4.0, math.nan]]),
        row_weights=torch.tensor([2.0, 1.0]),
        clipped=torch.tensor([[True, True], [False, True]]),
        policy_lags=torch.tensor([0, 4]),
        band=ClippedRatio(log_sequence_ratio, **CLIP),
    )
    metrics = metrics_of(statistics_of(inputs), denominator=2.0)
    assert metrics == pytest.approx(
        {
            "loss/policy": (2 * -1.5 + 4) / 2,
            "ratio/log_mean": 0.05,
            "ratio/log_std": 0.25,
            "ratio/log_min": -0.2,
            "ratio/log_max": 0.3,
            "ratio/log_p05": -0.175,
            "ratio/log_p50": 0.05,
            "ratio/log_p95": 0.275,
            "ratio/first": (math.exp(0.3) - 1 + 1 - math.exp(-0.2)) / 2,
            "ratio/token_log_abs_max": 0.5,
            "ratio/m2": (0.01 + 0.25 + 0.04) / 3,
            # The second row is below the band too, and its `clipped` is False; its padding's is not counted.
            "clip/fraction": 0.5,
            "clip/positive_above": 0.5,
            "clip/positive_below": 0.0,
            "clip/negative_above": 0.0,
            "clip/negative_below": 0.5,
            "clip_tokens/fraction": 2 / 3,
            "clip_tokens/positive_above": 2 / 3,
            "clip_tokens/positive_below": 0.0,
            "clip_tokens/negative_above": 0.0,
            "clip_tokens/negative_below": 1 / 3,
            "ess/sequence": (math.exp(0.6) + math.exp(-0.2)) ** 2 / (2 * (math.exp(1.2) + math.exp(-0.4))),
            "ess/sequence_truncated": (math.exp(0.6) + math.exp(-0.2)) ** 2 / (2 * (math.exp(1.2) + math.exp(-0.4))),
            "ess/token": (math.exp(0.1) + math.exp(0.5) + math.exp(-0.2)) ** 2
            / (3 * (math.exp(0.2) + math.exp(1.0) + math.exp(-0.4))),
            "kl/behavior_policy_k1": -0.4 / 3,
            "kl/behavior_policy_k3": (math.exp(0.1) - 1.1 + math.exp(0.5) - 1.5 + math.exp(-0.2) - 0.8) / 3,
            "by_lag/0/count": 1,
            "by_lag/0/ratio_log_mean": 0.3,
            "by_lag/0/ratio_log_std": 0.0,
            "by_lag/0/ratio_m2": 0.13,
            "by_lag/0/clip_fraction": 1.0,
            "by_lag/0/ess_sequence": 1.0,
            "by_lag/0/ess_token": (math.exp(0.1) + math.exp(0.5)) ** 2 / (2 * (math.exp(0.2) + math.exp(1.0))),
            "by_lag/0/kl_behavior_policy_k1": -0.3,
            "by_lag/0/kl_behavior_policy_k3": (math.exp(0.1) - 1.1 + math.exp(0.5) - 1.5) / 2,
            "by_lag/3-4/count": 1,
            "by_lag/3-4/ratio_log_mean": -0.2,
            "by_lag/3-4/ratio_log_std": 0.0,
            "by_lag/3-4/ratio_m2": 0.04,
            "by_lag/3-4/clip_fraction": 0.0,
            "by_lag/3-4/ess_sequence": 1.0,
            "by_lag/3-4/ess_token": 1.0,
            "by_lag/3-4/kl_behavior_policy_k1": 0.2,
            "by_lag/3-4/kl_behavior_policy_k3": math.exp(-0.2) - 0.8,
        },
        abs=1e-7,  # the losses and the band's ratio are float32
    )


def expected_metrics(inputs: dict[str, Any], denominator: float) -> dict[str, float]:
    """Compute all metrics but quantiles and buckets, token by token in Python floats, from likelihood ratios."""
    policy, behavior, proximal, advantages, losses = (inputs[name].tolist() for name in PER_TOKEN)
    anchor = anchor_of(inputs).tolist()
    clipped, correction = inputs["clipped"].tolist(), inputs["correction"]
    lengths = inputs["completion_mask"].sum(dim=-1).tolist()
    tokens = [(i, t) for i, length in enumerate(lengths) for t in range(length)]
    rows = [i for i, length in enumerate(lengths) if length]
    token_ratio = {(i, t): math.exp(policy[i][t] - anchor[i][t]) for i, t in tokens}
    token_weight = {(i, t): math.exp(policy[i][t] - behavior[i][t]) for i, t in tokens}
    s = [math.prod(token_ratio[i, t] for t in range(lengths[i])) ** (1 / lengths[i]) for i in rows]
    sequence_weight = [math.prod(token_weight[i, t] for t in range(lengths[i])) for i in rows]
    loss = sum(
        weight * fmean(losses[i][:length]) if length else 0.0
        for i, (length, weight) in enumerate(zip(lengths, inputs["row_weights"].tolist(), strict=True))
    )

    def size(of_weights: list[float]) -> float:
        return sum(of_weights) ** 2 / sum(weight**2 for weight in of_weights) / len(of_weights)

    def divergence(p: list[list[float]], q: list[list[float]]) -> tuple[float, float]:
        k1 = [p[i][t] - q[i][t] for i, t in tokens]
        return fmean(k1), fmean(math.exp(-x) - 1 + x for x in k1)

    sides = {
        "fraction": {(i, t) for i, t in tokens if clipped[i][t]},
        "positive_above": {(i, t) for i, t in tokens if advantages[i][t] > 0 and token_ratio[i, t] > 1.2},
        "positive_below": {(i, t) for i, t in tokens if advantages[i][t] > 0 and token_ratio[i, t] < 0.9},
        "negative_above": {(i, t) for i, t in tokens if advantages[i][t] < 0 and token_ratio[i, t] > 1.2},
        "negative_below": {(i, t) for i, t in tokens if advantages[i][t] < 0 and token_ratio[i, t] < 0.9},
    }
    assert all(sides.values()), "the case must reach every side of the band"
    log_s = [math.log(ratio) for ratio in s]
    kl = {
        "behavior_policy": divergence(behavior, policy),
        "behavior_proximal": divergence(behavior, proximal),
        "proximal_policy": divergence(proximal, policy),
    }
    weights, log_rho = correction.weights.tolist(), correction.log_rho.tolist()
    kept = [weights[i][t] for i, t in tokens if weights[i][t]]
    cut = [(i, t) for i, t in tokens if weights[i][t] and abs(math.log(weights[i][t]) - log_rho[i][t]) > 1e-5]
    return {
        "loss/policy": loss / denominator,
        "ratio/log_mean": fmean(log_s),
        "ratio/log_std": pstdev(log_s),
        "ratio/log_min": min(log_s),
        "ratio/log_max": max(log_s),
        "ratio/first": fmean(abs(ratio - 1) for ratio in s),
        "ratio/token_log_abs_max": max(abs(math.log(ratio)) for ratio in token_ratio.values()),
        "ratio/m2": fmean(math.log(weight) ** 2 for weight in token_weight.values()),
        **{
            f"clip/{name}": fmean(sum((i, t) in side for t in range(n)) / n if n else 0.0 for i, n in enumerate(lengths))
            for name, side in sides.items()
        },
        **{f"clip_tokens/{name}": len(side) / len(tokens) for name, side in sides.items()},
        "ess/sequence": size(sequence_weight),
        "ess/sequence_truncated": size([min(weight, SEQUENCE_WEIGHT_CAP) for weight in sequence_weight]),
        "ess/token": size(list(token_weight.values())),
        **{f"kl/{pair}_k1": values[0] for pair, values in kl.items()},
        **{f"kl/{pair}_k3": values[1] for pair, values in kl.items()},
        "correction/masked": 1 - len(kept) / len(tokens),
        "correction/truncated": len(cut) / len(tokens),
        "correction/log_mean": fmean(log_rho[i][t] for i, t in tokens),
        "correction/weight_mean": sum(kept) / len(tokens),
    }


@pytest.mark.parametrize("spread", [0.2, 0.3, 1.0])
def test_every_metric_equals_loops_over_tokens_in_float64(spread):
    inputs = make_inputs([5, 1, 0, 12, 7, 9, 3, 0, 8, 11, 6, 2], seed=1, spread=spread)
    inputs["correction"].weights[3, 2:6] = 0.0
    metrics = metrics_of(statistics_of(inputs), denominator=12.0)
    expected = expected_metrics(inputs, 12.0)
    of_step = {name for name in metrics if not name.startswith("by_lag/")}
    assert of_step == expected.keys() | {"ratio/log_p05", "ratio/log_p50", "ratio/log_p95"}
    for name, value in expected.items():
        # The loss alone is summed from float32.
        assert metrics[name] == pytest.approx(value, rel=1e-6 if name == "loss/policy" else 1e-9), name


@pytest.mark.parametrize("padding", [-math.inf, math.inf, math.nan])
def test_padding_of_any_value_and_width_changes_nothing(padding):
    inputs = make_inputs([4, 0, 2, 7])
    expected = statistics_of(inputs)

    def padded(values: Tensor, fill: Any) -> Tensor:
        filled = values.where(inputs["completion_mask"], fill)
        return torch.cat([filled, torch.full((4, 3), fill, dtype=values.dtype)], dim=1)

    wide = {name: padded(inputs[name], padding) for name in PER_TOKEN}
    wide |= {"completion_mask": padded(inputs["completion_mask"], False), "clipped": padded(inputs["clipped"], True)}
    wide["band"] = inputs["band"]._replace(log_ratio=padded(inputs["band"].log_ratio, padding))
    wide["correction"] = inputs["correction"]._replace(
        weights=padded(inputs["correction"].weights, 0.0),
        log_rho=padded(inputs["correction"].log_rho, padding),
        truncated=padded(inputs["correction"].truncated, True),
    )
    torch.testing.assert_close(statistics_of({**inputs, **wide}), expected, rtol=1e-12, atol=1e-12)


@given(st.permutations(range(6)), st.integers(1, 5))
@settings(max_examples=20)
def test_micro_batches_ranks_and_order_of_rows_change_nothing(order, cut):
    inputs = make_inputs([4, 0, 2, 7, 1, 5])
    expected = metrics_of(statistics_of(inputs), denominator=6.0)
    parts = [statistics_of(rows_of(inputs, part)) for part in (order[:cut], [], order[cut:])]
    assert metrics_of(*parts, denominator=6.0) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"])
def test_the_loss_is_the_aggregate_over_the_denominator(mode):
    inputs = make_inputs([4, 0, 2, 7])
    expected = aggregate(inputs["token_losses"], inputs["completion_mask"], inputs["row_weights"], mode=mode) / 7.0
    metrics = metrics_of(statistics_of(inputs), aggregation=mode, denominator=7.0)
    assert metrics["loss/policy"] == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("objective", [gspo, ppo_clip])
def test_the_clipped_sides_of_the_band_are_what_the_objective_clipped(objective):
    inputs: dict[str, Any] = make_inputs([6, 3, 9, 1, 5, 8, 2, 7], seed=3) | {"proximal_logprobs": None}
    # A band with an end at a ratio that occurs: a row's or a token's, which is then not beyond it.
    log_ratio = inputs["policy_logprobs"] - anchor_of(inputs)
    if objective is gspo:
        lengths = inputs["completion_mask"].sum(dim=-1, keepdim=True)
        log_ratio = (log_ratio.where(inputs["completion_mask"], 0.0).sum(dim=-1, keepdim=True) / lengths).expand_as(log_ratio)
    ratios = log_ratio.exp()[inputs["completion_mask"]].tolist()
    band = {"clip_low": 1 - min(r for r in ratios if 0.5 < r < 0.99), "clip_high": max(r for r in ratios if r < 1.15) - 1}
    result = objective(
        inputs_of(inputs["policy_logprobs"], anchor_of(inputs), inputs["completion_mask"], inputs["advantages"]), **band
    )
    inputs |= {"clipped": result.clipped, "band": ClippedRatio(log_ratio, **band)}
    metrics = metrics_of(statistics_of(inputs))
    assert metrics["clip_tokens/fraction"] > 0
    for area in ("clip", "clip_tokens"):
        clipped = metrics[f"{area}/positive_above"] + metrics[f"{area}/negative_below"]
        assert metrics[f"{area}/fraction"] == pytest.approx(clipped)


@pytest.mark.parametrize("objective", [gspo, ppo_clip])
def test_what_dual_clip_capped_is_in_the_fraction_beside_the_sides_that_the_band_clipped(objective):
    # Every token of a row has its ratio: 1.5 is capped, 1.3 above the band and not capped, the other two are clipped.
    ratios, advantages = [1.5, 1.3, 0.5, 1.5], [-1.0, -1.0, -1.0, 1.0]
    rows = [[math.log(ratio)] * length for ratio, length in zip(ratios, (3, 1, 1, 1), strict=True)]
    inputs = plain_inputs(rows, advantages)
    log_ratio = torch.tensor(ratios).log()[:, None].expand(4, 3)
    names = ("policy_logprobs", "behavior_logprobs", "completion_mask", "advantages")
    result = objective(inputs_of(*(inputs[name] for name in names)), **CLIP, dual_clip=1.4)
    metrics = metrics_of(statistics_of(inputs | {"clipped": result.clipped, "band": ClippedRatio(log_ratio, **CLIP)}))
    found = {name: metrics[name] for name in metrics if name.startswith("clip")}
    assert found == {
        "clip/fraction": 0.75,
        "clip/positive_above": 0.25,
        "clip/positive_below": 0.0,
        "clip/negative_above": 0.5,
        "clip/negative_below": 0.25,
        "clip_tokens/fraction": 5 / 6,
        "clip_tokens/positive_above": 1 / 6,
        "clip_tokens/positive_below": 0.0,
        "clip_tokens/negative_above": 4 / 6,
        "clip_tokens/negative_below": 1 / 6,
    }


def test_a_tenth_of_a_thousandth_keeps_its_digits_beside_large_logprobs():
    """k3 of a log-ratio of 1e-4 is 5e-9; in float32 `exp(x) - 1 - x` is only noise there."""
    policy = torch.tensor([[-10.0, -10.0]])
    behavior = policy - 1e-4
    inputs = plain_inputs([[0.0, 0.0]], [0.0], policy_logprobs=policy, behavior_logprobs=behavior)
    exact = (policy.double() - behavior.double())[0, 0].item()
    metrics = metrics_of(statistics_of(inputs))
    assert metrics["kl/behavior_policy_k3"] == pytest.approx(exact**2 / 2 + exact**3 / 6 + exact**4 / 24, rel=1e-10, abs=0)
    assert metrics["kl/behavior_policy_k1"] == pytest.approx(-exact, rel=1e-12)


def test_sizes_are_one_on_policy_and_one_row_of_many_at_worst():
    on_policy = metrics_of(statistics_of(plain_inputs([[0.0] * 3] * 5, [1.0] * 5)))
    assert (on_policy["ess/sequence"], on_policy["ess/sequence_truncated"], on_policy["ess/token"]) == (1.0, 1.0, 1.0)
    # Rows that all moved alike weigh alike, however far they moved; float64 would underflow at e^-746.
    all_alike = metrics_of(statistics_of(plain_inputs([[-500.0, -500.0]] * 5, [1.0] * 5)))
    assert (all_alike["ess/sequence"], all_alike["ess/sequence_truncated"]) == (1.0, 1.0)
    one_outweighs = metrics_of(statistics_of(plain_inputs([[500.0, 500.0], *[[0.0, 0.0]] * 4], [1.0] * 5)))
    assert one_outweighs["ess/sequence"] == pytest.approx(0.2)
    # Weights 8, 1, 1, 1, 1.
    assert one_outweighs["ess/sequence_truncated"] == pytest.approx(12**2 / (5 * 68))
    # The geometric mean that GSPO clips would hide it: log s is 0.5 at most.
    long_row = metrics_of(statistics_of(plain_inputs([[0.05] * 400, *[[0.0]] * 4], [1.0] * 5)))
    assert long_row["ess/sequence"] == pytest.approx(0.2, abs=1e-6)
    assert long_row["ratio/log_max"] == pytest.approx(0.05)


@given(
    st.lists(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), max_size=4), min_size=1, max_size=5),
    st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=20, max_size=20),
)
@settings(max_examples=60)
def test_metrics_of_any_finite_logprobs_are_finite_and_sizes_are_shares(log_ratios, proximal):
    lengths = [len(row) for row in log_ratios]
    inputs = plain_inputs(log_ratios, [1.0] * len(log_ratios))
    shape = inputs["policy_logprobs"].shape
    inputs |= {
        "proximal_logprobs": torch.tensor(proximal[: shape.numel()]).reshape(shape),
        "band": ClippedRatio(inputs["policy_logprobs"].float() + 1, **CLIP),
        "policy_lags": torch.arange(len(lengths)),
    }
    metrics = metrics_of(statistics_of(inputs))
    for name, value in metrics.items():
        assert math.isfinite(value), name
    for name in ("ess/sequence", "ess/sequence_truncated", "ess/token"):
        assert 0 < metrics[name] <= 1 + 1e-9, name
    for pair in ("behavior_policy", "behavior_proximal", "proximal_policy"):
        assert metrics[f"kl/{pair}_k3"] >= 0
    spread = [metrics[f"ratio/log_{name}"] for name in ("min", "p05", "p50", "p95", "max")]
    assert spread == sorted(spread)


def test_empty_completions_are_in_the_clip_denominator_and_not_in_the_ratios():
    alone = plain_inputs([[0.5]], [1.0], clipped=torch.tensor([[True]]), band=ClippedRatio(torch.tensor([[0.5]]), **CLIP))
    beside = plain_inputs(
        [[0.5], []], [1.0, 1.0], clipped=torch.tensor([[True], [True]]), band=ClippedRatio(torch.tensor([[0.5], [0.5]]), **CLIP)
    )
    of_one, of_two = metrics_of(statistics_of(alone)), metrics_of(statistics_of(beside))
    halved = {"clip/fraction", "clip/positive_above", "by_lag/0/clip_fraction"}
    assert of_two.pop("by_lag/0/count") == 2 * of_one.pop("by_lag/0/count")
    assert of_two == pytest.approx({name: value / 2 if name in halved else value for name, value in of_one.items()})


def test_a_step_of_empty_completions_has_ratio_one_and_finite_metrics():
    metrics = metrics_of(statistics_of(plain_inputs([[], []], [1.0, 1.0])))
    assert metrics["ratio/first"] == metrics["ratio/log_std"] == metrics["loss/policy"] == 0.0
    assert metrics["ess/sequence"] == metrics["ess/token"] == 1.0
    assert all(map(math.isfinite, metrics.values()))


def test_completions_are_in_the_bucket_of_their_lag():
    lags = [0, 0, 1, 2, 3, 4, 5, 8, 9, 100]
    table = statistics_of(plain_inputs([[0.1 * lag] for lag in lags], [1.0] * 10, policy_lags=torch.tensor(lags)))
    metrics = metrics_of(table)
    counts = {bucket: metrics[f"by_lag/{bucket}/count"] for bucket in LAG_BUCKETS}
    assert counts == {"0": 2, "1": 1, "2": 1, "3-4": 2, "5-8": 2, "9+": 2}
    means = [metrics[f"by_lag/{bucket}/ratio_log_mean"] for bucket in LAG_BUCKETS]
    assert means == pytest.approx([0.0, 0.1, 0.2, 0.35, 0.65, 5.45])
    without_twos = metrics_of(table[table[:, Column.POLICY_LAG] != 2])
    assert not any(name.startswith("by_lag/2/") for name in without_twos)
    assert without_twos["by_lag/1/count"] == 1


def test_what_the_objective_does_not_have_is_absent():
    def areas(**changes: Any) -> set[str]:
        return set(metrics_of(statistics_of({**make_inputs([3, 0, 5]), **changes})))

    everything = areas()
    assert not any("_above" in name or "_below" in name for name in areas(band=None))
    assert "clip/fraction" in areas(band=None)
    assert everything - areas(proximal_logprobs=None) == {name for name in everything if "proximal" in name}
    assert everything - areas(correction=None) == {name for name in everything if "correction" in name}


def test_truncated_weights_are_counted_where_no_mask_drops_them_and_raw_ratios_are_from_before():
    log_rho = torch.tensor([[-2.0, 0.0, 0.05, 2.0]])
    weights, truncated = torch.tensor([[0.3, 0.0, 1.1, 1.1]]), torch.tensor([[True, True, False, True]])
    found = metrics_of(
        statistics_of({**plain_inputs([[0.0] * 4], [1.0]), "correction": Correction(weights, log_rho, truncated)})
    )
    assert (found["correction/masked"], found["correction/truncated"]) == (0.25, 0.5)
    assert found["correction/log_mean"] == pytest.approx(0.0125)
    assert found["correction/weight_mean"] == pytest.approx(2.5 / 4)


def test_a_table_is_detached_and_made_without_reading_a_value_back():
    """Reading a value back would make the host wait for the device; on a meta tensor it raises."""
    inputs = make_inputs([3, 0, 5])
    inputs["policy_logprobs"].requires_grad_()
    inputs["token_losses"] = inputs["policy_logprobs"] * 2
    inputs["band"] = inputs["band"]._replace(log_ratio=inputs["policy_logprobs"] * 2)
    assert not statistics_of(inputs).requires_grad
    on_meta: dict[str, Any] = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in inputs.items()}
    on_meta["band"] = inputs["band"]._replace(log_ratio=inputs["band"].log_ratio.to("meta"))
    on_meta["correction"] = Correction(*(value.to("meta") for value in inputs["correction"]))
    table = statistics_of(on_meta)
    assert (table.shape, table.dtype) == ((3, len(Column)), torch.float64)


def test_noise_is_taken_out_of_clips_and_divergence_by_length_and_sign_of_advantage():
    # log s is normal around 0, of deviation 0.1 at length 1 and sqrt(0.0075 + 0.0025 / 2) = 0.0935 at length 2.
    floor = msgspec.structs.replace(normal_floor(0.5), mean=0.0, variance=0.0075, token_variance=0.0025, k3=0.005)
    inputs = plain_inputs(
        [[0.3], [-0.1, -0.1], [0.0], []],
        [1.0, -1.0, 0.0, 1.0],
        clipped=torch.tensor([[True, False], [False, False], [False, False], [False, False]]),
        policy_lags=torch.tensor([0, 3, 3, 3]),
    )
    table = statistics_of(inputs)
    band = ClipBand(0.1, 0.2, is_sequence_ratio=True)
    metrics = loss_metrics(table, aggregation="token-mean", denominator=1.0, noise=EngineNoise(alike(floor), band))
    above, below = norm.sf(math.log(1.2), scale=0.1), norm.cdf(math.log(0.9), scale=math.sqrt(0.00875))
    assert metrics["clip/noise"] == pytest.approx((above + below) / 4, abs=1e-3)
    assert metrics["clip/drift"] == pytest.approx(1 / 4 - (above + below) / 4, abs=1e-3)
    assert metrics["by_lag/0/clip_noise"] == pytest.approx(above, abs=1e-3)
    assert metrics["by_lag/0/clip_drift"] == pytest.approx(1 - above, abs=1e-3)
    assert metrics["by_lag/3-4/clip_noise"] == pytest.approx(below / 3, abs=1e-3)
    assert metrics["kl/drift"] == pytest.approx((math.exp(0.3) - 1.3 + 2 * (math.exp(-0.1) - 0.9)) / 4 - 0.005)
    without_band = loss_metrics(table, aggregation="token-mean", denominator=1.0, noise=EngineNoise(alike(floor), None))
    assert without_band["kl/noise"] == 0.005
    assert "clip/noise" not in without_band
