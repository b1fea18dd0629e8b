"""`./dev test --gpu` runs the tests of GPUs alone, and says on what, how fast; without a GPU it says so."""

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.gpu_report import MEASURED, SEND_BACK, Outcome, outcomes_of, table

ROOT = Path(__file__).parent.parent
TORCH = """
from types import SimpleNamespace as Names
__version__ = "2.13.0"
version = Names(cuda="13.0")
gpu = Names(name="H200", total_memory=139 << 30, major=9, minor=0)
cuda = Names(
    is_available=lambda: HAS_GPU, device_count=lambda: 1, get_device_properties=lambda index: gpu,
    nccl=Names(version=lambda: (2, 29, 7)),
)
"""
"""Stands for torch, as far as the selection of tests and the table ask it."""


def pytest_with_gpu(folder: Path, *, has_gpu: bool) -> subprocess.CompletedProcess[str]:
    (folder / "torch").mkdir()
    (folder / "torch/__init__.py").write_text(TORCH.replace("HAS_GPU", str(has_gpu)))
    (folder / "torch/version.py").write_text("cuda = None\n")
    (folder / "test_two.py").write_text(
        "import pytest\n@pytest.mark.gpu\ndef test_here(record_property):\n    record_property('measured', '12 tokens/s')\n"
        "@pytest.mark.gpu\ndef test_two_gpus():\n    pytest.skip('one GPU')\ndef test_elsewhere():\n    assert False\n"
    )
    (folder / "conftest.py").write_text("from tests.conftest import *\n")
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", folder, "-p", "no:cacheprovider", "-p", "no:xdist"]
    environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ['PYTHONPATH']}"}
    command = [sys.executable, "-m", "pytest", "--gpu", *options, folder]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_machine_without_a_gpu_is_told_so_in_one_line_and_fails(tmp_path: Path) -> None:
    ended = pytest_with_gpu(tmp_path, has_gpu=False)
    assert ended.returncode != 0
    assert [line for line in (ended.stdout + ended.stderr).splitlines() if line] == [
        "ERROR: --gpu: torch 2.13.0 finds no GPU here. On a machine with one run ./dev setup cuda first."
    ]


@pytest.mark.slow
def test_machine_with_a_gpu_runs_the_tests_of_gpus_alone_and_shows_their_figures(tmp_path: Path) -> None:
    ended = pytest_with_gpu(tmp_path, has_gpu=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    lines = [" ".join(line.split()) for line in ended.stdout.partition("= GPU =")[2].splitlines()]
    assert "GPU 0 H200, 139.0 GiB, compute capability 9.0" in lines
    assert {"CUDA of torch 13.0", "NCCL 2.29.7", "test_here passed, 0 s", "12 tokens/s", "one GPU"} <= set(lines)
    assert SEND_BACK in lines
    assert "test_elsewhere" not in ended.stdout


def test_failures_in_a_test_and_in_its_fixture_are_failures() -> None:
    def report(name: str, outcome: str) -> SimpleNamespace:
        properties = [(MEASURED, "1 token/s"), ("other", "unseen")]
        return SimpleNamespace(nodeid=f"a.py::{name}", duration=2.4, user_properties=properties, outcome=outcome, longrepr="")

    outcomes = outcomes_of({"failed": [report("one", "failed")], "error": [report("two", "failed")], "deselected": []})
    assert outcomes == [Outcome("one", "failed", 2.4, ("1 token/s",)), Outcome("two", "failed", 2.4, ("1 token/s",))]
    lines = table({"driver": "580"}, outcomes[:1])
    assert lines == ["driver  580", "", "one     failed, 2 s", "        1 token/s", "", SEND_BACK]
