"""Tensors of the stand-in. Their bytes are in host memory that nobody else has; every operator goes into a queue."""

from __future__ import annotations

import ctypes
import weakref
from functools import partial
from typing import Any

import torch
from torch._C._distributed_c10d import FakeWork
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from nvme_offload.offload._torch_private import is_view, written_tensors
from tests.support.late_device import collectives
from tests.support.late_device.queues import (
    LATE,
    LOCK,
    Stream,
    Work,
    computes,
    current_stream,
    extent_of,
    number_of,
    poison,
)

aten = torch.ops.aten
_NEEDS_VALUES = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten.is_nonzero.default}


class Allocation:
    """Bytes that somebody has.

    When he lets go of them, the next allocation on the same stream may get them, and write as soon as that stream comes
    there, also where another stream still reads it, unless ``record_stream`` has said so. Then nobody gets it before
    that stream has come to where it was freed.
    """

    def __init__(self, storage: torch.UntypedStorage, device: int) -> None:
        self.storage = storage
        owner = current_stream(device)
        while owner.freed:
            owner.push(owner.freed.pop())
        self.recorded: set[Stream] = {owner}
        LATE.contexts.add(device)
        LATE.ask_for_memory()
        LATE.count(storage.nbytes())
        weakref.finalize(self, _freed, storage, owner, self.recorded).atexit = False


def _freed(storage: torch.UntypedStorage, stream: Stream, recorded: set[Stream]) -> None:
    size_bytes = storage.nbytes()
    LATE.count(-size_bytes)
    if not size_bytes:
        return
    with LOCK:
        behind = {other for other in recorded - {stream} if not other.query()}
        for other in behind:
            other.push(Work(partial(_passed, other, behind, size_bytes), at_once=True))
        LATE.count(0, size_bytes * bool(behind))
        start, stop = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
        if {work.stream for work in LATE.users_of(start, stop)} - recorded:
            stream.freed.append(Work(partial(_given_away, storage), at_once=True))


def _given_away(storage: torch.UntypedStorage) -> None:
    """The stream that owned it has come to where it was freed: its next owner may write."""
    start = storage.data_ptr()
    LATE.freed_early += bool(LATE.users_of(start, start + storage.nbytes()))
    poison(torch.empty(0, dtype=torch.uint8).set_(storage))


def _passed(stream: Stream, behind: set[Stream], size_bytes: int) -> None:
    behind.discard(stream)
    if not behind:
        LATE.count(0, -size_bytes)


class Memory:
    """What all views of one tensor share, and ``tensor.untyped_storage()``: FSDP2 frees it and gets it anew.

    What is queued keeps the bytes that it was queued with.
    """

    def __init__(self, storage: torch.UntypedStorage, device: int) -> None:
        self.device = device
        self.identity = object()
        """Known by others for as long as they like; it keeps no bytes."""
        self.allocation: Allocation | None = Allocation(storage, device)

    def nbytes(self) -> int:
        return self.size()

    def size(self) -> int:
        return self.allocation.storage.nbytes() if self.allocation is not None else 0

    def data_ptr(self) -> int:
        return self.allocation.storage.data_ptr() if self.allocation is not None else 0

    def resize_(self, size_bytes: int) -> None:
        with LOCK:
            assert size_bytes == 0 or self.allocation is None, "nobody keeps bytes when a storage grows"
            self.allocation = None
            if size_bytes:
                room = torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
                poison(room)
                self.allocation = Allocation(room.untyped_storage(), self.device)


