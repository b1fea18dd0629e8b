"""Tiny models that many tests share, the selection of tests, and the check that they leave nothing behind."""

import atexit
import gc
import importlib.util
import logging
import os
import re
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pytest
from hypothesis import HealthCheck, settings

from offbeat.common.processes import process_table as processes
from offbeat.common.processes.environment import BROKEN_VARIABLE, prepare_environment
from offbeat.common.records.logs import CollapsingHandler
from tests.gpu_report import Figures, describe_machine, outcomes_of, require_gpu, table
from tests.process_ends import is_mapped

# Before any test module imports transformers or vLLM.
prepare_environment()
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# Processes started by tests find broken packages by themselves, as elsewhere.
os.environ.pop(BROKEN_VARIABLE, None)
# They run the code beside these tests, also where another checkout is installed.
_SOURCES = str(Path(__file__).resolve().parents[1] / "src")
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_SOURCES, os.environ.get("PYTHONPATH")]))

# A script's background processes ignore SIGINT, and so would those that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

# No time limits on single examples: on a busy machine they fail tests at random.
settings.register_profile("offbeat", deadline=None, max_examples=50, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("fast", settings.get_profile("offbeat"), max_examples=10)
settings.load_profile("offbeat")

SLOW_MARKERS = ("engine", "service", "slow")
LANES = ("chaos", "real_model", "serving")
"""Markers of tests that only run where `-m` names them."""
SLOW_FILE = re.compile(rf"^pytestmark = .*\bmark\.({'|'.join(SLOW_MARKERS)})\b", re.MULTILINE)
TEST_FUNCTION = re.compile(r"^def test_", re.MULTILINE)
LEFT_OUT = pytest.StashKey[dict[str, int]]()
"""Number of tests that were left out, by the reason."""
LEFT_OUT_KEY = "left_out"
SLOW = "of engines, services, and slow ones (--fast)"
MARK_VARIABLE = "OFFBEAT_TESTS"
"""Environment variable of every process that a test starts, directly or indirectly."""
SHARED_MEMORY = Path("/dev/shm")
EXTRA_PACKAGES = ("mlflow", "ray", "trackio", "wandb")
"""Packages of extras that `dev` does not bring: MLflow and trackio exclude versions in constraints.txt, Ray is large."""
LEAVE_S = 10.0
"""Longest time that processes may take to end after the last test."""

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz+-=>"
"""The characters that `tiny_model` and its variants know."""


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a dense Qwen3 with tied embeddings and one token per character of `ALPHABET`."""
    return _make(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def tiny_untied_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model like `tiny_model`, with an output head that is not tied to the embeddings."""
    return _make(tmp_path_factory.mktemp("tiny_untied_model"), tie_embeddings=False)


@pytest.fixture(scope="session")
def tiny_moe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a model like `tiny_model`, with four experts in each layer."""
    return _make(tmp_path_factory.mktemp("tiny_moe_model"), architecture="qwen3_moe")


@pytest.fixture(scope="session")
def tiny_bpe_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a dense Qwen3 with a byte-level BPE tokenizer and a chat template."""
    from offbeat.deploy.local.quickstart.tiny_models import make_tiny_bpe_model

    folder = tmp_path_factory.mktemp("tiny_bpe_model")
    make_tiny_bpe_model(folder, ["What is 2 + 2?", "Natalia sold 48 clips in May. #### 72"], vocab_size=300)
    return folder


@pytest.fixture(scope="session")
def tiny_vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen2.5-VL with one token per character of `ALPHABET`."""
    return _make_vision(tmp_path_factory.mktemp("tiny_vision_model"), "qwen2_5_vl")


@pytest.fixture(scope="session")
def tiny_deep_vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3-VL, whose vision tower also feeds the first layers of the language model."""
    return _make_vision(tmp_path_factory.mktemp("tiny_deep_vision_model"), "qwen3_vl")


@pytest.fixture(scope="session")
def tiny_linear_vision_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a Qwen3.5 with its vision tower, which is not packed because it has linear attention."""
    return _make_vision(tmp_path_factory.mktemp("tiny_linear_vision_model"), "qwen3_5")


def _make_vision(folder: Path, kind: Literal["qwen2_5_vl", "qwen3_vl", "qwen3_5"]) -> Path:
    from offbeat.deploy.local.quickstart.tiny_models import make_tiny_vision_model

    make_tiny_vision_model(folder, alphabet=ALPHABET, kind=kind)
    return folder


def _make(folder: Path, *, architecture: Literal["qwen3", "qwen3_moe"] = "qwen3", tie_embeddings: bool = True) -> Path:
    # Imported here: most tests need no model, and transformers takes seconds to import.
    from offbeat.deploy.local.quickstart.tiny_models import make_tiny_model

    make_tiny_model(folder, alphabet=ALPHABET, architecture=architecture, tie_embeddings=tie_embeddings)
    return folder


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--fast", action="store_true", help="leave out tests marked engine, service or slow, and try fewer random examples"
    )
    parser.addoption(
        "--gpu", action="store_true", help="only tests that need a GPU, and a table of what they found to send back"
    )


def pytest_configure(config: pytest.Config) -> None:
    # Imports and collected tests are a million objects that stay alive: freezing them spares the garbage collector.
    gc.disable()
    # A frozen object is not collected at the end either; then libraries write pages about what they leak.
    atexit.register(gc.unfreeze)
    if config.getoption("--fast"):
        settings.load_profile("fast")
    if config.getoption("--gpu"):
        require_gpu()
        config.pluginmanager.register(Figures(config))


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `--fast`, do not even import a file that is slow as a whole."""
    if not config.getoption("--fast") or collection_path.suffix != ".py":
        return None
    text = collection_path.read_text()
    if SLOW_FILE.search(text) is None:
        return None
    _count(config, SLOW, len(TEST_FUNCTION.findall(text)))
    return True


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


# First: xdist reads the groups in the same hook.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests by what they start, sort the longest first, and leave out those that this machine or `--fast` does not run."""
    for item in items:
        if "warm" in getattr(item, "fixturenames", ()):
            item.add_marker("service")
    # Services come first, in a chain on each of two workers; everything else fills the time that is left.
    items.sort(key=lambda item: item.get_closest_marker("service") is None)
    if config.pluginmanager.hasplugin("xdist"):
        for item in items:
            # The whole runs are half of the services' time.
            services = "whole runs" if item.path.parent.name == "deploy" else "services"
            group = services if item.get_closest_marker("service") else item.location[0]
            item.add_marker(pytest.mark.xdist_group(group))
    _leave_out(config, items, set(SLOW_MARKERS) if config.getoption("--fast") else set(), SLOW)
    if config.getoption("--gpu"):
        others = [item for item in items if not item.get_closest_marker("gpu")]
        items[:] = [item for item in items if item.get_closest_marker("gpu")]
        config.hook.pytest_deselected(items=others)
    elif any(item.get_closest_marker("gpu") for item in items) and not _has_gpu():
        _leave_out(config, items, {"gpu"}, "without a GPU")
    if not all(importlib.util.find_spec(package) for package in EXTRA_PACKAGES):
        _leave_out(config, items, {"extras"}, "without the packages of .ci/extras")
    if not importlib.util.find_spec("vllm"):
        _leave_out(config, items, {"vllm"}, "without vLLM")
    lanes = {lane for lane in LANES if lane not in str(config.getoption("-m"))}
    _leave_out(config, items, lanes, f'without -m "{" or ".join(LANES)}"')


def pytest_runtest_setup() -> None:
    """Let DeepSpeed forget process groups that a test of vLLM has destroyed, which the next trainer would take for its own."""
    comm, dist = sys.modules.get("deepspeed.comm.comm"), sys.modules.get("torch.distributed")
    if comm is not None and dist is not None and not dist.is_initialized():
        vars(comm)["cdb"] = None
        vars(sys.modules["deepspeed.utils.groups"])["_WORLD_GROUP"] = None


def pytest_runtest_teardown() -> None:
    """Undo the signal handlers and the log of a command that a test has called in this process."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    root = logging.getLogger()
    for handler in [handler for handler in root.handlers if isinstance(handler, CollapsingHandler)]:
        root.removeHandler(handler)
        handler.close()


def _leave_out(config: pytest.Config, items: list[pytest.Item], markers: set[str], why: str) -> None:
    left_out = {item for item in items if any(item.get_closest_marker(marker) for marker in markers)}
    if left_out:
        items[:] = [item for item in items if item not in left_out]
        config.hook.pytest_deselected(items=list(left_out))
        _count(config, why, len(left_out))


def _count(config: pytest.Config, why: str, number: int) -> None:
    counts = config.stash.setdefault(LEFT_OUT, {})
    counts[why] = counts.get(why, 0) + number


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over the numbers of tests that a worker of `-n` left out; each worker has collected all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get(LEFT_OUT_KEY, {})


def pytest_sessionfinish(session: pytest.Session) -> None:
    # xdist sets it, in workers only.
    output = vars(session.config).get("workeroutput")
    if output is not None:
        output[LEFT_OUT_KEY] = session.config.stash.get(LEFT_OUT, {})


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if left_out := config.stash.get(LEFT_OUT, {}):
        terminalreporter.write_line(f"left out: {', '.join(f'{number} {why}' for why, number in left_out.items())}")
    if config.getoption("--gpu"):
        terminalreporter.section("GPU")
        for line in table(describe_machine(), outcomes_of(terminalreporter.stats)):
            terminalreporter.write_line(line)


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()


@pytest.fixture(scope="session", autouse=True)
def _leaves_nothing_behind() -> Iterator[None]:
    """Fail the last test when a process that some test started, or its shared memory, is still there."""
    mark = str(os.getpid())
    os.environ[MARK_VARIABLE] = mark
    shared_before = set(SHARED_MEMORY.iterdir()) if SHARED_MEMORY.exists() else set()
    yield
    deadline = time.monotonic() + LEAVE_S
    while (left := _left_processes(mark)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left, "processes of tests that still run"
    # What others on this machine use is theirs, and trackers of dead processes clear up a moment later.
    while (left_files := _left_files(shared_before)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not left_files, "shared memory that no process uses"


def _left_files(before: set[Path]) -> list[Path]:
    files = set(SHARED_MEMORY.iterdir()) - before if SHARED_MEMORY.exists() else set()
    return [file for file in files if file.exists() and not is_mapped(file)]


def _left_processes(mark: str) -> list[str]:
    started = {*processes.marked(MARK_VARIABLE, mark), *processes.descendants(os.getpid())} - {os.getpid()}
    lines = [f"{pid}: {' '.join(filter(None, processes.arguments(pid)))}" for pid in sorted(started)]
    # Helpers of multiprocessing and of torch's compiler end with this process.
    helpers = ("multiprocessing.resource_tracker", "multiprocessing.forkserver", "torch/_inductor/compile_worker")
    return [line for line in lines if not any(helper in line for helper in helpers)]
