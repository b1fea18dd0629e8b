"""The loss of a step, with an objective's defaults, equals the method as its paper or its authors' code has it.

Each method is written anew here, token by token, from the place that its docstring names. `loss_cases.PRINTED` compares the
loss functions at other bounds; `test_peer_gradients` has gradients that other projects' code gave. Where offbeat departs from a
source, a test holds the difference that docs/objectives.md states.
"""

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from offbeat.common.settings.loading import load
from offbeat.learner.objectives.aggregation import aggregate
from offbeat.learner.objectives.losses import gmpo, m2po, m2po_candidates, m2po_cutoff
from offbeat.learner.objectives.objective import (
    Evaluation,
    Objective,
    PolicyLogprobs,
    StepConstants,
    group_logprob,
    make_objective,
)
from tests.learner.objectives.loss_cases import inputs_of

ROWS, TOKENS, GROUP_SIZE = 12, 16, 6
SEEDS = range(3)


class LossToken(NamedTuple):
    """A loss token's log-probs."""

    policy: Tensor
    """A scalar with a gradient."""
    proximal: float
    behavior: float


class Completion(NamedTuple):
    tokens: list[LossToken]
    advantage: float


class Step(NamedTuple):
    """One optimizer step; log-probs are `[ROWS, TOKENS]` float64, with garbage outside the mask."""

    policy: Tensor
    proximal: Tensor
    behavior: Tensor
    mask: Tensor
    advantages: Tensor
    """`[ROWS]`."""

    def completions(self) -> Iterator[Completion]:
        for row in range(ROWS):
            kept = [token for token in range(TOKENS) if self.mask[row, token]]
            tokens = [
                LossToken(self.policy[row, token], float(self.proximal[row, token]), float(self.behavior[row, token]))
                for token in kept
            ]
            yield Completion(tokens, float(self.advantages[row]))

    def num_tokens(self) -> int:
        return int(self.mask.sum())


def random_step(seed: int) -> Step:
    """Return completions near and far from their policy, of both signs, with gaps, one empty and one without an advantage."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    behavior = -0.05 - normal(ROWS, TOKENS).abs() * 2
    spread = torch.tensor([0.02, 0.3, 2.0], dtype=torch.float64).repeat(ROWS // 3)[:, None]
    policy = (behavior + spread * normal(ROWS, TOKENS)).clamp(max=-1e-3)
    proximal = (behavior + 0.1 * normal(ROWS, TOKENS)).clamp(max=-1e-3)
    mask = torch.rand(ROWS, TOKENS, generator=generator) < 0.8
    mask[3], mask[4] = False, torch.arange(TOKENS) == TOKENS - 1
    advantages = normal(ROWS).abs() * torch.tensor([1.0, 1.0, 1.0, -1.0, -1.0, -1.0], dtype=torch.float64).repeat(2)
    advantages[6] = 0.0
    garbage = torch.tensor([math.nan, -math.inf, math.inf], dtype=torch.float64).repeat(ROWS * TOKENS // 3).view(ROWS, TOKENS)
    policy, proximal, behavior = (torch.where(mask, tensor, garbage) for tensor in (policy, proximal, behavior))
    return Step(policy.requires_grad_(), proximal, behavior, mask, advantages)


def ctpo(step: Step) -> Tensor:
    """`cum-token-cumprod-la` in verl/trainer/ppo/core_algos.py of horizon-llm/CTPO, with the numbers of its ctpo.sh.

    The paper, https://arxiv.org/abs/2605.07331, section 3.3, has neither the dual clip nor the mean over tokens.
    """
    terms = []
    for tokens, advantage in step.completions():
        before = 0.0
        for position, token in enumerate(tokens, start=1):
            own = token.policy - token.behavior
            log_ratio = before + own
            before += own.item()
            low, high = -0.025 * position**0.5, 0.05 * position**0.5
            worse = max(-advantage * log_ratio.exp(), -advantage * log_ratio.clamp(low, high).exp())
            cap = worse.new_tensor(-advantage * math.exp(high))
            terms.append(min(worse, cap) if advantage < 0 else worse)
    return torch.stack(terms).sum() / step.num_tokens()


def ce_gppo(step: Step) -> Tensor:
    """Eq. 8 of https://arxiv.org/abs/2509.20712, with its section 4.1 and table 1: 0.2, and 0.75 and 1 for the betas."""
    terms = []
    for tokens, advantage in step.completions():
        for token in tokens:
            ratio = (token.policy - token.behavior).exp()
            if ratio < 0.8 and advantage < 0:
                terms.append(0.75 * 0.8 / ratio.detach() * ratio * advantage)
            elif ratio > 1.2 and advantage > 0:
                terms.append(1.0 * 1.2 / ratio.detach() * ratio * advantage)
            else:
                terms.append(ratio * advantage)
    return -torch.stack(terms).sum() / step.num_tokens()


