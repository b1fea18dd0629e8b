"""`offbeat serve`: a model of a run behind the OpenAI-compatible server of its engine, a child process.

run, or model folder  ->  exported model  ->  `actor/engines/openai_server.py` in a session of its own  ->  clients
"""

import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import httpx2

from offbeat.actor.engines.openai_server import MODULE, transformers_arguments, vllm_arguments
from offbeat.common.errors import SettingError
from offbeat.common.processes.shutdown import PARENT_VARIABLE, StopRequest
from offbeat.common.records.logs import doing
from offbeat.common.records.run_folder import CONFIG_FILE, MODEL, read_run_config
from offbeat.common.records.web import LOOPBACK
from offbeat.common.settings.config import Config
from offbeat.lab.export import export, find_checkpoint
from offbeat.lab.run_summary import read_end

logger = logging.getLogger(__name__)

LOOK_S = 0.2
END_S = 10.0
"""Seconds that the server has for open requests after a signal."""
KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable with the key that vLLM's server asks its clients for."""


class Served(NamedTuple):
    """A model folder, and how it is served."""

    folder: Path
    engine: Literal["vllm", "transformers"]
    host: str
    port: int
    server_arguments: Sequence[str]
    """Arguments of the engine's server."""

    @property
    def url(self) -> str:
        """The base URL that OpenAI clients take."""
        return f"http://{_in_url(self.host)}:{self.port}/v1"


def check_address(host: str, port: int, engine: Literal["vllm", "transformers"]) -> None:
    """Raise `SettingError` for a port that is taken, and for an address that others reach without a key."""
    if _in_url(host) not in LOOPBACK and not (engine == "vllm" and os.environ.get(KEY_VARIABLE)):
        if engine == "vllm":
            cure = f"Set the environment variable {KEY_VARIABLE}, or use ssh -L {port}:127.0.0.1:{port} from the other machine."
        else:
            cure = f"Its server knows no keys: use ssh -L {port}:127.0.0.1:{port} from the other machine."
        raise SettingError("--host", host, "anyone who reaches this address could use the model", cure)
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host.strip("[]"), port))
        except OSError as error:
            raise SettingError("--port", port, f"it cannot be used ({error.strerror})", "Give another --port.") from error


def _in_url(host: str) -> str:
    """Return the host as URLs have it: an IPv6 address in brackets, whether it was given with them or not."""
    return f"[{host.strip('[]')}]" if ":" in host else host


def model_folder(run: Path, step: int | None) -> tuple[Path, Config | None]:
    """Return the model to serve, and the settings of its run: a model folder itself has none.

    A finished run has its model. Otherwise the checkpoint of `step`, None for the newest whole one, is exported first, unless
    that was done before. Raises `SettingError` for a folder that is neither a run nor a model.
    """
    if not (run / CONFIG_FILE).exists():
        if step is not None:
            raise SettingError("--step", step, f"{run} is not the folder of a run", "Leave it out, or name a run.")
        if not (run / "config.json").exists():
            problem = "it is neither the folder of a run nor that of a model"
            raise SettingError("RUN", str(run), problem, "Name a run's folder, or what `offbeat export` has written.")
        return run, None
    config = read_run_config(run)
    end = read_end(run)
    if step is None and end is not None and end.outcome == "finished" and (run / MODEL).exists():
        return run / MODEL, config
    checkpoint = find_checkpoint(run, step)
    exported = run / f"{MODEL}-{checkpoint.name}"
    if exported.exists():
        if exported.stat().st_mtime > checkpoint.stat().st_mtime:
            return exported, config
        # A run that was resumed from an older checkpoint has made the same step again.
        shutil.rmtree(exported)
    with doing(logger, f"exporting {checkpoint} to {exported}"):
        return export(run, step=step, out=exported, only_adapter=False), config


def server_arguments(folder: Path, config: Config | None, engine: Literal["vllm", "transformers"]) -> list[str]:
    """Return the arguments of the engine's server that follow from the settings of the model's run."""
    dtype = "auto" if config is None else config.model.dtype
    if engine == "transformers":
        return transformers_arguments(str(folder), dtype)
    if config is None or config.actor.engine == "transformers":
        return vllm_arguments(str(folder), dtype, {})
    return vllm_arguments(str(folder), dtype, config.actor.engine_options)


def serve(served: Served, stop: StopRequest, program: Sequence[str] = (sys.executable, "-m", MODULE)) -> int:
    """Run the server until it ends or a signal comes, and return its exit status, 0 after a signal.

    Waits for: the server's end, looking every `LOOK_S`. Unblocked by: a signal. While the model is loaded, a signal kills the
    server; afterwards it finishes open requests for up to `END_S`. Nothing that it has started outlives it.
    """
    command = [*program, served.engine, *served.server_arguments]
    command += ["--host", served.host.strip("[]"), "--port", str(served.port)]
    # Warnings at the start of an engine are for its developers.
    environment = {"PYTHONWARNINGS": "ignore", **os.environ, PARENT_VARIABLE: str(os.getpid())}
    process = subprocess.Popen(command, env=environment)
    try:
        with doing(logger, f"loading {served.folder} with {served.engine}"):
            while not stop and process.poll() is None and not _answers(served):
                time.sleep(LOOK_S)
        if not stop and process.poll() is None:
            logger.info('serving at %s; the model is called "%s"; Ctrl-C ends it', served.url, served.folder)
            while not stop and process.poll() is None:
                time.sleep(LOOK_S)
            if stop:
                _end(process)
    finally:
        process.kill()
        process.wait()
    return 0 if stop else process.returncode


def _end(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        logger.warning("open requests were dropped after %g s", END_S)


def _answers(served: Served) -> bool:
    """Return whether the server says that its model is loaded."""
    address = f"{served.url.removesuffix('/v1')}/health"
    try:
        # Not by way of a proxy, which would ask its own machine.
        return httpx2.get(address, timeout=LOOK_S, trust_env=False).status_code == 200
    except httpx2.HTTPError:
        return False
