"""Mistakes with a device, each of which the stand-in must find: a missing wait, a buffer given away too early."""

import inspect
import textwrap
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest

from nvme_offload.offload._fsdp_passes import _GroupOfOne
from nvme_offload.offload.activations.device_copies import DeviceCopies
from nvme_offload.offload.devices import device
from nvme_offload.offload.devices.device import CopyQueue, Near
from nvme_offload.offload.shards import departures
from nvme_offload.offload.shards.departures import Departures
from nvme_offload.offload.swapper.records import SwapIn, SwapOut, Task
from nvme_offload.optim.durable.sealing import Sealing
from nvme_offload.optim.durable.state import DurableState
from nvme_offload.optim.state.body import StateBody
from nvme_offload.optim.state.phase import StepRecord
from nvme_offload.optim.step import job
from nvme_offload.optim.step.begin import Inbox
from nvme_offload.optim.step.stepper import Stepper
from nvme_offload.optim.tiers import arrivals
from nvme_offload.optim.tiers.arrivals import Arrivals, _Arrival
from nvme_offload.optim.tiers.grad_tier import GradTier
from nvme_offload.optim.updates import in_torch
from nvme_offload.optim.updates.mirrored import DeviceMirror
from nvme_offload.optim.zero.engine import OffloadEngine
from tests.support.late_device.queues import LATE, Event


def _without(holder: Any, name: str, instead: Callable[..., Any]) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def mutated() -> Iterator[None]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(holder, name, instead)
            yield

    return mutated


def _edited(holder: Any, name: str, text: str, instead: str = "pass") -> Callable[[], AbstractContextManager[None]]:
    """A function as it would be with another text in the place of one that it has once."""

    @contextmanager
    def mutated() -> Iterator[None]:
        function = inspect.unwrap(getattr(holder, name))
        source = textwrap.dedent(inspect.getsource(function))
        assert source.count(text) == 1, f"{name} is written otherwise now: {text}"
        made: dict[str, Any] = {}
        exec(compile(source.replace(text, instead), f"<{name} with a mistake>", "exec"), function.__globals__, made)
        with _without(holder, name, made[name])():
            yield

    return mutated


