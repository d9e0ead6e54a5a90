"""Mistakes to make in what goes block by block: a comparison with the loop has to find each."""

from functools import partial
from pkgutil import resolve_name

from nvme_offload import OffloadOptimizer

BlockCall = resolve_name("nvme_offload.optim.zero.block_call:BlockCall")
TakingTurns = resolve_name("nvme_offload.offload._fsdp_passes:TakingTurns")
KeptReduction = resolve_name("nvme_offload.optim.zero.host_collectives:KeptReduction")


def take_in_place_of_reductions(take):
    """For a process that does nothing else."""
    KeptReduction.__call__ = take


def exchange_between_calls(patch, attribute):
    """In backward the calls of a block in two micro-batches have this of each other."""
    forward, backward, calls = BlockCall.forward, BlockCall.backward, {}

    def noting(call, *arguments, **more):
        calls.setdefault(call.block, []).append(call)
        return forward(call, *arguments, **more)

    def exchanging(call):
        if call.block in calls:
            one, other = calls.pop(call.block)
            of_one, of_other = getattr(one, attribute), getattr(other, attribute)
            setattr(one, attribute, of_other)
            setattr(other, attribute, of_one)
        backward(call)

    patch.setattr(BlockCall, "forward", noting)
    patch.setattr(BlockCall, "backward", exchanging)


def add_gradients_twice(patch):
    """It gives what was put aside of the gradient of a tied weight."""
    exchange = TakingTurns.exchange

    def exchanging(turns, gradients):
        return exchange(turns, [(record, grad if grad is None else grad + grad) for record, grad in gradients])

    patch.setattr(TakingTurns, "exchange", exchanging)


def reduce_the_root_late(patch):
    """Reduce gradients of the root in the next step."""
    end_pass, end = TakingTurns.end_pass, TakingTurns.end

    def ending(turns, modules, *, reduces):
        end_pass(turns, modules, reduces=reduces and turns._root not in modules)

    def end_without_root(turns):
        late = turns.exchange([(record, None) for record, _ in turns.gathered(turns._root)])
        end(turns)
        turns.exchange([pair for pair in late if hasattr(pair[0], "_unsharded_param")])

    patch.setattr(TakingTurns, "end_pass", ending)
    patch.setattr(TakingTurns, "end", end_without_root)


def update_before_the_last(patch):
    """Gradients of a block are taken for final when the first micro-batch has gone backward through it."""
    expect_step = OffloadOptimizer.expect_step

    def expect(optimizer, after_next_backward, *, by_turns=False):
        expect_step(optimizer, after_next_backward or by_turns, by_turns=by_turns)

    patch.setattr(OffloadOptimizer, "expect_step", expect)


MISTAKES = {
    "a boundary of another micro-batch": partial(exchange_between_calls, attribute="_boundary"),
    "a gradient of another micro-batch": partial(exchange_between_calls, attribute="_arriving"),
    "a gradient added twice": add_gradients_twice,
    "a late root": reduce_the_root_late,
    "an update before the last micro-batch": update_before_the_last,
}
