"""Health rules: signs in the step rows that a run learns nothing, breaks, or waits, each with its reason and a hint."""

import math
import statistics
from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import NamedTuple

from offbeat.common.records.rows import EvalRow, EventRow, StepRow

PERHAPS_SOLVED = "The task may be solved"
"""Begins the hint of rules about equal rewards; with the held-out reward behind it where that is high."""
HISTORY = 200
"""Newest steps that the rules look at."""
CLEAR_STEPS = 10
"""Steps in a row without a rule's condition after which it is cleared."""

SIGNAL_STEPS = 10
ALIKE_STEPS, ALIKE_SHARE = 20, 0.9
CUT_STEPS, CUT_SHARE = 10, 0.95
ENTROPY_STEPS, LEAST_ENTROPY = 10, 0.02
EXPLODED_STEPS = 3
LARGEST_LOG_RATIO = 1.0
GRADIENT_FACTOR, GRADIENT_STEPS = 100.0, 50
REWARD_STEPS, REWARD_ERRORS = 20, 4.0
SOLVED_SHARE = 0.99
"""Share of the held-out prompts from which on the task counts as solved."""
IDLE_STEPS, IDLE_SHARE = 20, 0.9
STARVED_SHARE = 0.3
LEAST_STEP_S = 1e-3

_FINITE = ("reward/mean", "loss/policy", "loss/grad_norm", "ratio/log_mean", "kl/behavior_policy_k3")
"""Metrics whose value is a number in every sound step."""


Reason = Callable[[Sequence[StepRow]], str | None]
"""Returns the trouble in words, None while there is none, from the newest steps, at most `HISTORY`, oldest first."""


class HealthRule(NamedTuple):
    """One sign of trouble."""

    name: str
    condition: str
    hint: str
    reason: Reason
    is_of_solved_tasks: bool = False
    """True where the condition is no trouble once the policy solves the task."""


RULES: list[HealthRule] = []
"""Every health rule, in the order in which they are reported: that of the functions below."""


def _rule(condition: str, hint: str, *, is_of_solved_tasks: bool = False) -> Callable[[Reason], Reason]:
    """Make a function the reason of a rule of its name."""

    def add(reason: Reason) -> Reason:
        RULES.append(HealthRule(reason.__name__.strip("_"), condition, hint, reason, is_of_solved_tasks))
        return reason

    return add


class Health:
    """The rules that hold at the newest step of a run."""

    def __init__(self) -> None:
        self.steps: deque[StepRow] = deque(maxlen=HISTORY)
        """The newest steps, oldest first."""
        self._quiet: dict[str, int] = {}
        """Steps since the condition last held, for each rule that was reported."""
        self._evaluation: EvalRow | None = None

    def note_evaluation(self, evaluation: EvalRow) -> None:
        """Take the newest evaluation: some rules have another hint where the task is solved."""
        self._evaluation = evaluation

    def take(self, step: StepRow) -> list[EventRow]:
        """Take the next step; return a `health` event for each rule that begins to hold, `health_cleared` for one that ends."""
        self.steps.append(step)
        steps = list(self.steps)
        events: list[EventRow] = []
        for rule in RULES:
            reason = rule.reason(steps)
            if reason is not None:
                if rule.name not in self._quiet:
                    events.append(_event("health", rule, f"{reason}. {self._hint(rule)}", step))
                self._quiet[rule.name] = 0
            elif rule.name in self._quiet:
                self._quiet[rule.name] += 1
                if self._quiet[rule.name] >= CLEAR_STEPS:
                    del self._quiet[rule.name]
                    events.append(_event("health_cleared", rule, f"not for {CLEAR_STEPS} steps", step))
        return events

    def _hint(self, rule: HealthRule) -> str:
        if self._evaluation is not None and is_solved([rule.name], self._evaluation):
            return f"{PERHAPS_SOLVED} (held-out {solved_share(self._evaluation):.3f}). If not, use harder prompts."
        return rule.hint


def solved_share(evaluation: EvalRow) -> float:
    """Return the share of its prompts that an evaluation solves, or its reward where rewards are not 0 or 1."""
    return evaluation.pass_at.get("1", evaluation.reward or 0.0)