class LateTensor(torch.Tensor):
    """A tensor on the stand-in."""

    __slots__ = (
        "memory",
        "resized",
    )  # no attributes that somebody put on it: whoever carries these over keeps no bytes
    memory: Memory
    resized: torch.Tensor | None  # what it became by ``resize_``: the shape of a wrapper stays

    @staticmethod
    def __new__(cls, store: torch.Tensor, on: Memory | int) -> LateTensor:
        memory = on if isinstance(on, Memory) else Memory(store.untyped_storage(), on)
        where = {"storage_offset": store.storage_offset(), "device": torch.device("late", memory.device)}
        how = {"strides": store.stride(), "dtype": store.dtype, **where}
        tensor: LateTensor = torch.Tensor._make_wrapper_subclass(cls, store.shape, **how)
        tensor.memory, tensor.resized = memory, None
        return tensor

    @property
    def store(self) -> torch.Tensor:
        """Its bytes, as the host has them."""
        if self.resized is not None:
            return self.resized
        assert self.memory.allocation is not None, "memory of the device is used after it was freed"
        with torch.inference_mode(False), torch._C._DisableTorchDispatch():
            bytes_of = torch.empty(0, dtype=self.dtype, device="cpu")
            return bytes_of.set_(self.memory.allocation.storage, self.storage_offset(), self.shape, self.stride())

    def untyped_storage(self) -> Memory:  # type: ignore[override]
        return self.memory

    @property
    def data(self) -> torch.Tensor:
        return torch.Tensor.data.__get__(self)  # type: ignore[attr-defined,no-any-return]

    @data.setter
    def data(self, other: LateTensor) -> None:
        torch.Tensor.data.__set__(self, other)  # type: ignore[attr-defined]
        self.memory = other.memory

    def __repr__(self, **unused: Any) -> str:  # type: ignore[override]
        return f"LateTensor(shape={tuple(self.shape)}, dtype={self.dtype})"

    def data_ptr(self) -> int:
        return self.store.data_ptr() if self.numel() else 0

    def record_stream(self, stream: Stream) -> None:
        if self.memory.allocation is not None:
            self.memory.allocation.recorded.add(stream)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Queue an operator on the current stream; views and shapes are known at once."""
        kwargs = kwargs or {}
        others = {kind for kind in types if not issubclass(kind, (LateTensor, torch.nn.Parameter))} - {torch.Tensor}
        if others:
            return NotImplemented
        with LOCK, torch.inference_mode(False):  # in which a wrapper cannot be made
            if func.namespace in ("c10d", "_c10d_functional"):
                return _collective(func, args)
            if func.overloadpacket is aten.to:  # which comes here undivided from inside another class's operator
                return func.decompose(*args, **kwargs)
            if func is aten.resize_.default:
                return _resize(*args)
            if func is aten.copy_.default:
                return _copy(*args, **kwargs)
            if func is aten._to_copy.default and kwargs.get("device") is not None:
                return _to_copy(*args, **kwargs)
            if func in _NEEDS_VALUES:
                _wait(str(func), _device_of(args))
                return func(*_store(args), **_store(kwargs))
            if kwargs.get("device") is not None and torch.device(kwargs["device"]).type != "late":
                return func(*_store(args), **kwargs)  # empty_like and its kind: of no value, elsewhere
            if is_view(func):
                memory = next(leaf.memory for leaf in tree_flatten(args)[0] if isinstance(leaf, LateTensor))
                return tree_map(lambda view: _wrapped(view, memory), func(*_store(args), **kwargs))
            return _queue(func, args, kwargs)


def _resize(tensor: LateTensor, size: Any) -> LateTensor:
    """As ``all_gather_object`` does with bytes; the host waits for what was in there."""
    _wait("resize_", tensor.memory.device)
    before = tensor.store
    tensor.resized = before.new_zeros(size)
    kept = min(before.numel(), tensor.resized.numel())
    tensor.resized.view(-1)[:kept] = before.view(-1)[:kept]
    return tensor


def _collective(func: Any, args: tuple[Any, ...]) -> Any:
    """The host waits for what it is called with, and so do the other ranks. What comes of it is there later.

    It is written on the stream that called it, as of NCCL: of FSDP2 that is not the one that computes.
    """
    if func.name().split("::")[1] in ("wait_tensor", "_wrap_tensor_autograd"):
        return args[0]
    device = _device_of(args)
    _wait(str(func), device)
    for leaf in tree_flatten(args)[0]:
        if isinstance(leaf, LateTensor):
            leaf.record_stream(current_stream(device))  # NCCL keeps it until then
    result = collectives.run(func, _store(args))
    for written in [result] if isinstance(result, torch.Tensor) else tree_flatten(_store(args[0]))[0]:
        _come_later(written, device)
    return LateTensor(result, device) if isinstance(result, torch.Tensor) else (args[0], FakeWork().boxed())


def _come_later(written: torch.Tensor, device: int) -> None:
    values = written.clone()
    poison(written)
    _launch(Work(lambda: written.copy_(values), (written,)), device)


def _store(leaf: Any) -> Any:
    """Return what the host has of a tensor, or of those in a list: `tree_map` takes ten times as long."""
    if isinstance(leaf, LateTensor):
        return leaf.store
    if type(leaf) in (list, tuple):
        return type(leaf)(map(_store, leaf))
    if type(leaf) is dict:
        return {name: _store(each) for name, each in leaf.items()}
    if isinstance(leaf, torch.device) and leaf.type == "late":
        return torch.device("cpu")
    return leaf


def _device_of(arguments: Any) -> int:
    """The device on which an operator runs: that of its first tensor there, whichever the thread uses."""
    leaves = tree_flatten(arguments)[0]
    return next((leaf.memory.device for leaf in leaves if isinstance(leaf, LateTensor)), LATE.current)


def _wrapped(value: Any, on: Memory | int) -> Any:
    return LateTensor(value, on) if isinstance(value, torch.Tensor) else value


def _wait(why: str, device: int) -> None:
    LATE.note_wait(why)
    stream = current_stream(device)
    stream.run_to(len(stream.queue))


def _launch(work: Work, device: int) -> None:
    if LATE.latest_error:
        error, LATE.latest_error = LATE.latest_error, 0
        raise RuntimeError(f"late error {error}, which some call before this one left behind")
    current_stream(device).push(work)


def _queue(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operator whose results, or the arguments that it writes to, have their values later."""
    leaves, layout = tree_flatten((args, kwargs))
    device = number_of(kwargs["device"]) if kwargs.get("device") is not None else _device_of(args)
    stores = [_store(leaf) for leaf in leaves]
    touches = [store for store in stores if isinstance(store, torch.Tensor)]
    plain_args, plain_kwargs = tree_unflatten(stores, layout)
    written = written_tensors(func, args, kwargs)
    if written:
        _launch(Work(lambda: func(*plain_args, **plain_kwargs), touches), device)
        return written[0] if len(written) == 1 and not isinstance(args[0], list | tuple) else None
    metas = tree_unflatten([_meta(store) for store in stores], layout)
    shapes, result_layout = tree_flatten(func(*metas[0], **metas[1]))
    results = [
        torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")
        if isinstance(shape, torch.Tensor)
        else shape
        for shape in shapes
    ]
    targets = [result for result in results if isinstance(result, torch.Tensor)]
    for target in targets:
        poison(target)

    def run() -> None:
        plain = _as_the_cpu_has_them(func, plain_args)
        found = [leaf for leaf in tree_flatten(func(*plain, **plain_kwargs))[0] if isinstance(leaf, torch.Tensor)]
        for target, value in zip(targets, found, strict=True):
            target.copy_(value)

    _launch(Work(run, [*touches, *targets]), device)
    return tree_unflatten([_wrapped(result, device) for result in results], result_layout)


