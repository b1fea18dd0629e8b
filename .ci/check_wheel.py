"""Builds the sdist, and the wheel from it, and checks: every file of the package once, nothing else, and `offbeat check` runs.

The build downloads hatchling unless pip finds it in its cache. Run it from the repository: python .ci/check_wheel.py
"""

import os
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def expected_files() -> set[str]:
    """Return the paths in the wheel of every tracked file below `src/offbeat`, with its links followed."""
    own = sorted((ROOT / "src/offbeat").iterdir())
    rooms = [path.name for path in own if path.is_symlink()]
    tracked = subprocess.run(["git", "ls-files", *rooms], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    return {f"offbeat/{name}" for name in [*tracked.splitlines(), *(path.name for path in own if path.suffix == ".py")]}


def main() -> None:
    """Exit with a message when the wheel is wrong."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "--target", folder / "build", "hatchling"], check=True)
        build = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder]
        tools = {**os.environ, "PYTHONPATH": str(folder / "build")}
        subprocess.run(build, cwd=ROOT, env=tools, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, check=True)
        (sdist,) = folder.glob("offbeat-*.tar.gz")
        subprocess.run([*pip, "wheel", "--no-deps", "-w", folder, sdist], check=True)
        (wheel,) = folder.glob("offbeat-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            names = [name for name in archive.namelist() if ".dist-info/" not in name]
            archive.extractall(folder / "site")
        if twice := [name for name, times in Counter(names).items() if times > 1]:
            sys.exit(f"twice in the wheel: {twice}")
        if missing := expected_files() - set(names):
            sys.exit(f"missing in the wheel: {sorted(missing)}")
        if foreign := set(names) - expected_files():
            sys.exit(f"in the wheel, but not tracked: {sorted(foreign)}")
        # Run in the temporary folder, with the wheel before the environment's own (editable) installation.
        environment = {**os.environ, "PYTHONPATH": str(folder / "site")}
        for command in (
            [
                "-c",
                f"import offbeat.deploy; assert offbeat.deploy.__file__.startswith({str(folder)!r}), offbeat.deploy.__file__",
            ],
            ["-m", "offbeat.deploy.cli.main", "check"],
        ):
            subprocess.run([sys.executable, *command], cwd=folder, env=environment, stdout=subprocess.DEVNULL, check=True)
        print(f"{sdist.name} -> {wheel.name}: {len(names)} files, each once")


if __name__ == "__main__":
    main()
