"""`offbeat samples` shows what the log holds, also of a live run, and takes every text for data."""

import io
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from offbeat.common.errors import SettingError
from offbeat.common.records.run_folder import read_run_config
from offbeat.common.settings.config import Config, DataSection, ModelSection, RunSection
from offbeat.common.settings.learning_sections import TrainSection
from offbeat.common.settings.loading import resolved_toml
from offbeat.lab.lease_history import LeaseHistories, LeaseHistory
from offbeat.lab.samples import (
    SampledCompletion,
    SampledGroup,
    SamplesRequest,
    choose,
    print_samples,
    printable,
    read_samples,
)
from offbeat.learner.leases.events import Started, Trained
from offbeat.learner.leases.log_reading import read_log
from offbeat.learner.leases.prompts import Prompt
from offbeat.learner.leases.rollout_log import RolloutLog
from offbeat.protocols.payload import CompletionMeta, Segment, Turn
from tests.learner.leases.event_makers import make_accepted, make_granted, make_trained

LETTER_A = 8
"""Token id of `a`."""
TEXTS = ("01", "23", "45", "67")
PROMPTS = [
    Prompt(index, text, np.array([2 * index, 2 * index + 1], np.int32), f'{{"prompt": "{text}"}}')
    for index, text in enumerate(TEXTS)
]


def started(version: int) -> Started:
    return Started(at=0, run_id="r", learner_incarnation=1, policy_version=version)


def trained(version: int, *lease_ids: int) -> Trained:
    return make_trained(*lease_ids, policy_version=version, num_steps=2)


