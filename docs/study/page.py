"""The page about the study: the blocks of `docs/study.md` between its marks, and the pictures beside it, from the rows."""

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from docs.study import analysis
from docs.study.trials import ProbeRow, StudyRow
from offbeat.common.errors import SettingError
from offbeat.common.formats import number
from offbeat.common.pages.page import render
from offbeat.lab.sweep.estimates import PAIRED_CONFIDENCE

_LOW, _MIDDLE, _HIGH = (178, 24, 43), (247, 247, 247), (33, 102, 172)
"""Red, nearly white and blue: told apart by readers who are color-blind, too."""


class HeatCell(NamedTuple):
    """One cell of a heat map."""

    text: str
    color: str
    ink: str
    """Color of the text."""


def heat_map(title: str, methods: Sequence[str], lags: Sequence[int], rewards: Mapping[tuple[str, int], float]) -> str:
    """Return an SVG with a row for each method and a column for each lag; a missing run is blank.

    Rewards are between 0 and 1.
    """
    rows = [(method, [_heat_cell(rewards.get((method, lag))) for lag in lags]) for method in methods]
    return render("heat_map.svg", title=title, lags=lags, rows=rows)


def _heat_cell(reward: float | None) -> HeatCell | None:
    if reward is None:
        return None
    return HeatCell(f"{reward:.2f}", _color(reward), "white" if abs(reward - 0.5) > 0.35 else "black")


def _color(reward: float) -> str:
    share = min(1.0, max(0.0, reward))
    start, end, place = (_LOW, _MIDDLE, 2 * share) if share < 0.5 else (_MIDDLE, _HIGH, 2 * share - 1)
    return "#" + "".join(f"{round(first + place * (second - first)):02x}" for first, second in zip(start, end, strict=True))


BEGIN, END = "<!-- results: written by `python -m docs.study --page` -->", "<!-- end of results -->"


def write_page(rows: Sequence[StudyRow], probes: Sequence[ProbeRow], page: Path) -> list[Path]:
    """Put the results into the page between its marks, and the pictures into the folder of its name; return what was written.

    Raises `SettingError` where the page lacks the marks, or cannot be read or written, or there are no rows.
    """
    if not rows:
        raise SettingError("FOLDER", "", "it holds no rows", "Run the study first, or name the folder of another.")
    try:
        text = page.read_text(encoding="utf-8")
    except OSError as error:
        cure = f"Name a page that has {BEGIN} and {END}."
        raise SettingError("--page", str(page), f"it cannot be read ({error.strerror})", cure) from error
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise SettingError("--page", str(page), "it has no marks between which results belong", f"Add {BEGIN} and {END}.")
    folder = page.with_suffix("")
    pictures = {folder / _picture_name(task, noise): _picture(rows, task, noise) for task, noise in _tables(rows)}
    results = "\n\n".join([_overview(rows), *_sections(rows, folder), _claims(rows), _signs(rows), *_probe_sections(probes)])
    try:
        folder.mkdir(exist_ok=True)
        for file, svg in pictures.items():
            file.write_text(svg, encoding="utf-8")
        page.write_text(f"{before}{BEGIN}\n\n{results}\n\n{END}{after}", encoding="utf-8")
    except OSError as error:
        cure = "Name a page NAME.md beside which you may write."
        raise SettingError("--page", str(page), f"{error.filename} cannot be written ({error.strerror})", cure) from error
    return [page, *pictures]


def _tables(rows: Sequence[StudyRow]) -> list[tuple[str, float]]:
    return sorted({(row.task, row.noise) for row in rows})


def _overview(rows: Sequence[StudyRow]) -> str:
    lines = []
    for task in sorted({row.task for row in rows}):
        own = [row for row in rows if row.task == task]
        lines.append(
            (
                f"`{task}`",
                f"{len(own)}",
                f"{len({row.method for row in own})}",
                ", ".join(f"{lag}" for lag in sorted({row.lag for row in own})),
                ", ".join(f"{noise:g}" for noise in sorted({row.noise for row in own})),
                f"{len({row.seed for row in own})}",
                f"{sum(row.outcome != 'finished' for row in own)}",
                f"{statistics.median(row.cpu_s for row in own):.0f}",
                f"{sum(row.cpu_s for row in own) / 3600:.2f}",
            )
        )
    heads = ("task", "runs", "methods", "lags", "noise", "seeds", "stopped", "median CPU s", "CPU hours")
    return _markdown(heads, lines)


def _sections(rows: Sequence[StudyRow], folder: Path) -> list[str]:
    parts: list[str] = []
    for task, noise in _tables(rows):
        title = f"### `{task}`" + (f", noise {noise:g}" if noise else "")
        picture = f"![final reward by method and lag]({folder.name}/{_picture_name(task, noise)})"
        parts += [title, picture]
        for condition in analysis.conditions(rows):
            if (condition.task, condition.noise) == (task, noise):
                results = analysis.compare_methods(rows, condition)
                parts += [f"Lag {condition.lag}:", _method_table(results, analysis.baseline_of(rows, task))]
    return parts


def _method_table(results: Sequence[analysis.MethodResult], baseline: str) -> str:
    heads = (
        "method",
        "seeds",
        "final reward",
        f"± {PAIRED_CONFIDENCE:.0%}",
        f"minus {baseline}",
        "p (Holm)",
        "area",
        f"steps to {analysis.TARGET:g}",
        "stopped",
    )
    ordered = sorted(results, key=lambda result: -result.reward.mean)
    return _markdown(heads, [_method_line(result) for result in ordered])


