"""The report's samples: prompts and completions of some steps, and of the evaluations."""

import html
from collections.abc import Sequence

from offbeat.common.records.rows import EvalSampleRow, SampleRow
from offbeat.lab.report.page import section
from offbeat.lab.samples import printable
from offbeat.learner.diagnostics.sample_rows import MAX_TEXT, shorten

MAX_SAMPLES = 60
"""Largest number of samples in a section; of a longer list, the first and the last ones."""


def samples_section(samples: Sequence[SampleRow]) -> str:
    """Return the part of the page with prompts and completions, oldest step first; all but the last ones are folded."""
    lead = "The best and the worst completion of some steps, as the model wrote them. All others: offbeat samples RUN."
    if not samples:
        return section("Samples", lead, '<div class="card"><div class="missing">No step was sampled.</div></div>')
    return section("Samples", lead, _cards(samples))


def evaluation_samples_section(samples: Sequence[EvalSampleRow]) -> str:
    """Return the part of the page with completions of held-out prompts, oldest evaluation first; empty without samples."""
    lead = "A completion of some held-out prompts in each evaluation, as the model wrote it."
    return section("Evaluation samples", lead, _cards(samples)) if samples else ""


def _cards(samples: Sequence[SampleRow] | Sequence[EvalSampleRow]) -> str:
    shown = [*samples]
    if len(shown) > MAX_SAMPLES:
        shown = shown[: MAX_SAMPLES // 2] + shown[-MAX_SAMPLES // 2 :]
    last = shown[-1].policy_version
    return "".join(_card(sample, is_open=sample.policy_version == last) for sample in shown)


def _card(sample: SampleRow | EvalSampleRow, *, is_open: bool) -> str:
    reward = "–" if sample.reward is None else f"{sample.reward:.3g}"
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
    return (
        f'<details class="card"{" open" if is_open else ""}><summary>{html.escape(facts)}</summary>'
        f"<p>{html.escape(more)}</p><pre>{_text(sample.prompt)}</pre><pre>{_text(sample.completion)}</pre></details>"
    )


def _text(text: str) -> str:
    # Rows are files that anybody may have written: their length is not trusted.
    return html.escape(printable(shorten(text, MAX_TEXT)))
