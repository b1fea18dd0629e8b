"""`offbeat samples`: the prompts and completions that a run was trained on, read from its rollout log."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import msgspec
from rich.console import Console
from rich.text import Text
from rich.tree import Tree

from offbeat.common.errors import SettingError
from offbeat.common.formats import listed
from offbeat.common.models.folders import resolve_model
from offbeat.common.records.rows import EvalSampleRow
from offbeat.common.records.run_folder import LOG, read_run_config
from offbeat.common.settings.config import Config, environment_of
from offbeat.lab.history import read_run_history
from offbeat.lab.lease_history import LeaseHistories, LeaseHistory
from offbeat.learner.diagnostics.sample_rows import Decode, shorten, written
from offbeat.learner.leases.events import Accepted
from offbeat.learner.leases.groups import Rollout, unpack
from offbeat.learner.leases.log_reading import Position, read_log, read_record
from offbeat.learner.leases.prompts import Prompt, load_prompts
from offbeat.protocols.payload import Segment
from offbeat.protocols.text import plain

Order = Literal["newest", "best", "worst"]
MAX_TEXT = 2000
"""Longest text that is printed without `--full`, in characters."""


class SamplesRequest(NamedTuple):
    """The trained groups to show."""

    order: Order = "newest"
    step: int | None = None
    """Show only groups of the optimizer step that made this policy version."""
    prompt_id: int | None = None
    """Show only groups of this prompt."""
    num_groups: int = 4
    num_completions: int = 4
    """Completions to show of each group: the best ones first; for the order `worst`, the worst ones first."""


class SampledTurn(msgspec.Struct, frozen=True):
    """One turn of an episode that branches."""

    continues: int | None
    """Index of the turn that it continues, -1 for the prompt, None for a turn that begins a new sequence."""
    num_tokens: int
    versions: tuple[int, ...]
    """The policy versions that sampled it."""
    text: str
    """The added text, between ⟦ and ⟧, and after it what the model wrote."""
    reward: float
    """The reward that was given after the turn."""


class SampledCompletion(msgspec.Struct, frozen=True):
    """One completion of a group."""

    reward: float
    above_mean: float
    """The reward less the mean reward of the group: the advantage before it is scaled."""
    finish_reason: str
    """`stop`, or `length` for a completion cut off at `rollout.max_new_tokens`."""
    num_tokens: int
    text: str
    """The completion as the model wrote it, special tokens included."""
    versions: tuple[Segment, ...] = ()
    """The policy versions that sampled it, each with its first token."""
    turns: tuple[SampledTurn, ...] = ()
    """The turns of an episode with branches; empty where each turn continues the one before."""


class SampledGroup(msgspec.Struct, frozen=True):
    """A trained group, decoded."""

    step: int
    """The policy version that the last optimizer step on the group made."""
    policy_lag: int
    lease_id: int
    prompt_id: int | None
    """Id of the prompt; None where the log does not reach back to the lease's grant."""
    actor: str
    prompt: str | None
    """Text of the prompt; None where the data no longer has it, or has another one under its id."""
    completions: tuple[SampledCompletion, ...]


def read_samples(run: Path, request: SamplesRequest) -> list[SampledGroup]:
    """Return the groups that are asked for; raise `SettingError` for a run without a log, model or such groups."""
    config = read_run_config(run)
    folder = run / LOG
    if not folder.is_dir():
        problem = (
            "it has no rollout log, so there is nothing to read" if not config.log.enabled else "it has no rollout log yet"
        )
        cure = "Its report shows some samples: offbeat report RUN. Runs with log.enabled=true keep all completions."
        raise SettingError("RUN", str(run), problem, cure)
    leases, positions = LeaseHistories(epochs=config.train.epochs_per_batch), dict[int, Position]()
    for record in read_log(folder):
        leases.take(record.event)
        if isinstance(record.event, Accepted):
            positions[record.event.lease_id] = record.position
    chosen = choose(list(leases.trained_groups()), request)
    if not chosen:
        cure = "Ask for a step or prompt that was trained on; the log keeps log.retain_mb of the newest groups."
        raise SettingError("RUN", str(run), "its log has no trained group of that kind", cure)
    decode, prompts = _open_texts(config)
    return list(_decoded(folder, chosen, positions, decode, prompts, request))


