"""`python -m tests.gpu_lease collect KIT`."""

import sys
from pathlib import Path

from tests.gpu_lease.collect import collect

match sys.argv[1:]:
    case ["collect", kit]:
        collect(Path(kit))
    case _:
        raise SystemExit(__doc__)