def is_solved(rules: Collection[str], evaluation: EvalRow | None) -> bool:
    """Return whether one of these rules holds only because the policy solves its task, by the newest evaluation."""
    if evaluation is None or solved_share(evaluation) < SOLVED_SHARE:
        return False
    return any(rule.is_of_solved_tasks for rule in RULES if rule.name in rules)


def troubles(events: Iterable[EventRow]) -> dict[str, str]:
    """Return what is not well after these events of a run, as reasons and hints by rule; a restart begins anew."""
    found: dict[str, str] = {}
    for event in events:
        update_troubles(found, event)
    return found


def update_troubles(found: dict[str, str], event: EventRow) -> None:
    """Bring `troubles` up to date with one more event."""
    if event.event == "run_started":
        found.clear()
    elif event.rule is not None and event.event == "health":
        found[event.rule] = event.detail
    elif event.rule is not None and event.event == "health_cleared":
        found.pop(event.rule, None)


def _event(kind: str, rule: HealthRule, detail: str, step: StepRow) -> EventRow:
    return EventRow(event=kind, rule=rule.name, detail=detail, policy_version=step.policy_version)


# The rules


@_rule(
    f"In each of {SIGNAL_STEPS} steps all rewards are equal, or all rewards within each group are, so every advantage "
    "with a group baseline is 0.",
    "Read some completions (`offbeat samples`) and check the reward. Use harder or easier prompts, or a larger "
    "rollout.group_size or temperature. If you have changed the learning rate, the policy may be ruined: resume an earlier "
    "checkpoint.",
    is_of_solved_tasks=True,
)
def _no_signal(steps: Sequence[StepRow]) -> str | None:
    last = _last(steps, SIGNAL_STEPS)
    if last and all(_num_completions(step) > 1 and step.number("reward/std") == 0 for step in last):
        rewards = {step.number("reward/mean") for step in last}
        value = f"the same reward, {rewards.pop():g}" if len(rewards) == 1 else "the same reward as the others of its step"
        return f"No signal: every completion of the last {SIGNAL_STEPS} steps has {value}"
    if last and all(_num_alike(step) == _num_groups(step) for step in last):
        return f"No signal: in the last {SIGNAL_STEPS} steps the rewards within every group are equal"
    return None


@_rule(
    f"In at least {ALIKE_SHARE:.0%} of the groups of {ALIKE_STEPS} steps, though not in all, the rewards are equal.",
    "The task may be solved: look at the held-out reward. If it is not, use harder or easier prompts, or "
    'loss.zero_variance = "drop".',
    is_of_solved_tasks=True,
)
def _groups_alike(steps: Sequence[StepRow]) -> str | None:
    last = _last(steps, ALIKE_STEPS)
    num_groups = sum(_num_groups(step) for step in last)
    share = sum(_num_alike(step) or 0 for step in last) / num_groups if num_groups else 0.0
    if ALIKE_SHARE <= share < 1:
        rewards = _numbers(last, "reward/mean")
        mean = f" (mean reward {statistics.fmean(rewards):.3f})" if rewards else ""
        return f"Little signal: in {share:.0%} of the groups of the last {ALIKE_STEPS} steps all rewards are equal{mean}"
    return None


@_rule(
    f"In each of {CUT_STEPS} steps at least {CUT_SHARE:.0%} of the completions are cut at `rollout.max_new_tokens`.",
    "Raise rollout.max_new_tokens, or check that the chat template and the model agree on the end of a turn.",
)
def _all_cut(steps: Sequence[StepRow]) -> str | None:
    shares = _numbers(_last(steps, CUT_STEPS), "length/cut")
    if len(shares) == CUT_STEPS and min(shares) >= CUT_SHARE:
        return f"In the last {CUT_STEPS} steps {statistics.fmean(shares):.0%} of the completions were cut at max_new_tokens"
    return None


@_rule(
    f"In each of {ENTROPY_STEPS} steps the policy's mean entropy is below {LEAST_ENTROPY:g} nats per token.",
    "Completions hardly differ any more. If the reward is not high enough yet, lower train.learning_rate, or raise "
    "loss.entropy_coef or loss.clip_high.",
)
def _entropy_collapsed(steps: Sequence[StepRow]) -> str | None:
    entropies = _numbers(_last(steps, ENTROPY_STEPS), "entropy/mean")
    if len(entropies) == ENTROPY_STEPS and max(entropies) < LEAST_ENTROPY:
        mean = statistics.fmean(entropies)
        return f"The policy's entropy has collapsed to {mean:.2g} nats per token in the last {ENTROPY_STEPS} steps"
    return None