def _method_line(result: analysis.MethodResult) -> tuple[str, ...]:
    reward, against = result.reward, result.against_baseline
    difference, p_value = "–", "–"
    if against is not None:
        difference = _bold(against.compared.text(), against.is_significant)
        p_value = number(against.adjusted_p, ".2g")
    return (
        f"`{result.method}`",
        f"{result.num_seeds}",
        f"{reward.mean:.3f}",
        number(None if reward.high is None else reward.high - reward.mean),
        difference,
        p_value,
        f"{result.area:.3f}",
        number(result.steps_to_target, "g"),
        f"{result.num_stopped}",
    )


def _claims(rows: Sequence[StudyRow]) -> str:
    """Return the claims with the verdicts that their intervals allow, and each difference."""
    found = {text: analysis.compare_claim(differences, rows) for text, differences in analysis.CLAIMS.items()}
    verdicts = _markdown(("claim", "verdict"), [(text, analysis.claim_verdict(of_claim)) for text, of_claim in found.items()])
    lines = [_finding_line(text, finding) for text, of_claim in found.items() for finding in of_claim]
    heads = ("claim", "difference", "seeds", f"mean ({PAIRED_CONFIDENCE:.0%})", "p (Holm)")
    text = (
        "### Claims, held to their intervals\n\nA claim is confirmed if each of its differences is above 0: the whole "
        "interval, and p < 0.05 after\nHolm's correction for the claim's differences. Where an interval holds 0 the seeds "
        "cannot tell, which does not mean that there is no\ndifference."
    )
    return f"{text}\n\n{verdicts}\n\n{_markdown(heads, lines)}"


def _finding_line(claim: str, finding: analysis.TestedContrast) -> tuple[str, ...]:
    mean = _bold(finding.compared.text(), finding.sign != 0)
    return claim, f"{finding.difference}", f"{finding.compared.num_seeds[0]}", mean, number(finding.adjusted_p, ".2g")


def _bold(text: str, is_bold: bool) -> str:
    return f"**{text}**" if is_bold else text


def _signs(rows: Sequence[StudyRow]) -> str:
    lines = [
        (sign.name, f"{sign.num_collapsed}", f"{sign.num_others}", number(sign.share, ".2f"))
        for sign in analysis.signs_of_collapse(rows)
    ]
    text = (
        f"### Signs of a collapse\n\nA run has collapsed that ends {analysis.FALL:g} or more below its best evaluation. Each "
        f"number is taken from the first {analysis.EARLY:.0%} of the steps, and runs whose\nbest evaluation is within them are "
        "left out. The share is the chance that the number is worse in a run that collapses than in one under the\nsame "
        "condition that does not."
    )
    return f"{text}\n\n" + _markdown(("number", "collapsed", "others", "share"), lines)


def _probe_sections(probes: Sequence[ProbeRow]) -> list[str]:
    """Return a table for each task: how a method's gradient on stale completions differs from its own on fresh ones."""
    parts: list[str] = []
    for task in sorted({row.task for row in probes}):
        own = [row for row in probes if row.task == task]
        lags = sorted({row.lag for row in own})
        apart = [("total variation", lambda row: row.total_variation), ("chi-squared", lambda row: row.chi_squared)]
        lines = [
            (name, *(f"{statistics.fmean(value(row) for row in own if row.lag == lag):.2g}" for lag in lags))
            for name, value in apart
        ]
        for method in dict.fromkeys(row.method for row in own):
            of_method = [[row for row in own if (row.method, row.lag) == (method, lag)] for lag in lags]
            lines.append((f"`{method}`", *map(_bias_and_variance, of_method)))
        parts += [
            f"### Bias and variance of gradients: `{task}`",
            "At the end of a run of the default at each lag: the cosine of a method's expected gradient on stale completions "
            "with its own on fresh ones, and in brackets the variance of the stale one over its squared norm. Above them, how "
            "far the two policies are apart. – where the batches are too few to tell.",
            _markdown(("method", *(f"lag {lag}" for lag in lags)), lines),
        ]
    return parts


def _bias_and_variance(rows: Sequence[ProbeRow]) -> str:
    cosines = [row.cosine for row in rows if row.cosine is not None]
    variances = [row.variance for row in rows if row.variance is not None]
    cosine = f"{statistics.fmean(cosines):.2f}" if cosines else "–"
    return f"{cosine} ({statistics.fmean(variances):.2g})" if variances else cosine


def _picture_name(task: str, noise: float) -> str:
    return f"{task}-noise-{noise:g}.svg" if noise else f"{task}.svg"


def _picture(rows: Sequence[StudyRow], task: str, noise: float) -> str:
    own = [row for row in rows if (row.task, row.noise) == (task, noise)]
    lags = sorted({row.lag for row in own})
    results = {
        (result.method, lag): result.reward.mean
        for lag in lags
        for result in analysis.compare_methods(own, analysis.Condition(task, noise, lag))
    }
    title = f"{task}: final held-out reward" + (f", noise {noise:g}" if noise else "")
    return heat_map(title, list(dict.fromkeys(row.method for row in own)), lags, results)


def _markdown(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return "\n".join([f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}", *(f"| {' | '.join(line)} |" for line in lines)])
