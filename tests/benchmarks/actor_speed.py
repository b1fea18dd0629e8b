"""The actor against bare vLLM: the same prompts and settings through its loop and through `vllm.LLM.generate`, in turns.

    python -m tests.benchmarks.actor_speed    # 3 minutes on two quiet cores

    bare     `LLM.generate` of all prompts at once; it returns token ids and log-probs, and no text
    actor    the service over a real hub: leases in, rewards in worker processes, groups out. A lease follows for each group
             that comes back, so that as many completions are at work as vLLM runs at once in the other process

Each has a process with an engine of its own, which is idle in the other's turn. Tokens are sampled ones. CPU seconds are those
of the process with the engine, all threads; without other load and with one thread of torch they are its wall-clock time.
Weights do not change (`weight_sync` measures that).
"""

import itertools
import json
import os
import tempfile
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from offbeat.common.processes.environment import has_gpu, prepare_environment
from tests.benchmarks.measuring import NUM_ROUNDS, PATIENCE_S, print_table, processes, receive_from, spread
from tests.weights import buffer_of

GROUP_SIZE = 8
INFLIGHT_GROUPS = 16
NUM_GROUPS = 160
"""Groups of one trial; a tenth of them start and end it, with a batch that is not full."""
ALPHABET = "0123456789>"


