"""All micro-batches of a step go through one block before the next block is gathered.

So a block is gathered twice in a step, once for the forwards and once for the backwards of all micro-batches, however
many they are. A model need not be a stack: what is between its blocks is its own code. Each forward runs in a thread
of its own and asks for each block that it calls (`Runner`); of all threads and the caller's one runs at any time, and
blocks are computed in the caller's. Two micro-batches, three blocks A, B, C, and before them E, which is in no block::

    gathered         E     A     B     C                            C       B       A       E
    micro-batch 0    E     A     B     C  loss  tail                C*      B*      A*      E*
    micro-batch 1       E     A     B     C           loss |  tail     C*      B*      A*      E*

A star stands for backward, for which a block is computed again. At the bar `forward` has returned.

1. **Forward.** Block after block, each computed for micro-batch 0, 1, ... Of it stay its inputs, and no graph.
2. **Tail.** When a micro-batch's forward is at its end, backward goes from its loss to what the last block gave. So the
   logits of one micro-batch exist at a time.
3. **Backward.** Block before block, each computed again for micro-batch 0, 1, ... and gone through. Then comes what is
   between it and the block before, as far as it is not yet gone through.

Invariants:

- A parameter gets its gradients in the order of micro-batches, each whole. What is in no block may be used in several
  places. Then its gradients are put aside until backward has come to the last of these, and only then reduced
  (`_Forward.gradients`). So they have the bits of the plain loop: those of a tied head and embedding, too.
- A gradient is final when the last micro-batch has gone backward through its block, or through its last place.
- Nothing is reduced or freed by FSDP2 itself meanwhile (`TakingTurns`).
- What a model does that would make this wrong raises `BlockOrderError`, before any gradient is final.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.utils.hooks import RemovableHandle

from nvme_offload.aio_native.interrupt import DeferredInterrupt
from nvme_offload.offload._fsdp_passes import TakingTurns
from nvme_offload.offload._torch_private import is_compiled, version_of
from nvme_offload.offload.errors import BlockOrderError, PeerError
from nvme_offload.offload.warn import Once
from .block_call import Arriving, BlockCall, Keeper, Kept
from .relay import Runner
from .scalars import scalars_of

BeginBackward = Callable[[torch.Tensor | None, bool], torch.Tensor | None]
"""It gets the loss, or None past the tail, and whether the micro-batch is the last one; it returns the scaled loss."""

_OF_TORCH = frozenset(vars(nn.Module()))
_thread = threading.local()
"""Its `forward` is the micro-batch whose forward runs in this thread."""


class BlockByBlock:
    """Takes the micro-batches of a step through the blocks of a sharded model by turns: `forward`, then `backward`."""

    def __init__(self, root: nn.Module, blocks: Sequence[nn.Module], device: torch.device, keeper: Keeper) -> None:
        if is_compiled(root):
            what = "the whole model is compiled: compile its blocks one by one, with block.compile()"
            raise BlockOrderError(RuntimeError(what))
        names = {module: name for name, module in root.named_modules()}
        self._root = root
        self._names = {block: names[block] for block in blocks}
        self._parts = {block: [part for part in block.modules() if isinstance(part, FSDPModule)] for block in blocks}
        self._turns = TakingTurns(root, blocks)
        inside = {module for block in blocks for module in block.modules()}
        around = [pair for pair in root.named_modules() if not inside.isdisjoint(pair[1].modules())]
        self._around = [(name, module) for name, module in around if module not in inside]
        """Modules with blocks in them: what one micro-batch leaves in them the others find."""
        self._device = device
        self._keeper = keeper
        self._forwards: list[_Forward] = []
        self._runners: list[Runner] = []
        self._once = Once()
        self.has_looked = False
        """Whether a step has shown that the blocks are functions of their arguments."""
        for block in blocks:  # not an attribute of the block: Python takes `__call__` from the class
            block.__class__ = _asking(type(block))  # type: ignore[arg-type]  # a class is hashable

    def forward(
        self, loss_of: Callable[[Any], torch.Tensor], micro_batches: Sequence[Any], begin_backward: BeginBackward
    ) -> None:
        """Run all forwards, and for all but the last micro-batch backward through its tail."""
        self.stop()  # threads of a step that an exception ended may still wait
        self._begin_backward = begin_backward
        self._forwards = [_Forward(self._names, self._keeper) for _ in micro_batches]
        self._runners = [
            Runner(partial(forward.run, loss_of, batch, self._free_unasked), self._device)
            for forward, batch in zip(self._forwards, micro_batches, strict=True)
        ]
        self._turns.begin()
        block: nn.Module | None = None
        asides = [(self._turns.put_aside(), _state_of(self._around)) for _ in self._forwards]
        while True:
            calls: list[BlockCall | None] = []
            for number, forward in enumerate(self._forwards):
                # Nobody asked for the first turn.
                answer = self._computed(forward.calls[-1], forward) if block is not None else lambda: None
                record, left = asides[number]
                # Before it goes on: what differs now was changed by another micro-batch.
                found = _state_of(self._around) if block is not None and len(asides) > 1 else left
                self._turns.take_up(record)
                calls.append(self._runners[number].advance(answer))
                if changed := [name for name in left if name not in found or found[name] != left[name]]:
                    why = "and all would find what the latest left there: make it anew, and hand it on"
                    raise BlockOrderError(f"forwards change {changed[0]} of the model, {why}")
                asides[number] = self._turns.put_aside(), _state_of(self._around)
                if calls[-1] is not None:
                    forward.calls.append(calls[-1])
                elif number < len(self._forwards) - 1:  # the last one makes gradients final: `backward` checks first
                    self._go_through_tail(forward)
            if block is not None:
                self._turns.end_pass(self._parts[block], reduces=False)
                self._turns.free(self._parts[block], after_forward=True)
            block = self._same_block(calls)
            if block is None:
                return
            self._turns.end_pass(self._turns.units, reduces=False)
            self._turns.free(self._turns.units, after_forward=True)

    def backward(self, catch_up: Callable[[], None]) -> list[torch.Tensor]:
        """Run backward through the last micro-batch's tail and all blocks; return the losses, without their graphs."""
        for call in (call for forward in self._forwards for call in forward.calls):
            call.check_arguments()  # of all calls, before the first gradient is final: nothing is lost yet
        self._go_through_tail(self._forwards[-1])
        self._turns.free(self._turns.units, after_forward=False)
        catch_up()  # here and below, because no backward is under way
        for at in reversed(range(len(self._forwards[0].calls))):
            block = self._forwards[0].calls[at].block
            # What the block before takes is read while this one computes; the first block has none before it.
            following = [forward.calls[number] for number in (at, at - 1)[: at + 1] for forward in self._forwards]
            self._keeper.announce(kept for call in following for kept in call.kept())
            for forward in self._forwards:
                is_last = forward is self._forwards[-1]
                self._begin_backward(None, is_last)
                call = forward.calls.pop()
                # The next block comes while the last micro-batch computes, unless no backward would ask for it.
                if is_last and at and forward.calls[-1].is_trained and isinstance(forward.calls[-1].block, FSDPModule):
                    forward.calls[-1].block.unshard(async_op=True)
                if call.is_trained:
                    call.backward()
                self._warn_of_checkpoint(call)
                self._turns.end_pass(self._parts[block], reduces=True)
            self._turns.free(self._parts[block], after_forward=False)
            catch_up()
            for forward in self._forwards:
                if ends := forward.pop_ends(at):
                    self._begin_backward(None, forward is self._forwards[-1])
                    self._go_through(forward, ends, at)
            self._turns.free(self._turns.units, after_forward=False)
        self._turns.end()  # reduces what is left, so that it is final
        catch_up()
        losses = [forward.loss for forward in self._forwards]
        self._forwards, self._runners, self.has_looked = [], [], True
        return losses

    def stop(self, error: BaseException | None = None) -> None:
        """Leave nothing of what an exception ended: no thread, nothing kept. Other ranks hear of it. Idempotent."""
        with DeferredInterrupt():  # or Ctrl-C leaves threads that wait for their turn
            for runner in self._runners:
                runner.stop()
            self._forwards, self._runners = [], []
            self._turns.stop()
        # Past that: it waits for other ranks, which Ctrl-C must be able to end.
        if isinstance(error, BlockOrderError) and not isinstance(error.__cause__, PeerError):  # heard from another
            self._turns.refuse(str(error))

    def _warn_of_checkpoint(self, call: BlockCall) -> None:
        if call.computes_again_by_itself:
            self._once.warn(
                "checkpointing inside",
                f"block {self._names[call.block]} has activation checkpointing inside. Block by block each block is "
                "computed again in backward anyway: switch that off, or the block is computed three times",
            )

    def _computed(self, call: BlockCall, forward: _Forward) -> Callable[[], Any]:
        """Compute the block that a micro-batch waits for; return a function that gives the result or its error."""
        try:
            output = call.forward(self._keeper, looks=not self.has_looked)
        except Exception as error:
            return partial(_raise, error)  # in the forward's thread, where the model may catch it
        forward.note_outputs(call, output)
        return lambda: output

    def _free_unasked(self, block: nn.Module) -> None:
        """Free a block that was called without gradients, as an evaluation inside a loss does."""
        self._turns.end_pass(self._parts[block], reduces=False)
        self._turns.free(self._parts[block], after_forward=True)

    def _same_block(self, calls: Sequence[BlockCall | None]) -> nn.Module | None:
        """Return the block that all micro-batches have come to; None: they are at the end."""
        places = ["the end" if call is None else f"block {self._names[call.block]}" for call in calls]
        for number, place in enumerate(places):
            if place != places[0]:
                both = f"micro-batch 0 came to {places[0]} where micro-batch {number} came to {place}"
                raise BlockOrderError(f"{both}: all have to go through the same blocks, without layer drop")
        if calls[0] is None and not self._forwards[0].calls:
            raise BlockOrderError("no block was called: the loss has to call the engine, with gradients")
        return calls[0].block if calls[0] is not None else None

    def _go_through_tail(self, forward: _Forward) -> None:
        loss = self._begin_backward(forward.loss, forward is self._forwards[-1])
        out_of_order = self._turns.out_of_order(part for parts in self._parts.values() for part in parts)
        given = (ref() for each in self._forwards for call in each.calls for ref in call.arguments.stand_ins)
        inside = (scalar for block in self._parts for scalar in scalars_of(block))
        outside = {id(scalar) for scalar in scalars_of(self._root)}
        # It refuses before this backward has added to any gradient.
        forward.find_last_uses({id(leaf) for leaf in (*out_of_order, *given, *inside)}, outside)
        forward.loss = forward.loss.detach()
        self._go_through(forward, [Arriving(self._keeper, loss)], len(forward.calls))

    def _go_through(self, forward: _Forward, ends: Sequence[Arriving], at: int) -> None:
        """Go backward from `ends` through the code before call number `at`, with what is gathered in no block."""
        turns, modules = self._turns, [*self._turns.units, self._root]
        # What this micro-batch gave so far takes the place of the sums of earlier ones: the loop, too, adds to these
        # only what one micro-batch gave in all.
        earlier = turns.exchange([(record, kept.take()) for record, kept in forward.gradients])
        is_loss = at == len(forward.calls)
        found = [(end.tensor, grad) for end in ends if (grad := end.take()) is not None or is_loss]  # a loss has none
        with torch.autocast(self._device.type, enabled=False):
            torch.autograd.backward([one for one, _ in found if one is not None], [grad for _, grad in found])
        last = {module: forward.last_use(param for _, param in turns.gathered(module)) for module in modules}
        unfinished = [pair for module in modules if last[module] < at for pair in turns.gathered(module)]
        # Backward comes to these once more: FSDP2 would reduce a part of the gradient.
        partial_sums = [(record, param.grad) for record, param in unfinished if param.grad is not None]
        turns.exchange([(record, None) for record, _ in partial_sums])
        forward.gradients = [(record, self._keeper.keep(grad)) for record, grad in partial_sums]
        turns.add_up(earlier)
        for module in modules:
            turns.end_pass([module], reduces=last[module] == at)


