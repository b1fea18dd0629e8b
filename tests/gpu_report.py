"""`./dev test --gpu`: only the tests that need a GPU, and a table that says what ran on what, how fast."""

import importlib.metadata
import platform
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest

PACKAGES = ("offbeat", "torch", "vllm", "deepspeed", "transformers")
MEASURED = "measured"
"""Name of the properties of a test that are figures: `record_property("measured", "12 tokens/s")`."""
NO_GPU = "--gpu: torch {version} finds no GPU here. On a machine with one run ./dev setup cuda first."
SEND_BACK = "Please send this table back: the project has no GPU of its own."


class Outcome(NamedTuple):
    """The end of a test."""

    name: str
    result: str
    """`passed`, `failed` or `skipped`."""
    seconds: float
    notes: tuple[str, ...] = ()
    """Its figures, or why it was skipped."""


def require_gpu() -> None:
    """End pytest with one line where torch finds no GPU."""
    import torch

    if not torch.cuda.is_available():
        raise pytest.UsageError(NO_GPU.format(version=torch.__version__))


class Figures:
    """A plugin of pytest that prints the figures of each test when it ends: a run that is cut off keeps them."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        reporter = self._config.pluginmanager.get_plugin("terminalreporter")
        if reporter is not None and report.when == "call":
            for note in _notes(report):
                reporter.ensure_newline()
                reporter.write_line(f"{report.nodeid.partition('::')[2]}: {note}", flush=True)


def describe_machine() -> dict[str, str]:
    """Return GPUs, driver and versions by name."""
    import torch

    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    return {
        **{
            f"GPU {index}": f"{gpu.name}, {gpu.total_memory / (1 << 30):.1f} GiB, compute capability {gpu.major}.{gpu.minor}"
            for index, gpu in enumerate(gpus)
        },
        "driver": _driver(),
        "CUDA of torch": str(torch.version.cuda),
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),  # pyright: ignore[reportAttributeAccessIssue]
        "Python": f"{platform.python_version()} on {platform.platform()}",
        **{name: _version(name) for name in PACKAGES},
    }


def outcomes_of(stats: Mapping[str, Sequence[Any]]) -> list[Outcome]:
    """Return the ends of all tests from pytest's reports; a test whose fixture failed has failed."""
    kinds = {"passed": "passed", "failed": "failed", "error": "failed", "skipped": "skipped"}
    return [
        Outcome(report.nodeid.partition("::")[2], kinds[kind], report.duration, tuple(_notes(report)))
        for kind in kinds
        for report in stats.get(kind, ())
    ]


def table(machine: Mapping[str, str], outcomes: Iterable[Outcome]) -> list[str]:
    """Return the lines of the table: the machine, then a test a line with its figures, then what to do with it."""
    rows = [*machine.items(), ("", "")]
    for outcome in outcomes:
        rows.append((outcome.name, f"{outcome.result}, {outcome.seconds:.0f} s"))
        rows += [("", note) for note in outcome.notes]
    width = max(len(name) for name, _ in rows)
    return [*(f"{name:<{width}}  {text}".rstrip() for name, text in rows), "", SEND_BACK]


def _notes(report: Any) -> Iterable[str]:
    yield from (str(value) for name, value in report.user_properties if name == MEASURED)
    if report.outcome == "skipped" and isinstance(report.longrepr, tuple):
        yield str(report.longrepr[2]).removeprefix("Skipped: ")


def _driver() -> str:
    file = Path("/sys/module/nvidia/version")
    return file.read_text().strip() if file.exists() else "unknown"


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"
