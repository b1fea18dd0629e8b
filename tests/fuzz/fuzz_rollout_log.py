"""Coverage-guided fuzzing of the rollout log's reader (needs atheris; the options are libFuzzer's).

    python -m tests.fuzz.fuzz_rollout_log -runs=1000000 [-max_len=512] [FOLDER]

FOLDER keeps the inputs that reached new code. Without FOLDER, fuzzing starts from tests/fuzz/corpus/rollout_log.
"""

import sys
from importlib import import_module
from pathlib import Path

# Imported by name, so that type checkers do not need atheris.
atheris = import_module("atheris")

SEEDS = Path(__file__).parent / "corpus/rollout_log"

# Imported under instrumentation, because coverage guides the fuzzer.
with atheris.instrument_imports(include=["learner", "tests"]):
    from tests.fuzz.rollout_log_claims import check_segment


def one_input(data: bytes) -> None:
    """Check one input; libFuzzer calls this function."""
    check_segment(data)


def main() -> None:
    """Fuzz until `-runs` or `-max_total_time` is over; a claim that does not hold ends the process with its input saved."""
    arguments = sys.argv[1:]
    if all(argument.startswith("-") for argument in arguments):
        arguments.append(f"-seed_inputs={','.join(str(path) for path in sorted(SEEDS.iterdir()))}")
    # The decoder must not allocate the announced length before the bytes have arrived.
    atheris.Setup([sys.argv[0], "-malloc_limit_mb=256", "-rss_limit_mb=1024", "-timeout=5", *arguments], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
