"""A stand-in for a device's stream, on the CPU: what is copied without blocking arrives when the stream is synchronized."""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class LateCopies(TorchDispatchMode):
    """Copies inside the context are late. A source may be freed or overwritten at once: the stream keeps the order of work."""

    def __init__(self) -> None:
        super().__init__()
        self.num_late = self.most_late = 0
        """Copies that have not arrived; the most at once."""
        self._copies: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)) | (kwargs or {})
        if not given.get("non_blocking"):
            return func(*args, **(kwargs or {}))
        targets, sources = ([part] if isinstance(part, Tensor) else part for part in (given["self"], given["src"]))
        self._copies += [(target, source.clone()) for target, source in zip(targets, sources, strict=True)]
        self.num_late = len(self._copies)
        self.most_late = max(self.most_late, self.num_late)
        return given["self"] if func._schema.returns else None

    def synchronize(self) -> None:
        """Have all copies arrive."""
        with torch._C._DisableTorchDispatch():
            for target, source in self._copies:
                target.copy_(source)
        self._copies.clear()
        self.num_late = 0
