"""Claims about the tasks of the study: right progressions, shown ones of one length, and the reward of a sentence."""

import itertools
import random

import pytest

from docs.study.tasks import FORK, LENGTH, TASKS, Progression, long_sentence

pytestmark = pytest.mark.slow


def test_every_prompt_is_there_once_with_the_numbers_that_follow() -> None:
    rows = list(Progression().rows(random.Random(0)))
    assert len({row["prompt"] for row in rows}) == len(rows) == 39 * 8
    answers = {row["prompt"]: row["answer"] for row in rows}
    assert answers["39+9="] == "48,57,66,75,84,93"
    assert answers["01+2="].startswith("03,05,07,")
    assert answers["01+2="].endswith(",97,99")
    lengths = [len(answer) + 1 for answer in answers.values()]
    assert (min(lengths), max(lengths)) == (18, 147)
    assert max(len(prompt + answer) + 1 for prompt, answer in answers.items()) <= LENGTH


def test_shown_progressions_have_one_length_and_errors_at_the_stated_rate_where_they_pass_a_fork() -> None:
    generator = random.Random(1)
    shown = [Progression().shown(generator) for _ in range(2000)]
    assert {len(text) for text, _ in shown} == {len(mask) for _, mask in shown} == {LENGTH}
    num_forks = num_off = 0
    for text, mask in shown:
        prompt, rest = text.split("=")
        assert mask == "." * (len(prompt) + 1) + "x" * (len(rest.rstrip())) + "." * (len(rest) - len(rest.rstrip()))
        start, step = map(int, prompt.split("+"))
        numbers = [start, *map(int, rest.rstrip(" $").split(","))]
        for first, second in itertools.pairwise(numbers):
            is_fork = first // FORK != (first + step) // FORK
            assert abs(second - first - step) <= is_fork
            num_forks += is_fork
            num_off += second != first + step
    assert 0.37 < num_off / num_forks < 0.43


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ("The old pirate sleeps. ", 1.0),
        ("A Pirate sleeps.", 0.75),
        ("The pirate and his parrot sleep in a harbor.", 0.0),
        ("The pirates sleep long.", 0.0),
        ("The old pirate sleeps", 0.0),
        ("The pirate sleeps. Long.", 0.0),
    ],
    ids=["right", "one word less", "twice as many and one", "another word", "no end", "two sentences"],
)
def test_sentence_is_worth_how_near_its_number_of_words_is(completion: str, reward: float) -> None:
    assert long_sentence("", completion, {"noun": "pirate", "length": 4}) == reward


def test_nouns_of_held_out_sentences_are_in_no_prompt_to_train_on() -> None:
    rows = TASKS["sentences_adapter"].rows
    assert rows is not None
    to_train, held_out = ({row["noun"] for row in part} for part in rows)
    assert len(to_train) == 24 and len(held_out) == 8 and not to_train & held_out
