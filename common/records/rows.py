"""The rows of `metrics.jsonl`: one struct for each kind, and how a row becomes a line of the file and back.

A line is a JSON object with `kind` and `time` first. The metrics of a step or routing row stand beside its other fields,
under names that `offbeat.common.records.step_metrics` lists.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeGuard, get_args

import msgspec

from offbeat.common.records.step_metrics import step_metric
from offbeat.protocols.message_parts import EngineInfo

MetricValue = int | float | dict[str, int] | None
"""A metric's value; only `lag/counts` and `broken/leases` are mappings. None: the value was not finite when it was written."""


class Stamped(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, tag_field="kind"):
    """Something that happened at a time. Fields that default to None are absent from the line when they are None."""

    time: float = math.nan
    """Seconds since the epoch; nan until `MetricsWriter` has stamped the row."""


class StepRow(Stamped, frozen=True, kw_only=True, tag="step"):
    """One optimizer step."""

    policy_version: int
    """The learner's version after the step."""
    metrics: Mapping[str, MetricValue]
    """Numbers by name (`offbeat.common.records.step_metrics`)."""

    def number(self, name: str) -> float | None:
        """Return the finite value of a metric, None where the step has none. `KeyError` for a name that no step has."""
        if step_metric(name) is None:
            raise KeyError(f"no step writes a metric named {name}")
        value = self.metrics.get(name)
        return value if isinstance(value, int | float) and math.isfinite(value) else None

    def measured(self, name: str) -> float:
        """Return a metric that the step has, finite or not. `KeyError` where it has none."""
        value = self.metrics[name]
        assert isinstance(value, int | float), f"{name} is no number"
        return value

    @property
    def groups_by_lag(self) -> dict[int, int]:
        """Groups of the step by policy lag."""
        counts = self.metrics.get("lag/counts")
        return {int(lag): count for lag, count in counts.items() if lag.isdecimal()} if isinstance(counts, dict) else {}


class EvalRow(Stamped, frozen=True, kw_only=True, tag="eval"):
    """A finished evaluation on the held-out prompts."""

    policy_version: int
    """The oldest version that its completions may have."""
    reward: float | None
    """Mean over the completions; nan, null in the file, where every prompt failed."""
    length: float | None
    """Mean tokens of the completions; nan, null in the file, where every prompt failed."""
    num_completions: int
    """Completions that were rewarded."""
    num_failed: int
    """Prompts without completions after all attempts."""
    pass_at: dict[str, float] = {}
    """pass@k by k: the share of prompts that at least one of k completions solves (`evaluation.pass_reward`)."""
    sets: dict[str, float] = {}
    """Mean reward of each named set of `data.eval_data`; sets without completions are left out."""
    numbers: dict[str, float] = {}
    """Numbers that `evaluation.function` returned, by name."""


class GroupRow(Stamped, frozen=True, kw_only=True, tag="group"):
    """The end of a generated group."""

    lease_id: int
    """The lease that the group was generated for."""
    prompt_id: int
    """Number of the prompt, counted from 0; rows that `data.long_prompts` leaves out do not count."""
    actor: str
    """The actor that generated the group."""
    outcome: str
    """`trained` or `dropped`."""
    reason: str
    """The reason for the drop; empty for a trained group."""
    policy_version: int
    """The learner's version when the group was trained on (before that step) or dropped."""
    policy_lag: int
    """Optimizer steps between the oldest version in the group and `policy_version`."""
    lengths: list[int]
    """Tokens of each completion."""
    rewards: list[float | None]
    """Reward of each completion, before any scaling or penalty."""
    generate_s: float
    """Seconds the actor took."""
    num_segments: int
    """Largest number of versions that sampled one completion."""
    taken_at: float
    """Time at which the group left the buffer: selected with its batch, or dropped."""
    num_turns: list[int] | None = None
    """Turns of each episode; absent without an environment."""
    environment_s: list[float] | None = None
    """Seconds spent in each episode's function; absent without an environment."""