@_rule(
    "Reward, loss, gradient norm, mean log ratio or KL of a step is infinite or not a number.",
    "Resume an earlier checkpoint with a lower train.learning_rate, or in float32.",
)
def _not_finite(steps: Sequence[StepRow]) -> str | None:
    names = [name for name in _FINITE if name in steps[-1].metrics and steps[-1].number(name) is None]
    return f"Not a finite number at step {steps[-1].policy_version}: {', '.join(names)}" if names else None


@_rule(
    f"In each of {EXPLODED_STEPS} steps the 5th or 95th percentile of log s is beyond {LARGEST_LOG_RATIO:g} nats.",
    "The policy has moved too far from the one that sampled its data: lower train.learning_rate or staleness.max_staleness.",
)
def _ratios_exploded(steps: Sequence[StepRow]) -> str | None:
    last = _last(steps, EXPLODED_STEPS)
    widest = [max(map(abs, _numbers([step], "ratio/log_p05", "ratio/log_p95")), default=0.0) for step in last]
    if last and min(widest) > LARGEST_LOG_RATIO:
        return f"The importance ratios have exploded: the 5th or 95th percentile of log s is beyond {widest[-1]:.2g}"
    return None


@_rule(
    f"In each of {EXPLODED_STEPS} steps the gradient norm is above {GRADIENT_FACTOR:g} times the median of the up to "
    f"{GRADIENT_STEPS} steps before them.",
    "Lower train.learning_rate, and look at the completions of these steps.",
)
def _gradient_exploded(steps: Sequence[StepRow]) -> str | None:
    last = _numbers(_last(steps, EXPLODED_STEPS), "loss/grad_norm")
    before = _numbers(steps[-EXPLODED_STEPS - GRADIENT_STEPS : -EXPLODED_STEPS], "loss/grad_norm")
    if len(last) < EXPLODED_STEPS or len(before) < SIGNAL_STEPS:
        return None
    usual = statistics.median(before)
    if usual > 0 and min(last) > GRADIENT_FACTOR * usual:
        return f"The gradient has exploded: its norm is {last[-1]:.3g}, and was {usual:.3g} (median)"
    return None


@_rule(
    f"In each of {SIGNAL_STEPS} steps the gradient norm is 0, although rewards differ.",
    "Everything is clipped or masked: see clip/fraction and correction/masked, and widen the clip range.",
)
def _gradient_zero(steps: Sequence[StepRow]) -> str | None:
    norms = _numbers(_last(steps, SIGNAL_STEPS), "loss/grad_norm")
    if len(norms) == SIGNAL_STEPS and max(norms) == 0 and _no_signal(steps) is None:
        return f"The gradient norm is 0 in the last {SIGNAL_STEPS} steps, although rewards differ"
    return None


@_rule(
    f"The mean reward of {REWARD_STEPS} steps is less than half of the best such mean of the last {HISTORY} steps, and lower "
    f"by more than {REWARD_ERRORS:g} standard errors. If a mean is negative, both are measured from the lowest mean.",
    "Resume the checkpoint before the fall with a lower train.learning_rate or staleness.max_staleness.",
)
def _reward_halved(steps: Sequence[StepRow]) -> str | None:
    rewards = _numbers(steps, "reward/mean")
    if len(rewards) < 2 * REWARD_STEPS:
        return None
    windows = [rewards[start : start + REWARD_STEPS] for start in range(len(rewards) - REWARD_STEPS + 1)]
    means = [sum(window) / REWARD_STEPS for window in windows]
    now, best = means[-1], max(means[:-REWARD_STEPS])
    best_window = windows[means.index(best)]
    error = ((statistics.variance(windows[-1]) + statistics.variance(best_window)) / REWARD_STEPS) ** 0.5
    # Rewards may be negative: then the lowest mean takes the place of 0.
    floor = min(0.0, *means)
    if now - floor < (best - floor) / 2 and best - now > REWARD_ERRORS * error:
        return f"The reward fell by half: {now:.3g} over the last {REWARD_STEPS} steps, {best:.3g} at its best"
    return None


