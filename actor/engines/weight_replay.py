"""Weight commits as copies: where each incoming tensor lands in the model is learned once, and repeated without a loader.

    first commit: the loader runs under `CopyRecorder` -> landings; each is repeated and compared with what the loader left
    later ones:   one call copies all landings -> `pack`, where the engine keeps packed copies of weights

A loader that does more than copy slices (it quantizes, shuffles, or computes other tensors from the weights) cannot be
repeated so, and `learn` says why.
"""

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Weights = Mapping[str, Tensor]
"""All incoming tensors by their names."""
_PIECE_BYTES = 64 << 20


class NotReplayableError(RuntimeError):
    """The loader does more than copy slices, or the model changed since; the text says what."""


Packer = Any
"""A method that keeps its layer's weights in another form: it has vLLM's `process_weights_after_loading(layer)`."""


class Region(NamedTuple):
    """A strided part of a storage, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    def of(self, tensor: Tensor, start: int = 0) -> Tensor:
        """Return this part of the tensor's storage; `start` is added to the offset."""
        return tensor.detach().as_strided(self.size, self.stride, start + self.offset)


class Landing(NamedTuple):
    """A slice of an incoming tensor, and where it is copied to."""

    name: str
    taken: Region
    """Part of the incoming tensor; the offset counts from its first element."""
    to: Region
    """Part of the destination's storage."""

    def source(self, weights: Weights) -> Tensor:
        """Return the slice."""
        return self.taken.of(weights[self.name], int(weights[self.name].storage_offset()))


class Destination(NamedTuple):
    """A tensor of the model that incoming tensors are copied into."""

    module: nn.Module
    name: str
    tensor: Tensor
    storage: int
    """The tensor's storage when the landings were learned."""
    landings: tuple[Landing, ...]

    def is_in_use(self) -> bool:
        """Return False when the model has replaced the tensor or its memory since."""
        return getattr(self.module, self.name, None) is self.tensor and _storage(self.tensor) == self.storage

    def repeats(self, weights: Weights) -> bool:
        """Copy the weights once more; return True if that leaves the bytes that are there, else put those back."""
        whole = torch.empty(0, dtype=torch.uint8, device=self.tensor.device).set_(self.tensor.untyped_storage())
        before = whole.clone()
        for landing in self.landings:
            # A copy that writes nothing must show.
            landing.to.of(self.tensor).zero_().sub_(1)
        for landing in self.landings:
            landing.to.of(self.tensor).copy_(landing.source(weights))
        # Piece by piece: a comparison on a device takes as much memory as its operands, which an engine has not left.
        pieces = zip(whole.split(_PIECE_BYTES), before.split(_PIECE_BYTES), strict=True)
        is_same = all(torch.equal(piece, as_loaded) for piece, as_loaded in pieces)
        if not is_same:
            whole.copy_(before)
        return is_same


class PackedParameter(NamedTuple):
    """A parameter that exists only until it is packed."""

    name: str
    shape: Region
    dtype: torch.dtype
    landings: tuple[Landing, ...]

    def assemble(self, weights: Weights, device: torch.device) -> Tensor:
        """Return the parameter as the loader makes it."""
        tensor = torch.empty_strided(self.shape.size, self.shape.stride, dtype=self.dtype, device=device)
        for landing in self.landings:
            landing.to.of(tensor).copy_(landing.source(weights))
        return tensor

    def is_whole(self) -> bool:
        """Return True if the landings fill the parameter."""
        filled = torch.zeros_like(torch.empty_strided(self.shape.size, self.shape.stride, dtype=torch.bool))
        for landing in self.landings:
            landing.to.of(filled).fill_(True)
        return bool(filled.all())


class PackedLayer(NamedTuple):
    """A layer that is packed after each update. Parameters that stay in the layer are destinations."""

    layer: nn.Module
    packer: Packer
    parameters: tuple[PackedParameter, ...]

    def pack(self, weights: Weights) -> None:
        """Pack new weights, and put the layer's own parameters, which are empty, back."""
        own = {parameter.name: self.layer.get_parameter(parameter.name) for parameter in self.parameters}
        try:
            for parameter in self.parameters:
                whole = parameter.assemble(weights, own[parameter.name].device)
                self.layer.register_parameter(parameter.name, nn.Parameter(whole, requires_grad=False))
            self.packer.process_weights_after_loading(self.layer)
        finally:
            for name, parameter in own.items():
                self.layer.register_parameter(name, parameter)


