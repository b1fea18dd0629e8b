"""Differences of weights along a real training trajectory: their size, and the time to encode and to apply them.

A small transformer learns to predict the bytes of this project's documentation. After a warm-up at a high learning rate AdamW
goes on from the same weights at each learning rate. The master weights are float32; versions are cast as they would be sent.
"""

import itertools
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from transformers import Qwen3Config, Qwen3ForCausalLM

from offbeat.common.weights.deltas import apply_delta, word_bytes
from offbeat.common.weights.flat import WeightBuffer, checksum, make_layout
from offbeat.learner.weights.double_buffer import WeightSnapshot
from offbeat.learner.weights.server import DeltaChain
from tests.benchmarks.measuring import NUM_ROUNDS, print_table, spread

LEARNING_RATES = (1e-6, 1e-5, 1e-4)
DTYPES = (torch.bfloat16, torch.float32)
WARM_UP_STEPS = 50
SETTLING_STEPS = 8
"""Steps at a learning rate before the first version is kept: AdamW's first steps are longer than the others."""
NUM_VERSIONS = 5
CHUNK_BYTES = 8 << 20
BATCH_ROWS = 8
ROW_BYTES = 128


class Sizes(NamedTuple):
    """Sizes of the differences of one trajectory, relative to the weights."""

    changed: float
    """Share of the words that a step changes."""
    ratio: float
    """The weights' size over a difference's."""
    xor_ratio: float
    """The weights' size over that of the exclusive or of both versions, compressed byte plane by byte plane."""
    distant_ratio: float
    """The weights' size over that of all differences together: an actor that missed all versions but the first."""


class Speed(NamedTuple):
    """Megabytes of weights in a second of CPU time, in one thread."""

    encode: float
    apply: float


def make_trajectories() -> dict[float, list[dict[str, torch.Tensor]]]:
    """Return consecutive versions of float32 weights for each learning rate."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=256,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        tie_word_embeddings=True,
    )
    model = Qwen3ForCausalLM(config)
    pages = sorted(Path(__file__).parents[2].joinpath("docs").glob("*.md"))
    data = torch.frombuffer(bytearray(b"".join(page.read_bytes() for page in pages)), dtype=torch.uint8).long()
    loss = train(model, data, 1e-3, WARM_UP_STEPS)[1]
    print(f"{sum(parameter.numel() for parameter in model.parameters()) / 1e6:.1f}M weights, loss {loss:.2f} after the warm-up")
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trajectories = {}
    for learning_rate in LEARNING_RATES:
        model.load_state_dict(start)
        trajectories[learning_rate] = train(model, data, learning_rate, SETTLING_STEPS + NUM_VERSIONS)[0][SETTLING_STEPS:]
    return trajectories


def train(
    model: Qwen3ForCausalLM, data: torch.Tensor, learning_rate: float, num_steps: int
) -> tuple[list[dict[str, torch.Tensor]], float]:
    """Return the weights after each of the last steps, and the last loss. AdamW has the settings that `train.*` defaults to."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0)
    versions, loss = [], torch.tensor(0.0)
    for step in range(num_steps):
        starts = torch.randint(0, len(data) - ROW_BYTES, (BATCH_ROWS,))
        rows = torch.stack([data[start : start + ROW_BYTES] for start in starts])
        loss = model(input_ids=rows, labels=rows).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step >= num_steps - NUM_VERSIONS:
            versions.append({name: parameter.detach().clone() for name, parameter in model.named_parameters()})
        else:
            versions.append({})
    return versions, loss.item()


def cast(trajectory: list[dict[str, torch.Tensor]], dtype: torch.dtype) -> list[WeightSnapshot]:
    """Return the versions as they would be sent."""
    layout = make_layout([(name, tuple(tensor.shape)) for name, tensor in trajectory[0].items()], dtype)
    snapshots = []
    for version, weights in enumerate(trajectory):
        buffer = WeightBuffer(layout)
        for name, view in buffer.views():
            view.copy_(weights[name])
        snapshots.append(WeightSnapshot(buffer, version, known_checksum=checksum(buffer.flat)))
    return snapshots


