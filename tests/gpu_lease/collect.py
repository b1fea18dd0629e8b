"""Collects a kit: one folder of wheels, small enough to travel to a GPU machine that has no network.

    packages -> wheels without what nothing imports -> vLLM without what an H100 does not need -> offbeat's name and version

The machine brings Python 3.12 with torch, transformers and common packages; everything else is carried. `README.md` tells how.
"""

import csv
import fnmatch
import io
import os
import re
import struct
import subprocess
import sys
import tomllib
import zipfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[2]
CACHE = Path.home() / ".cache/offbeat-gpu-lease"
"""Folder that keeps vLLM's wheel, of 300 MB, for the next kit."""
LIMIT_BYTES = 52 << 20
"""Largest kit: 64 MiB travel in one call, and the working tree takes ten of them."""
ARCHITECTURE = 90
"""The GPUs' architecture, sm_90: H100 and H200."""
FATBIN = struct.Struct("<IHHQ")
"""Magic number, version, size of the header, size of the entries."""
FATBIN_START = struct.pack("<IHH", 0xBA55ED50, 1, 16)
ENTRY = struct.Struct("<HHIQ12xI")
"""Kind, version, size of the header, size of the payload, architecture."""
ELF = 2
ATTENTION = b"FlashAttnFwdSm90"
KEPT_ATTENTION = re.compile(rb"ELi(64|96|128|256)ENS_(10bfloat16_t|6half_t)EfNS_4arch4Sm90")
"""FlashAttention's kernels that are carried: for 16-bit numbers, and heads whose keys and values are as long."""

VLLM = "vllm==0.26.0"
"""vLLM's last release that is built against torch 2.11."""
DEEPSPEED = "deepspeed==0.19.8"
"""Published as source alone."""
OFFBEAT = """
annotated-types antlr4-python3-runtime datasets dill gguf hjson httpcore2 httpx2 latex2sympy2_extended math-verify msgspec
multiprocess Pebble plotly pydantic pydantic_core pyzmq starlette truststore typing-inspection uvicorn
"""
"""Packages that offbeat imports and the machine does not have."""
FOR_VLLM = """
apache-tvm-ffi astor blake3 cachetools cbor2 compressed-tensors==0.17.0 depyf distro fastapi ijson interegular jiter jmespath
jsonschema jsonschema-specifications lark llguidance lm-format-enforcer loguru mistral_common model-hosting-container-standards
openai openai-harmony outlines_core partial-json-parser prometheus-fastapi-instrumentator pybase64 pycountry
pydantic-extra-types python-json-logger referencing rpds-py setproctitle sniffio supervisor watchfiles xgrammar
"""
"""Packages that vLLM imports when an engine starts, and the machine does not have."""
PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)] + ["manylinux2014_x86_64", "manylinux1_x86_64"]

DROPPED = {
    "vllm": (
        "vllm/_flashmla*.so",
        "vllm/_qutlass*.so",
        "vllm/benchmarks/*",
        "vllm/distributed/*.jpg",
        "vllm/entrypoints/serve/instrumentator/static/*",
        "vllm/model_executor/layers/*/configs/*.json",
        "vllm/third_party/deep_gemm/*",
        "vllm/third_party/fmha_sm100/*",
        "vllm/vllm-rs",
        "vllm/vllm_flash_attn/_vllm_fa2_C*.so",
    ),
    "mistral_common": ("mistral_common/data/*",),
    "plotly": ("plotly/labextension/*", "plotly/package_data/widgetbundle.js", "plotly-*.data/*"),
    "pycountry": ("pycountry/locales/*",),
}
"""Files by package that the kit does without: kernels of other GPUs and models, pages, tuned settings, servers in Rust."""


def collect(kit: Path) -> None:
    """Fill the folder with wheels for the machine. Raise `SystemExit` if they are too large to travel."""
    kit.mkdir(parents=True, exist_ok=True)
    CACHE.mkdir(parents=True, exist_ok=True)
    for old in kit.glob("*.whl"):
        old.unlink()
    _download([_with_version(name) for name in (OFFBEAT + FOR_VLLM).split()], kit)
    _build_deepspeed(kit)
    vllm = VLLM.replace("==", "-")
    if not list(CACHE.glob(f"{vllm}-*.whl")):
        _download([VLLM], CACHE)
    (wheel,) = CACHE.glob(f"{vllm}-*.whl")
    for one in [wheel, *kit.glob("*.whl")]:
        package = one.name.partition("-")[0]
        repack(one, kit / one.name, DROPPED.get(package, ()), keep_one_architecture if package == "vllm" else bytes)
    _write_offbeat(kit)
    sizes = sorted(((file.stat().st_size, file.name) for file in kit.iterdir()), reverse=True)
    for size, name in sizes:
        print(f"{size / 2**20:6.2f} MiB  {name}")
    total = sum(size for size, _ in sizes)
    print(f"{total / 2**20:6.2f} MiB in all")
    if total > LIMIT_BYTES:
        raise SystemExit(f"the kit is larger than {LIMIT_BYTES >> 20} MiB")


