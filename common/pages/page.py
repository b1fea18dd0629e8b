"""A page for people: a head, tiles and sections of blocks, made into HTML by the templates beside this file.

    numbers of a run -> `Page` of blocks -> templates/*.html -> a file, or the report part of the live page

Blocks hold plain text; Jinja escapes all of it, so that no text of a run can become markup. A new section is a function that
returns a `PageSection`, called where its page is put together. A new kind of block is a class here and a macro of its name in
`templates/blocks.html`.
"""

import base64
import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from offbeat.common.errors import ServiceError
from offbeat.common.pages.figures import DARK_COLORS, Plot, figure_json, safe_json


class Mark(NamedTuple):
    """A cell's text behind a dot in the color of a tone: `good`, `bad`, `warn`, `calm` or `idle`."""

    text: str
    tone: str


class LinkedText(NamedTuple):
    """A cell's text that leads to another page."""

    text: str
    href: str


class NotedText(NamedTuple):
    """A cell's text with a remark in small type; an empty remark is left out."""

    text: str
    remark: str


TableCell = str | Mark | LinkedText | NotedText


class Table(NamedTuple):
    """Rows under a head. Columns after the first `num_text_columns` are aligned as numbers."""

    head: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    num_text_columns: int


class Sentence(NamedTuple):
    """A line of text; with a tone, in its color as a verdict."""

    text: str
    tone: str = ""


class Bullets(NamedTuple):
    """Lines of text, one below the other."""

    lines: Sequence[str]


class NamedNumbers(NamedTuple):
    """Numbers behind their names, side by side."""

    numbers: Mapping[str, int]


class Caption(NamedTuple):
    """Explanation of how to read the blocks above."""

    text: str


class Missing(NamedTuple):
    """Texts that replace a block without content, one line each."""

    lines: Sequence[str]


class Term(NamedTuple):
    """One number of a sum."""

    label: str
    number: int
    tone: str


class Sum(NamedTuple):
    """A whole beside the terms that should add up to it."""

    whole: Term
    terms: Sequence[Term]


class KeyFigure(NamedTuple):
    """One of the large numbers under a page's head."""

    label: str
    value: str
    unit: str
    note: str


class Tiles(NamedTuple):
    """Large numbers, side by side."""

    figures: Sequence[KeyFigure]


class Folded(NamedTuple):
    """A card that opens at a click on its summary: a line of text, and texts in fixed width."""

    summary: str
    line: str
    texts: Sequence[str]
    is_open: bool = False


class Card(NamedTuple):
    """Blocks in a frame."""

    blocks: Sequence["Block"]
    is_wide: bool = False
    """True for a card as wide as its grid."""


class Grid(NamedTuple):
    """Plots and cards, two beside each other where there is room."""

    cards: Sequence["Plot | Card"]


Block = Plot | Table | Sentence | Bullets | NamedNumbers | Caption | Missing | Sum | Tiles | Folded | Card | Grid
"""A part of a section; the template has a macro of the name of each class."""


class PageSection(NamedTuple):
    """A part of a page with a heading and the question that it answers."""

    title: str
    lead: str
    blocks: Sequence[Block]


class PageHead(NamedTuple):
    """The name of what a page is about, its outcome in a word, and facts by their labels."""

    name: str
    tone: str
    outcome: str
    detail: str
    facts: Mapping[str, str]


class Page(NamedTuple):
    """A page from top to bottom."""

    head: PageHead
    tiles: Tiles | None
    sections: Sequence[PageSection]
    foot: str


def page_html(page: Page) -> str:
    """Return the page as one file that needs neither a network nor other files."""
    scripts: list[str] = []
    if any(plot.traces for section in page.sections for plot in _plots(section.blocks)):
        # Imported here: Plotly reads 5 MB.
        from plotly.offline import get_plotlyjs

        scripts = [get_plotlyjs(), asset("figures.js").decode()]
    return render(
        "page.html",
        page=page,
        style=asset("page.css").decode(),
        scripts=scripts,
        # Under these hashes the browser runs the page's own scripts and no others.
        hashes=[base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts],
    )


def sections_html(page: Page) -> str:
    """Return what stands below the head of a page, for a page that has its own head and draws the figures itself."""
    return render("sections.html", page=page)


def render(template: str, **values: object) -> str:
    """Return the template with these values; their texts are escaped."""
    return _templates().get_template(template).render(values)


def write_page(path: Path, page: Page) -> Path:
    """Write the page, whole or not at all; return its path. Raises `ServiceError` where it cannot be written."""
    # Under another name first: a browser may be reading the report of a running run.
    unfinished = path.with_name(f"{path.name}.tmp")
    try:
        unfinished.write_text(page_html(page), encoding="utf-8")
        return unfinished.rename(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        cure = "Make room there, or choose a folder that you may write to."
        raise ServiceError(f"{path} cannot be written ({error.strerror}). {cure}") from error


def asset(name: str) -> bytes:
    """Return a style sheet or a script of the pages."""
    return resources.files("offbeat.common.pages").joinpath(name).read_bytes()


def _plots(blocks: Sequence[Block]) -> Iterator[Plot]:
    for block in blocks:
        match block:
            case Plot():
                yield block
            case Card(blocks=inner) | Grid(cards=inner):
                yield from _plots(inner)
            case _:
                pass


@cache
def _templates() -> Environment:
    templates = Environment(
        loader=PackageLoader("offbeat.common.pages"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    # What these return is markup by its making; everything else is text.
    templates.filters["figure_json"] = lambda plot: Markup(figure_json(plot))
    templates.filters["own"] = Markup
    templates.globals["dark_colors"] = Markup(safe_json(DARK_COLORS))
    templates.filters["html"] = _html
    return templates


def _html(block: Block | TableCell | Term) -> str:
    """Return a block or a cell as the macro of its class shows it; text as it is, for the template to escape."""
    macros = _templates().get_template("blocks.html").module
    return block if isinstance(block, str) else vars(macros)[type(block).__name__](block)
