"""A process that appends groups to a rollout log forever, and prints each one's number when it is acknowledged.

python -m tests.learner.leases.log_writer FOLDER FIRST_LEASE_ID
"""

import sys
from pathlib import Path

import numpy as np

from offbeat.learner.leases.events import Accepted
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.payload import CompletionMeta, Segment

NUM_TOKENS = 20_000
SEGMENT_BYTES = 1 << 21


def accepted(lease_id: int) -> tuple[Accepted, np.ndarray, np.ndarray]:
    """A group that can be told from every other by any of its bytes."""
    num_tokens = NUM_TOKENS + lease_id % 100
    completion = CompletionMeta(num_tokens, "stop", float(lease_id), (Segment(0, 0),))
    event = Accepted(
        at=0.0,
        lease_id=lease_id,
        actor="actor-0",
        completions=(completion,),
        generate_s=1.0,
        policy_version=lease_id,
        prompt_hash=0,
        reward_s=0.0,
    )
    return event, np.full(num_tokens, lease_id, np.int32), np.full(num_tokens, -lease_id, np.float32)


def main() -> None:
    """Append groups until the process is killed."""
    folder, first_lease_id = Path(sys.argv[1]), int(sys.argv[2])
    log = RolloutLog(folder, run_id="run", fsync="off", segment_bytes=SEGMENT_BYTES, retain_bytes=1 << 40, min_free_bytes=0)
    for lease_id in range(first_lease_id, 1 << 31):
        log.append(*accepted(lease_id))
        log.commit()
        print(lease_id, flush=True)


if __name__ == "__main__":
    main()