@_rule(
    f"The learner waits for rollouts {IDLE_SHARE:.0%} of the time in {IDLE_STEPS} steps; not with max_staleness 0.",
    "Add actors, or actor.reward_workers where they wait for rewards. Raise staleness.max_staleness if it holds leases back.",
)
def _learner_idle(steps: Sequence[StepRow]) -> str | None:
    share = _share_of_time(steps, "time/wait_rollouts_s")
    if share >= IDLE_SHARE:
        return f"The learner waits for rollouts, {share:.0%} of the last {IDLE_STEPS} steps' time"
    return None


@_rule(
    f"Only the staleness bound keeps an actor with capacity from getting a lease, {IDLE_SHARE:.0%} of the time in "
    f"{IDLE_STEPS} steps, and the learner waits less than {STARVED_SHARE:.0%} of it; not with max_staleness 0.",
    "The learner is the bottleneck: use fewer actors, or raise staleness.max_staleness.",
)
def _actors_idle(steps: Sequence[StepRow]) -> str | None:
    share = _share_of_time(steps, "time/held_back_s")
    if share >= IDLE_SHARE and _share_of_time(steps, "time/wait_rollouts_s") < STARVED_SHARE:
        return f"Actors could take more leases, {share:.0%} of the last {IDLE_STEPS} steps' time; the bound admits none"
    return None


@_rule(
    f"In {IDLE_STEPS} steps the learner waits for rollouts {STARVED_SHARE:.0%} of the time, the bound keeps an actor from "
    "getting a lease for as long, and groups take longer than `staleness.max_staleness` steps.",
    "Raise staleness.max_staleness, or end long episodes earlier (environment.episode_timeout_s).",
)
def bound_starves(steps: Sequence[StepRow]) -> str | None:
    """Learner and actors both wait, because groups take longer than the batches that the bound lets be under way."""
    last = _last(steps, IDLE_STEPS)
    shares = [_share_of_time(steps, name) for name in ("time/wait_rollouts_s", "time/held_back_s")]
    group_s = _numbers(last, "group/seconds_mean")
    if min(shares) < STARVED_SHARE or not group_s:
        return None
    work_s = (sum(_numbers(last, "time/step_s")) - sum(_numbers(last, "time/wait_rollouts_s"))) / len(last)
    bound = last[-1].number("staleness/bound") or 0.0
    latency_s = statistics.fmean(group_s)
    # Batches under way at most, one after the other: bound + 1.
    needed = math.ceil(latency_s / max(work_s, LEAST_STEP_S))
    if needed <= bound:
        return None
    return (
        f"Learner and actors wait for each other: groups take {latency_s:.3g} s, steps {work_s:.3g} s, and "
        f"staleness.max_staleness = {bound:g} keeps the next leases back. A bound of {needed} would be enough"
    )


# Numbers of steps


def _last(steps: Sequence[StepRow], number: int) -> Sequence[StepRow]:
    """Return the newest `number` steps; none while there are fewer."""
    return steps[-number:] if len(steps) >= number else ()


def _numbers(steps: Iterable[StepRow], *names: str) -> list[float]:
    return [value for step in steps for name in names if (value := step.number(name)) is not None]


def _num_groups(step: StepRow) -> int:
    return sum(step.groups_by_lag.values())


def _num_completions(step: StepRow) -> float:
    return sum(step.number(name) or 0 for name in step.metrics if name.startswith("by_lag/") and name.endswith("/count"))


def _num_alike(step: StepRow) -> float | None:
    """Return the number of groups with equal rewards; None where groups are of one completion, and always alike."""
    if _num_completions(step) <= _num_groups(step):
        return None
    return step.number("reward/zero_variance_groups")


def _share_of_time(steps: Sequence[StepRow], name: str) -> float:
    """Return the share of the time of the last steps that `name` covers; 0 in a synchronous run, which waits by design."""
    last = _last(steps, IDLE_STEPS)
    total_s = sum(_numbers(last, "time/step_s"))
    if not total_s or not all(step.number("staleness/bound") for step in last):
        return 0.0
    return sum(_numbers(last, name)) / total_s
