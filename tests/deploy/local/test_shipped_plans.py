"""Every row of examples/README.md fits its machine by the sums that stand there; every TOML of the pages can be planned."""

import re
import shlex
from pathlib import Path

import pytest

from offbeat.common.settings.config import Config
from offbeat.common.settings.loading import load
from offbeat.deploy.local.memory import engine_need, gib, learner_need
from offbeat.deploy.local.model_sizes import ModelSizes, sizes_of
from offbeat.deploy.local.plan import make_plan
from tests.deploy.local.machines import QWEN3_8B, QWEN3_30B_A3B, QWEN3_600M, TINY, machine

ROOT = Path(__file__).parents[3]
SIZES = {
    "Qwen/Qwen3-0.6B": sizes_of(QWEN3_600M),
    "Qwen/Qwen3-8B": sizes_of(QWEN3_8B),
    "Qwen/Qwen3-30B-A3B": sizes_of(QWEN3_30B_A3B),
}
ROW = re.compile(r"^\| (\d+) x (\d+) GB \| (.+?) \| `(.+?)` \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)
ROWS = ROW.findall((ROOT / "examples/README.md").read_text())
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "examples").glob("*/README.md"))]
BLOCKS = [(page, block) for page in PAGES for block in re.findall(r"```toml\n(.*?)```", page.read_text(), flags=re.DOTALL)]


def sizes_for(config: Config) -> ModelSizes:
    return SIZES.get(config.model.path, sizes_of(TINY))


def config_of(arguments: str) -> Config:
    file, *settings = shlex.split(arguments)
    return load(ROOT / file, settings)


def test_rows_cover_the_machines_and_models_of_the_examples() -> None:
    assert {f"{number} x {size}" for number, size, *_ in ROWS} == {"1 x 24", "1 x 48", "1 x 80", "8 x 80", "16 x 80"}
    assert {config_of(row[3]).model.path for row in ROWS} == SIZES.keys()
    files = {row[3].split()[0] for row in ROWS}
    shipped = [*ROOT.glob("examples/gsm8k_*gpu/run.toml"), ROOT / "examples/long_32k/run.toml"]
    assert files == {str(path.relative_to(ROOT)) for path in shipped}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}x{row[1]} {row[2]}")
def test_row_fits_its_machine_with_the_sums_that_stand_there(row: tuple[str, ...]) -> None:
    num_gpus, size, model, arguments, learner, actor = row
    config = config_of(arguments)
    assert config.model.path.rpartition("/")[2] == model.partition(",")[0]
    sizes = sizes_for(config)
    plan = make_plan(config, machine(int(num_gpus), float(size)), sizes)
    assert plan.warnings == ()
    needs = learner_need(config, sizes), engine_need(config, sizes)
    assert (learner, actor) == tuple(gib(need.num_bytes) for need in needs)
    used = {*plan.learner, *(gpu for one in plan.actors for gpu in one.gpus)}
    assert len(used) == int(num_gpus), "no GPU is idle"


@pytest.mark.parametrize(("page", "block"), BLOCKS, ids=[f"{page.name} {index}" for index, (page, _) in enumerate(BLOCKS)])
@pytest.mark.parametrize("num_gpus", [1, 8])
def test_every_toml_of_the_pages_can_be_planned(page: Path, block: str, num_gpus: int, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(block)
    config = load(tmp_path / "run.toml", [] if "[model]" in block else ["model.path=m", "data.train_data=d"])
    plan = make_plan(config, machine(num_gpus), sizes_for(config))
    assert len(plan.actors) == config.launch.num_actors
