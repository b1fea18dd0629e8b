"""The events of a lease, as records: the ledger applies them, the rollout log keeps them, a restart applies them again."""

import msgspec

from offbeat.protocols.payload import CompletionMeta, ExpertsMeta


class Event(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag=True, kw_only=True):
    """The fields of every event."""

    at: float
    """Seconds since the epoch, for people and statistics: no decision depends on it."""


class Started(Event, frozen=True):
    """A learner process took over at this policy version: steps after it are undone and will be trained again."""

    run_id: str
    learner_incarnation: int
    policy_version: int


class Granted(Event, frozen=True):
    """A prompt was leased to an actor."""

    lease_id: int
    prompt_id: int
    epoch: int
    """Pass over the data that the prompt belongs to."""
    actor: str
    policy_version: int
    """The learner's version at that moment."""
    oldest_version: int
    """The oldest version that a token of the group can have: what the actor had, or must wait for."""
    prompt_hash: int
    """`Prompt.content_hash` of the prompt that was sent."""
    epoch_size: int
    """Number of prompts of the pass `epoch`."""
    task: str = ""
    """Name of the prompt's task (`data.task_field`); empty where tasks are not told apart."""


class Accepted(Event, frozen=True):
    """A lease's group is in the buffer. Arrays: as those of `GroupDone`."""

    lease_id: int
    actor: str
    completions: tuple[CompletionMeta, ...]
    generate_s: float
    policy_version: int
    """The learner's version at that moment."""
    prompt_hash: int
    """`Prompt.content_hash` of the prompt that the group was taken for."""
    reward_s: float
    """Seconds from the last completion's end until all rewards were known."""
    experts: ExpertsMeta | None = None
    """`GroupDone.experts`, unchanged."""


class Dropped(Event, frozen=True):
    """A lease ended without training, for a reason that is counted."""

    lease_id: int
    reason: str
    is_final: bool
    """False: its prompt is re-queued."""


class Expired(Event, frozen=True):
    """A lease was taken back from an actor that was late, lost or left; its prompt is re-queued."""

    lease_id: int
    reason: str


class Trained(Event, frozen=True):
    """These groups made the optimizer steps from `policy_version` on; undone by a later `Started` at or below it."""

    lease_ids: tuple[int, ...]
    policy_version: int
    """Before the first of the steps."""
    num_steps: int
    selected_at: float
    """Time at which the batch was selected, in seconds since the epoch."""
    selected_after: int
    """Records from this process's `Started` to the selection: groups accepted after them could not be selected."""
    prompt_hashes: tuple[int, ...]
    """`Prompt.content_hash` of the prompt of each lease, as it was trained on."""


class Tuned(Event, frozen=True):
    """Settings were changed while the run went on. They hold from here on, after a restart too; no lease changes."""

    settings: dict[str, str]
    """`section.key` to its new value, as TOML."""
    who: str
    """`auto` for the automatic bound."""
    reason: str
    """Empty where a person changed them."""
    policy_version: int
    """The learner's version at that moment."""


class Weighed(Event, frozen=True):
    """From here on these shares of the tasks' prompts are leased; the prompt stream leaves out the others."""

    shares: dict[str, float]
    """`PromptStream.weigh` says what they mean. Empty: every prompt is leased."""
    policy_version: int
    """The learner's version at that moment."""


LeaseEvent = Started | Granted | Accepted | Dropped | Expired | Trained | Tuned | Weighed