class SampleRow(Stamped, frozen=True, kw_only=True, tag="sample"):
    """A completion that was trained on, as text; the best and the worst of some steps of a run.

    Long texts are shortened in the middle. All texts are exactly what the model wrote: escape them before you show them.
    """

    policy_version: int
    """The learner's version after the step."""
    lease_id: int
    """The lease that its group was generated for."""
    prompt_id: int
    """Number of the prompt, as in `group` rows."""
    policy_lag: int
    """The policy lag of its group, in optimizer steps."""
    reward: float | None
    """Reward of the completion, before any scaling or penalty."""
    above_mean: float | None
    """The reward less the mean reward of its group: the advantage before it is scaled."""
    finish_reason: str
    """`stop`, or `length` for a completion cut off at `rollout.max_new_tokens`."""
    num_tokens: int
    """Tokens of the completion."""
    prompt: str
    """The prompt with the chat template and the special tokens."""
    completion: str
    """The completion, special tokens included."""


class EvalSampleRow(Stamped, frozen=True, kw_only=True, tag="eval_sample"):
    """A completion of an evaluation, as text: the first one of some held-out prompts, the same prompts in every evaluation.

    Long texts are shortened in the middle. All texts are exactly what the model wrote: escape them before you show them.
    """

    policy_version: int
    """The version of the evaluation, as in its `eval` row."""
    prompt_id: int
    """Number of the held-out prompt, counted from 0 over all sets."""
    data_set: str | None = None
    """Name of the prompt's set in `data.eval_data`; absent where the sets have no names."""
    reward: float
    """Reward of the completion, before any scaling or penalty."""
    finish_reason: str
    """`stop`, or `length` for a completion cut off at `rollout.max_new_tokens`."""
    num_tokens: int
    """Tokens of the completion."""
    prompt: str
    """The prompt with the chat template and the special tokens."""
    completion: str
    """The completion, special tokens included."""


class ActorRow(Stamped, frozen=True, kw_only=True, tag="actor"):
    """An actor's report; its counters only grow until the actor is started again."""

    actor: str
    """The actor that sent the heartbeat."""
    policy_version: int | None
    """The version of the actor's weights; None before the first, written as -1."""
    num_generated_tokens: int
    """Tokens that its engine has sampled since the start."""
    num_groups_sent: int
    """Groups that it has sent since the start."""
    num_running_completions: int
    """Completions in its engine now."""
    seconds: dict[str, float]
    """Main-loop seconds by activity: `generate`, `commit_weights`, `wait_leases`, `wait_weights`, `wait_rewards`,
    `wait_gpu`."""
    judge: dict[str, float] = {}
    """Use of the judge by all processes of the actor: `requests` sent, `failed` ones, answers that were `cached`, `tokens`, and
    `seconds` of all requests. Absent in a run without a judge."""
    environment: dict[str, float] = {}
    """Counts of episodes, in a run with an environment: `begun`, `ended`, and `cancelled` (by a time limit, or because the
    lease is over); those `open` now, and of these the ones `waiting` for their function; `turns` sampled; `seconds` spent in
    functions; `prompt_tokens` of all turns, and how many of them the prefix cache held (`cached_tokens`); attempts that failed
    because of a time limit (`again_timeout`), a lost process (`again_lost`) or a temporary cause (`again_unavailable`);
    `worker_restarts`."""


class WeightsRow(Stamped, frozen=True, kw_only=True, tag="weights"):
    """Weights sent to actors in one collective."""

    policy_version: int
    """The version that was published."""
    publish_s: float
    """Seconds from the start of the update until every member was done or had been given up."""
    num_members: int
    """Actors that the update was for."""
    num_excluded: int
    """Actors excluded from collectives at its end."""


class PullRow(Stamped, frozen=True, kw_only=True, tag="pull"):
    """Weights that an actor has pulled."""

    actor: str
    """The actor that pulled the weights."""
    policy_version: int
    """The version that it pulled."""
    pull_s: float
    """Seconds from the start of the pull until the complete version was staged for the engine."""
    sent_bytes: int
    """Bytes that the learner sent for it; with `weights.delta` mostly differences."""
    full_bytes: int
    """Size of the weights."""
    delta_error: str | None = None
    """Reason why differences failed and all weights were pulled; absent when nothing failed."""