class Workload(NamedTuple):
    """A model and the lengths of what goes through it."""

    name: str
    hidden_size: int
    num_layers: int
    prompt_tokens: int
    new_tokens: int

    @property
    def max_length(self) -> int:
        """Tokens that the engine has room for."""
        return self.prompt_tokens + self.new_tokens

    @property
    def num_groups(self) -> int:
        """Groups of a trial: fewer where completions are long."""
        return max(2 * INFLIGHT_GROUPS, NUM_GROUPS * 8 // self.new_tokens)


WORKLOADS = (
    Workload("0.3 M parameters, prompts of 6 tokens, completions of up to 8", 128, 2, 6, 8),
    Workload("3 M parameters, prompts of 64 tokens, completions of up to 64", 256, 4, 64, 64),
)


class Trial(NamedTuple):
    """All groups of one trial."""

    num_tokens: int
    wall_s: float
    cpu_s: float


def make_model(folder: Path, workload: Workload) -> None:
    """Write a random model with the tokenizer of `ALPHABET`; a random model ends few completions early."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from offbeat.deploy.local.quickstart.tiny_models import make_tiny_model

    make_tiny_model(folder, alphabet=ALPHABET)
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": workload.hidden_size,
        "intermediate_size": 3 * workload.hidden_size,
        "num_hidden_layers": workload.num_layers,
        "num_attention_heads": workload.hidden_size // 32,
        "num_key_value_heads": workload.hidden_size // 64,
        "head_dim": 32,
        "tie_word_embeddings": True,
        "eos_token_id": tokenizer.eos_token_id,
    }
    Qwen3ForCausalLM(Qwen3Config(**shape)).save_pretrained(folder)


def prompts_of(workload: Workload, seed: int) -> list[list[int]]:
    """Return the prompts of one trial, other ones for each seed: a cache of prefixes must not help the second turn."""
    random = np.random.default_rng(seed)
    return random.integers(4, 4 + len(ALPHABET), (workload.num_groups, workload.prompt_tokens)).tolist()


def run_bare(connection: Connection, folder: str, workload: Workload) -> None:
    """Answer each list of prompts with a `Trial`."""
    prepare_environment()
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(
        folder,
        dtype="float32",
        max_model_len=workload.max_length,
        max_num_seqs=INFLIGHT_GROUPS * GROUP_SIZE,
        enforce_eager=not has_gpu(),
        kv_cache_memory_bytes=256 << 20,
        logprobs_mode="processed_logprobs",
    )
    params = SamplingParams(
        n=GROUP_SIZE, temperature=1.0, max_tokens=workload.new_tokens, logprobs=0, flat_logprobs=True, detokenize=False
    )
    connection.send(os.getpid())
    while True:
        prompts = [TokensPrompt(prompt_token_ids=prompt) for prompt in connection.recv()]
        started, cpu_before = time.monotonic(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        cpu_s, wall_s = time.process_time() - cpu_before, time.monotonic() - started
        num_tokens = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
        connection.send(Trial(num_tokens, wall_s, cpu_s))


def run_actor(connection: Connection, folder: str, workload: Workload, address: str) -> None:
    """Run an actor of the hub at `address` until the benchmark ends."""
    prepare_environment()
    import contextlib

    from transformers import AutoModelForCausalLM

    from offbeat.actor.contact import ActorIdentity
    from offbeat.actor.engines.choice import make_engine
    from offbeat.actor.engines.engine import EngineSettings
    from offbeat.actor.leases_at_work import LeasesAtWork, Outbox
    from offbeat.actor.rewards.runner import RewardRunner
    from offbeat.actor.sampling import SingleTurns
    from offbeat.actor.service import ActorService
    from offbeat.common.models.folders import load_tokenizer
    from offbeat.common.processes.shutdown import StopRequest
    from offbeat.common.settings.config import ActorSection, Config, HubSection
    from offbeat.protocols.channels import Link
    from offbeat.protocols.message_parts import ModelHashes

    config = Config(actor=ActorSection(max_inflight_groups=INFLIGHT_GROUPS), hub=HubSection(address=address))
    identity = ActorIdentity("actor-0", 1)
    rewards = RewardRunner(config.task, config.actor)
    engine = make_engine(
        "vllm",
        folder,
        EngineSettings(
            dtype="float32",
            max_model_len=workload.max_length,
            hashes=ModelHashes("", "", ""),
            seed=0,
            options={"max_num_seqs": INFLIGHT_GROUPS * GROUP_SIZE, "kv_cache_memory_bytes": 256 << 20},
        ),
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    engine.load_weights(buffer_of(model.named_parameters()), 0, recompute_kv=False)
    link = Link(address, identity=identity.peer(), max_message_bytes=config.hub.max_message_mb << 20)
    connection.send(os.getpid())
    outbox = Outbox(resend_after_s=config.hub.dead_after_s)
    play = SingleTurns(engine, load_tokenizer(Path(folder)), rewards)
    leases = LeasesAtWork(engine, play, outbox, max_message_bytes=config.hub.max_message_mb << 20)
    with contextlib.closing(rewards), contextlib.closing(engine), link:
        ActorService(
            identity=identity,
            config=config,
            engine=engine,
            leases=leases,
            link=link,
            stop=StopRequest(),
        ).run()


class Learner:
    """The learner's end of the hub for one actor: leases while it has credit, and acknowledgements."""

    def __init__(self) -> None:
        from offbeat.protocols.channels import Hub

        self.hub = Hub("tcp://127.0.0.1:0", max_message_bytes=1 << 26)
        self._peer = b""
        self._num_leases = 0

    def welcome(self) -> None:
        """Admit the actor."""
        import torch

        from offbeat.common.weights.flat import make_layout
        from offbeat.protocols.messages import Credit, Hello, Welcome

        layout = make_layout([("w", (1,))], torch.float32)
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline:
            for message in self._messages():
                if isinstance(message, Hello):
                    welcome = Welcome(
                        run_id="benchmark", learner_incarnation=1, max_message_bytes=1 << 26, layout=layout, policy_version=0
                    )
                    self.hub.send(self._peer, welcome, np.array([5, 6, 7], np.int32))
                elif isinstance(message, Credit):
                    return
        raise TimeoutError(f"no actor within {PATIENCE_S:g} s")

    def sample(self, prompts: list[list[int]], new_tokens: int) -> int:
        """Have the actor answer one lease for each prompt; return the number of sampled tokens."""
        from offbeat.protocols.messages import Ack, GroupDone, LeaseFailed

        waiting = iter(prompts)
        num_answers = num_tokens = 0
        for prompt in itertools.islice(waiting, INFLIGHT_GROUPS):
            self._lease(prompt, new_tokens)
        deadline = time.monotonic() + PATIENCE_S
        while num_answers < len(prompts):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{num_answers} of {len(prompts)} groups within {PATIENCE_S:g} s")
            for message in self._messages():
                assert not isinstance(message, LeaseFailed), message
                if isinstance(message, GroupDone):
                    self.hub.send(self._peer, Ack(lease_id=message.lease_id, outcome="accepted"))
                    num_answers += 1
                    num_tokens += sum(completion.num_tokens for completion in message.completions)
                    prompt = next(waiting, None)
                    if prompt is not None:
                        self._lease(prompt, new_tokens)
        return num_tokens

    def _lease(self, prompt: list[int], new_tokens: int) -> None:
        from offbeat.protocols.messages import Lease, Sampling

        lease = Lease(
            lease_id=self._num_leases,
            prompt_id=0,
            group_size=GROUP_SIZE,
            sampling=Sampling(new_tokens),
            min_policy_version=0,
            timeout_s=60.0,
            prompt="",
            row=json.dumps({"answer": "12345"}),
        )
        self._num_leases += 1
        self.hub.send(self._peer, lease, np.array(prompt, np.int32))

    def _messages(self) -> list[Any]:
        from offbeat.protocols.messages import ActorHeartbeat, LearnerHeartbeat
        from offbeat.protocols.wire import FromActor

        self.hub.wait(0.05)
        messages = []
        while (received := self.hub.receive()) is not None:
            self._peer = received.peer
            assert isinstance(received.packet, FromActor)
            if isinstance(received.packet.message, ActorHeartbeat):
                self.hub.send(self._peer, LearnerHeartbeat(newest_lease_id=self._num_leases))
            messages.append(received.packet.message)
        return messages


def process_cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its threads, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def compare(workload: Workload) -> list[str]:
    """Return the workload's row: rates and their ratios."""
    with tempfile.TemporaryDirectory(prefix="offbeat-benchmark-") as folder:
        make_model(Path(folder), workload)
        learner = Learner()
        with (
            processes(run_bare, 1, folder, workload) as (bare,),
            processes(run_actor, 1, folder, workload, learner.hub.address) as (actor,),
        ):
            receive_from(bare)
            actor_pid: int = receive_from(actor)
            learner.welcome()

            def of_bare(seed: int) -> Trial:
                bare.send(prompts_of(workload, seed))
                return receive_from(bare)

            def of_actor(seed: int) -> Trial:
                started, cpu_before = time.monotonic(), process_cpu_s(actor_pid)
                num_tokens = learner.sample(prompts_of(workload, seed), workload.new_tokens)
                return Trial(num_tokens, time.monotonic() - started, process_cpu_s(actor_pid) - cpu_before)

            variants: tuple[Callable[[int], Trial], ...] = (of_bare, of_actor)
            rounds: list[tuple[Trial, ...]] = []
            for seed in range(1 + 2 * NUM_ROUNDS):
                turns = variants if seed % 2 else variants[::-1]
                trials = {run: run(seed) for run in turns}
                rounds.append(tuple(trials[run] for run in variants))
        learner.hub.close()
    # The first round warms up.
    bare_trials, actor_trials = zip(*rounds[1:], strict=True)
    return [
        workload.name,
        f"{median(trial.num_tokens / trial.cpu_s for trial in bare_trials):,.0f}",
        f"{median(trial.num_tokens / trial.cpu_s for trial in actor_trials):,.0f}",
        spread([_per_token(b.cpu_s, b) / _per_token(a.cpu_s, a) for b, a in rounds[1:]]),
        spread([_per_token(b.wall_s, b) / _per_token(a.wall_s, a) for b, a in rounds[1:]]),
    ]


def _per_token(seconds: float, trial: Trial) -> float:
    return seconds / trial.num_tokens


def main() -> None:
    """Compare on all workloads, and print the ratios."""
    prepare_environment()
    print_table(
        f"The actor over bare vLLM: median (min–max) of {2 * NUM_ROUNDS} rounds, groups of {GROUP_SIZE}",
        ["workload", "bare, tokens per CPU s", "actor, tokens per CPU s", "actor / bare, CPU", "actor / bare, wall-clock"],
        [compare(workload) for workload in WORKLOADS],
    )


if __name__ == "__main__":
    main()
