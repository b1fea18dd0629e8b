"""Checks of this machine: ports, the run's folder and its disk, GPUs, environment variables, builds of packages."""

import errno
import importlib.metadata
import importlib.util
import ipaddress
import os
import shutil
import socket
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import psutil

from offbeat.common.errors import SettingError
from offbeat.common.processes.environment import COMPANIONS, launcher_number, launcher_rank
from offbeat.common.records.run_folder import check_run_folder, locked
from offbeat.common.settings.config import Config, has_own_critic, most_actors
from offbeat.common.settings.library_options import check_groups
from offbeat.deploy.checks.findings import Finding, findings_of, mistake
from offbeat.deploy.local.devices import find_gpus
from offbeat.deploy.local.memory import BYTES, check_cpu_run, engine_need, learner_need, trained_parameters
from offbeat.deploy.local.model_sizes import ModelSizes, model_sizes
from offbeat.deploy.local.plan import check_gpus, plan_of_this_machine
from offbeat.learner.training import checkpoints
from offbeat.protocols.addresses import host_of

_LARGEST_PORT = 65535
_ACTOR_PORT_CURE = "Choose an address of this machine and a free port; 0 is any free one, for each actor another."


def check_ports(config: Config) -> Iterator[Finding]:
    """Find ports of the learner that are taken, and an address that is not this machine's."""
    bind = config.hub.bind or config.hub.address
    host, port = host_of(bind), bind.rpartition(":")[2]
    if not port.isdecimal() or int(port) > _LARGEST_PORT:
        # Refused as a contradiction already.
        return
    setting = "hub.bind" if config.hub.bind else "hub.address"
    problem = _bind_problem(host, int(port))
    if problem:
        cure = "End the process that has it, or choose another port."
        if "in use" not in problem:
            cure = "Choose an address and port of this machine; actors elsewhere reach it under hub.address."
        yield mistake(setting, bind, problem, cure)
    for name, number in (("weights.port", config.weights.port), ("weights.pull_port", config.weights.pull_port)):
        problem = _bind_problem(host, number) if number else None
        if problem:
            yield mistake(name, number, problem, "End the process that has it, or choose another port; 0 is any free one.")
    page_host, _, page_port = config.metrics.bind.rpartition(":")
    if page_host and (problem := _bind_problem(page_host, int(page_port))):
        cure = "Choose an address of this machine and a free port; 0 is any free one. Empty: no page."
        yield mistake("metrics.bind", config.metrics.bind, problem, cure)


def check_actor_port(config: Config) -> Iterator[Finding]:
    """Find an address for an actor's metrics that cannot be bound."""
    bind = config.metrics.actor_bind
    host, _, port = bind.rpartition(":")
    if host and (problem := _bind_problem(host, int(port))):
        yield mistake("metrics.actor_bind", bind, problem, _ACTOR_PORT_CURE)


def check_shared_actor_port(config: Config) -> Iterator[Finding]:
    """Find one port for the numbers of several processes that start on this machine."""
    bind = config.metrics.actor_bind
    port = bind.rpartition(":")[2]
    if port in ("", "0"):
        return
    if (number := most_actors(config)) > 1:
        problem = f"{number} actors cannot share one port (launch.num_actors, scale.actors, scale.max)"
        yield mistake("metrics.actor_bind", bind, problem, _ACTOR_PORT_CURE)
    elif port == config.metrics.bind.rpartition(":")[2]:
        yield mistake("metrics.actor_bind", bind, "metrics.bind has the same port", _ACTOR_PORT_CURE)


