"""Counts the memory of tensors, on any device, those without data (meta) included."""

import weakref
from typing import Any

import torch
from torch import Tensor, UntypedStorage
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of the storages that operations inside the context make on a device, while they are alive."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self._device = torch.device(device)
        self.now = 0
        self.most = 0
        """Largest value of `now`."""
        self._sizes: dict[int, int] = {}
        """Bytes of each storage that is alive, by its address."""
        self._references: dict[int, weakref.ref[UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {_address(value) for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)}
        for value in tree_leaves(result):
            if isinstance(value, Tensor) and value.device == self._device and _address(value) not in given:
                self._note(value.untyped_storage())
        return result

    def _note(self, storage: UntypedStorage) -> None:
        address, num_bytes = storage._cdata, storage.nbytes()
        if address in self._sizes:
            return
        self._sizes[address] = num_bytes
        self._references[address] = weakref.ref(storage, lambda _: self._forget(address))
        self.now += num_bytes
        self.most = max(self.most, self.now)

    def _forget(self, address: int) -> None:
        self.now -= self._sizes.pop(address)
        del self._references[address]


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata
