"""The seam to devices: streams, events, copies, page-locked memory. Everybody else hands a ``torch.device`` around.

Whatever kind of device there is comes from ``torch.get_device_module``. One that this project can use queues its work
in streams, marks places in them with events, and page-locks memory of ours: CUDA, ROCm under its name, and the
stand-in of the tests.
"""

import ctypes
import signal
from collections.abc import Iterable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch

HOST = torch.device("cpu")

KINDS = "the CPU or a CUDA device"
"""Messages say this of the devices that can be used."""

_NEEDED = ("Stream", "Event", "current_stream", "cudart")
_PORTABLE = 1  # cudaHostRegisterPortable: page-locked for all devices of the process


Event = torch.Event
"""A place in a stream."""
Stream = torch.Stream
"""A queue of a device's work."""


def is_host(device: torch.device) -> bool:
    """Whether the host's processor computes there."""
    return device.type == HOST.type


def is_device(device: torch.device | str) -> bool:
    """Whether this is a device, or the type of one, with memory and streams of its own that can be used here."""
    kind = device.type if isinstance(device, torch.device) else torch.device(device).type
    if kind == HOST.type:
        return False
    module = getattr(torch, kind, None)
    return all(hasattr(module, name) for name in _NEEDED)


def may_run_triton(device: torch.device) -> bool:
    """Whether Triton is installed and compiles for a device: for CUDA's alone, as far as this project knows."""
    return device.type == "cuda" and torch.version.cuda is not None and find_spec("triton") is not None


def default_device_type() -> str:
    """Return the type of device that trains where nobody says otherwise: torch's accelerator, or the CPU."""
    found = torch.accelerator.current_accelerator(check_available=True)
    return found.type if found is not None and is_device(found) else HOST.type


def current_of(kind: str) -> torch.device:
    """Return the device of a type that this thread uses."""
    return HOST if kind == HOST.type else torch.device(kind, torch.get_device_module(kind).current_device())


def free_bytes(device: torch.device) -> int:
    """Return the memory of a device that nobody has taken yet."""
    return int(torch.get_device_module(device).mem_get_info(device)[0])


def use(device: torch.device) -> None:
    """Make a device this thread's own, as every thread of ours does before it works for one.

    A thread begins with the first device of the process. What leaves a stream goes back to that, and so opens a context
    there, which keeps memory that this process does not use.
    """
    if not is_host(device):
        torch.get_device_module(device).set_device(device)


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype in which autocast computes here on devices of this type; None where it is off."""
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


def begin_thread(device: torch.device) -> None:
    """Begin a thread of ours that works for a device, and leave signals to threads that can handle them."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    use(device)


def current_stream(device: torch.device) -> Stream:
    """Return the stream on which this thread queues; it owns the memory that the thread allocates."""
    stream: Stream = torch.get_device_module(device).current_stream(device)
    return stream


def queued(device: torch.device) -> Event:
    """Return a mark behind all that this thread has queued on a device so far."""
    event: Event = torch.get_device_module(device).current_stream(device).record_event()
    return event


def is_reached(mark: Event | None) -> bool:
    """Whether a device has come to a mark; without one there is nothing to wait for."""
    return mark is None or mark.query()


def sent(source: torch.Tensor, device: torch.device) -> tuple[torch.Tensor, Event]:
    """Copy host memory to new memory of a device, on the stream that this thread queues on; that owns the copy.

    Returns the copy and a mark behind it: until then `source` must not change.
    """
    target = torch.empty_like(source, device=device)
    target.copy_(source, non_blocking=True)
    return target, queued(device)


def refuse_capture(device: torch.device) -> None:
    """Raise RuntimeError where this thread captures a graph of the device's work: it cannot hold a wait for others."""
    if not is_host(device) and torch.get_device_module(device).is_current_stream_capturing():
        raise RuntimeError(
            "this thread captures a CUDA graph, and what it calls here waits for copies of other streams and threads, "
            "which a graph cannot hold. Capture what is computed between two such calls, behind "
            'optimizer.synchronize(), with capture_error_mode="thread_local"'
        )


def wait_for_all(device: torch.device) -> None:
    """Wait until everything that was queued on a device is done."""
    torch.get_device_module(device).synchronize(device)


def wait_for_queued(device: torch.device) -> None:
    """Wait, asleep, until all that this thread has queued on a device is done."""
    refuse_capture(device)
    mark = torch.get_device_module(device).Event(blocking=True)
    mark.record(current_stream(device))
    mark.synchronize()


def free_unused(device: torch.device) -> None:
    """Wait for all that is queued on a device, and give it the memory back that torch keeps and nobody has."""
    if not is_host(device):
        wait_for_all(device)
        torch.get_device_module(device).empty_cache()