class WeightReplay:
    """Commits of weights of one layout into one model, without the model's loader."""

    def __init__(self, weights: Weights, destinations: Sequence[Destination], packed: Sequence[PackedLayer]) -> None:
        """`weights` have the layout of all later ones."""
        self._layout = _layout(weights)
        self._destinations = destinations
        self._packed = packed
        self._targets = [landing.to.of(to.tensor) for to in destinations for landing in to.landings]
        self._devices = {target.device for target in self._targets} - {torch.device("cpu")}
        self._sources: list[Tensor] = []
        """The slices of the incoming tensors at `_addresses`, one for each of `_targets`."""
        self._addresses: list[int] = []
        self._num_loads = 0

    @torch.no_grad()
    def load(self, weights: Weights) -> None:
        """Copy the weights into the model, on the current stream; return when they may be overwritten.

        Raise `NotReplayableError` when weights or model are not those that were learned; then load them in the usual way.
        """
        if _layout(weights) != self._layout:
            raise NotReplayableError("the weights have another layout")
        for destination in self._destinations:
            if not destination.is_in_use():
                raise NotReplayableError(f"the model replaced {destination.name} of a {type(destination.module).__name__}")
        addresses = [tensor.data_ptr() for tensor in weights.values()]
        if addresses != self._addresses:
            self._sources = [landing.source(weights) for to in self._destinations for landing in to.landings]
            self._addresses = addresses
        torch._foreach_copy_(self._targets, self._sources, non_blocking=True)  # pyright: ignore[reportPrivateImportUsage]
        for packed in self._packed:
            packed.pack(weights)
        for device in self._devices:
            torch.accelerator.current_stream(device).synchronize()
        self._check_sample()

    def _check_sample(self) -> None:
        """Compare one row of one landing, another one at each load, with its source."""
        turn, index = divmod(self._num_loads, len(self._targets))
        self._num_loads += 1
        target, source = self._targets[index], self._sources[index]
        if target.dim() and target.shape == source.shape:
            target, source = target[turn % len(target)], source[turn % len(target)]
        if not torch.equal(target.cpu(), source.to("cpu", target.dtype).expand(target.shape)):
            raise NotReplayableError("copied weights are not those that arrived")


@torch.no_grad()
def learn(model: nn.Module, weights: Weights, load: Callable[[], None], packers: Iterable[Packer] = ()) -> WeightReplay:
    """Run `load`, which loads `weights` into the model, and return how to repeat it with others.

    `packers` are methods that `load` calls once the parameters of a layer are there. Raise `NotReplayableError`, after
    `load` is done, if it cannot be repeated.
    """
    recorder = CopyRecorder(weights)
    with recorder.watching(packers), recorder:
        load()
    if recorder.trouble is not None:
        raise NotReplayableError(recorder.trouble)
    destinations: dict[int, Destination] = {}
    for module in model.modules():
        tensors = itertools.chain(module.named_parameters(recurse=False), module.named_buffers(recurse=False))
        for name, tensor in tensors:
            landings = recorder.landings(tensor)
            if landings:
                # Tied parameters are one storage under two names.
                destinations.setdefault(_storage(tensor), Destination(module, name, tensor, _storage(tensor), landings))
    landed = {landing.name for to in destinations.values() for landing in to.landings}
    landed |= {landing.name for layer in recorder.packed for parameter in layer.parameters for landing in parameter.landings}
    if landed != weights.keys():
        raise NotReplayableError(f"the loader does not copy {min(weights.keys() - landed)}")
    for destination in destinations.values():
        if not destination.repeats(weights):
            raise NotReplayableError(f"{destination.name} of a {type(destination.module).__name__} is not a copy")
    return WeightReplay(weights, list(destinations.values()), recorder.packed)


