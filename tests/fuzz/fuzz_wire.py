"""Coverage-guided fuzzing of the wire's decoder (needs atheris; the options are libFuzzer's).

    python -m tests.fuzz.fuzz_wire -runs=2000000 [FOLDER]

FOLDER keeps the inputs that reached new code. Without FOLDER, fuzzing starts from tests/fuzz/corpus/wire.
Half of the mutations change bytes; the others change, drop, add or repeat one value in the msgpack tree of a body.
"""

import random
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec

# Imported by name, so that type checkers do not need atheris.
atheris = import_module("atheris")

SEEDS = Path(__file__).parent / "corpus/wire"

# Imported under instrumentation, because coverage guides the fuzzer.
with atheris.instrument_imports(include=["protocols", "tests.fuzz.wire_claims"]):
    from tests.fuzz.wire_claims import check_frames, pack, unpack

INTERESTING: tuple[Any, ...] = (
    *(0, 1, -1, 2, 3, 255, 2**31 - 1, 2**31, 2**53, 2**62, 2**63 - 1, 2**63, 2**64 - 1, -(2**63)),
    *(0.0, -1.0, 1e308, float("nan"), float("inf"), float("-inf")),
    *(
        "",
        "x",
        "x" * 257,
        "\0",
        "é",
        "stop",
        "length",
        "vllm",
        "float32",
        "gloo",
        b"",
        b"\xff",
        None,
        True,
        False,
        [],
        {},
        [[]],
    ),
)


def one_input(data: bytes) -> None:
    """Check one input; libFuzzer calls this function."""
    check_frames(data)


def mutate(data: bytes, max_size: int, seed: int) -> bytes:
    """Return a mutated input; libFuzzer calls this function."""
    choose = random.Random(seed)
    is_from_learner, first, frames = unpack(data)
    if not frames or choose.random() < 0.15:
        return atheris.Mutate(data, max_size)
    if choose.random() < 0.1:
        first = choose.randrange(5)
    which = choose.randrange(len(frames)) if choose.random() < 0.4 else 0
    if which == 0 and choose.random() < 0.6:
        frames[0] = _mutate_body(frames[0], choose)
    elif choose.random() < 0.8:
        frames[which] = atheris.Mutate(frames[which], max(1, max_size - len(data) + len(frames[which])))
    else:
        frames = choose.choice([frames[:which] + frames[which + 1 :], [*frames, frames[which]], frames[::-1]])
    _let_lengths_agree(frames, choose)
    return pack(is_from_learner, first, frames)[:max_size]


def _mutate_body(body: bytes, choose: random.Random) -> bytes:
    try:
        tree = msgspec.msgpack.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return atheris.Mutate(body, len(body) + 16)
    root = [tree]
    places = list(_places(root, 0))
    container, key = choose.choice(places)
    match choose.randrange(5):
        case 0 | 1:
            container[key] = choose.choice(INTERESTING)
        case 2 if isinstance(container[key], int | float) and not isinstance(container[key], bool):
            container[key] += choose.choice((-1, 1, 7))
        case 3 if isinstance(container, dict):
            del container[key]
        case 3 if container is not root:
            container.insert(key, container[choose.randrange(len(container))])
        case _ if isinstance(container, dict):
            container[choose.choice(("more", "type", *map(str, container)))] = choose.choice(INTERESTING)
        case _ if container is not root:
            del container[key]
    try:
        return msgspec.msgpack.encode(root[0])
    except (OverflowError, TypeError):
        return body


def _places(container: Any, depth: int) -> Any:
    """Yield every `(container, key)` of a tree, a few levels deep."""
    for key in list(container) if isinstance(container, dict) else range(len(container)):
        yield container, key
        if isinstance(container[key], dict | list) and depth < 6:
            yield from _places(container[key], depth + 1)


def _let_lengths_agree(frames: list[bytes], choose: random.Random) -> None:
    """Usually make a group's arrays as long as its body announces: otherwise hardly any input passes that check."""
    if len(frames) != 3 or choose.random() < 0.2:
        return
    read: Callable[[bytes], Any] = msgspec.msgpack.Decoder().decode
    try:
        num_tokens = sum(completion["num_tokens"] for completion in read(frames[0])["completions"])
        if 0 < num_tokens < 64:
            frames[1:] = [frame[: 4 * num_tokens].ljust(4 * num_tokens, b"\0") for frame in frames[1:]]
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError, KeyError, IndexError):
        return


def main() -> None:
    """Fuzz until `-runs` or `-max_total_time` is over; a claim that does not hold ends the process with its input saved."""
    arguments = sys.argv[1:]
    if all(argument.startswith("-") for argument in arguments):
        arguments.append(f"-seed_inputs={','.join(str(path) for path in sorted(SEEDS.iterdir()))}")
    # The decoder must not allocate the announced length before the bytes have arrived.
    options = ["-malloc_limit_mb=256", "-rss_limit_mb=1024", "-timeout=5", *arguments]
    atheris.Setup([sys.argv[0], *options], one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
