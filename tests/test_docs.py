"""Links in the pages lead somewhere, and the commands and paths they name exist."""

import re
from pathlib import Path

import pytest

from offbeat.deploy.cli.main import PANELS
from tests.families import FAMILIES, SHAPE

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob("examples/**/README.md")])
LINK = re.compile(r"\]\(([^)\s]+)\)")
MODULE = re.compile(r"`((?:protocols|common|actor|learner|lab|deploy|tests)/[\w/.]+\.(?:py|toml))`")
COMMAND = re.compile(r"`offbeat ([a-z]+)\b")
BENCHMARK = re.compile(r"python -m (tests\.[\w.]+)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def broken_links(page: Path) -> list[str]:
    broken: list[str] = []
    for link in LINK.findall(page.read_text()):
        if link.startswith(("https://", "http://")):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    return broken


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_links_lead_to_files_and_headings_that_exist(page: Path) -> None:
    assert broken_links(page) == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_benchmarks_and_fuzzers_named_on_a_page_exist(page: Path) -> None:
    modules = BENCHMARK.findall(page.read_text())
    places = [(module, ROOT / module.replace(".", "/")) for module in modules]
    assert [
        module for module, place in places if not (place.with_suffix(".py").is_file() or (place / "__main__.py").is_file())
    ] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_named_on_a_page_exist(page: Path) -> None:
    assert [path for path in MODULE.findall(page.read_text()) if not (ROOT / path).is_file()] == []


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_commands_named_on_a_page_exist(page: Path) -> None:
    assert set(COMMAND.findall(page.read_text())) - {name for panel in PANELS for name in panel.commands} == set()


def test_a_broken_link_is_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A heading, with `code`\n[a](#a-heading-with-code) [b](page.md#other) [c](none.md) [d](https://example.org/x)\n"
    )
    assert broken_links(page) == ["page.md#other", "none.md"]


def test_readme_is_short_and_its_tree_names_folders_that_exist() -> None:
    text = (ROOT / "README.md").read_text()
    assert text.count("\n") < 200
    tree = re.search(r"```\n(protocols/.*?)```", text, flags=re.DOTALL)
    assert tree is not None
    missing: list[str] = []
    room = ROOT
    for line in tree[1].splitlines():
        if not line.startswith(" "):
            room = ROOT / line.partition("/")[0]
        missing += [
            name for name in re.findall(r"(?<![\w/])([\w_]+)/", line) if not any((p / name).is_dir() for p in (ROOT, room))
        ]
    assert missing == []


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_table_of_families_is_true(name: str) -> None:
    import torch
    import transformers

    from offbeat.actor.engines import transformers_engine
    from offbeat.common.models.routing import record_routing

    text = (ROOT / "docs/deployment.md").read_text().split("| family |")[1].split("\n\n")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines()]
    ((_, learner, engine, routing),) = [row for row in rows if name in row[0].split(", ")]
    family = FAMILIES[name]
    assert (learner == "packed") == (family.obstacle is None)
    config = getattr(transformers, family.config_class)(**SHAPE | {"vocab_size": 48} | family.settings)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    assert (engine == "continuous batches") == transformers_engine._choose_attention(model)
    with record_routing(model) as record, torch.no_grad():
        model(input_ids=torch.ones(1, 8, dtype=torch.long), use_cache=False)
    assert (routing == "yes") == (record.routing() is not None)