def choose(groups: Sequence[LeaseHistory], request: SamplesRequest) -> list[LeaseHistory]:
    """Return the groups to show, the last trained first among equals.

    The best group is the one with the best completion, the worst one that with the worst.
    """
    found = [
        group
        for group in reversed(groups)
        if (request.step is None or request.step in group.steps) and request.prompt_id in (None, group.prompt_id)
    ]
    if request.order == "best":
        found.sort(key=lambda group: -max(group.rewards))
    elif request.order == "worst":
        found.sort(key=lambda group: min(group.rewards))
    return found[: request.num_groups]


def print_samples(console: Console, samples: Sequence[SampledGroup | EvalSampleRow], *, full: bool = False) -> None:
    """Print the samples. Texts are data: control characters are escaped, and markup stands as it is."""
    limit = None if full else MAX_TEXT
    for sample in samples:
        if isinstance(sample, SampledGroup):
            _print_group(console, sample, limit)
        else:
            _print_evaluated(console, sample, limit)
        console.print()


def _print_group(console: Console, group: SampledGroup, limit: int | None) -> None:
    named = "unknown" if group.prompt_id is None else str(group.prompt_id)
    title = f"step {group.step}  prompt {named}  lag {group.policy_lag}  {printable(group.actor)}"
    console.rule(Text(title), align="left")
    print_text(console, group.prompt or "(the data does not have this prompt any more)", limit, style="dim")
    for completion in group.completions:
        ended = "cut at the limit" if completion.finish_reason == "length" else "stopped"
        scored = f"reward {completion.reward:g}  above mean {completion.above_mean:+.3g}"
        console.print(Text(f"{scored}  {completion.num_tokens} tokens, {ended}{_sampled_by(completion)}", style="bold"))
        if completion.turns:
            console.print(_tree(completion.turns, limit))
        else:
            print_text(console, completion.text, limit)


def _print_evaluated(console: Console, row: EvalSampleRow, limit: int | None) -> None:
    of_set = "" if row.data_set is None else f" of {printable(row.data_set)}"
    console.rule(Text(f"evaluation at version {row.policy_version}  prompt {row.prompt_id}{of_set}"), align="left")
    print_text(console, row.prompt, limit, style="dim")
    ended = "cut at the limit" if row.finish_reason == "length" else "stopped"
    console.print(Text(f"reward {row.reward:g}  {row.num_tokens} tokens, {ended}", style="bold"))
    print_text(console, row.completion, limit)


def _tree(turns: Sequence[SampledTurn], limit: int | None) -> Tree:
    """Draw the turns of an episode below those that they continue."""
    episode = Tree("", hide_root=True)
    nodes = {-1: episode.add("the prompt")} if any(turn.continues == -1 for turn in turns) else {}
    for index, turn in enumerate(turns):
        versions = listed([str(version) for version in turn.versions])
        sampled = f"{turn.num_tokens} token{'s' * (turn.num_tokens > 1)} by version{'s' * (len(turn.versions) > 1)} {versions}"
        scored = f", reward {turn.reward:g}" if turn.reward else ""
        label = Text(f"turn {index + 1}: {sampled}{scored}\n", style="bold")
        label.append(printable(turn.text if limit is None else shorten(turn.text, limit)), style="not bold")
        parent = episode.add("a new sequence") if turn.continues is None else nodes[turn.continues]
        nodes[index] = parent.add(label)
    return episode


def _sampled_by(completion: SampledCompletion) -> str:
    """Return the policy versions that sampled a completion, with the tokens of each where the weights changed in it."""
    versions = completion.versions
    if len(versions) < 2:
        return "".join(f", sampled by version {segment.policy_version}" for segment in versions)
    ends = [*(segment.first_token for segment in versions[1:]), completion.num_tokens]
    parts = [f"{one.policy_version} (tokens {one.first_token} to {end - 1})" for one, end in zip(versions, ends, strict=True)]
    return f", sampled by versions {listed(parts)}"


def printable(text: str) -> str:
    """Return the text with its lines as they are and every other unprintable character shown as an escape."""
    return "\n".join(plain(line, len(line)) for line in text.split("\n"))


def print_text(console: Console, text: str, limit: int | None, style: str = "") -> None:
    """Print a text as data, indented; one of more than `limit` characters without its middle."""
    shown = printable(text if limit is None else shorten(text, limit))
    console.print(Text("\n".join(f"  {line}" for line in shown.split("\n"))), style=style, soft_wrap=True)


