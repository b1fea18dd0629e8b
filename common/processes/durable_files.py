"""Files that survive a power failure: synced to the disk, and replaced whole or not at all."""

import os
from pathlib import Path

from offbeat.common.processes.descriptors import patiently


def sync(path: Path) -> None:
    """Flush a file's bytes, or a folder's names, to the disk."""
    descriptor = patiently(lambda: os.open(path, os.O_RDONLY))
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace(path: Path, content: bytes) -> None:
    """Write a file so that a killed process leaves the old one or the new one."""
    partial = path.with_name(path.name + ".partial")
    partial.write_bytes(content)
    sync(partial)
    partial.rename(path)
