"""The parts of the kit: which tests run, side by side or alone, and for how long at most.

    python3 -m tests.gpu_lease run KIT [PART ...] --seconds 590 --out FOLDER

The wheels of the folder KIT are installed beside the machine's packages. Each part is a process of pytest with a log of its
own in FOLDER; its figures are there as soon as they are known, because a part that runs out of time is killed. Parts of one
row of `ROUNDS` run at the same time: they need little of the GPU and measure no speed.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
SITE = Path("/tmp/offbeat-kit")


class Part(NamedTuple):
    """Tests that run together."""

    arguments: tuple[str, ...]
    """pytest's."""
    seconds: float
    """The longest time they may take."""


PARTS = {
    "learner": Part(("--gpu", "tests/learner/test_gpu_learner.py", "-k", "not 0_6b"), 110),
    "families": Part(("tests/test_families.py",), 110),
    "weights": Part(("--gpu", "tests/common/weights"), 110),
    "speed": Part(("--gpu", "tests/learner/test_gpu_learner.py", "-k", "0_6b"), 200),
    "vllm": Part(("--gpu", "tests/deploy/test_gpu.py", "-k", "quick_start and vllm"), 140),
    "engine": Part(("--gpu", "tests/actor/engines/test_gpu_engine.py"), 160),
    "transformers": Part(("--gpu", "tests/deploy/test_gpu.py", "-k", "quick_start and transformers"), 170),
    "canary": Part(("--gpu", "tests/deploy/test_gpu.py", "-k", "canary or gloo or turns"), 170),
}
ROUNDS = (("learner", "families", "weights"), ("speed",), ("vllm",), ("engine",), ("transformers",), ("canary",))


def run(kit: Path, names: Sequence[str], *, seconds: float, out: Path) -> None:
    """Install the kit and run the named parts, or all, as far as the seconds go."""
    started = time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    install = ["install", "-q", "--no-index", "--no-deps", "--no-compile", "--no-cache-dir", "--upgrade", "--target", str(SITE)]
    subprocess.run([sys.executable, "-m", "pip", *install, *map(str, sorted(kit.glob("*.whl")))], check=True)
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SITE), str(ROOT / "src"), str(ROOT)]),
        "PATH": f"{SITE / 'bin'}{os.pathsep}{os.environ['PATH']}",
        "PYTHONUNBUFFERED": "1",
        # vLLM takes FlashInfer for installed, and the kit leaves it out.
        "VLLM_USE_FLASHINFER_SAMPLER": "0",
    }
    print(f"installed after {time.monotonic() - started:.0f} s", flush=True)
    for together in ROUNDS:
        chosen = [name for name in together if name in names or not names]
        left = seconds - (time.monotonic() - started)
        if chosen and left > 20:
            _run_together({name: PARTS[name] for name in chosen}, variables, left, out)


def _run_together(parts: Mapping[str, Part], variables: Mapping[str, str], left: float, out: Path) -> None:
    """Run these parts side by side and print the end of each log."""
    started = time.monotonic()
    processes = {}
    for name, part in parts.items():
        options = ["-n", "0", "-v", "-p", "no:cacheprovider", "--basetemp", _work_of(name)]
        command = [sys.executable, "-m", "pytest", *options, *part.arguments]
        with (out / f"{name}.log").open("wb") as log:
            processes[name] = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=log, stderr=log, start_new_session=True)
    for name, process in processes.items():
        limit = min(parts[name].seconds, left) - (time.monotonic() - started)
        try:
            ended = f"ended with {process.wait(max(1.0, limit))}"
        except subprocess.TimeoutExpired:
            ended = "ran out of time"
            _keep_logs(_work_of(name), out / f"{name}.log")
        _kill_group(process)
        lines = (out / f"{name}.log").read_text(errors="replace").splitlines()
        print(f"== {name}: {ended}, {time.monotonic() - started:.0f} s", *lines[-60:], sep="\n", flush=True)


def _work_of(name: str) -> Path:
    """Return the folder in which a part's tests work."""
    return SITE.with_name(f"{SITE.name}-{name}")


def _keep_logs(work: Path, log: Path) -> None:
    """Append the ends of the services' logs: pytest shows them only when a test ends by itself."""
    with log.open("a") as stream:
        for file in sorted(work.rglob("*.log")):
            lines = file.read_text(errors="replace").splitlines()[-40:]
            print(f"-- {file.relative_to(work)}", *lines, sep="\n", file=stream)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """Kill what a part has left, such as services of a test that was cut off."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