class CopyRecorder(TorchDispatchMode):
    """Records which slices of the incoming tensors are copied where, also by way of temporary tensors."""

    def __init__(self, weights: Weights) -> None:
        super().__init__()
        self.trouble: str | None = None
        """The first thing done with weights that is more than a copy; None as long as there is none."""
        self.packed: list[PackedLayer] = []
        """The layers that watched packers have packed."""
        self._weights = weights
        self._incoming: dict[int, list[tuple[int, int, str]]] = {}
        """Storages of incoming tensors: first byte, end and name of each."""
        for name, tensor in weights.items():
            start = int(tensor.storage_offset()) * tensor.itemsize
            self._incoming.setdefault(_storage(tensor), []).append((start, start + tensor.nbytes, name))
        self._landings: dict[int, list[Landing] | None] = {}
        """The incoming tensors that each storage was written with; None where anything else wrote it."""
        # A weak reference keeps the address of a storage from another one, and lets its memory go.
        self._seen: dict[int, StorageWeakRef] = {}
        self._is_paused = False

    def landings(self, tensor: Tensor) -> tuple[Landing, ...]:
        """Return what was copied into the tensor's storage. Raise `NotReplayableError` if something else was."""
        landings = self._landings.get(_storage(tensor), [])
        if landings is None:
            raise NotReplayableError(f"a tensor of shape {tuple(tensor.shape)} is computed from the weights")
        return tuple(landings)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing meanwhile."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not self._is_paused:
            with self.paused():
                self._note(func, [*args, *(kwargs or {}).values()], result)
        return result

    @contextlib.contextmanager
    def watching(self, packers: Iterable[Packer]) -> Iterator[None]:
        """Append every call of a packer to `packed`, too."""
        name = "process_weights_after_loading"
        with contextlib.ExitStack() as stack:
            for packer in packers:
                vars(packer)[name] = functools.partial(self._pack_watched, packer, packer.process_weights_after_loading)
                stack.callback(vars(packer).pop, name)
            yield

    def _pack_watched(self, packer: Packer, pack: Callable[[nn.Module], None], layer: nn.Module) -> None:
        """Pack the layer, and note how to make the parameters that it no longer has afterwards."""
        before = {name: parameter for name, parameter in layer.named_parameters(recurse=False) if parameter.numel()}
        with self.paused():
            pack(layer)
            gone: list[PackedParameter] = []
            for name, parameter in before.items():
                if layer.get_parameter(name).numel():
                    continue
                try:
                    packed = PackedParameter(name, _region(parameter), parameter.dtype, self.landings(parameter))
                except NotReplayableError as error:
                    self.trouble = self.trouble or str(error)
                    continue
                if not packed.is_whole() or not torch.equal(packed.assemble(self._weights, parameter.device), parameter):
                    self.trouble = self.trouble or f"{name} of a {type(layer).__name__} is not a copy"
                gone.append(packed)
        self.packed.append(PackedLayer(layer, packer, tuple(gone)))

    def _note(self, func: Any, arguments: list[Any], result: Any) -> None:
        tensors = _real_tensors(arguments)
        if func is torch.ops.aten.copy_.default:
            if len(tensors) == 2:
                self._note_copy(*tensors)
            return
        known = {_storage(tensor) for tensor in tensors} & (self._incoming.keys() | self._landings.keys())
        # A constant is the same after every update.
        if not known or func in (torch.ops.aten.fill_.Scalar, torch.ops.aten.zero_.default):
            return
        results = tree_leaves(result)
        is_view = len(_real_tensors(results)) == len(results) and {_storage(value) for value in results} <= known
        is_meta = all(isinstance(value, Tensor) and (value.is_meta or not value.numel()) for value in results)
        if func._schema.is_mutable or not (is_view or is_meta):
            self.trouble = self.trouble or f"the loader does {func} with weights"

    def _note_copy(self, target: Tensor, source: Tensor) -> None:
        to = _region(target)
        if _storage(source) in self._incoming:
            landing = self._landing(source, to)
            self._extend(target, None if landing is None else [landing])
            return
        if _storage(source) == _storage(target) and _region(source) == to:
            return
        copied = self._landings.get(_storage(source))
        is_whole = source.untyped_storage().nbytes() == source.nbytes
        is_alike = source.dtype == target.dtype and (source.shape, source.stride()) == (target.shape, target.stride())
        moved: list[Landing] | None = None
        if copied is not None and is_whole and is_alike:
            moved = [one._replace(to=one.to._replace(offset=one.to.offset + to.offset)) for one in copied]
        self._extend(target, moved)

    def _landing(self, source: Tensor, to: Region) -> Landing | None:
        first_byte = int(source.storage_offset()) * source.itemsize
        for start, end, name in self._incoming[_storage(source)]:
            if start <= first_byte < end and source.dtype == self._weights[name].dtype:
                region = _region(source)
                return Landing(name, region._replace(offset=region.offset - int(self._weights[name].storage_offset())), to)
        return None

    def _extend(self, target: Tensor, landings: list[Landing] | None) -> None:
        storage = _storage(target)
        if storage not in self._seen:
            self._seen[storage] = StorageWeakRef(target.untyped_storage())
        before = self._landings.get(storage, [])
        self._landings[storage] = None if before is None or landings is None else [*before, *landings]


def _layout(weights: Weights) -> dict[str, tuple[torch.Size, tuple[int, ...], torch.dtype]]:
    return {name: (tensor.shape, tensor.stride(), tensor.dtype) for name, tensor in weights.items()}


def _region(tensor: Tensor) -> Region:
    return Region(int(tensor.storage_offset()), tuple(tensor.shape), tensor.stride())


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _real_tensors(values: Any) -> list[Tensor]:
    """Return the tensors among nested values that have elements in memory."""
    return [value for value in tree_leaves(values) if isinstance(value, Tensor) and not value.is_meta and value.numel()]
