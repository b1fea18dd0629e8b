"""Prove offbeat on a lent machine with a GPU that reaches no network: collect wheels at home, then run its tests there.

python -m tests.gpu_lease collect KIT
python3 -m tests.gpu_lease run KIT [PART ...] [--seconds N] [--out FOLDER]
"""

import argparse
from pathlib import Path

from tests.gpu_lease.parts import PARTS, run


def main() -> None:
    """Collect or run."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_lease", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("collect").add_argument("kit", type=Path)
    running = commands.add_parser("run")
    running.add_argument("kit", type=Path)
    running.add_argument("parts", nargs="*", metavar="PART", help=f"of {', '.join(PARTS)}; default: all, in this order")
    running.add_argument("--seconds", type=float, default=590.0)
    running.add_argument("--out", type=Path, default=Path("gpu-lease"))
    arguments = parser.parse_args()
    if arguments.command == "collect":
        # Imported here: it takes packages that the lent machine lacks.
        from tests.gpu_lease.collect import collect

        collect(arguments.kit)
        return
    unknown = set(arguments.parts) - set(PARTS)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    run(arguments.kit, arguments.parts, seconds=arguments.seconds, out=arguments.out)


if __name__ == "__main__":
    main()