class CommitRow(Stamped, frozen=True, kw_only=True, tag="commit"):
    """An actor's engine has changed to new weights."""

    actor: str
    """The actor that committed the weights."""
    policy_version: int
    """The version that its engine samples with from now on."""
    stall_s: float
    """Seconds for which the engine paused."""


class CanaryRow(Stamped, frozen=True, kw_only=True, tag="canary"):
    """An engine's log-probs of a fixed sequence, compared with the learner's under the same weights."""

    actor: str
    """The actor whose engine scored the canary."""
    policy_version: int
    """The version that the canary was scored under."""
    max_abs_diff: float | None
    """Largest difference of a token, in nats; nan, null in the file, where a log-prob was not finite."""
    mean_abs_diff: float | None = None
    """Mean difference of a token, in nats."""
    high_abs_diff: float | None = None
    """The difference that 95% of the tokens do not exceed, in nats."""
    excess: float | None = None
    """Largest ratio of a statistic (mean, 95% quantile, maximum) to the actor's limit for it. The canary has each token in two
    contexts, and the smaller of its two differences counts. A value above 1 means that the actor is wrong, unless
    `weights.canary_tolerance` is set; then `max_abs_diff` decides."""


class RoutingRow(Stamped, frozen=True, kw_only=True, tag="routing"):
    """Expert routing of the canary in a mixture-of-experts model."""

    actor: str | None = None
    """The actor whose engine is compared with the learner; absent where versions of the learner are."""
    policy_version: int
    """The version whose routing is compared."""
    metrics: Mapping[str, int | float | None]
    """Numbers by name (`offbeat.common.records.step_metrics`)."""


class EngineRow(Stamped, frozen=True, kw_only=True, tag="engine"):
    """An actor has joined with this engine."""

    actor: str
    """The actor that joined."""
    engine: EngineInfo
    """Name, version, dtype and device of its engine, and hashes of its model, tokenizer and chat template."""


class EventRow(Stamped, frozen=True, kw_only=True, tag="event"):
    """A join, a loss, a change of a setting, or anything else out of the ordinary."""

    event: str
    """The kind of event: `actor_joined`, `lease_expired`, `setting_changed`, ..."""
    detail: str
    """One sentence for people."""
    reason: str | None = None
    """Reason given for a changed setting."""
    rule: str | None = None
    """Name of the health rule that a `health` or `health_cleared` event is about (docs/health.md)."""
    setting: str | None = None
    """`section.key` of a setting that was changed, or kept over a restart."""
    before: str | None = None
    """The setting's value before the change, as TOML."""
    after: str | None = None
    """The setting's value after the change, as TOML."""
    value: str | None = None
    """The value that was kept over a restart, as TOML."""
    who: str | None = None
    """Name of the operator that changed the setting; `auto` for the automatic bound."""
    at: float | None = None
    """Time of the change."""
    policy_version: int | None = None
    """The learner's version at the change."""
    num_reused: int | None = None
    """Groups that a resumed run took over from the rollout log."""
    actor: str | None = None
    """The actor that the event is about."""
    peer: str | None = None
    """Sender of a message that was rejected."""
    lease_id: int | None = None
    """The lease that the event is about."""
    after_s: float | None = None
    """Seconds from the lease's grant to its end."""


class EpochRow(Stamped, frozen=True, kw_only=True, tag="epoch"):
    """The end of a pass over the prompts."""

    epoch: int
    """Number of the pass, from 0."""
    num_trained: int
    """Prompts of the epoch that were trained on."""
    dropped: dict[str, list[int]]
    """Prompts that were not trained on in this pass, by reason."""
    num_left_out: int = 0
    """Prompts that were not leased in this pass, because of the shares that data.curriculum gave their tasks."""