def _bind_problem(host: str, port: int) -> str | None:
    """Return why this process cannot listen at the port; None when it can."""
    if port > _LARGEST_PORT:
        # The C library would take the remainder.
        return f"there is no port {port}"
    try:
        # An IPv6 address has brackets, which are for people.
        name = host.strip("[]")
        family, _, _, _, address = socket.getaddrinfo(name, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            # As ZeroMQ does: a port that a learner has just left is free.
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except socket.gaierror as error:
        return f"the host {host!r} is not known ({error.strerror})"
    except PermissionError:
        return f"port {port} is only for the administrator"
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            return f"port {port} is in use"
        return f"{host} is no address of this machine" if error.errno == errno.EADDRNOTAVAIL else str(error.strerror)
    return None


def check_folder(config: Config) -> Iterator[Finding]:
    """Find a run folder that holds a run or has a learner, cannot be made or written, or whose disk has too little room."""
    if not config.run.dir.strip():
        # The settings are refused for that; it does not stand for the current folder.
        return
    folder = Path(config.run.dir)
    check_run_folder(config.run)
    if folder.is_dir():
        # Only looked at: the learner locks it for itself.
        with locked(folder):
            pass
    there = next(parent for parent in [folder, *folder.absolute().parents] if os.path.lexists(parent))
    if not there.exists():
        problem = f"{there} is a symbolic link that leads nowhere"
        raise SettingError("run.dir", config.run.dir, problem, "Remove the link, or name a folder.")
    if not there.is_dir():
        raise SettingError("run.dir", config.run.dir, f"{there} is a file", "Name a folder.")
    try:
        # Rights alone do not say it: the file system may be read-only, or full.
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        problem = f"{there} cannot be written ({error.strerror})"
        raise SettingError("run.dir", config.run.dir, problem, "Name a folder that you may write to.") from error
    free_mb = shutil.disk_usage(there).free >> 20
    if config.log.enabled and free_mb < config.log.min_free_mb:
        problem = f"the disk of run.dir has {free_mb} MB free, so no lease would ever be granted"
        yield mistake("log.min_free_mb", config.log.min_free_mb, problem, "Free space, lower it, or name another run.dir.")
    if config.train.checkpoint_interval and (sizes := model_sizes(config.model.path, asks_hub=False)):
        yield from _check_checkpoints(config, sizes, free_mb)


def _check_checkpoints(config: Config, sizes: ModelSizes, free_mb: int) -> Iterator[Finding]:
    """Note the disk that the run's checkpoints take; warn where there is less."""
    num_trained = trained_parameters(config, sizes) + (sizes.num_parameters if has_own_critic(config) else 0)
    num_bytes = checkpoints.BYTES_PER_PARAMETER * num_trained
    if config.lora.rank:
        num_bytes += BYTES[config.model.dtype] * sizes.num_parameters
    one_mb = int(num_bytes) >> 20
    # The best one is kept too, and an old one is deleted only after the new one is whole.
    most = config.train.keep_checkpoints + 2
    text = (
        f"a checkpoint takes up to {one_mb:,} MB, and up to {most} lie in run.dir at once (train.checkpoint_interval = "
        f"{config.train.checkpoint_interval}, train.keep_checkpoints = {config.train.keep_checkpoints})"
    )
    if most * one_mb <= free_mb:
        yield Finding("note", text)
    else:
        cure = "Free space, name another run.dir, or set train.checkpoint_interval=0 to do without"
        yield Finding("warning", f"{text}, but its disk has {free_mb:,} MB free. {cure}.")


def show_devices(config: Config) -> Iterator[Finding]:
    """Find what `check_devices` does where the run's GPUs may be this machine's; else note the sums for those of others."""
    inventory = find_gpus()
    if inventory.gpus and config.launch.learner_processes <= len(inventory.gpus):
        yield from check_devices(config)
        return
    try:
        check_gpus(config, len(inventory.gpus))
    except SettingError as error:
        # The run may be meant for another machine.
        yield Finding("warning", f"on this machine: {error}")
    if inventory.unused:
        yield Finding("note", f"a run here uses no GPU: {inventory.unused}")
    if sizes := model_sizes(config.model.path):
        yield Finding("note", f"on a GPU each learner process would take, estimated: {learner_need(config, sizes)}")
        yield Finding("note", f"on a GPU each actor would take at least: {engine_need(config, sizes)}")
    if not inventory.gpus:
        # As above: a run that exceeds this machine may be meant for another.
        found = findings_of(partial(_check_cpu_memory, config))
        yield from (Finding("warning" if one.kind == "mistake" else one.kind, one.text) for one in found)


def check_devices(config: Config) -> Iterator[Finding]:
    """Find a device plan that this machine cannot meet; note the plan, or why the machine's GPUs are not used."""
    plan, inventory = plan_of_this_machine(config)
    if inventory.unused:
        yield Finding("note", f"the run uses no GPU: {inventory.unused}")
    if plan is not None:
        yield from (Finding("warning", text) for text in plan.warnings)
        yield from (Finding("note", text) for text in plan.notes)
    else:
        yield from _check_cpu_memory(config)


def _check_cpu_memory(config: Config) -> Iterator[Finding]:
    """Find a run that this machine's memory cannot hold; note its sums, with a warning where too little is free now."""
    sizes = model_sizes(config.model.path, asks_hub=False)
    if sizes is None:
        return
    total, free = memory_here()
    yield from (Finding("note", text) for text in check_cpu_run(config, sizes, total_bytes=total, free_bytes=free))


def memory_here(limit: Path = Path("/sys/fs/cgroup/memory.max")) -> tuple[float, float]:
    """Return the memory in bytes that processes here may have in all, by a container's limit too, and what is free of it."""
    memory = psutil.virtual_memory()
    total = float(memory.total)
    # Absent at the root of the hierarchy and on other systems; "max" where there is no limit.
    text = limit.read_text().strip() if limit.is_file() else "max"
    if text.isdecimal():
        total = min(total, float(text))
    return total, min(total, float(memory.available))


def check_groups_of_processes(config: Config) -> None:
    """Raise `SettingError` for learner processes that cannot be divided into groups that share packs."""
    check_groups(config.train.sequence_parallel_size, num_processes=config.launch.learner_processes)


def check_variables(config: Config) -> None:
    """Raise `SettingError` for variables that no distributed launcher sets so, or that keep other machines from rank 0."""
    launcher_rank()
    launcher_number("LOCAL_RANK", 0)
    host = os.environ.get("MASTER_ADDR", "")
    # torchrun's name for the processes of one machine, and DeepSpeed's.
    num_here = next((launcher_number(name, 1) for name in ("LOCAL_WORLD_SIZE", "LOCAL_SIZE") if name in os.environ), None)
    if not host or num_here is None or launcher_number("WORLD_SIZE", 1) <= num_here:
        return
    setting = "environment variable MASTER_ADDR"
    cure = "Give --master-addr an address of this machine that the others reach."
    try:
        addresses = {str(found[4][0]) for found in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)}
    except socket.gaierror as error:
        raise SettingError(setting, host, f"the host is not known ({error.strerror})", cure) from error
    if all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in addresses):
        problem = (
            f"to this machine it is its own loopback ({', '.join(sorted(addresses))}), and ranks run on other machines too"
        )
        raise SettingError(setting, host, problem, cure)


def check_companions(config: Config) -> Iterator[Finding]:
    """Find packages beside torch of another build, with which transformers and vLLM outside of offbeat fail to import."""
    versions = {name: _version(name) for name in ("torch", *COMPANIONS)}
    _, _, build = (versions.pop("torch") or "").partition("+")
    others = [name for name, version in versions.items() if version is not None and version.partition("+")[2] != build]
    # PyPI's builds have no label.
    if build and others:
        yield Finding(
            "warning",
            f"{', '.join(others)} and torch ({build}) are of different builds. offbeat does without them, but transformers and "
            f"vLLM outside of it may not load a trained model: pip uninstall {' '.join(others)}",
        )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
