"""Torch's companion packages, as every process sees them; variables that a launcher sets."""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest

from offbeat.common.environment import BROKEN_VARIABLE, fast_imports, launcher_number, launcher_rank
from offbeat.common.settings import SettingError

ROOT = Path(__file__).parents[2]

LOOK = """
import importlib.util, sys
from offbeat.common.environment import prepare_environment
prepare_environment()
print([name for name in ("torchvision", "torchaudio", "torchcodec") if importlib.util.find_spec(name) is not None])
if len(sys.argv) > 1:
    import subprocess
    subprocess.run([sys.executable, *sys.argv[1:]], check=True)
"""


def test_broken_packages_look_absent_and_are_tried_by_the_first_process_alone(tmp_path: Path) -> None:
    tried = tmp_path / "tried"
    for name in ("torchvision", "torchaudio", "torchcodec"):
        code = f"open({str(tried)!r}, 'a').write('{name} ')\n"
        (tmp_path / f"{name}.py").write_text(code + ("" if name == "torchaudio" else "raise OSError('another build')\n"))
    script = tmp_path / "look.py"
    script.write_text(LOOK)
    environment = {name: value for name, value in os.environ.items() if name != BROKEN_VARIABLE}
    environment["PYTHONPATH"] = f"{tmp_path}:{ROOT / 'src'}"
    result = subprocess.run(
        [sys.executable, str(script), str(script)], env=environment, capture_output=True, text=True, check=True
    )
    assert result.stdout.splitlines() == ["['torchaudio']", "['torchaudio']"]
    assert tried.read_text().split() == ["torchvision", "torchaudio", "torchcodec"]


def test_collector_rests_while_modules_are_imported_and_works_again_afterwards() -> None:
    enabled_within = []
    with pytest.raises(ImportError), fast_imports():
        enabled_within.append(gc.isenabled())
        raise ImportError
    assert enabled_within == [False]
    assert gc.isenabled()


def test_launchers_variable_that_is_no_number_is_a_mistake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert launcher_number("RANK", 0) == 3
    monkeypatch.delenv("RANK")
    assert launcher_number("RANK", 0) == 0
    monkeypatch.setenv("RANK", "first")
    with pytest.raises(SettingError, match='environment variable RANK = "first"'):
        launcher_number("RANK", 0)


@pytest.mark.parametrize(("rank", "world_size"), [("3", None), ("2", "2"), ("0", "0")])
def test_rank_that_no_launcher_sets_is_a_mistake(rank: str, world_size: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert launcher_rank() == 1
    monkeypatch.setenv("RANK", rank)
    # As after a launcher's shell: one of the two is left.
    if world_size is None:
        monkeypatch.delenv("WORLD_SIZE")
    else:
        monkeypatch.setenv("WORLD_SIZE", world_size)
    with pytest.raises(SettingError, match=f"RANK = {rank}: .*WORLD_SIZE is {world_size or 1}. Run `unset RANK WORLD_SIZE`"):
        launcher_rank()