def minirl(step: Step) -> Tensor:
    """Eq. 7 of https://arxiv.org/abs/2512.01374, with its section 4.2: 0.27 and 0.2, and a weight of at most 5."""
    objective = torch.zeros((), dtype=torch.float64)
    for tokens, advantage in step.completions():
        for token in tokens:
            staleness = math.exp(token.policy.item() - token.proximal)
            if (advantage > 0 and staleness > 1 + 0.27) or (advantage < 0 and staleness < 1 - 0.2):
                continue
            weight = min(math.exp(token.policy.item() - token.behavior), 5.0)
            objective = objective + weight * advantage * token.policy
    return -objective / ROWS


def aspo(step: Step) -> Tensor:
    """Section 6 of https://arxiv.org/abs/2510.06062, steps 1 to 3, as the weighted log-likelihood of its proposition 4.1.

    The range of 0.2 is appendix B's. The cap of 3 and the mean over tokens are those of `compute_policy_loss_archer` in
    verl/trainer/ppo/core_algos.py of wizard-III/Archer2.0; the paper has no number for the one, and a mean over completions.
    """
    objective = torch.zeros((), dtype=torch.float64)
    for tokens, advantage in step.completions():
        for token in tokens:
            ratio = math.exp(token.policy.item() - token.behavior)
            if (advantage < 0 and ratio < 1 - 0.2) or (advantage > 0 and ratio > 1 + 0.2):
                continue
            weight = min(1 / ratio if advantage > 0 else ratio, 3.0)
            objective = objective + weight * advantage * token.policy
    return -objective / step.num_tokens()


def topr(step: Step) -> Tensor:
    """Eq. 8 of https://arxiv.org/abs/2503.14286, with advantages for its rewards."""
    objective = torch.zeros((), dtype=torch.float64)
    for tokens, advantage in step.completions():
        likelihood_ratio = math.exp(sum(token.policy.item() - token.behavior for token in tokens))
        weight = 1.0 if advantage >= 0 else min(max(likelihood_ratio, 0.0), 1.0)
        for token in tokens:
            objective = objective + weight * advantage * token.policy
    return -objective / ROWS


def m2po_of_paper(step: Step) -> Tensor:
    """Algorithm 1 and eq. 5 of https://arxiv.org/abs/2510.01161, with its threshold of 0.04; the mean is over all tokens."""
    tokens = [(token, advantage) for tokens, advantage in step.completions() for token in tokens]
    squares: dict[int, float] = {}
    for index, (token, advantage) in enumerate(tokens):
        log_ratio = token.policy.item() - token.behavior
        if (advantage > 0 and log_ratio > 0) or (advantage < 0 and log_ratio < 0):
            squares[index] = log_ratio**2
    trusted = dict(squares)
    while trusted and sum(trusted.values()) / len(trusted) > 0.04:
        del trusted[max(trusted, key=trusted.__getitem__)]
    terms = [
        (token.policy - token.behavior).exp() * advantage
        for index, (token, advantage) in enumerate(tokens)
        if index in trusted or index not in squares
    ]
    return -torch.stack(terms).sum() / len(tokens)


def gepo(step: Step) -> Tensor:
    """`loss_type == "gepo"` in src/hetero_rl/learner_script_checkpoint.py of HanlardResearch/HeteroRL_GEPO, clipped at 0.2.

    The group is that of a prompt, as in eq. 2 of https://arxiv.org/abs/2508.17850; the code takes a device's micro-batch.
    """
    completions = list(step.completions())
    loss = torch.zeros((), dtype=torch.float64)
    for first in range(0, ROWS, GROUP_SIZE):
        # A completion without tokens is in no group here. The code gives it the likelihood 1.
        group = [completion for completion in completions[first : first + GROUP_SIZE] if completion.tokens]
        sampled = [math.exp(sum(token.behavior for token in tokens) / len(tokens)) for tokens, _ in group]
        expected = sum(q / sum(sampled) * q for q in sampled)
        for tokens, advantage in group:
            likelihood = (torch.stack([token.policy for token in tokens]).sum() / len(tokens)).exp()
            ratio = likelihood / expected
            loss = loss - min(ratio * advantage, ratio.clamp(1 - 0.2, 1 + 0.2) * advantage)
    return loss / ROWS