def _while(
    mode: str, mutated: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Callable[[], AbstractContextManager[None]]:
    @contextmanager
    def changed() -> Iterator[None]:
        setattr(LATE, mode, True)
        with mutated():
            yield
        setattr(LATE, mode, False)

    return changed


def _nothing(*unused: Any, **unused_too: Any) -> None:
    """What is done in the place of a wait."""


def _copy_without_waiting(task: Any, pairs: Any, queues: Any) -> Iterator[Any]:
    for mark in _COPY_EACH(task, pairs, queues):
        del mark  # and nobody waits for it
        break
    return iter(())


def _read_without_waiting(task: Any, pairs: Any, queues: Any) -> Iterator[Any]:
    return (_COPY_EACH if task.copy is not None else _copy_without_waiting)(task, pairs, queues)


def _hand_over_without_waiting(task: Any, pairs: Any, queues: Any) -> Iterator[Any]:
    return (_COPY_EACH if task.copy is None else _copy_without_waiting)(task, pairs, queues)


def _release_at_once(tier: Any) -> None:
    for block in list(tier._open):
        tier._release(block)


def _compute_at_once(alone: Any) -> None:
    if alone._group._all_gather_result is None:
        alone.unshard()
    if (lent := alone._group._all_gather_result) is not None:
        alone._group._all_gather_result = lent._replace(all_gather_event=Event())
    _WAIT(alone)


_COPY_EACH, _WAIT = Task._copied_each, _GroupOfOne.wait_for_unshard

OF_MIRROR = {
    "the kernel does not wait for its copies": _edited(DeviceMirror, "take", "mirror.arrived.synchronize()"),
    "a mirror is filled before it has left": _edited(DeviceMirror, "fetch", "self._down.come_after(mirror.left)"),
    "forward does not wait for the parameters": _without(DeviceMirror, "end_step", _nothing),
}
OF_SWAPPER = {
    "a tensor is copied before it is computed": _without(CopyQueue, "come_after", _nothing),
    "a buffer is written before its copy is done": _without(SwapOut, "_copied_each", _copy_without_waiting),
    "a buffer is given back before its copy is done": _without(SwapIn, "_copied_each", _read_without_waiting),
    "a prefetched copy is let go before it is copied": _without(SwapIn, "_copied_each", _hand_over_without_waiting),
}
OF_GRADIENTS = {
    "parameters change before all have read them": _without(
        DeviceMirror, "begin_step", lambda mirror: mirror._ready.clear()
    ),
    "a gradient is copied before it is final": _edited(CopyQueue, "carry", "self.come_after()"),
    "a gradient is summed before it has landed": _edited(_Arrival, "land", "mark.synchronize()"),
    "a gradient's memory is used again before it is copied": _while(
        "prompt", _edited(_Arrival, "let_go", "queue.let_current_come_after(self.mark)")
    ),
    "a room is used again before its gradient is added": _while(
        "hasty", _edited(Arrivals, "bring", "self._wait_for(before)")
    ),
    "a block is written before its gradients have landed": _without(GradTier, "_release_landed", _release_at_once),
}
OF_PARAMETERS = {
    "a block is changed before it is copied": _edited(Departures, "end_all", "self._wait_for(departure)", "break"),
    "a block's buffer is given away before it is copied": _edited(
        Departures, "_send", "return departure", "self._end(departure)\n    return departure"
    ),
    "a parameter is computed with before it is there": _without(_GroupOfOne, "wait_for_unshard", _compute_at_once),
    "memory is taken back before parameters are copied from it": _edited(
        _GroupOfOne, "wait_for_unshard", "stream.wait_event(computing)"
    ),
}
OF_UPDATES_BEHIND = {
    "a gather does not wait for copies behind the step": _without(DeviceMirror, "end_step", _nothing),
    "a gradient is fetched in backward before it is final": _without(
        DeviceMirror, "come_after", lambda mirror, mark: mirror._down.computing()
    ),
    "the worker does not wait for its copies": _edited(DeviceMirror, "take", "mirror.arrived.synchronize()"),
}
OF_MEMORY = {
    "what a gradient had waits for the host": _edited(
        CopyQueue, "carry", "return Near", "_on_device(target, source).record_stream(self._stream)\n    return Near"
    ),
    "a thread begins with another device": _edited(
        arrivals, "_land_each", "begin_thread(device)", "begin_thread(torch.device(device.type, 1))"
    ),
}
OF_ENDS = {
    "blocks end with copies under way": _edited(Departures, "close", "while self._on_way:", "while False:"),
    "gradients end with copies under way": _edited(Arrivals, "close", "self._queue.wait()\n    self._end()"),
    "a mirror ends with copies under way": _edited(DeviceMirror, "close", "self._down.wait()\n        self._up.wait()"),
    "copies that fail halfway leave one under way": _edited(CopyQueue, "copy_all", "self.wait()"),
    "what is copied to is not recorded": _edited(
        CopyQueue, "copy_all", "_on_device(target, source).record", "is_host(target.device) and source.record"
    ),
}
OF_COMMITS = {
    "what is written of parameters is not there yet": _edited(Sealing, "_fill_tail", "self._mirror.end_step()")
}
OF_THREADS = {
    "a thread does not begin with its device": _without(device, "use", _nothing),
    "memory is page-locked wherever the thread is": _without(device, "_being_current", lambda *unused: nullcontext()),
}
OF_ENGINES = {
    "updates inside a step are not waited for": _edited(Stepper, "_go_on", "store.mirror.end_step()"),
    "updates behind a step are not waited for by readers": _edited(
        StateBody, "wait_for_updates", "self.mirror.end_step()"
    ),
    "updates behind a step are not waited for by a gather": _edited(
        StateBody, "wait_for_updates_of", "self.mirror.end_step()"
    ),
    "what is fetched ahead lacks gradients": _edited(
        job, "read_update_write", "filter(record.pending.__contains__, order[position :", "iter(order[position :"
    ),
    "what is taken back goes before what went up": _edited(DurableState, "take_back", "self._ground.mirror.end_step()"),
    "a gradient is looked at before it has landed": _edited(GradTier, "copy_of", "self.flush()"),
    "the norm is taken before gradients have landed": _without(GradTier, "land", _nothing),
    "a gradient is copied before it is computed": _edited(CopyQueue, "carry", "self.come_after()"),
    "a copy is taken for over": _edited(Departures, "_end_finished", "and mark.query()", ""),
    "a block is given away without waiting": _edited(
        Departures, "free_one", "self._wait_for(self._on_way[0])", "self._end(self._on_way[0])"
    ),
    "a copy is marked before it is queued": _edited(
        departures, "sent", "return target, queued(device)", "return target, torch.late.Event()"
    ),
    "shards are marked where they are computed with": _edited(
        _GroupOfOne, "unshard", "stream.record_event()", "group.device_handle.current_stream().record_event()"
    ),
    "shards set out where they are computed with": _edited(
        _GroupOfOne,
        "unshard",
        "stream, _ = group.comm_ctx.get_all_gather_streams(async_op, group._training_state)",
        "stream = group.device_handle.current_stream()",
    ),
}
OF_REFUSALS = {
    "an update that was refused memory is given up": _without(Stepper, "_end_cut_short", _nothing),
    "an update that was refused memory begins anew": _edited(StepRecord, "update", "= kernel\n", "= lambda: 0\n"),
    "state on the device is updated where it is": _edited(
        in_torch.OnDevice,
        "_updated",
        "update_copies(rule.update, run, OnAccelerator())()",
        "update_run(rule.update, run, OnAccelerator())",
    ),
    "matrices are updated where they are": _edited(
        in_torch.WholeMatrix,
        "_update_copies",
        "return update_copies(update, run, self.means.kernels)",
        "changed = update_run(update, run, self.means.kernels)\n        return lambda: changed",
    ),
    "a backward says that it failed when it is over": _edited(
        OffloadEngine, "backward", "return divided", "return loss.detach() / share"
    ),
}
OF_RANKS = {
    "squares are summed on the worker's own stream": _edited(
        DeviceMirror, "come_after", "return self.looking()", "return nullcontext()"
    ),
    "a gradient is final where others compute": _edited(
        Inbox, "put", "queued(grad.device)", "torch.late.default_stream().record_event()"
    ),
}
OF_ACTIVATIONS = {
    "a saved tensor is copied before it is computed": _edited(CopyQueue, "carry", "self.come_after()"),
    "a saved tensor's memory is used again before it has left": _while("prompt", _without(Near, "let_go", _nothing)),
    "a saved tensor is written before it has landed": _edited(SwapOut, "move", "self._after is not None", "False"),
    "a saved tensor is computed with before it is there": _edited(
        DeviceCopies, "take", "self._up.let_current_come_after(near.mark)"
    ),
    "host memory is lent again before what landed there is copied": _edited(
        DeviceCopies, "leave", "self._landing[number] = near.mark, target"
    ),
    "host memory is lent again before it is copied to the device": _edited(
        DeviceCopies, "bring_ahead", "self._arriving[number] = near.mark, source"
    ),
    "activations end with copies under way": _edited(DeviceCopies, "close", "self._down.wait()\n    self._up.wait()"),
}
NO_MISTAKE = {"copies are later than what is computed": _while("prompt")}
MUTATIONS = NO_MISTAKE | OF_ACTIVATIONS | OF_COMMITS | OF_ENDS | OF_ENGINES | OF_MEMORY | OF_MIRROR | OF_GRADIENTS
MUTATIONS |= OF_PARAMETERS | OF_RANKS | OF_REFUSALS | OF_SWAPPER | OF_THREADS | OF_UPDATES_BEHIND