def _as_the_cpu_has_them(func: Any, args: Any) -> Any:
    """The statistics of a layer norm are fp32 on a device; on the CPU they have the dtype of its weight."""
    if func is not aten.native_layer_norm_backward.default:
        return args
    return (*args[:3], *(statistic.to(args[5].dtype) for statistic in args[3:5]), *args[5:])


def _meta(leaf: Any) -> Any:
    if isinstance(leaf, torch.Tensor):
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device="meta")
    return torch.device("meta") if isinstance(leaf, torch.device) else leaf


def _copy(target: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """Between host and device only pinned memory is copied behind the host's back; see ``cudaMemcpyAsync``."""
    to, of, device = _store(target), _store(source), _device_of((target, source))
    on_host = [tensor for tensor in (target, source) if not isinstance(tensor, LateTensor)]
    if on_host:
        LATE.ask_for_memory()
        LATE.num_copies += 1
        LATE.copies_of[computes(current_stream(device))] += 1
    behind = not on_host or (non_blocking and LATE.is_pinned(on_host[0]))
    if on_host and on_host[0] is source and not behind:
        of = source.clone()  # it is staged before the call returns
    if isinstance(source, LateTensor) and to.dtype != of.dtype and on_host:
        behind = False
    if not LATE.overlaps_pending(to):
        poison(to)
    if behind and on_host:
        to, of = _unowned(to), _unowned(of)
    _launch(Work(lambda: to.copy_(of), (to, of)), device)
    if not behind and isinstance(source, LateTensor):
        _wait("a copy to the host", device)
    return target


def _unowned(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory. What is pinned by us is not kept for a copy, which knows addresses alone."""
    if LATE.keeps(tensor):
        return tensor
    start, stop = extent_of(tensor)
    memory = (ctypes.c_char * (stop - start)).from_address(start)
    return torch.frombuffer(memory, dtype=tensor.dtype).as_strided(tensor.shape, tensor.stride())


def _to_copy(
    source: Any, *, dtype: Any = None, device: Any, non_blocking: bool = False, memory_format: Any = None, **unused: Any
) -> torch.Tensor:
    shape = torch.empty_like(_meta(_store(source)), dtype=dtype, memory_format=memory_format or torch.preserve_format)
    room = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")
    target = room if torch.device(device).type == "cpu" else LateTensor(room, number_of(device))
    return _copy(target, source, non_blocking)


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """``aten::_copy_from``: what ``torch.tensor`` uses."""
    with LOCK:
        return _copy(target, source, non_blocking)


def empty(size: Any, *, dtype: Any = None, device: Any = None, memory_format: Any = None, **unused: Any) -> LateTensor:
    """``aten::empty.memory_format``."""
    with LOCK:
        room = torch.empty(size, dtype=dtype or torch.get_default_dtype(), device="cpu")
        poison(room)
        return LateTensor(room, number_of(device))


def empty_strided(size: Any, stride: Any, *, dtype: Any = None, device: Any = None, **unused: Any) -> torch.Tensor:
    """``aten::empty_strided``."""
    with LOCK:
        room = torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype(), device="cpu")
        poison(room)
        return LateTensor(room, number_of(device))


def arange(end: Any, *, dtype: Any = None, device: Any = None, **unused: Any) -> torch.Tensor:
    """``aten::arange``, which torch makes of a tensor that grows."""
    with LOCK:
        made: torch.Tensor = _queue(aten.arange.default, (end,), {"dtype": dtype, "device": device})
        return made