SOURCES: dict[str, tuple[Callable[[Step], Tensor], list[str]]] = {
    "ctpo": (ctpo, ["loss.objective=ctpo"]),
    "ce_gppo": (ce_gppo, ["loss.objective=ce_gppo"]),
    "minirl": (minirl, ["loss.objective=minirl"]),
    "aspo": (aspo, ["loss.objective=aspo"]),
    "topr": (topr, ["loss.objective=topr"]),
    "m2po": (m2po_of_paper, ["loss.objective=m2po"]),
    "gepo": (gepo, ["loss.objective=gspo", "loss.anchor=group"]),
}


def objective_of(settings: list[str]) -> Objective:
    return make_objective(load(None, [f"rollout.max_new_tokens={TOKENS}", *settings]).loss)


def evaluate(objective: Objective, step: Step, *, proximal: bool) -> Evaluation:
    advantages = step.advantages[:, None].expand(ROWS, TOKENS)
    log_ratio = step.policy.detach() - step.behavior
    cutoff = math.inf
    if objective.m2_threshold is not None:
        candidates = m2po_candidates(log_ratio, step.mask, advantages)
        cutoff = m2po_cutoff(candidates, threshold=objective.m2_threshold)
    group = None
    if objective.anchor == "group":
        behavior = [step.behavior[row, step.mask[row]].numpy() for row in range(ROWS)]
        of_groups = [group_logprob(behavior[first : first + GROUP_SIZE]) for first in range(0, ROWS, GROUP_SIZE)]
        group = torch.tensor(of_groups, dtype=torch.float64).repeat_interleave(GROUP_SIZE)[:, None].expand(ROWS, TOKENS)
    logprobs = PolicyLogprobs(step.policy, step.behavior, step.proximal if proximal else None, group)
    return objective.evaluate(logprobs, step.mask, advantages, StepConstants(m2po_cutoff=cutoff))


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", SOURCES)
def test_loss_and_gradient_of_a_step_equal_those_of_the_source(name, seed):
    source, settings = SOURCES[name]
    step, objective = random_step(seed), objective_of(settings)
    found = evaluate(objective, step, proximal=name == "minirl")
    total = aggregate(found.losses, step.mask, torch.ones(ROWS, dtype=torch.float64), mode=objective.aggregation)
    loss = total / objective.denominator(num_groups=ROWS // GROUP_SIZE, num_rows=ROWS, num_tokens=step.num_tokens())
    expected = source(step)
    gradients = [torch.autograd.grad(value, step.policy, retain_graph=True)[0] for value in (loss, expected)]
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-9, atol=1e-9)
    assert not gradients[0][~step.mask].any()
    assert found.clipped.any() == (name not in ("ce_gppo", "topr")), "the step must reach the clip"


@pytest.mark.parametrize("seed", SEEDS)
def test_the_random_steps_reach_every_bound_at_either_sign(seed):
    step = random_step(seed)
    signs = step.advantages.sign()[:, None].expand(ROWS, TOKENS)[step.mask]
    ratio = (step.policy.detach() - step.behavior).exp()[step.mask]
    for sign in (1, -1):
        of_sign = ratio[signs == sign]
        assert of_sign.min() < 1 / 3, "beyond ASPO's cap"
        assert of_sign.max() > 5, "beyond MiniRL's cap"
        assert ((of_sign - 1).abs() < 0.2).any()


def token_ratio_topr(step: Step) -> Tensor:
    """`_compute_topr_loss` in roll/pipeline/rlvr/actor_pg_worker.py of alibaba/ROLL, for scores with the advantages' signs.

    `TOPRPolicyLossFn` of Trinity-RFT has the same weights.
    """
    objective = torch.zeros((), dtype=torch.float64)
    for tokens, advantage in step.completions():
        for token in tokens:
            weight = 1.0 if advantage > 0 else min(math.exp(token.policy.item() - token.behavior), 1.0)
            objective = objective + weight * advantage * token.policy
    return -objective / ROWS