def _open_texts(config: Config) -> tuple[Decode, dict[int, Prompt]]:
    """Return a function that decodes token ids, and the prompts by id; no prompts where the data cannot be read any more."""
    folder = resolve_model(config.model.path)
    if (folder / "tokenizer.json").is_file():
        # Not AutoTokenizer, which imports torch: it would take four times as long.
        from transformers import PreTrainedTokenizerFast as Tokenizer
    else:
        from transformers import AutoTokenizer as Tokenizer
    tokenizer = Tokenizer.from_pretrained(folder)
    try:
        loaded = load_prompts(
            config.data.train_data, config.data.train_split, config.data, tokenizer, environment=environment_of(config)
        )
    except SettingError:
        # The completions can be read without the data.
        return tokenizer.decode, {}
    return tokenizer.decode, {prompt.prompt_id: prompt for prompt in loaded.prompts}


def _decoded(
    folder: Path,
    chosen: Sequence[LeaseHistory],
    positions: Mapping[int, Position],
    decode: Decode,
    prompts: Mapping[int, Prompt],
    request: SamplesRequest,
) -> Iterator[SampledGroup]:
    for group in chosen:
        record = read_record(folder, positions[group.lease_id])
        # A live run may have deleted the segment meanwhile.
        if record is None or not isinstance(record.event, Accepted):
            continue
        assert group.step is not None and group.policy_lag is not None
        rollouts = unpack(record.event.completions, record.arrays)
        mean = sum(group.rewards) / len(group.rewards)
        completions = [
            SampledCompletion(
                rollout.reward,
                rollout.reward - mean,
                rollout.finish_reason,
                len(rollout.token_ids),
                written(rollout, decode),
                tuple(rollout.segments),
                _branching_turns(rollout, decode),
            )
            for rollout in rollouts
        ]
        completions.sort(key=lambda completion: completion.reward, reverse=request.order != "worst")
        prompt = None if group.prompt_id is None else prompts.get(group.prompt_id)
        if prompt is not None and record.event.prompt_hash != prompt.content_hash:
            prompt = None
        yield SampledGroup(
            step=group.step,
            policy_lag=group.policy_lag,
            lease_id=group.lease_id,
            prompt_id=group.prompt_id,
            actor=group.actor,
            prompt=None if prompt is None else decode(prompt.token_ids.tolist()),
            completions=tuple(completions[: request.num_completions]),
        )


def _branching_turns(rollout: Rollout, decode: Decode) -> tuple[SampledTurn, ...]:
    """Return the turns of an episode; none where each continues the one before, so that the text says everything."""
    if all(turn.back == 1 for turn in rollout.turns):
        return ()
    turns: list[SampledTurn] = []
    starts = [segment.first_token for segment in rollout.segments]
    stretches = list(zip(rollout.segments, starts, [*starts[1:], len(rollout.token_ids)], strict=True))
    start = 0
    for index, (turn, context, sampled) in enumerate(rollout.pieces()):
        end = start + turn.num_sampled
        turns.append(
            SampledTurn(
                continues=index - turn.back if turn.back else None,
                num_tokens=turn.num_sampled,
                versions=tuple(segment.policy_version for segment, first, last in stretches if first < end and last > start),
                text=(f"⟦{decode(context.tolist())}⟧" if len(context) else "") + decode(sampled.tolist()),
                reward=turn.reward,
            )
        )
        start = end
    return tuple(turns)


def read_evaluation_samples(run: Path, request: SamplesRequest) -> list[EvalSampleRow]:
    """Return at most `num_groups` samples of the run's evaluations; raise `SettingError` where there are none to return.

    `request.step` is the policy version that was evaluated. The newest evaluation comes first among equals.
    """
    samples = read_run_history(run).evaluation_samples.values()
    found = [
        row
        for row in sorted(samples, key=lambda row: (-row.policy_version, row.prompt_id))
        if request.step in (None, row.policy_version) and request.prompt_id in (None, row.prompt_id)
    ]
    if not found:
        cure = "Evaluations need data.eval_data and evaluation.interval. Ask for a version and a prompt that were evaluated."
        raise SettingError("RUN", str(run), "its rows have no sample of such an evaluation", cure)
    if request.order == "best":
        found.sort(key=lambda row: -row.reward)
    elif request.order == "worst":
        found.sort(key=lambda row: row.reward)
    return found[: request.num_groups]
