"""Writes tests/gpu_names.json: how the CUDA wheels define what the source uses. Run it when a pin or a use has changed.

    python .ci/read_cuda_wheels.py
    python .ci/read_cuda_wheels.py --against 0.34.0    before that vLLM is allowed: what it defines otherwise; writes nothing
    python .ci/read_cuda_wheels.py --against newest    each week: exits with 1 if something that the source uses is gone

Of each wheel only the directory and the files that are looked at are fetched, some megabytes; nothing is installed.
"""

import argparse
import io
import json
import sys
import tarfile
import urllib.request
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from packaging.specifiers import SpecifierSet
from packaging.version import Version

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.gpu_names import TABLE, Definitions, differences, find_uses, losses, read_pins, read_range  # noqa: E402

INDEX = "https://pypi.org/simple"
PLATFORM = "manylinux_2_28_x86_64.whl"
BLOCK_BYTES = 1 << 19


class RemoteFile(io.RawIOBase):
    """A file on a server, read by ranges."""

    def __init__(self, url: str, num_bytes: int) -> None:
        self._url, self._num_bytes, self._position = url, num_bytes, 0

    def seekable(self) -> bool:
        return True

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self._position = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._num_bytes}[whence]
        return self._position

    def readinto(self, buffer: Any) -> int:
        last = min(self._position + len(buffer), self._num_bytes) - 1
        if last < self._position:
            return 0
        content = fetch(self._url, {"Range": f"bytes={self._position}-{last}"})
        buffer[: len(content)] = content
        self._position += len(content)
        return len(content)


class Wheel:
    """The files of a wheel on the index."""

    def __init__(self, url: str, num_bytes: int) -> None:
        self._archive = zipfile.ZipFile(io.BufferedReader(RemoteFile(url, num_bytes), BLOCK_BYTES))
        self._names = set(self._archive.namelist())

    def read(self, path: str) -> str | None:
        return self._archive.read(path).decode() if path in self._names else None

    def requirements(self) -> list[str]:
        """Return the lines of the wheel's requirements."""
        (metadata,) = [name for name in self._names if name.endswith(".dist-info/METADATA")]
        lines = self._archive.read(metadata).decode().splitlines()
        return [line.removeprefix("Requires-Dist: ") for line in lines if line.startswith("Requires-Dist: ")]


class SourceArchive:
    """The files of a package that is published as source only."""

    def __init__(self, content: bytes) -> None:
        self._archive = tarfile.open(fileobj=io.BytesIO(content))  # noqa: SIM115, as long as this object
        self._members = {member.name.partition("/")[2]: member for member in self._archive.getmembers() if member.isfile()}

    def read(self, path: str) -> str | None:
        file = self._archive.extractfile(self._members[path]) if path in self._members else None
        return file.read().decode() if file else None


def fetch(url: str, headers: Mapping[str, str]) -> bytes:
    """Return what a server answers."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=dict(headers)), timeout=120) as answer:
        return answer.read()


def list_files(package: str) -> list[dict[str, Any]]:
    """Return the files of a package on the index, without withdrawn ones."""
    page = json.loads(fetch(f"{INDEX}/{package}/", {"Accept": "application/vnd.pypi.simple.v1+json"}))
    return [one for one in page["files"] if not one.get("yanked")]


def find_file(package: str, beginning: str, ending: str) -> tuple[str, int]:
    """Return address and size of a package's file on the index."""
    found = [one for one in list_files(package) if one["filename"].startswith(beginning) and one["filename"].endswith(ending)]
    if len(found) != 1:
        sys.exit(f"error: {len(found)} files of {package} are named {beginning}...{ending}")
    return found[0]["url"], found[0]["size"]


def find_newest(allowed: str) -> str:
    """Return the newest release of vLLM among the allowed versions; empty: among all."""
    names = [one["filename"] for one in list_files("vllm") if one["filename"].endswith(PLATFORM)]
    return str(max(SpecifierSet(allowed).filter(Version(name.split("-")[1]) for name in names)))


def read_names(vllm_version: str, deepspeed_version: str) -> dict[str, str]:
    """Return the definitions of the names that the source uses, where there is one.

    They are read from the CUDA wheels of a vLLM and of the torch that it requires, and from the source of a DeepSpeed.
    """
    vllm = Wheel(*find_file("vllm", f"vllm-{vllm_version}-cp", PLATFORM))
    (torch_version,) = [line.removeprefix("torch==") for line in vllm.requirements() if line.startswith("torch==")]
    print(f"vLLM {vllm_version}, torch {torch_version} and DeepSpeed {deepspeed_version}")
    sources = {
        "vllm": vllm,
        "torch": Wheel(*find_file("torch", f"torch-{torch_version}-cp311-cp311-", PLATFORM)),
        "deepspeed": SourceArchive(fetch(find_file("deepspeed", f"deepspeed-{deepspeed_version}", ".tar.gz")[0], {})),
    }
    definitions = {package: Definitions(source) for package, source in sources.items()}
    names = {}
    for use in find_uses():
        try:
            names[use.name] = definitions[use.name.partition(".")[0]].describe(use.name)
        except LookupError:
            print(f"{use.place}: the CUDA wheel does not define {use.name}")
    return names


def main() -> None:
    """Read the wheels, and write the table or compare with it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--against", metavar="VERSION", help="compare this vLLM, or the newest, with the table; write nothing")
    against = parser.parse_args().against
    pins, allowed = read_pins(), read_range()
    if against:
        version = find_newest("") if against == "newest" else against
        lines = differences(json.loads(TABLE.read_text())["names"], read_names(version, pins["deepspeed"]))
        print("\n".join(lines or ["no name differs"]))
        if lost := losses(lines):
            sys.exit("\n".join(["error: of what the source uses is gone:", *lost]))
        return
    names = read_names(pins["vllm"], pins["deepspeed"])
    if absent := {use.name for use in find_uses()} - names.keys():
        sys.exit(f"error: the pinned versions do not define {', '.join(sorted(absent))}")
    newest = find_newest(allowed)
    table = {"pins": pins, "range": allowed, "names": dict(sorted(names.items()))}
    table["others"] = {newest: differences(names, read_names(newest, pins["deepspeed"]))}
    TABLE.write_text(json.dumps(table, indent=1) + "\n")
    print(f"{len(names)} names in {TABLE.name}")


if __name__ == "__main__":
    main()
