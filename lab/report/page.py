"""The building blocks of the reports' pages: frame, head, sections, tables, tiles and figures, as HTML."""

import html
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from offbeat.common.errors import ServiceError
from offbeat.lab.report.figures import DARK_COLORS, Plot


class Figures:
    """Collects the figures of a page while its text is made."""

    def __init__(self) -> None:
        self._figures: list[dict[str, Any]] = []

    def card(self, plot: Plot) -> str:
        """Return the plot's frame with title and caption, and keep its figure for `scripts`."""
        if not plot.traces:
            drawing = f'<div class="missing">{html.escape(plot.missing)}</div>'
        else:
            drawing = f'<div class="plot" data-figure="figure-{len(self._figures)}"></div>'
            self._figures.append({"data": plot.traces, "layout": plot.layout})
        css_class = "card wide" if plot.wide else "card"
        return (
            f'<figure class="{css_class}"><h3>{html.escape(plot.title)}</h3>{drawing}'
            f"<figcaption>{html.escape(plot.caption)}</figcaption></figure>"
        )

    def cards(self, plots: Iterable[Plot]) -> str:
        """Return the frames of several plots in a grid."""
        return f'<div class="grid">{"".join(self.card(plot) for plot in plots)}</div>'

    def scripts(self) -> str:
        """Return Plotly, the figures as JSON and the script that draws them; empty for a page without figures."""
        if not self._figures:
            return ""
        # Imported here: Plotly reads 5 MB.
        from plotly.offline import get_plotlyjs

        data = "\n".join(
            f'<script type="application/json" id="figure-{index}">{_script_json(figure)}</script>'
            for index, figure in enumerate(self._figures)
        )
        colors = f'<script type="application/json" id="dark-colors">{_script_json(DARK_COLORS)}</script>'
        return f"<script>{get_plotlyjs()}</script>\n{data}\n{colors}\n<script>\n{_asset('report.js')}</script>"


class KeyFigure(NamedTuple):
    """One of the large numbers under a page's head."""

    label: str
    value: str
    unit: str
    note: str


def page_html(title: str, body: str, figures: Figures) -> str:
    """Return the whole page; `body` is HTML."""
    # Under this policy the browser refuses every request that the page could make.
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy"
 content="default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data:">
<title>{html.escape(title)} · offbeat</title>
<style>
{resources.files("offbeat.common.records").joinpath("page.css").read_text(encoding="utf-8")}</style>
</head>
<body>
<main>
{body}
</main>
{figures.scripts()}
</body>
</html>
"""


def write_page(path: Path, text: str) -> Path:
    """Write the page, whole or not at all; return its path. Raises `ServiceError` where it cannot be written."""
    # Under another name first: a browser may be reading the report of a running run.
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(text, encoding="utf-8")
        return unfinished.rename(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        raise ServiceError(f"{path} cannot be written ({error.strerror}). Make room there.") from error


def head(name: str, tone: str, outcome: str, detail: str, facts: Mapping[str, str]) -> str:
    """Return the page's head: name, outcome in the color of the CSS class `tone`, and facts by their labels."""
    terms = "".join(f"<div><dt>{html.escape(label)}</dt><dd>{html.escape(fact)}</dd></div>" for label, fact in facts.items())
    return f"""<header>
<div class="wordmark">{_WORDMARK} offbeat</div>
<h1>{html.escape(name)}</h1>
<p class="outcome"><span class="pill {tone}">{html.escape(outcome)}</span> {html.escape(detail)}</p>
<dl class="facts">{terms}</dl>
</header>"""


# Four beats, the accents between them.
_WORDMARK = (
    '<svg width="30" height="18" viewBox="0 0 30 18" fill="none" stroke-width="2.6" stroke-linecap="round">'
    + "".join(
        f'<path d="M{2 + 3.7 * index:.1f} {9 - height}v{2 * height}" stroke="var(--{"accent" if index % 2 else "muted"})"/>'
        for index, height in enumerate((2, 7, 2, 5, 2, 7, 2, 4))
    )
    + "</svg>"
)


def tiles(figures: Iterable[KeyFigure]) -> str:
    """Return the large numbers, side by side."""
    boxes = "".join(
        f'<div class="figure"><div class="label">{html.escape(label)}</div>'
        f'<div class="value">{html.escape(value)} <small>{html.escape(unit)}</small></div>'
        f'<div class="note">{html.escape(note)}</div></div>'
        for label, value, unit, note in figures
    )
    return f'<div class="figures">{boxes}</div>'


def section(title: str, lead: str, content: str) -> str:
    """Return a part of the page with a heading; `content` is HTML."""
    return f"<section><h2>{html.escape(title)}</h2><p>{html.escape(lead)}</p>{content}</section>"


def table_html(head: Sequence[str], rows: Iterable[Sequence[str]], *, num_text_columns: int) -> str:
    """Return a table; its cells are HTML. Columns after the first `num_text_columns` are aligned as numbers."""

    def line(tag: str, cells: Sequence[str]) -> str:
        aligned = (
            f"<{tag}{'' if index < num_text_columns else ' class=number'}>{cell}</{tag}>" for index, cell in enumerate(cells)
        )
        return f"<tr>{''.join(aligned)}</tr>"

    body = "".join(line("td", row) for row in rows)
    return f'<div class="scroll"><table><thead>{line("th", head)}</thead><tbody>{body}</tbody></table></div>'


def _script_json(value: Any) -> str:
    """Return JSON that cannot close the script element around it."""
    return msgspec.json.encode(value).decode().replace("<", "\\u003c")


def _asset(name: str) -> str:
    return resources.files("offbeat.lab.report").joinpath(name).read_text(encoding="utf-8")
