"""Tensors on disk as data: safetensors, with msgpack for the values around them. Reading them executes nothing."""

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

_TENSOR = 1
"""Msgpack's extension code of a tensor, whose content is its name in the safetensors file."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write named tensors to a safetensors file; raises OSError where the disk refuses, as for any other file."""
    with disk_errors(path):
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}, path)


@contextlib.contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise an OSError about `path` for an error of the disk, which safetensors reports only in its error's text."""
    try:
        yield
    except SafetensorError as error:
        number = re.search(r"\(os error (\d+)\)", str(error))
        if number is None:
            raise
        raise OSError(int(number[1]), os.strerror(int(number[1])), str(path)) from error


def write_tree(path: Path, tree: Any) -> None:
    """Write dicts, lists and plain values around tensors: `path.safetensors` and `path.msgpack`."""
    tensors: dict[str, Tensor] = {}

    def name_tensor(value: Any) -> msgspec.msgpack.Ext:
        if not isinstance(value, Tensor):
            raise NotImplementedError(f"a checkpoint cannot hold a {type(value).__name__}")
        name = str(len(tensors))
        tensors[name] = value
        return msgspec.msgpack.Ext(_TENSOR, name.encode())

    structure = msgspec.msgpack.encode(tree, enc_hook=name_tensor)
    write_tensors(path.with_suffix(".safetensors"), tensors)
    path.with_suffix(".msgpack").write_bytes(structure)


def read_tree(path: Path) -> Any:
    """Return what `write_tree` wrote, tensors in CPU memory; tuples have become lists."""
    tensors = load_file(path.with_suffix(".safetensors"))

    def find_tensor(code: int, data: memoryview) -> Tensor:
        assert code == _TENSOR
        return tensors[bytes(data).decode()]

    return msgspec.msgpack.decode(path.with_suffix(".msgpack").read_bytes(), ext_hook=find_tensor)