def copy_alone(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy a tensor to one of its shape and dtype; in host memory without torch's threads.

    They meet at a barrier, for which a busy machine needs 20 ms where the copy itself needs one, and those of a thread
    of ours take the processors of whoever computes.
    """
    if _is_plain(target) and _is_plain(source):
        ctypes.memmove(target.data_ptr(), source.data_ptr(), source.numel() * source.element_size())
    else:
        target.copy_(source)


class Near(NamedTuple):
    """Memory of a device, and a mark behind the copy of it, or to it."""

    memory: torch.Tensor
    mark: Event
    owner: Stream
    """It allocated the memory, and may use it again behind the mark."""

    def let_go(self) -> None:
        """Let the memory be used again; whoever has this lets go of it next."""
        self.owner.wait_event(self.mark)


class CopyQueue:
    """Copies between a device and the host in one direction: a stream beside the one that computes.

    Copies run in the order in which they are queued. What they must come after, and what must come after them, is said
    with marks; nothing here waits unless its name says so.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._module = torch.get_device_module(device)
        self._stream = self._module.Stream(device)

    def come_after(self, mark: Event | None = None) -> None:
        """Let what is queued from here on begin after a mark; by default after all that this thread has queued."""
        self._stream.wait_event(queued(self.device) if mark is None else mark)

    def carry(self, target: torch.Tensor, source: torch.Tensor) -> Near:
        """Queue a copy behind all that this thread has queued; it runs behind the host's back if the memory is pinned.

        It never casts: that would leave the way of DMA. Neither side may be touched before the mark behind it. The
        caller keeps what is on the device until `Near.let_go`, or until the stream that owns it comes after the mark.
        """
        assert target.dtype is source.dtype
        self.come_after()
        with self._module.stream(self._stream):
            target.copy_(source, non_blocking=True)
        return Near(_on_device(target, source), self.mark(), current_stream(self.device))

    def copy_all(self, pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Event:
        """Queue copies, as pairs of target and source; returns a mark behind them. If one fails, none is under way.

        What is on the device may be freed at once. The allocator gives it to nobody before the host has seen the end of
        the copy, and reserves more while the host is ahead of the device. One thread at a time may call it: a stream
        that is entered itself, and not by its module, which takes ten times as long, remembers where to go back to.
        """
        try:
            with self._stream:
                for target, source in pairs:
                    assert target.dtype is source.dtype
                    target.copy_(source, non_blocking=True)
                    _on_device(target, source).record_stream(self._stream)
        except BaseException:
            self.wait()
            raise
        return self.mark()

    def computing(self) -> AbstractContextManager[object]:
        """Have operators of this thread run among the copies, in the order in which both are queued."""
        context: AbstractContextManager[object] = self._module.stream(self._stream)
        return context

    def mark(self) -> Event:
        """Return a mark behind all that has been queued."""
        event = self._module.Event(blocking=True)  # who waits for it sleeps: kernels and drives need the processor
        event.record(self._stream)
        marked: Event = event
        return marked

    def let_current_come_after(self, mark: Event | None = None) -> None:
        """Let what this thread queues from here on begin after a mark; by default after all copies so far."""
        refuse_capture(self.device)
        current_stream(self.device).wait_event(self.mark() if mark is None else mark)

    def wait(self) -> None:
        """Wait until all copies are done."""
        self._stream.synchronize()


def new_host_tensor(shape: torch.Size, dtype: torch.dtype, pinned_for: torch.device | None = None) -> torch.Tensor:
    """Make a tensor in host memory with any values; page-locked in the context of a device, if one is named."""
    if pinned_for is None:
        return torch.empty(shape, dtype=dtype, device=HOST)
    with _being_current(torch.get_device_module(pinned_for), pinned_for):
        return torch.empty(shape, dtype=dtype, device=HOST, pin_memory=True)


def page_lock(address: int, size_bytes: int, device: torch.device) -> int:
    """Page-lock host memory, in the context of this device and no other; returns 0, or the number of an error.

    A refusal is not left behind as the runtime's latest error, which the caller's next kernel would raise.
    """
    module = torch.get_device_module(device)
    with _being_current(module, device):
        error = int(module.cudart().cudaHostRegister(address, size_bytes, _PORTABLE))
        if error:
            _take_latest_error(device)
    return error


def page_unlock(address: int, device: torch.device) -> None:
    """Undo `page_lock`."""
    module = torch.get_device_module(device)
    with _being_current(module, device):
        module.cudart().cudaHostUnregister(address)


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.device == HOST and tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg()


def _on_device(target: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return source if is_host(target.device) else target


def _being_current(module: Any, device: torch.device) -> AbstractContextManager[object]:
    # Without it the runtime opens a context on the first device, where every rank would then keep memory.
    context: AbstractContextManager[object] = module.device(device)
    return context


def _take_latest_error(device: torch.device) -> None:
    """Have a kernel of ours raise what the next kernel would: raising takes it away. Torch offers no call for it."""
    try:
        torch.ones(1, device=device)
    except RuntimeError:
        return
