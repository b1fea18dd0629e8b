"""Episodes that wait for slow tools, beside quick ones: what they cost the quick ones' throughput.

    python -m tests.benchmarks.slow_tools    # 2 minutes on two quiet cores

    alone    16 groups of quick episodes (four turns each) at work, a lease for each group that ends
    beside   the same, and hundreds of episodes whose tool sleeps five seconds after each of their two turns

One real engine and one real environment process, in one loop as in the actor. Counted are the quick episodes only; the slow
ones take their turns in the engine too, which is told beside it. CPU seconds are those of the process with the engine.
"""

import itertools
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from offbeat.common.processes.environment import prepare_environment
from tests.benchmarks.measuring import NUM_ROUNDS, print_table, spread
from tests.weights import buffer_of

QUICK_GROUPS = 16
GROUP_SIZE = 8
SLOW_GROUPS = (0, 32, 64)
"""Groups whose tools sleep, of each variant: 0, 256 and 512 episodes."""
SLEEP_S = 5.0
TRIAL_S = 12.0
"""Longer than two sleeps, so that slow episodes begin, wait and end in every trial."""
MAX_LENGTH = 64


async def play(chat: Any, row: dict[str, Any]) -> float:
    """Play four quick turns, or two with a tool that sleeps."""
    import asyncio

    for _ in range(2 if row["is_slow"] else 4):
        await chat.sample(max_new_tokens=4)
        if row["is_slow"]:
            await asyncio.sleep(SLEEP_S)
        chat.add("tool", "7")
    return 0.0


class Trial(NamedTuple):
    """Rates of one trial."""

    quick_per_s: float
    """Quick episodes that ended in a second."""
    slow_per_s: float
    quick_per_cpu_s: float
    """Quick episodes for each CPU second of the process with the engine."""


class Loop:
    """The engine, the environment process and the leases at work."""

    def __init__(self, engine: Any, workers: Any, config: Any, prompt: list[int]) -> None:
        from offbeat.actor.environments.episodes import Episodes

        self._engine = engine
        self._prompt = prompt
        self._numbers = itertools.count()
        self._slow: set[int] = set()
        self._episodes = Episodes(engine, workers, config)

    def run(self, num_slow: int) -> Trial:
        """Keep the groups at work for `TRIAL_S`, then let all of them end."""
        for is_slow in [False] * QUICK_GROUPS + [True] * num_slow:
            self._begin(is_slow=is_slow)
        ended = {False: 0, True: 0}
        started, cpu = time.monotonic(), time.process_time()
        wall_s = cpu_s = 0.0
        while self._episodes.is_waiting:
            is_over = time.monotonic() - started > TRIAL_S
            if is_over and not wall_s:
                wall_s, cpu_s = time.monotonic() - started, time.process_time() - cpu
            for outcome in self._step():
                is_slow = outcome.lease_id in self._slow
                if not is_over:
                    ended[is_slow] += GROUP_SIZE
                    self._begin(is_slow=is_slow)
        return Trial(ended[False] / wall_s, ended[True] / wall_s, ended[False] / cpu_s)

    def _begin(self, *, is_slow: bool) -> None:
        from offbeat.protocols.messages import Lease, Sampling

        number = next(self._numbers)
        if is_slow:
            self._slow.add(number)
        row = '{"is_slow": true}' if is_slow else '{"is_slow": false}'
        lease = Lease(
            lease_id=number, prompt_id=0, group_size=GROUP_SIZE, sampling=Sampling(4), min_policy_version=0, timeout_s=600.0,
            prompt="1+1=", row=row,
        )  # fmt: skip
        self._episodes.begin(lease, self._prompt)

    def _step(self) -> list[Any]:
        from offbeat.actor.sampling import RewardedGroup

        if self._engine.num_unfinished:
            for completion in self._engine.step():
                self._episodes.add(completion)
        else:
            time.sleep(0.001)
        outcomes = self._episodes.poll()
        assert all(isinstance(one, RewardedGroup) for one in outcomes), outcomes
        return outcomes


@contextmanager
def loop() -> Iterator[Loop]:
    """Open a model, an engine and an environment process."""
    prepare_environment()
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from offbeat.actor.engines.choice import make_engine
    from offbeat.actor.engines.engine import EngineSettings
    from offbeat.actor.environments.messages import Begin
    from offbeat.actor.environments.worker_starts import WorkerStarts
    from offbeat.actor.environments.workers import Workers
    from offbeat.common.models.folders import hash_model
    from offbeat.common.settings.loading import load
    from offbeat.deploy.local.quickstart.tiny_models import make_tiny_model

    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        make_tiny_model(folder, alphabet="0123456789+=")
        options = {"max_num_seqs": QUICK_GROUPS * GROUP_SIZE, "kv_cache_memory_bytes": 256 << 20}
        engine = make_engine(
            "vllm",
            str(folder),
            EngineSettings(
                dtype="float32", max_model_len=MAX_LENGTH, hashes=hash_model(folder), seed=1, options=options, has_turns=True
            ),
        )
        model = AutoModelForCausalLM.from_pretrained(folder)
        engine.load_weights(buffer_of(model.named_parameters()), 0, recompute_kv=True)
        lengths = [f"model.max_length={MAX_LENGTH}", f"train.micro_batch_tokens={MAX_LENGTH}"]
        limits = ["turn_timeout_s=60", "episode_timeout_s=120", "reward_retry_s=0", "actor.on_update=recompute_kv"]
        config = load(None, ["task.environment=tests.benchmarks.slow_tools:play", *lengths, *limits])
        workers = Workers(Begin(config=config, model=str(folder)), WorkerStarts(forks=False, has_parser=False))
        try:
            yield Loop(engine, workers, config, AutoTokenizer.from_pretrained(folder).encode("1+1="))
        finally:
            workers.close()
            engine.close()


def main() -> None:
    """Measure all variants in turns, and print ratios to the first one of the same round."""
    with loop() as measured:
        measured.run(0)
        rounds = [{num_slow: measured.run(num_slow) for num_slow in SLOW_GROUPS} for _ in range(NUM_ROUNDS)]
    rows = []
    for num_slow in SLOW_GROUPS:
        trials = [one[num_slow] for one in rounds]
        ratios = [one[num_slow].quick_per_s / one[0].quick_per_s for one in rounds]
        cpu_ratios = [one[num_slow].quick_per_cpu_s / one[0].quick_per_cpu_s for one in rounds]
        rows.append(
            (
                f"{num_slow * GROUP_SIZE:,}",
                spread([trial.quick_per_s for trial in trials], 0),
                spread(ratios),
                spread(cpu_ratios),
                f"{np.round(median(trial.slow_per_s for trial in trials), 1):g}",
            )
        )
    header = ("episodes with slow tools", "quick episodes / s", "ratio", "ratio for each CPU second", "slow episodes / s")
    print_table("Episodes that wait for slow tools", header, rows)


if __name__ == "__main__":
    main()
