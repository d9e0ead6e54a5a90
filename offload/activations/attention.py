"""Results of attention, kept beside the inputs of blocks: what takes longest to compute again for long sequences."""

from collections.abc import Callable
from typing import Any

import torch

from nvme_offload.offload._torch_private import ATTENTION, argument_of, run_operators, tree_flatten, tree_unflatten
from nvme_offload.offload.activations.kept import Handle


class AttentionResults:
    """The results of attention in one call of a block; the repetition takes them in the same order.

    Autograd's own node for attention is made in the repetition, too, around the results that are taken: it saves them
    as if they had just been computed. Selective checkpointing works so as well, but keeps them where hooks on saved
    tensors do not look.
    """

    def __init__(self, keep: Callable[[torch.Tensor], Handle]) -> None:
        self._keep = keep
        self._kept: list[tuple[list[Any], Any]] = []
        self._next = 0

    def contexts(self) -> tuple[Any, Any]:
        """Return what the forward of the block runs in, and what its repetition does."""
        return run_operators(self._compute, self._kept.clear), run_operators(self._take, self._begin)

    def _begin(self) -> None:
        self._next = 0  # a graph that is retained is computed again more than once

    def _compute(self, op: Any, args: Any, kwargs: Any) -> Any:
        results = op(*args, **kwargs)
        if _is_kept(op, args, kwargs):
            leaves, layout = tree_flatten(results)
            self._kept.append(([self._keep(x) if isinstance(x, torch.Tensor) else x for x in leaves], layout))
        return results

    def _take(self, op: Any, args: Any, kwargs: Any) -> Any:
        if not _is_kept(op, args, kwargs):
            return op(*args, **kwargs)
        leaves, layout = self._kept[self._next]
        self._next += 1
        return tree_unflatten([leaf.take() if hasattr(leaf, "take") else leaf for leaf in leaves], layout)


def _is_kept(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is attention. With dropout it draws random numbers, and what comes after it others if it did not."""
    return op in ATTENTION and not argument_of(op, "dropout_p", args, kwargs, 0.0)
