"""Events of leases for tests that care about a few of their fields."""

from typing import Any

import msgspec

from offbeat.learner.leases.events import Accepted, Granted, Trained

_GRANTED = Granted(
    at=0.0,
    lease_id=0,
    prompt_id=0,
    epoch=0,
    actor="a",
    policy_version=0,
    oldest_version=0,
    prompt_hash=0,
    epoch_size=20,
)
_ACCEPTED = Accepted(
    at=0.0, lease_id=0, actor="a", completions=(), generate_s=0.0, policy_version=0, prompt_hash=0, reward_s=0.0
)
_TRAINED = Trained(at=0.0, lease_ids=(), policy_version=0, num_steps=1, selected_at=0.0, selected_after=0, prompt_hashes=())


def make_granted(lease_id: int, **fields: Any) -> Granted:
    """Return the grant of a lease."""
    return msgspec.structs.replace(_GRANTED, lease_id=lease_id, **fields)


def make_accepted(lease_id: int, **fields: Any) -> Accepted:
    """Return the acceptance of a lease's group."""
    return msgspec.structs.replace(_ACCEPTED, lease_id=lease_id, **fields)


def make_trained(*lease_ids: int, **fields: Any) -> Trained:
    """Return the training of a batch."""
    return msgspec.structs.replace(_TRAINED, lease_ids=lease_ids, **fields)
