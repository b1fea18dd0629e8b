"""The conditions under which an actor may work for a run, and the settings for actors that bring none."""

import hashlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from offbeat.common.errors import SettingError
from offbeat.common.formats import listed
from offbeat.common.settings.config import Config
from offbeat.learner.dispatch.send_queue import SendQueue
from offbeat.learner.leases.groups import ExpertLimits
from offbeat.protocols.message_parts import PART_BYTES, ModelHashes
from offbeat.protocols.messages import Hello, Refused, RunPart, TensorSpec
from offbeat.protocols.payload import MAX_EXPERTS

if TYPE_CHECKING:
    # It imports torch, which the hub's thread does without.
    from offbeat.common.models.routing import Routing

MAX_SERVINGS = 4
"""A peer may ask for each part this many times on average."""

MAX_PEERS = 4096
"""Peers whose requests are counted; one that is forgotten begins anew."""


class JoinPayload(NamedTuple):
    """The run for actors that bring neither settings nor model."""

    content: bytes = b""
    """An encoded `protocols.message_parts.JoinSettings`; empty where there is none."""
    obstacle: str = "this learner does not accept --join"
    """The reason why there is none, with the cure."""


class Contract(NamedTuple):
    """The learner's side of the hello."""

    run_id: str
    learner_incarnation: int
    """Random, different for each learner process."""
    layout: tuple[TensorSpec, ...]
    """The flat weight buffer, in order."""
    canary_token_ids: np.ndarray
    """int32 `[num_tokens]`."""
    dtype: str
    """torch dtype of the weights without its prefix: `float32`, `bfloat16`."""
    hashes: ModelHashes
    max_length: int
    """Longest prompt plus completion of this run, in tokens."""
    vocabulary_size: int
    temperature: float
    reward: str
    """`common.settings.loading.weighted_reward`."""
    software: str
    """Version of offbeat."""
    max_message_bytes: int
    max_peers: int | None = None
    """Connections that the limit on open files leaves room for; None: it was not looked at."""
    experts: ExpertLimits | None = None
    """The routers of a run that replays the engine's routing; None in other runs."""
    has_images: bool = False
    """True where prompts have images (`data.image_field`)."""
    sources: Mapping[str, str] = {}
    """`common.user_code.functions.hash_sources` of the function that judges completions; empty where the learner lacks it."""
    join_payload: JoinPayload = JoinPayload()
    """The run for actors that bring neither settings nor model."""


def expert_limits(config: Config, routing: "Routing | None") -> ExpertLimits | None:
    """Return the limits of groups' experts, by a routing of the run's model; None where the engine's are not replayed.

    Raises `SettingError` for a model with more experts than bytes can name.
    """
    if config.loss.routing_replay != "sampled":
        return None
    assert routing is not None, "the trainer refuses a model whose routers do not return their choice"
    if routing.num_experts > MAX_EXPERTS:
        problem = f"experts are sent as bytes, and {config.model.path} has {routing.num_experts} in a layer"
        raise SettingError("loss.routing_replay", "sampled", problem, 'Set it to "recomputed" or "off".')
    _, num_layers, top_k = routing.experts.shape
    return ExpertLimits(num_layers, top_k, routing.num_experts)


def objection(contract: Contract, hello: Hello) -> str | None:
    """Return every reason why this actor would bias or break the run, with the cures; None for an actor that fits."""
    engine = hello.engine
    if hello.run_id not in ("", contract.run_id):
        return (
            f"the actor worked for run {hello.run_id}, and here is run {contract.run_id}: start the actor anew, or give it the "
            "hub.address of its own run"
        )
    model = (
        ("model config", engine.hashes.config, contract.hashes.config),
        ("tokenizer", engine.hashes.tokenizer, contract.hashes.tokenizer),
        ("chat template", engine.hashes.chat_template, contract.hashes.chat_template),
    )
    settings = (
        ("model.dtype", engine.dtype, contract.dtype),
        ("rollout.temperature", hello.temperature, contract.temperature),
        ("task.reward", hello.reward, contract.reward),
    )
    objections: list[str] = []
    for compared, both in ((model, "model.path contents"), (settings, "config")):
        unlike = [f"{what} ({theirs}, not {ours})" for what, theirs, ours in compared if theirs != ours]
        if unlike:
            objections.append(f"actor and learner differ in {listed(unlike)}: give both the same {both}")
    if contract.has_images and not engine.takes_images:
        objections.append(
            "the prompts of this run have images, and the actor takes none: give it the learner's data.image_field and release "
            "of offbeat"
        )
    if engine.max_model_len < contract.max_length:
        objections.append(
            f"the actor's engine takes {engine.max_model_len} tokens, the run needs {contract.max_length}: give both the same "
            "model.max_length"
        )
    return "; ".join(objections) or None