class _End(NamedTuple):
    """Backward goes on between blocks with this tensor's gradient, when the first call that uses it is done."""

    at: int
    """The number of that call."""
    arriving: Arriving


class _Forward:
    """The forward of one micro-batch, and what it leaves for backward."""

    def __init__(self, names: dict[nn.Module, str], keeper: Keeper) -> None:
        self.calls: list[BlockCall] = []
        self.ends: list[_End] = []
        """Tensors that code between blocks made and blocks were given."""
        self.loss = torch.empty(0, device="cpu")
        self.gradients: list[tuple[Any, Kept]] = []
        """Gradients that are not whole, each with FSDP2's record of its parameter."""
        self._last_uses: dict[int, int] = {}
        self._end = 0
        self._names = names
        self._keeper = keeper
        self._outputs: dict[int, tuple[weakref.ref[torch.Tensor], Arriving]] = {}

    def run(
        self, loss_of: Callable[[Any], torch.Tensor], batch: Any, free: Callable[[nn.Module], None], runner: Runner
    ) -> None:
        """Run in a thread, which asks for each block; `free` is called with one that ran without being asked for."""
        _thread.forward, _thread.runner, _thread.free = self, runner, free
        try:
            self.loss = loss_of(batch)
        except RuntimeError as error:
            if "leaf Variable that requires grad" not in str(error):  # torch's words
                raise
            raise BlockOrderError("code behind a block changes what it gave: write h = h + x for h += x") from error

    def call_of(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BlockCall:
        """Note that a block is called: in the thread, whose autocast state counts."""
        name = self._names[block]
        if any(call.block is block for call in self.calls):
            why = "is called twice in one micro-batch: its gradients would be added up in another order"
            raise BlockOrderError(f"block {name} {why}")
        return BlockCall(block, name, args, kwargs, self._source_of)

    def note_outputs(self, call: BlockCall, output: Any) -> None:
        """Remember the leaves that a block gave, to know them when another one is given them."""
        for leaf, arriving in call.outputs(output):
            self._outputs[id(leaf)] = weakref.ref(leaf), arriving

    def pop_ends(self, at: int) -> list[Arriving]:
        """Take out the ends with which backward goes on after a call."""
        found = [end.arriving for end in self.ends if end.at == at]
        self.ends = [end for end in self.ends if end.at != at]
        return found

    def find_last_uses(self, out_of_order: set[int], scalars: set[int]) -> None:
        """Find where backward comes to parameters last.

        BlockOrderError if it comes to code between blocks twice, from there to one of the leaves with these ids, or to
        one of these scalars from two places.
        """
        parts: dict[int, list[torch.Tensor]] = {len(self.calls): [self.loss]}
        for end in sorted(self.ends, key=lambda end: -end.at):  # as backward does: what is noted last is the last use
            assert end.arriving.tensor is not None
            parts.setdefault(end.at, []).append(end.arriving.tensor)
        self._end = min(parts)
        owners: dict[Any, int] = {}
        for at, tensors in parts.items():
            left = [tensor.grad_fn for tensor in tensors]
            while left:
                node: Any = left.pop()
                if hasattr(node, "variable"):  # a leaf, which takes gradients as often as they come
                    used_at = self._last_uses.setdefault(id(node.variable), at)
                    self._last_uses[id(node.variable)] = at
                    if id(node.variable) in scalars and used_at != at:
                        why = "a parameter without dimensions is used in several places between blocks: its gradient"
                        raise BlockOrderError(f"{why} would be added up in another order")
                    if id(node.variable) in out_of_order:
                        why = "what a block keeps beside its result (an attribute, what a hook saw), or parameters"
                        raise BlockOrderError(f"the loss depends on {why} themselves, as a penalty does")
                elif node is not None and node not in owners:
                    owners[node] = at
                    left += [following for following, _ in node.next_functions]
                elif node is not None and owners[node] != at:
                    name = self._names[self.calls[at].block]
                    why = f"what block {name} is given, or goes into that, is used past the block, too"
                    raise BlockOrderError(why)

    def last_use(self, params: Iterable[torch.Tensor]) -> int:
        """Return the number of the call before which backward comes to these parameters last; the end, if unknown."""
        uses = [self._last_uses[id(param)] for param in params if id(param) in self._last_uses]
        return min(uses, default=self._end)

    def _source_of(self, tensor: torch.Tensor) -> Arriving:
        known, arriving = self._outputs.get(id(tensor), (None, None))
        if known is not None and arriving is not None and known() is tensor:  # the id may be another one's by now
            return arriving
        for end in self.ends:
            if end.arriving.tensor is tensor:
                return end.arriving
        self.ends.append(_End(len(self.calls), Arriving(self._keeper, tensor)))
        return self.ends[-1].arriving


@cache
def _asking(kind: type[nn.Module]) -> type[nn.Module]:
    """Return a class of modules that ask for their result where a micro-batch takes turns, and compute it elsewhere."""

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        forward = getattr(_thread, "forward", None)
        if forward is None:
            return kind.__call__(module, *args, **kwargs)
        if torch.is_grad_enabled():
            return _thread.runner.ask(forward.call_of(module, args, kwargs))
        try:
            return kind.__call__(module, *args, **kwargs)
        finally:
            _thread.free(module)  # while turns are taken FSDP2 does not

    return type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


def _state_of(modules: Iterable[tuple[str, nn.Module]]) -> dict[str, tuple[int, int, Any]]:
    """Return what modules have by themselves, tensors and containers, by name, each with what tells of a change."""
    found = {}
    for path, module in modules:
        for name, value in (*vars(module).items(), *module.named_buffers(recurse=False)):
            # A list of hooks says nothing: a forward may make them anew.
            are_hooks = isinstance(value, list) and value and all(isinstance(one, RemovableHandle) for one in value)
            if name not in _OF_TORCH and isinstance(value, torch.Tensor | list | dict | set) and not are_hooks:
                seen = version_of(value) if isinstance(value, torch.Tensor) else len(value)
                found[f"{path}.{name}".lstrip(".")] = id(value), seen, value  # which is not freed meanwhile
    return found


def _raise(error: BaseException) -> None:
    raise error