class Run:
    """A run's folder with a log that a learner is writing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        vocabulary = {letter: index for index, letter in enumerate("01234567ab")}
        tokenizer = Tokenizer(models.WordLevel(vocabulary))
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
        tokenizer.decoder = decoders.Fuse()
        (folder / "model").mkdir()
        tokenizer.save(str(folder / "model/tokenizer.json"))
        (folder / "data.jsonl").write_text('{"prompt": "01"}\n{"prompt": "23"}\n{"prompt": "45"}\n{"prompt": "67"}\n')
        config = Config(
            model=ModelSection(path=str(folder / "model")),
            data=DataSection(train_data=str(folder / "data.jsonl"), chat_template=False),
            run=RunSection(dir=str(folder)),
            train=TrainSection(groups_per_step=1, steps_per_batch=2),
        )
        (folder / "config.toml").write_text(resolved_toml(config))
        self.log = RolloutLog(
            folder / "log", run_id="run", fsync="off", segment_bytes=1 << 20, retain_bytes=1 << 30, min_free_bytes=0
        )

    def group(self, lease_id: int, rewards: tuple[float, float], version: int, prompt_id: int | None = None) -> None:
        """Lease prompt `lease_id % 4` and accept two completions, `aa` and `aab`, for it or for prompt `prompt_id`."""
        grant = {"epoch": 0, "actor": "a", "policy_version": version, "oldest_version": version}
        self.log.append(make_granted(lease_id, prompt_id=lease_id % 4, **grant))
        completions = tuple(
            CompletionMeta(num_tokens=2 + index, finish_reason=reason, reward=reward, segments=(Segment(version, 0),))
            for index, (reward, reason) in enumerate(zip(rewards, ("stop", "length"), strict=True))
        )
        ids = np.array([LETTER_A, LETTER_A, LETTER_A, LETTER_A, LETTER_A + 1], np.int32)
        accepted = make_accepted(
            lease_id,
            completions=completions,
            generate_s=0.1,
            policy_version=version,
            prompt_hash=PROMPTS[lease_id % 4 if prompt_id is None else prompt_id].content_hash,
        )
        self.log.append(accepted, ids, np.zeros(5, np.float32))

    def episode(self, lease_id: int, turns: tuple[Turn, ...], segments: tuple[Segment, ...]) -> None:
        """Accept one episode whose model writes `a` only, and whose environment adds `0`."""
        version = segments[0].policy_version
        grant = {"epoch": 0, "actor": "a", "policy_version": version, "oldest_version": version}
        self.log.append(make_granted(lease_id, prompt_id=lease_id % 4, **grant))
        num_tokens = sum(turn.num_sampled for turn in turns)
        meta = CompletionMeta(num_tokens=num_tokens, finish_reason="stop", reward=1.0, segments=segments, turns=turns)
        content = PROMPTS[lease_id % 4].content_hash
        accepted = make_accepted(lease_id, completions=(meta,), generate_s=0.1, policy_version=version, prompt_hash=content)
        ids = np.full(num_tokens, LETTER_A, np.int32)
        context = np.zeros(sum(turn.num_context for turn in turns), np.int32)
        self.log.append(accepted, ids, np.zeros(num_tokens, np.float32), context)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    run = Run(tmp_path)
    run.log.append(started(0))
    run.group(0, (0.0, 1.0), 0)
    run.group(1, (0.25, 0.5), 0)
    run.log.append(trained(0, 0, 1))
    run.group(2, (-1.0, 0.5), 1)
    run.group(3, (0.0, 0.0), 2)
    run.log.append(trained(2, 2, 3))
    return run


def trained_groups(run: Run) -> list[LeaseHistory]:
    return list(LeaseHistories(record.event for record in read_log(run.folder / "log")).trained_groups())


def steps_and_leases(run: Run) -> list[tuple[int | None, int, int | None]]:
    return [(group.step, group.lease_id, group.policy_lag) for group in trained_groups(run)]


def test_each_group_has_the_step_and_the_lag_that_it_was_trained_with(run: Run) -> None:
    assert steps_and_leases(run) == [(1, 0, 0), (2, 1, 1), (3, 2, 1), (4, 3, 1)]


def test_steps_that_a_restart_undid_are_not_shown(run: Run) -> None:
    run.log.append(started(2))
    assert steps_and_leases(run) == [(1, 0, 0), (2, 1, 1)]
    run.log.append(trained(2, 3, 2))
    assert steps_and_leases(run)[2:] == [(3, 3, 0), (4, 2, 2)]


def test_completion_shows_which_version_sampled_which_tokens() -> None:
    whole = SampledCompletion(1.0, 0.5, "stop", 30, "a", (Segment(7, 0),))
    changed = msgspec.structs.replace(whole, versions=(Segment(7, 0), Segment(9, 12)))
    group = SampledGroup(10, 3, 1, 0, "a", "p", (whole, changed))
    console = Console(file=(text := io.StringIO()), width=200)
    print_samples(console, [group])
    assert "30 tokens, stopped, sampled by version 7\n" in text.getvalue()
    assert "30 tokens, stopped, sampled by versions 7 (tokens 0 to 11) and 9 (tokens 12 to 29)\n" in text.getvalue()


@pytest.mark.slow
def test_groups_are_decoded_with_their_prompt_best_completion_first(run: Run) -> None:
    (group,) = read_samples(run.folder, SamplesRequest(step=3))
    assert (group.prompt_id, group.prompt, group.actor) == (2, "45", "a")
    first = (Segment(1, 0),)
    assert group.completions == (
        SampledCompletion(reward=0.5, above_mean=0.75, finish_reason="length", num_tokens=3, text="aab", versions=first),
        SampledCompletion(reward=-1.0, above_mean=-0.75, finish_reason="stop", num_tokens=2, text="aa", versions=first),
    )
    (worst,) = read_samples(run.folder, SamplesRequest(order="worst", num_groups=1, num_completions=1))
    assert (worst.lease_id, worst.completions[0].reward) == (2, -1.0)


def test_groups_are_chosen_by_order_step_and_prompt(run: Run) -> None:
    groups = trained_groups(run)

    def lease_ids(request: SamplesRequest) -> list[int]:
        return [group.lease_id for group in choose(groups, request)]

    assert lease_ids(SamplesRequest()) == [3, 2, 1, 0]
    assert lease_ids(SamplesRequest(order="best")) == [0, 2, 1, 3]
    assert lease_ids(SamplesRequest(order="worst")) == [2, 3, 0, 1]
    assert lease_ids(SamplesRequest(prompt_id=1)) == [1]
    assert lease_ids(SamplesRequest(num_groups=1)) == [3]


@pytest.mark.slow
def test_groups_of_a_step_of_any_epoch_are_shown(run: Run) -> None:
    config = read_run_config(run.folder)
    train = msgspec.structs.replace(config.train, steps_per_batch=1, epochs_per_batch=2, groups_per_step=2)
    (run.folder / "config.toml").write_text(resolved_toml(msgspec.structs.replace(config, train=train)))
    for step in (1, 2):
        groups = read_samples(run.folder, SamplesRequest(step=step))
        assert [(group.lease_id, group.step, group.policy_lag) for group in groups] == [(1, 2, 1), (0, 2, 1)]


@pytest.mark.slow
def test_completions_are_shown_when_the_data_is_gone(run: Run) -> None:
    (run.folder / "data.jsonl").unlink()
    (group,) = read_samples(run.folder, SamplesRequest(step=1))
    assert group.prompt is None and group.completions[0].text == "aab"


@pytest.mark.slow
def test_prompt_that_the_data_has_no_more_under_its_id_is_not_shown(run: Run) -> None:
    run.group(4, (1.0, 1.0), 4, prompt_id=0)
    run.group(5, (1.0, 1.0), 4, prompt_id=0)
    run.log.append(trained(4, 4, 5))
    assert [group.prompt for group in read_samples(run.folder, SamplesRequest(num_groups=2))] == [None, "01"]


def test_run_without_a_log_says_that_there_is_nothing_to_read(tmp_path: Path) -> None:
    text = resolved_toml(Config(model=ModelSection(path="model"), data=DataSection(train_data="d.jsonl")))
    (tmp_path / "config.toml").write_text(text.replace("[log]\nenabled = true", "[log]\nenabled = false"))
    with pytest.raises(SettingError, match=r"no rollout log, so there is nothing to read.*log.enabled=true"):
        read_samples(tmp_path, SamplesRequest())


def test_episode_with_branches_is_drawn_as_a_tree_with_the_versions_of_each_turn(run: Run) -> None:
    # Two answers to the first turn, and a sequence of its own.
    turns = (Turn(0, 2), Turn(1, 1), Turn(0, 2, back=2, reward=0.5), Turn(1, 1, back=0))
    run.episode(4, turns, segments=(Segment(2, 0), Segment(3, 4)))
    run.log.append(trained(4, 4))
    (group,) = read_samples(run.folder, SamplesRequest(step=5))
    (completion,) = group.completions
    assert [turn.continues for turn in completion.turns] == [-1, 0, 0, None]
    assert [turn.versions for turn in completion.turns] == [(2,), (2,), (2, 3), (3,)]
    console = Console(file=(text := io.StringIO()), width=100)
    print_samples(console, [group])
    drawn = [line.rstrip() for line in text.getvalue().splitlines()]
    assert drawn[drawn.index("the prompt") :] == [
        "the prompt",
        "└── turn 1: 2 tokens by version 2",
        "    aa",
        "    ├── turn 2: 1 token by version 2",
        "    │   ⟦0⟧a",
        "    └── turn 3: 2 tokens by versions 2 and 3, reward 0.5",
        "        aa",
        "a new sequence",
        "└── turn 4: 1 token by version 3",
        "    ⟦0⟧a",
        "",
    ]


def test_step_that_was_not_trained_is_refused(run: Run) -> None:
    with pytest.raises(SettingError, match="no trained group of that kind"):
        read_samples(run.folder, SamplesRequest(step=9))


def test_text_of_a_model_is_printed_as_data() -> None:
    completion = SampledCompletion(1.0, 0.5, "stop", 3, "[bold]a[/bold] \x1b[31mred\x07 \u202e\nnext [link=file:///x]y[/link]")
    output = io.StringIO()
    console = Console(file=output, width=200, force_terminal=True, color_system=None)
    print_samples(console, [SampledGroup(1, 0, 0, 0, "ac\x1b[2Jtor", "[red]prompt[/red]", (completion,))])
    shown = output.getvalue()
    assert "[bold]a[/bold] \\x1b[31mred\\x07 \\u202e" in shown
    assert "[red]prompt[/red]" in shown and "ac\\x1b[2Jtor" in shown and "[link=file:///x]y[/link]" in shown
    assert "\x07" not in shown and "\u202e" not in shown and "\x1b[31m" not in shown and "\x1b[2J" not in shown


def test_letters_of_every_script_stay() -> None:
    assert printable("é 中 ß\n😀") == "é 中 ß\n😀"
    assert printable("\x85\x9b\u2028\ud800") == "\\x85\\x9b\\u2028\\ud800"
