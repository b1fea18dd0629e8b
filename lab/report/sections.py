"""The report's sections on health, evaluations and samples."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from offbeat.common.formats import duration, number
from offbeat.common.pages.figures import ACTOR_COLORS, Plot, Trace, line_trace, step_layout
from offbeat.common.pages.page import Card, Folded, Grid, Mark, Missing, PageSection, Sentence, Table
from offbeat.common.records.rows import EvalRow, EvalSampleRow, EventRow, SampleRow
from offbeat.lab.history import RunHistory
from offbeat.lab.samples import printable
from offbeat.learner.diagnostics.health import PERHAPS_SOLVED, is_solved, troubles
from offbeat.learner.diagnostics.sample_rows import MAX_TEXT, shorten

MAX_SAMPLES = 60
"""Largest number of samples in a section; of a longer list, the first and the last ones."""


def samples_section(samples: Sequence[SampleRow]) -> PageSection:
    """Return the section with prompts and completions, oldest step first; all but the last ones are folded."""
    lead = "The best and the worst completion of some steps, as the model wrote them. All others: offbeat samples RUN."
    return PageSection("Samples", lead, _cards(samples) or [Card([Missing(["No step was sampled."])])])


def evaluation_samples_sections(samples: Sequence[EvalSampleRow]) -> list[PageSection]:
    """Return the section with completions of held-out prompts, oldest evaluation first; none without samples."""
    lead = "A completion of some held-out prompts in each evaluation, as the model wrote it."
    return [PageSection("Evaluation samples", lead, _cards(samples))] if samples else []


def _cards(samples: Sequence[SampleRow] | Sequence[EvalSampleRow]) -> list[Folded]:
    shown = [*samples]
    if len(shown) > MAX_SAMPLES:
        shown = shown[: MAX_SAMPLES // 2] + shown[-MAX_SAMPLES // 2 :]
    return [_card(sample, is_open=sample.policy_version == shown[-1].policy_version) for sample in shown]


def _card(sample: SampleRow | EvalSampleRow, *, is_open: bool) -> Folded:
    reward = number(sample.reward, ".3g")
    ended = "cut at rollout.max_new_tokens" if sample.finish_reason == "length" else "stopped"
    if isinstance(sample, SampleRow):
        above = "" if sample.above_mean is None else f" ({sample.above_mean:+.3g} above its group's mean)"
        facts = f"step {sample.policy_version:,}: reward {reward}{above}"
        source = f"prompt {sample.prompt_id:,}, lag {sample.policy_lag}"
    else:
        of_set = "" if sample.data_set is None else f" of {printable(sample.data_set)}"
        facts = f"version {sample.policy_version:,}, prompt {sample.prompt_id:,}{of_set}: reward {reward}"
        source = "held out"
    more = f"{source}, {sample.num_tokens:,} tokens, {ended}"
    return Folded(facts, more, [_text(sample.prompt), _text(sample.completion)], is_open)


def _text(text: str) -> str:
    # Rows are files that anybody may have written: their length is not trusted.
    return printable(shorten(text, MAX_TEXT))


def health_section(events: Iterable[EventRow], start: float | None, evaluation: EvalRow | None) -> PageSection:
    """Return the section with every health rule that held.

    Args:
        start: The run's first time, in epoch seconds.
        evaluation: The run's newest evaluation: what some rules report is no trouble once the held-out prompts are solved.
    """
    lead = "Signs that the run was dead, broken or waiting, and what to do about each. docs/health.md lists the rules."
    told = [event for event in events if event.event in ("health", "health_cleared", "run_started")]
    rows = [
        (
            duration(event.time - (start or 0.0)),
            number(event.policy_version, ","),
            Mark(event.rule or "", "bad" if event.event == "health" else "good"),
            "" if event.event == "health" else "cleared",
            event.detail,
        )
        for event in told
        if event.event != "run_started"
    ]
    if not rows:
        return PageSection("Health", lead, [Card([Sentence("No health rule reported a problem.", "good")])])
    left = troubles(told)
    may_be_solved = is_solved(left, evaluation)
    verdict = f"These rules held at the end: {', '.join(left)}." if left else "Every problem had cleared by the end."
    if may_be_solved:
        verdict += f" {PERHAPS_SOLVED}."
    tone = "" if may_be_solved else "bad" if left else "good"
    listing = Table(("After", "Version", "Rule", "", "Reason"), rows, 5)
    return PageSection("Health", lead, [Card([Sentence(verdict, tone), listing])])


def evaluation_sections(history: RunHistory) -> list[PageSection]:
    """Return the section about evaluations; none for a run without one."""
    rows = [row for _, row in sorted(history.evaluations.items())]
    if not rows:
        return []
    ks = sorted({k for row in rows for k in row.pass_at if k.isdecimal()}, key=int)
    layout = step_layout("policy version", [row.policy_version for row in rows], "share of prompts", y={"rangemode": "tozero"})
    pass_at_k = Plot(
        "Held-out pass@k",
        "Share of the held-out prompts that at least one of k completions solves: a reward of evaluation.pass_reward or more.",
        [_line(rows, lambda row: row.pass_at, k, f"pass@{k}", index) for index, k in enumerate(ks)],
        layout,
        missing="No evaluation has measured pass@k.",
    )
    sets = "Mean reward of the completions of each named set of data.eval_data."
    own = "The numbers that evaluation.function returned."
    plots = [
        pass_at_k,
        *_named_lines(rows, lambda row: row.sets, "Held-out reward by set", sets, "reward"),
        *_named_lines(rows, lambda row: row.numbers, "Own numbers", own, "number"),
    ]
    return [PageSection("Evaluation", "How well does the policy solve prompts that it is not trained on?", [Grid(plots)])]


def _named_lines(
    rows: Sequence[EvalRow], numbers: Callable[[EvalRow], Mapping[str, float]], title: str, caption: str, axis: str
) -> Iterator[Plot]:
    """Yield a plot over policy versions with a line for each name among the numbers, the user's text; none without a name."""
    names = sorted({name for row in rows for name in numbers(row)})
    if names:
        lines = [_line(rows, numbers, name, name, index) for index, name in enumerate(names)]
        layout = step_layout("policy version", [row.policy_version for row in rows], axis)
        yield Plot(title, caption, lines, layout, missing="")


def _line(
    rows: Sequence[EvalRow], numbers: Callable[[EvalRow], Mapping[str, float]], key: str, label: str, index: int
) -> Trace:
    pairs = [(row.policy_version, numbers(row)[key]) for row in rows if key in numbers(row)]
    color = ACTOR_COLORS[index % len(ACTOR_COLORS)]
    return line_trace([version for version, _ in pairs], [number for _, number in pairs], label, color)