def keep_one_architecture(content: bytes) -> bytes:
    """Return a library with other machine code zeroed: it keeps its size, and the zeros compress to almost nothing.

    A kernel that is there as source for the driver (PTX) alone cannot run any more; those are for quantized weights.
    """
    changed = bytearray(content)
    for kind, architecture, start, size in _entries(content):
        payload = content[start : start + size]
        is_kept = ATTENTION not in payload or KEPT_ATTENTION.search(payload)
        if (kind, architecture) != (ELF, ARCHITECTURE) or not is_kept:
            changed[start : start + size] = bytes(size)
    return bytes(changed)


def _entries(content: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Yield the entries of a library's fatbin containers: kind, architecture, and place and size of the payload."""
    place = content.find(FATBIN_START)
    while place >= 0:
        _, _, header, size = FATBIN.unpack_from(content, place)
        at, end = place + header, place + header + size
        while at < end:
            kind, _, entry_header, payload, architecture = ENTRY.unpack_from(content, at)
            yield kind, architecture, at + entry_header, payload
            at += entry_header + payload
        assert at == end, "the layout of fatbin containers has changed"
        place = content.find(FATBIN_START, end)


def repack(source: Path, target: Path, dropped: Iterable[str], change: Callable[[bytes], bytes] = bytes) -> None:
    """Write a wheel anew without the files that match a pattern, its libraries changed, and as small as it gets."""
    patterns = list(dropped)
    with zipfile.ZipFile(source) as wheel:
        names = [name for name in wheel.namelist() if not any(fnmatch.fnmatch(name, pattern) for pattern in patterns)]
        files = {name: wheel.read(name) for name in names if not name.endswith(("/", ".dist-info/RECORD"))}
    files = {name: change(content) if name.endswith(".so") else content for name, content in files.items()}
    _write_wheel(target, files)


def _write_wheel(target: Path, files: Mapping[str, bytes]) -> None:
    (folder,) = {name.partition("/")[0] for name in files if name.endswith(".dist-info/METADATA")}
    record = io.StringIO()
    csv.writer(record, lineterminator="\n").writerows([name, "", ""] for name in [*files, f"{folder}/RECORD"])
    with zipfile.ZipFile(target, "w", zipfile.ZIP_LZMA) as wheel:
        for name, content in {**files, f"{folder}/RECORD": record.getvalue().encode()}.items():
            wheel.writestr(name, content)


def _with_version(name: str) -> str:
    """Return the requirement of a package in the version of constraints.txt, where that names one."""
    lines = re.findall(r"^[\w.-]+==\S+$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    versions = {re.sub(r"[-_.]+", "-", line.partition("==")[0]).lower(): line for line in lines}
    return versions.get(re.sub(r"[-_.]+", "-", name).lower(), name)


def _pip(*arguments: str | Path, variables: Mapping[str, str] | None = None) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments], env={**os.environ, **(variables or {})}, check=True)


def _download(requirements: list[str], folder: Path) -> None:
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    chosen = ["--only-binary=:all:", "--python-version", "3.12", "--implementation", "cp", *platforms]
    _pip("download", "-q", "--no-deps", *chosen, "-d", folder, *requirements)


def _build_deepspeed(kit: Path) -> None:
    """Build the wheel without compiled parts: DeepSpeed compiles them when they are first used."""
    _pip("wheel", "-q", "--no-deps", "--no-build-isolation", "-w", kit, DEEPSPEED, variables={"DS_BUILD_OPS": "0"})
    (built,) = kit.glob("deepspeed-*.whl")
    # It has no compiled code, whatever its name says of the Python that built it.
    built.rename(built.with_name(re.sub(r"-[^-]+-[^-]+-[^-]+\.whl$", "-py3-none-any.whl", built.name)))


def _write_offbeat(kit: Path) -> None:
    """Write a wheel that gives offbeat a name, a version and a command, while its source is read from the working tree."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    folder = f"offbeat-{project['version']}.dist-info"
    scripts = "".join(f"{name} = {target}\n" for name, target in project["scripts"].items())
    files = {
        f"{folder}/METADATA": f"Metadata-Version: 2.1\nName: offbeat\nVersion: {project['version']}\n",
        f"{folder}/WHEEL": "Wheel-Version: 1.0\nGenerator: offbeat\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{folder}/entry_points.txt": f"[console_scripts]\n{scripts}",
        # Python imports `sitecustomize` at the start of every process.
        "sitecustomize.py": Path(__file__).with_name("old_versions.py").read_text() + "\n\ninstall()\n",
    }
    _write_wheel(kit / f"offbeat-{project['version']}-py3-none-any.whl", {name: text.encode() for name, text in files.items()})
