"""A process of few descriptors that serves a keyed hub and writes a log and files: `crowded_hub.py FOLDER NUM_FILES`.

Reads FOLDER/learner.key and FOLDER/allowed_keys; prints the port, and at the end of its stdin what became of it.
"""

import resource
import select
import sys
from pathlib import Path

from offbeat.common.processes.files import patiently
from offbeat.learner.leases.events import Started
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.channels import Hub
from offbeat.protocols.keys import AllowList, HubKeys, read_key_pair
from offbeat.protocols.messages import SayHello


def main(folder: Path, num_files: int) -> None:
    resource.setrlimit(resource.RLIMIT_NOFILE, (num_files, num_files))
    keys = HubKeys(read_key_pair(folder / "learner.key"), AllowList(folder / "allowed_keys"))
    log = RolloutLog(folder / "log", run_id="run", fsync="second", segment_bytes=256, retain_bytes=1 << 30, min_free_bytes=0)
    num_answered = num_written = 0
    with Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 20, keys=keys) as hub:
        print(hub.address.rpartition(":")[2], flush=True)
        while not select.select([sys.stdin], [], [], 0)[0]:
            hub.wait(0.005)
            while (received := hub.receive()) is not None:
                num_answered += hub.send(received.peer, SayHello())
            log.append(Started(at=0.0, run_id="run", learner_incarnation=1, policy_version=0))
            patiently(lambda: (folder / "file").write_bytes(b"whole"))
            num_written += 1
        log.close()
        print(num_answered, num_written, hub.connections.num_closed, flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
