"""What torch sees of the stand-in: the device type ``late`` and the module ``torch.late``."""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils import backend_registration

from nvme_offload.offload import _torch_private
from nvme_offload.offload.activations import choice
from nvme_offload.offload.swapper import tensor_swapper
from nvme_offload.optim.tiers.arrivals import Arrivals
from nvme_offload.perf.verify import engines
from tests.support.late_device import autocast
from tests.support.late_device.queues import (
    LATE,
    LOCK,
    Event,
    Late,
    Stream,
    current_stream,
    default_stream,
    number_of,
    on_stream,
    reset,
    run_all,
    set_device,
)
from tests.support.late_device.tensor import LateTensor, Memory, arange, copy_from, empty, empty_strided

NAME = "late"
NUM_DEVICES = 2
_REFUSED = 2  # cudaErrorMemoryAllocation


def _register(address: int, size_bytes: int, flags: int) -> int:
    LATE.pinned_on.append(LATE.current)
    if LATE.refusals or address in LATE.pinned:
        LATE.refusals = max(0, LATE.refusals - 1)
        LATE.latest_error = _REFUSED
        return _REFUSED
    LATE.pinned[address] = size_bytes
    return 0


def _unregister(address: int) -> int:
    """The driver would unlock pages that a copy is still reading or writing, where nobody has waited for it.

    Such a copy does not happen: the pages may be gone when it is its turn.
    """
    size_bytes = LATE.pinned.pop(address)
    with LOCK:
        for work in LATE.users_of(address, address + size_bytes):
            work.run = lambda: None
            LATE.unlocked_early += 1
    return 0


def _new_host_tensor(shape: torch.Size, dtype: torch.dtype, pinned_for: torch.device | None = None) -> torch.Tensor:
    tensor = torch.empty(shape, dtype=dtype, device="cpu")
    if pinned_for is not None and tensor.numel():
        LATE.pinned[tensor.data_ptr()] = tensor.nbytes
        LATE.pinned_by_torch.add(tensor.data_ptr())
        weakref.finalize(tensor, _free_host_tensor, tensor.data_ptr()).atexit = False
    return tensor


def _free_host_tensor(address: int) -> None:
    LATE.pinned_by_torch.discard(address)
    del LATE.pinned[address]


@contextmanager
def _device(device: Any) -> Iterator[None]:
    before, LATE.current = LATE.current, number_of(device)
    try:
        yield
    finally:
        LATE.current = before


class _Module:
    Stream = Stream
    Event = Event
    device = staticmethod(_device)
    stream = staticmethod(on_stream)
    current_stream = staticmethod(current_stream)
    default_stream = staticmethod(default_stream)
    set_device = staticmethod(set_device)

    cudart = staticmethod(lambda: SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister))

    @staticmethod
    def get_device_properties(device: Any) -> Any:
        """It hangs on no bus."""
        return SimpleNamespace()

    is_available = staticmethod(lambda: LATE.available)
    is_initialized = staticmethod(lambda: True)
    device_count = staticmethod(lambda: NUM_DEVICES if LATE.available else 0)
    current_device = staticmethod(lambda: LATE.current)
    is_current_stream_capturing = staticmethod(lambda: LATE.is_capturing)
    max_memory_reserved = staticmethod(lambda device=None: LATE.peak_bytes)
    mem_get_info = staticmethod(lambda device=None: (LATE.size_bytes - LATE.live_bytes, LATE.size_bytes))
    memory_reserved = staticmethod(lambda device=None: LATE.live_bytes + LATE.waiting_bytes)

    @staticmethod
    def reset_peak_memory_stats(device: Any = None) -> None:
        LATE.peak_bytes = LATE.live_bytes + LATE.waiting_bytes

    @staticmethod
    def set_sync_debug_mode(mode: str) -> None:
        LATE.warns = mode == "warn"

    @staticmethod
    def empty_cache() -> None:
        """Nothing is kept that nobody has."""

    @staticmethod
    def synchronize(device: Any = None) -> None:
        LATE.note_wait("synchronize")
        run_all()

    _is_in_bad_fork = staticmethod(lambda: False)

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        """Random numbers are the CPU's."""

    get_rng_state = staticmethod(lambda device=None: torch.get_rng_state())

    @staticmethod
    def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
        """The CPU's are set by whoever sets those of a device."""

    get_amp_supported_dtype = staticmethod(lambda: [torch.bfloat16, torch.float16])


_kept: list[Any] = []


def _hide_from(place: Any, name: str, without: torch.device | None) -> None:
    """Let torch have no accelerator while there is none: FSDP2 shards over it wherever nobody names a device."""
    asked = getattr(place, name)
    setattr(place, name, lambda: asked() if LATE.available else without)


def install() -> None:
    """Make the device known to torch, once in a process. It is not `available` until a test says so."""
    if _kept:
        return
    backend_registration._setup_privateuseone_for_python_backend(NAME, _Module())
    delattr(torch.nn.Module, NAME)  # `module.late()` of torch's own making: modules of that name would not be found
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    library.impl("_copy_from", copy_from, "PrivateUse1")
    library.impl("arange", arange, "PrivateUse1")
    _kept.extend([library, *autocast.libraries()])
    dist.Backend.default_device_backend_map[NAME] = "gloo"
    _hide_from(torch._C, "_get_accelerator", torch.device("cpu"))
    _hide_from(torch._C, "_accelerator_getAccelerator", None)


_wait_for_landing = Arrivals._wait_for


def _land(arrivals: Arrivals, last: Any) -> None:
    LATE.num_landing += 1
    try:
        _wait_for_landing(arrivals, last)
    finally:
        LATE.num_landing -= 1


_weak_ref = _torch_private.StorageWeakRef


def _identity(storage: Any) -> Any:
    return storage.identity if isinstance(storage, Memory) else _weak_ref(storage)


@contextmanager
def late_device() -> Iterator[Late]:
    """The stand-in, with nothing queued and nothing counted, as the accelerator that torch sees."""
    install()
    reset()
    LATE.available = True
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tensor_swapper, "new_host_tensor", _new_host_tensor)  # torch pins none for a device of Python
        patch.setattr(choice, "PLAIN_CLASSES", (*choice.PLAIN_CLASSES, LateTensor))
        patch.setattr(_torch_private, "StorageWeakRef", _identity)
        patch.setattr(Arrivals, "_wait_for", _land)
        patch.setattr(torch.accelerator, "current_stream", current_stream)  # nor has streams of it
        patch.setattr(engines, "has_context", lambda device: device.index in LATE.contexts)
        yield LATE
        assert not LATE.unlocked_early, "page-locked memory is unlocked with copies under way"
        assert not LATE.freed_early, "memory of the device is given away with copies under way"
    LATE.available = False
    reset()
