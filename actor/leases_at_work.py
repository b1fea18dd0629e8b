"""The leases at work, from a lease through its completions and rewards to its answer, and the answers not acknowledged yet."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import msgspec
import numpy as np

from offbeat.actor.engines.engine import Engine
from offbeat.actor.environments.episodes import Episodes
from offbeat.actor.sampling import RewardedGroup, SingleTurns
from offbeat.common.errors import one_line
from offbeat.common.models.images import ImageError, ImagePatches, ImageReader, hash_image
from offbeat.protocols.messages import ActorMessage, GroupDone, Lease, LeaseFailed
from offbeat.protocols.payload import CompletionMeta, ExpertsMeta, encode_experts
from offbeat.protocols.wire import Array, Frame, has_context


@dataclass
class Parcel:
    """One unacknowledged message."""

    message: ActorMessage
    arrays: tuple[Array, ...]
    sent_at: float = float("-inf")


class Outbox:
    """Unacknowledged messages by lease, oldest first. The actor's credit bounds their number."""

    def __init__(self, *, resend_after_s: float) -> None:
        self._resend_after_s = resend_after_s
        self._parcels: dict[int, Parcel] = {}

    def __len__(self) -> int:
        return len(self._parcels)

    @property
    def lease_ids(self) -> tuple[int, ...]:
        """Leases that these messages answer."""
        return tuple(self._parcels)

    def put(self, lease_id: int, message: ActorMessage, *arrays: Array) -> None:
        """Keep a message until `acknowledge`."""
        self._parcels[lease_id] = Parcel(message, arrays)

    def acknowledge(self, lease_id: int) -> None:
        """Forget the answer to a lease, if it is here."""
        self._parcels.pop(lease_id, None)

    def send_all_again(self) -> None:
        """Make every message due: those sent through an earlier connection may be lost."""
        for parcel in self._parcels.values():
            parcel.sent_at = float("-inf")

    def due(self, now: float) -> list[Parcel]:
        """Return the messages to send now: new ones, and those not acknowledged for `resend_after_s`."""
        return [parcel for parcel in self._parcels.values() if now - parcel.sent_at >= self._resend_after_s]


def read_images(
    lease: Lease, prompt_token_ids: list[int], files: Frame, reader: ImageReader | None
) -> tuple[ImagePatches, ...]:
    """Return the images of a lease; raise `ImageError` where one is not what the learner announced, or cannot be decoded.

    `files` are as long as announced: `protocols.wire` has checked that.
    """
    if not lease.images:
        return ()
    if reader is None:
        raise ImageError("this actor takes no images: give it the learner's data.image_field")
    images: list[ImagePatches] = []
    start = 0
    for index, reference in enumerate(lease.images):
        content = bytes(files[start : start + reference.num_bytes])
        start += reference.num_bytes
        if hash_image(content) != reference.hash:
            raise ImageError(f"image {index} is not the one that the learner announced")
        images.append(reader.read(content))
    reader.check_prompt(np.array(prompt_token_ids, dtype=np.int32), images)
    return tuple(images)


_LATE = 0.9
"""Share of a lease's time from which on a cancelled lease counts as expired: the learner's clock began to run earlier."""
_REGAINED = 0.5
"""Part of a lease that each finished group adds to `LeasesAtWork.most`: one that expires by chance costs little."""


