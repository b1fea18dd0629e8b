"""One learner rank of a test: trains on shared groups in each case; rank 0 writes the results."""

import os
import resource
from pathlib import Path

import torch

from offbeat.common.processes.shutdown import end_process
from offbeat.common.weights.flat import WeightBuffer, map_bytes, named_views
from offbeat.learner.policy.lora import merged_parameters
from offbeat.learner.policy.zero import gathered_parameters
from offbeat.learner.training.checkpoints import CheckpointFailedError
from offbeat.learner.training.trainer import Trainer
from tests.learner.training.trainer_cases import APART, GATHERED_NUMEL, MEMORY_CASES, SGD, make_config, make_groups
from tests.learner.training.trainer_cases import RANK_CASES as CASES
from tests.live_bytes import LiveBytes


def train(model: Path, case: str, checkpoints: Path) -> dict[str, object]:
    """Take two optimizer steps, the second by a new trainer that loads the first one's checkpoint."""
    config = make_config(model, **{"deepspeed": SGD, **CASES[case].of_step, **CASES[case].of_ranks})
    trainer = Trainer(config)
    # Several chunks a micro-batch, and not as many on every rank.
    trainer.networks.module.head._max_chunk_logits = 7 * 44
    first = trainer.train_batch(make_groups(3, seed=1))
    failure = save_on_a_full_disk(trainer, checkpoints / case / "step-00000000")
    trainer.save_checkpoint(checkpoints / case / "step-00000001", b"position")
    trainer.close()
    trainer = Trainer(config)
    extra = trainer.load_checkpoint(checkpoints / case / "step-00000001")
    second = trainer.train_batch(make_groups(3, seed=2))
    buffer = WeightBuffer(trainer.layout()) if trainer.rank == 0 else None
    trainer.snapshot(None if buffer is None else dict(buffer.views()))
    flats = snapshots(trainer)
    score = trainer.score([5, 6, 7, 8]).logprobs
    trainer.save_model(checkpoints / f"model-{case}")
    trainer.close()
    weights = dict(buffer.views()) if buffer is not None else {}
    return {
        "weights": weights,
        "snapshots": flats,
        "metrics": [*first, *second],
        "extra": extra,
        "failure": failure,
        "score": torch.from_numpy(score),
    }


def snapshots(trainer: Trainer) -> dict[str, torch.Tensor]:
    """Snapshot the weights in several ways; on rank 0 return the bytes.

    `gathered`: rank 0 copies whole weights. `sent`: rank 1 has no buffer. `shared`: it has the same one as rank 0. `first`,
    `second`: each rank has a buffer of its own, so that it is seen what each of them writes.
    """
    layout, is_first = trainer.layout(), trainer.rank == 0
    gathered, sent, own = (WeightBuffer(layout) for _ in range(3))
    for (_, view), (_, weight) in zip(gathered.views(), merged_parameters(trainer.networks.module.policy), strict=True):
        view.copy_(weight)
    trainer.snapshot(dict(sent.views()) if is_first else None)
    shared, of_second = (share(WeightBuffer(layout)) for _ in range(2))
    trainer.snapshot(dict(named_views(shared, layout)))
    trainer.snapshot(dict(own.views()) if is_first else dict(named_views(of_second, layout)))
    named = {"gathered": gathered.flat, "sent": sent.flat, "shared": shared, "first": own.flat, "second": of_second}
    return {name: flat.clone() for name, flat in named.items()} if is_first else {}


def share(buffer: WeightBuffer) -> torch.Tensor:
    """Return the bytes of rank 0's buffer on every rank."""
    where = [buffer.address]
    torch.distributed.broadcast_object_list(where)
    flat = map_bytes(where[0], len(buffer.flat))
    # Until here rank 0 keeps it.
    torch.distributed.barrier()
    return flat


def count_memory(model: Path, case: str) -> dict[str, object]:
    """Count what one rank of a case holds in its second optimizer step, and while whole weights pass through it."""
    config = make_config(model, **MEMORY_CASES[case], learning_rate=1e-3)
    with LiveBytes("cpu") as live:
        trainer = Trainer(config)
        # Its samples of gradients are larger than the tiny model.
        trainer._direction.compare = lambda gradients: None
        trainer.train_batch(make_groups(3, seed=1))
        live.most = live.now
        trainer.train_batch(make_groups(3, seed=2))
        in_step, before = live.most, live.now
        live.most = before
        for _ in gathered_parameters(trainer.networks.module.policy.named_parameters(), bucket_numel=GATHERED_NUMEL):
            pass
        gathered = live.most - before
        flats = snapshots(trainer)
        if config.train.zero_stage == 0:
            # They are those that were loaded, beside the counter.
            in_step += sum(parameter.nbytes for parameter in trainer.networks.module.parameters())
        trainer.close()
    return {"in_step": in_step, "gathered": gathered, "snapshots": flats}


def save_on_a_full_disk(trainer: Trainer, folder: Path) -> str:
    """Save a checkpoint while rank 1 may write no large file; return what this rank was told."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if trainer.rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        trainer.save_checkpoint(folder, b"")
    except CheckpointFailedError as error:
        return str(error)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return ""


def run_rank(variables: dict[str, str], model: Path, result: Path) -> None:
    """Run every case with torchrun's variables; only rank 0 has weights to write."""
    os.environ.update(variables)
    own = result.parent / f"machine-{os.environ['RANK']}"
    own.mkdir()
    os.chdir(own)
    outcome = {case: train(model, case, Path("run") if case in APART else result.parent / "run") for case in CASES}
    memory = {case: count_memory(model, case) for case in MEMORY_CASES}
    if torch.distributed.get_rank() == 0:
        torch.save(outcome | {"memory": memory}, result)
    # As the learner ends: freed with the interpreter, torch's threads may abort the process.
    end_process(0)