def source_objection(contract: Contract, hello: Hello, others: Iterable[Hello]) -> str | None:
    """Return the files in which an actor's reward differs from the run's, with the cure; None for one that agrees.

    The run's are those of the learner, or of the first of the `others` that has some: the learner need not have the code.
    Files that only one of two machines has are not compared: elsewhere they may be an installed package.
    """
    if not hello.sources:
        return None
    witness, known = "the learner", contract.sources
    if not known:
        witness, known = next(((f"actor {other.actor}", other.sources) for other in others if other.sources), ("", {}))
    unlike = [
        f"{name} (hash {theirs}, not {known[name]})"
        for name, theirs in hello.sources.items()
        if known.get(name, theirs) != theirs
    ]
    if known and not known.keys() & hello.sources.keys():
        unlike = [f"{next(iter(hello.sources))} is not {next(iter(known))}"]
    if not unlike:
        return None
    return (
        f"the actor's code of {contract.reward} is not that of {witness}: {listed(unlike)}. Give the actor the same files, on "
        "its import path (PYTHONPATH, or the folder that it is started in). To change the code of a run, stop it, change it "
        "everywhere, and resume"
    )


def differences(contract: Contract, hello: Hello) -> list[str]:
    """Return the harmless differences between actor and learner, which explain results that are compared later."""
    found = []
    if hello.software != contract.software:
        found.append(f"offbeat {hello.software}, the learner has {contract.software}")
    if not hello.engine.has_weight_files:
        found.append("it starts without weights, so its first update is its noise floor (canary)")
    if hello.engine.max_model_len > contract.max_length:
        found.append(f"max length {hello.engine.max_model_len} tokens (the run needs {contract.max_length})")
    if hello.engine.quantization:
        found.append(
            f"it computes with {hello.engine.quantization}, the learner does not: `offbeat calibrate` measures the noise"
        )
    return found


class JoinServer:
    """Answers requests for parts of the join settings. The dispatcher's lock guards it."""

    def __init__(self, payload: JoinPayload, send_queue: SendQueue) -> None:
        self._payload = payload
        self._send_queue = send_queue
        self._digest = hashlib.sha256(payload.content).hexdigest()
        self._num_parts = -(-len(payload.content) // PART_BYTES)
        self._num_served: dict[bytes, int] = {}
        """Parts that each peer was sent, oldest peer first: a peer that asks and does not read would fill the memory."""

    def answer(self, peer: bytes, index: int) -> None:
        """Send a peer this part, or the reason why it gets none."""
        if not self._num_parts:
            self._send_queue.send(peer, Refused(reason=self._payload.obstacle))
            return
        num_served = self._num_served.get(peer, 0)
        if index >= self._num_parts or num_served >= MAX_SERVINGS * self._num_parts:
            reason = f"the run has {self._num_parts} parts, and {num_served} were sent: start the actor anew"
            self._send_queue.send(peer, Refused(reason=reason))
            return
        self._num_served[peer] = num_served + 1
        if len(self._num_served) > MAX_PEERS:
            del self._num_served[next(iter(self._num_served))]
        part = np.frombuffer(self._payload.content, np.uint8, offset=index * PART_BYTES)[:PART_BYTES]
        self._send_queue.send(peer, RunPart(index=index, num_parts=self._num_parts, digest=self._digest), part)