@pytest.mark.parametrize("seed", SEEDS)
def test_topr_of_roll_truncates_the_ratio_of_each_token_and_ours_that_of_the_completion(seed):
    step = random_step(seed)
    log_ratio = torch.where(step.mask, step.policy.detach() - step.behavior, 0.0)
    theirs, ours = (torch.autograd.grad(source(step), step.policy)[0] for source in (token_ratio_topr, topr))
    whole = log_ratio.sum(dim=-1, keepdim=True).clamp(max=0).exp()
    bad = step.mask & (step.advantages < 0)[:, None]
    torch.testing.assert_close((theirs * whole)[bad], (ours * log_ratio.clamp(max=0).exp())[bad], rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(theirs[~bad], ours[~bad])
    assert not torch.allclose(theirs[bad], ours[bad], rtol=0.5)


def bound_of_m2po_code(squares: list[float], *, budget: float) -> float:
    """Return the bound of `kpo_clip_harmful_tokens` in verl/trainer/ppo/core_algos.py of Infini-AI-Lab/M2PO.

    The largest candidate at which the mean of `min((log r)^2, bound)` over all candidates is below the budget; its own token is
    clipped, too. Infinite where their mean is within the budget.
    """
    if sum(squares) / len(squares) <= budget:
        return math.inf
    below = [bound for bound in squares if sum(min(square, bound) for square in squares) / len(squares) < budget]
    return max(below, default=0.0)


@pytest.mark.parametrize("seed", SEEDS)
def test_m2po_of_the_authors_code_drops_the_gradient_of_more_tokens_and_is_ours_at_its_bound(seed):
    step = random_step(seed)
    advantages = step.advantages[:, None].expand(ROWS, TOKENS)
    log_ratio = step.policy.detach() - step.behavior
    candidates = m2po_candidates(log_ratio, step.mask, advantages)
    bound = bound_of_m2po_code(candidates.tolist(), budget=0.04)
    cutoff = m2po_cutoff(candidates, threshold=0.04)
    assert int((candidates >= bound).sum()) > int((candidates >= cutoff).sum()) > 0

    losses, dropped, _ = m2po(inputs_of(step.policy, step.behavior, step.mask, advantages), cutoff=bound)
    (ours,) = torch.autograd.grad(losses.sum(), step.policy)
    # Their loss: the larger of both sides of a clip to e^-tau and e^tau.
    tau = math.sqrt(bound) - 1e-12
    ratio = torch.where(step.mask, step.policy - step.behavior, 0.0).exp()
    clipped = ratio.clamp(math.exp(-tau), math.exp(tau))
    (theirs,) = torch.autograd.grad(torch.maximum(-advantages * ratio, -advantages * clipped).sum(), step.policy)
    torch.testing.assert_close(ours, torch.where(step.mask, theirs, 0.0), rtol=1e-9, atol=1e-9)
    assert dropped.any()


@pytest.mark.parametrize("seed", SEEDS)
def test_verl_counts_gmpo_tokens_on_either_side_of_the_range_as_clipped_and_we_those_without_a_gradient(seed):
    """`actor/pg_clipfrac` and `pg_clipfrac_lower` of `compute_policy_loss_geo_mean`, verl/trainer/ppo/core_algos.py.

    verl compares the log-ratio with its clamp to both bounds, and counts the tokens that differ by the sign of A alone: with
    A > 0 also those below the range, which its minimum leaves as they are.
    """
    step = random_step(seed)
    advantages = step.advantages[:, None].expand(ROWS, TOKENS)
    bounds = {"clip_low": 1 - math.exp(-0.4), "clip_high": math.exp(0.4) - 1}
    _, clipped, _ = gmpo(inputs_of(step.policy, step.behavior, step.mask, advantages), **bounds)
    of_verl = pulled_back = 0
    for tokens, advantage in step.completions():
        for token in tokens:
            log_ratio = token.policy.item() - token.behavior
            of_verl += advantage != 0 and min(max(log_ratio, -0.4), 0.4) != log_ratio
            pulled_back += (advantage > 0 and log_ratio < -0.4) or (advantage < 0 and log_ratio > 0.4)
    assert of_verl == int(clipped.sum()) + pulled_back
    assert pulled_back > 0
