"""The repeated layers of a model, each computed once more in backward from its input."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, noop_context_fn

from .._torch_private import replace_calls, tree_flatten, tree_unflatten
from .buffers import Buffers

_PLAIN = (int, float, complex, bool, str, torch.Tensor, torch.dtype, torch.device, torch.Size)
"""A block may be given these, beside None and tuples, lists and dicts of these: nothing that a second call changes."""


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """Find the repeated layers of a model, which are worth gathering one by one.

    They are what Hugging Face models name in ``_no_split_modules``, and the members of every ``nn.ModuleList`` or
    ``nn.Sequential`` that holds two or more modules of one class with parameters.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    blocks: dict[nn.Module, None] = {}
    for module in model.modules():
        if type(module).__name__ in named:
            blocks[module] = None
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        called = [child for child in module if not isinstance(child, nn.ModuleList | nn.ModuleDict)]
        members = [child for child in called if next(child.parameters(), None) is not None]
        kinds = [type(child) for child in members]
        blocks.update({child: None for child in members if kinds.count(type(child)) > 1})
    return outermost(blocks, model)


def outermost(blocks: dict[nn.Module, None], model: nn.Module) -> list[nn.Module]:
    """Leave out the model itself and blocks inside blocks: FSDP2 would gather those twice as often."""
    inside = {inner for block in blocks for inner in block.modules() if inner is not block}
    return [block for block in blocks if block not in inside and block is not model]


def checkpoint_calls(
    blocks: Sequence[nn.Module],
    is_wanted: Callable[[], bool],
    contexts: Callable[[], tuple[Any, Any]] = noop_context_fn,
) -> Callable[[], object]:
    """Checkpoint each call of a block while `is_wanted()`; returns a function that undoes it.

    It is not wanted within a checkpoint, for example: nothing is computed three times. `contexts` makes what a forward
    runs in, and what its repetition does. A block that changes its buffers is repeated on copies of them as they were.
    """
    leaving: set[tuple[nn.Module, tuple[bool, ...]]] = set()  # of these blocks, in these modes, no bits are compared

    def call(block: nn.Module, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if not (torch.is_grad_enabled() and is_wanted()):
            return inner(*args, **kwargs)
        leaves, layout = tree_flatten((args, kwargs))
        _check_arguments(leaves)
        places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        tensors = [leaves[place] for place in places]
        kind = block, tuple(module.training for module in block.modules())
        before = Buffers(block.named_modules())
        changed: list[Buffers] = []
        for place in places:
            leaves[place] = None  # what is computed again gets them from who saved them, and nobody else has them

        def again(*tensors: torch.Tensor) -> Any:
            given = list(leaves)
            for place, tensor in zip(places, tensors, strict=True):
                given[place] = tensor
            args, kwargs = tree_unflatten(given, layout)
            with changed[0].standing_in() if changed else nullcontext():
                return inner(*args, **kwargs)

        output = checkpoint(again, *tensors, use_reentrant=False, context_fn=contexts)
        if before.changed(compares=kind not in leaving):
            changed.append(before)
        else:
            leaving.add(kind)
        return output

    undo = [replace_calls([block], partial(call, block)) for block in blocks]
    return lambda: [each() for each in undo]


def what_may_change(arguments: Any) -> list[object]:
    """Return what a block is given that it might change: it would be changed again when backward computes it."""
    return [leaf for leaf in tree_flatten(arguments)[0] if leaf is not None and not isinstance(leaf, _PLAIN)]


def _check_arguments(leaves: Sequence[object]) -> None:
    """Raise TypeError for an object that a block might change."""
    for leaf in what_may_change(leaves):
        raise TypeError(
            f"a block was given a {type(leaf).__name__}, which it may change, and backward computes it once more: "
            "gradients would be wrong. If it is a cache of keys and values, call the model with use_cache=False; "
            'else write "keep": "all" in the section\'s activations'
        )
