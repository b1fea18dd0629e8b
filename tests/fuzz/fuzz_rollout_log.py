"""Coverage-guided fuzzing of the rollout log's reader (needs atheris; the options are libFuzzer's).

    python -m tests.fuzz.fuzz_rollout_log -runs=1000000 [-max_len=512] [FOLDER]

FOLDER keeps the inputs that reached something new. Without one, those in tests/fuzz/corpus/rollout_log are where it starts.
"""

import sys
from importlib import import_module
from pathlib import Path

# By name: type checkers need not have it installed.
atheris = import_module("atheris")

SEEDS = Path(__file__).parent / "corpus/rollout_log"

# Imported under instrumentation: coverage is what guides the fuzzer.
with atheris.instrument_imports(include=["learner", "tests"]):
    from tests.fuzz.rollout_log_claims import check_segment


def one_input(data: bytes) -> None:
    """What libFuzzer calls."""
    check_segment(data)


def main() -> None:
    """Fuzz until `-runs` or `-max_total_time` is over; a claim that does not hold ends the process with its input saved."""
    arguments = sys.argv[1:]
    if all(argument.startswith("-") for argument in arguments):
        arguments.append(f"-seed_inputs={','.join(str(path) for path in sorted(SEEDS.iterdir()))}")
    # The decoder must not allocate what a length says before the bytes are there.
    atheris.Setup([sys.argv[0], "-malloc_limit_mb=256", "-rss_limit_mb=1024", "-timeout=5", *arguments], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