@dataclass(eq=False)
class LeasesAtWork:
    """All leases of an actor that are not answered. Each ends in the outbox, or is cancelled."""

    _engine: Engine
    sampler: SingleTurns | Episodes
    """Makes groups of leases; says which rewards or episodes it waits for, and whether they fail."""
    outbox: Outbox
    max_message_bytes: int
    """Largest array that the learner takes; the service sets it at each welcome."""
    images: ImageReader | None = None
    """Reads the images of prompts; None where prompts have none."""
    clock: Callable[[], float] = time.monotonic
    """Monotonic seconds."""
    num_groups: int = 0
    """Groups finished since the start."""
    most: float = math.inf
    """Leases that can be answered in time, as far as those that expired tell; inf until one does.

    Each that expires takes one away, and each group brings a part of one back. An actor that held on to more than it can
    finish would finish none: all of them share its engine and the line for rewards until they expire.
    """
    _lease_ids: dict[int, float] = field(default_factory=dict)
    """The leases at work, with the times at which they expire."""
    _waiting: dict[int, tuple[Lease, list[int], tuple[ImagePatches, ...]]] = field(default_factory=dict)
    """Those whose weights are not here yet, with what `sampler.begin` will get."""

    @property
    def lease_ids(self) -> tuple[int, ...]:
        """The leases at work."""
        return tuple(self._lease_ids)

    @property
    def are_waiting_for_weights(self) -> bool:
        """True while a lease needs newer weights than the engine has."""
        return bool(self._waiting)

    def add(self, lease: Lease, prompt_token_ids: list[int], image_files: Frame = b"") -> None:
        """Take a lease; it starts with the next `start_ready`. `image_files` are the images of its prompt."""
        try:
            images = read_images(lease, prompt_token_ids, image_files, self.images)
        except ImageError as error:
            self._fail(lease.lease_id, "image_error", one_line(error))
            return
        self._waiting[lease.lease_id] = lease, prompt_token_ids, images
        self._lease_ids[lease.lease_id] = self.clock() + _LATE * lease.timeout_s

    def start_ready(self) -> None:
        """Begin the leases whose weights are here."""
        version = self._engine.policy_version
        if version is None:
            return
        for lease_id in [lease_id for lease_id, (lease, *_) in self._waiting.items() if lease.min_policy_version <= version]:
            self.sampler.begin(*self._waiting.pop(lease_id))

    def step(self) -> None:
        """Advance the engine by one step."""
        for completion in self._engine.step():
            self.sampler.add(completion)

    def collect(self) -> None:
        """Put the answers of leases that have ended into the outbox."""
        for outcome in self.sampler.poll():
            if self._lease_ids.pop(outcome.lease_id, None) is None:
                continue
            if isinstance(outcome, RewardedGroup):
                self._finish(outcome)
            else:
                self._fail(outcome.lease_id, outcome.reason, outcome.detail)

    def cancel(self, lease_ids: Iterable[int]) -> None:
        """Stop working on these leases and forget their answers. Unknown ones are ignored."""
        for lease_id in lease_ids:
            if self._lease_ids.get(lease_id, math.inf) <= self.clock():
                self.most = max(1.0, min(self.most, len(self._lease_ids)) - 1)
            self._abort(lease_id)
            self.outbox.acknowledge(lease_id)

    def return_all(self) -> None:
        """Give every lease at work back to the learner."""
        self._return(self.lease_ids)

    def return_waiting(self) -> None:
        """Give the leases that have not begun back to the learner."""
        self._return(tuple(self._waiting))

    def _finish(self, group: RewardedGroup) -> None:
        message, arrays = as_group(group)
        largest = max(array.nbytes for array in arrays)
        if largest > self.max_message_bytes:
            # The hub would drop the connection, and the group would be sent again on the next one.
            detail = f"the group has {largest} bytes; the learner's hub.max_message_mb takes {self.max_message_bytes}"
            self._fail(group.lease_id, "too_large", detail)
            return
        self.outbox.put(group.lease_id, message, *arrays)
        self.num_groups += 1
        self.most += _REGAINED

    def _return(self, lease_ids: Iterable[int]) -> None:
        for lease_id in lease_ids:
            self._abort(lease_id)
            self._fail(lease_id, "returned")

    def _fail(self, lease_id: int, reason: str, detail: str = "") -> None:
        self.outbox.put(lease_id, LeaseFailed(lease_id=lease_id, reason=reason, detail=detail))

    def _abort(self, lease_id: int) -> None:
        if lease_id in self._lease_ids:
            del self._lease_ids[lease_id]
            self.sampler.cancel(lease_id)
            self._waiting.pop(lease_id, None)


def as_group(group: RewardedGroup) -> tuple[GroupDone, tuple[Array, ...]]:
    """Return the message that answers a lease, and its arrays, completions concatenated."""
    completions = group.completions
    message = GroupDone(
        lease_id=group.lease_id,
        completions=tuple(
            CompletionMeta(
                len(completion.token_ids),
                completion.finish_reason,
                reward.total,
                completion.segments,
                reward.parts,
                completion.turns,
                completion.environment_s,
            )
            for completion, reward in zip(completions, group.rewards, strict=True)
        ),
        generate_s=group.generate_s,
        reward_s=group.reward_s,
    )
    arrays: list[Array] = [
        np.concatenate([completion.token_ids for completion in completions]),
        np.concatenate([completion.behavior_logprobs for completion in completions]),
    ]
    if has_context(message.completions):
        return message, (*arrays, np.concatenate([completion.context_ids for completion in completions]))
    recorded = [completion.experts for completion in completions if completion.experts is not None]
    if len(recorded) < len(completions):
        return message, tuple(arrays)
    num_prompt_tokens = len(recorded[0]) - len(completions[0].token_ids) + 1
    # The prompt's are the same in all completions but for rounding, and the learner computes it once.
    content = encode_experts(np.concatenate([recorded[0], *(experts[num_prompt_tokens:] for experts in recorded[1:])]))
    _, num_layers, top_k = recorded[0].shape
    experts = ExpertsMeta(num_prompt_tokens, num_layers, top_k, len(content))
    return msgspec.structs.replace(message, experts=experts), (*arrays, content)