class LedgerSums(msgspec.Struct, frozen=True):
    """Leases of the run by how they ended."""

    leased: int
    """Leases granted."""
    trained: int
    """Leases whose group was trained on."""
    dropped: dict[str, int]
    """Dropped leases, by reason."""
    expired: int
    """Leases that ended without a group."""
    in_flight: int
    """Leases that had not ended."""

    @property
    def num_accounted(self) -> int:
        """The right side of `leased = trained + dropped + expired + in flight`."""
        return self.trained + sum(self.dropped.values()) + self.expired + self.in_flight

    @property
    def adds_up(self) -> bool:
        """True when the conservation law holds."""
        return self.leased == self.num_accounted

    def by_name(self) -> dict[str, int]:
        """Return the sums by name, for people; drops as `dropped/REASON`."""
        dropped = {f"dropped/{reason}": number for reason, number in self.dropped.items()}
        return {"leased": self.leased, "trained": self.trained, **dropped, "expired": self.expired, "in flight": self.in_flight}


class FinalRow(Stamped, frozen=True, kw_only=True, tag="final"):
    """The end of the run."""

    policy_version: int
    """The version that training reached."""
    wall_s: float
    """Seconds since the learner process was started."""
    ledger: LedgerSums
    """Sums over all leases of the run."""
    outcome: str
    """`finished`, `stopped`, `paused` (`run.grace_s`) or `failed`."""
    detail: str
    """The signal that stopped the run, or the error that ended it."""


class OtherRow(NamedTuple):
    """A row that is damaged, or of a kind that only another version of this software knows."""

    time: float
    """Seconds since the epoch; nan where the row does not tell."""
    kind: str


Row = (
    StepRow
    | EvalRow
    | GroupRow
    | SampleRow
    | EvalSampleRow
    | ActorRow
    | WeightsRow
    | PullRow
    | CommitRow
    | CanaryRow
    | RoutingRow
    | EngineRow
    | EventRow
    | EpochRow
    | FinalRow
)
Recorder = Callable[[Row], None]
"""Takes a row to where rows are kept."""

ROW_TYPES: tuple[type[Row], ...] = get_args(Row)
_NO_VERSION = -1
"""Stands in the file for the version of an actor without weights."""
_TYPES_BY_KIND = {str(row_type.__struct_config__.tag): row_type for row_type in ROW_TYPES}


def row_fields(row: Row) -> dict[str, Any]:
    """Return the JSON object that a row is written as. `TypeError` for values that JSON cannot hold, numpy's included."""
    fields = msgspec.to_builtins(row)
    if isinstance(row, StepRow | RoutingRow):
        return fields | fields.pop("metrics")
    if isinstance(row, ActorRow) and row.policy_version is None:
        fields["policy_version"] = _NO_VERSION
    return fields


def encode_row(row: Row) -> bytes:
    """Return the row's line, with its end. Numbers that are not finite become null."""
    return msgspec.json.encode(row_fields(row)) + b"\n"


def decode_row(line: bytes) -> Row | OtherRow | None:
    """Return the row of a line; None for a line that is no JSON object. Fields that a kind does not have are left out."""
    try:
        fields = msgspec.json.decode(line, type=dict[str, Any])
    # UnicodeDecodeError: a string that was torn inside a character.
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None
    kind = fields.get("kind")
    row_type = _TYPES_BY_KIND.get(kind) if isinstance(kind, str) else None
    try:
        if row_type is StepRow or row_type is RoutingRow:
            own = row_type.__struct_fields__
            metrics = {name: value for name, value in fields.items() if name not in own and _is_metric(value)}
            return msgspec.convert(fields | {"metrics": metrics}, row_type)
        if row_type is ActorRow and fields.get("policy_version") == _NO_VERSION:
            fields["policy_version"] = None
        if row_type is not None:
            return msgspec.convert(fields, row_type)
    except msgspec.ValidationError:
        pass
    time = fields.get("time")
    return OtherRow(time=float(time) if _is_number(time) else math.nan, kind=str(kind))


def _is_metric(value: object) -> bool:
    """Return whether a field's value is a `MetricValue`."""
    if isinstance(value, dict):
        return all(type(count) is int for count in value.values())
    return value is None or _is_number(value)


def _is_number(value: object) -> TypeGuard[float]:
    return isinstance(value, int | float) and not isinstance(value, bool)