def encode(snapshots: list[WeightSnapshot]) -> DeltaChain:
    """Return the chain through all versions."""
    chain = DeltaChain(snapshots[0].buffer.layout, CHUNK_BYTES)
    for snapshot in snapshots:
        chain.advance(snapshot)
    return chain


def apply(chain: DeltaChain, flat: torch.Tensor, size: int) -> None:
    """Bring the buffer from the oldest version of the chain to the newest."""
    for delta in chain.deltas:
        for chunk, piece in zip(flat.split(CHUNK_BYTES), delta.pieces, strict=True):
            apply_delta(piece.numpy().tobytes(), chunk.numpy(), size)


def words(snapshot: WeightSnapshot) -> NDArray[np.integer]:
    """Return the weights' bits."""
    return snapshot.buffer.flat.numpy().view(f"<u{word_bytes(snapshot.buffer.layout)}")


def measure_sizes(snapshots: list[WeightSnapshot]) -> Sizes:
    """Return the sizes of the differences between consecutive versions."""
    full = len(snapshots[0].buffer.flat)
    pairs = [(words(old), words(new)) for old, new in itertools.pairwise(snapshots)]
    codec = pa.Codec("zstd", compression_level=1)
    planes = [(old ^ new).view(np.uint8).reshape(-1, old.itemsize).T.tobytes() for old, new in pairs]
    # A chain of two versions keeps its difference unless it is larger than the weights.
    sizes = [sum(delta.num_bytes for delta in encode(list(pair)).deltas) or full for pair in itertools.pairwise(snapshots)]
    return Sizes(
        changed=float(np.mean([np.mean(old != new) for old, new in pairs])),
        ratio=full * len(pairs) / sum(sizes),
        xor_ratio=full * len(pairs) / sum(len(codec.compress(of_pair, asbytes=True)) for of_pair in planes),
        distant_ratio=full / min(full, sum(sizes)),
    )


def measure_speed(snapshots: list[WeightSnapshot]) -> Speed:
    """Return the speed over all versions, and check that the last one results."""
    size = word_bytes(snapshots[0].buffer.layout)
    encode_s = apply_s = 0.0
    for pair in itertools.pairwise(snapshots):
        chain = encode([pair[0]])
        started = time.process_time()
        chain.advance(pair[1])
        encode_s += time.process_time() - started
        flat = pair[0].buffer.flat.clone()
        started = time.process_time()
        apply(chain, flat, size)
        apply_s += time.process_time() - started
        assert not chain.deltas or torch.equal(flat, pair[1].buffer.flat)
    megabytes = len(snapshots[0].buffer.flat) * (len(snapshots) - 1) / 1e6
    return Speed(megabytes / encode_s, megabytes / apply_s)


def main() -> None:
    """Print the tables."""
    trajectories = make_trajectories()
    torch.set_num_threads(1)
    cases = {(dtype, rate): cast(versions, dtype) for dtype in DTYPES for rate, versions in trajectories.items()}
    speeds: dict[tuple[torch.dtype, float], list[Speed]] = {case: [] for case in cases}
    for _ in range(NUM_ROUNDS):
        for case, snapshots in cases.items():
            speeds[case].append(measure_speed(snapshots))
    rows = []
    for (dtype, rate), snapshots in cases.items():
        sizes, of_case = measure_sizes(snapshots), speeds[dtype, rate]
        rows.append(
            [
                str(dtype).removeprefix("torch."),
                f"{rate:g}",
                f"{sizes.changed:.1%}",
                f"{sizes.ratio:.1f}",
                f"{sizes.distant_ratio:.1f}",
                f"{sizes.xor_ratio:.1f}",
                spread([speed.encode for speed in of_case], digits=0),
                spread([speed.apply for speed in of_case], digits=0),
            ]
        )
    header = (
        "weights",
        "learning rate",
        "words changed",
        "times smaller",
        f"{NUM_VERSIONS - 1} steps",
        "XOR planes",
        "encode, MB/s",
        "apply, MB/s",
    )
    print_table("Differences of weights (zstd-1; speeds in CPU time of one thread)", header, rows)


if __name__ == "__main__":
    main()
