"""Which micro-batch of a step is under way, and what may be called when: DeepSpeed's call sequence."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from nvme_offload.offload._torch_private import tree_flatten, version_of

_SEQUENCE = "for every micro-batch, write\n    engine.backward(loss)\n    engine.step()"


class Accumulation:
    """Counts the micro-batches of a step. Each ends with ``engine.step()``, however many losses it had."""

    def __init__(self, num_micro_batches: int, *, is_pipelined: bool, reduces_once: bool) -> None:
        self.num_micro_batches = num_micro_batches
        self._num_in_step = num_micro_batches
        self.micro_steps = 0
        """Micro-batches that ended since the latest boundary."""
        self.has_backward = False
        """Whether there was a backward since the latest ``engine.step()``."""
        self.is_whole = False
        """Whether ``engine.accumulate`` goes, or has gone, through all micro-batches of this step."""
        self.boundary: bool | None = None
        """Whether the micro-batch under way is the last one, where the loop says so itself."""
        self._is_pipelined = is_pipelined
        self.reduces_once = reduces_once
        """Whether gradients wait for the last micro-batch of a step, and are reduced with it."""
        self._waits = False

    @property
    def is_boundary(self) -> bool:
        """Whether the micro-batch under way is the last of its step; always true in a pipeline."""
        if self._is_pipelined:
            return True
        return self.micro_steps + 1 >= self._num_in_step if self.boundary is None else self.boundary

    @property
    def reduces_late(self) -> bool:
        """Whether gradients of the next backward may wait for another one before they are reduced."""
        return self._waits or (self.reduces_once and not self.is_boundary)

    def begin_step(self) -> None:
        """The next micro-batch is the first of a step."""
        self.micro_steps, self.has_backward, self.is_whole = 0, False, False
        self._num_in_step = self.num_micro_batches

    def begin_whole(self, num_micro_batches: int, *, divides: bool) -> None:
        """Begin a step of ``engine.accumulate``, which divides losses by the number of micro-batches that it has to be.

        ValueError if it is another one.
        """
        if num_micro_batches != self.num_micro_batches and (divides or not num_micro_batches):
            raise ValueError(
                f"engine.accumulate was given {num_micro_batches} micro-batches, and gradient_accumulation_steps = "
                f"{self.num_micro_batches}: hand in all micro-batches of a step, or change that key"
            )
        if self._is_pipelined or self._waits or self.boundary is not None:
            reason = "within engine.no_sync" if self._waits else "after engine.set_gradient_accumulation_boundary"
            reason = "in a mesh with a dimension 'pp', whose schedule runs all passes" if self._is_pipelined else reason
            raise RuntimeError(f"engine.accumulate was called {reason}: it goes through a whole step by itself")
        if self.progress:
            raise RuntimeError(
                f"engine.accumulate was called with {self.progress}: it goes through all of a step. Call engine.step() "
                "first, or engine.zero_grad() to give these up; engine.backward and engine.accumulate do not mix"
            )
        if not torch.is_grad_enabled():
            raise RuntimeError("engine.accumulate was called without gradients: call it outside of torch.no_grad()")
        self.is_whole, self._num_in_step = True, num_micro_batches

    def end_whole(self) -> None:
        """Note that all micro-batches of the step are done: ``engine.step()`` acts."""
        self.micro_steps, self.has_backward = self._num_in_step - 1, True

    def is_complete(self) -> bool:
        """Whether nothing but ``engine.step()`` is missing."""
        return self.is_boundary and self.has_backward

    def check_backward(self) -> None:
        """Raise RuntimeError for a backward in a step of ``engine.accumulate``."""
        if self.is_whole:
            raise RuntimeError(
                "engine.backward was called in a step of engine.accumulate, which does it for all micro-batches: call "
                "engine.step() first"
            )

    def end_micro_batch(self) -> None:
        """Another micro-batch of the same step follows."""
        self.micro_steps, self.has_backward = self.micro_steps + 1, False

    @property
    def progress(self) -> str:
        """Return how far the step is, in words; empty between two steps."""
        done = self.micro_steps + self.has_backward
        return f"{done} of {max(done, self._num_in_step)} micro-batches done" if done else ""

    @contextmanager
    def waiting(self, stage: int) -> Iterator[None]:
        """Within, no backward reduces gradients, and no step is taken."""
        if stage >= 2:
            raise RuntimeError(
                f"engine.no_sync: stage {stage} keeps its part of the gradients only, and so reduces them in every "
                "backward; write zero_optimization.stage = 1, or leave no_sync out: engine.step() acts at the boundary"
            )
        if self._waits:
            raise RuntimeError("engine.no_sync was entered within engine.no_sync; leave the inner one out")
        self._waits = True
        try:
            yield
        finally:
            self._waits = False

    def check_step(self, gradients: Iterable[torch.Tensor | None], *, is_scaled: bool) -> None:
        """Check that ``engine.step()`` may be called now, and take note of a plain ``loss.backward()``."""
        if self._waits:
            raise RuntimeError("engine.step was called within engine.no_sync; call it after the with block")
        if self.has_backward or self._is_pipelined:
            return
        if all(grad is None for grad in gradients):
            raise RuntimeError(f"engine.step was called before engine.backward: {_SEQUENCE}")
        if self.num_micro_batches > 1 or is_scaled or self.micro_steps:
            share = f"divides it by gradient_accumulation_steps = {self.num_micro_batches}"
            raise RuntimeError(
                f"engine.step was called after loss.backward(), but engine.backward(loss) {share}"
                f"{' and scales it for fp16' if is_scaled else ''}: {_SEQUENCE}\n"
                "or engine.scale(loss).backward() in place of the first line. engine.zero_grad() drops these gradients"
            )
        self.has_backward = True


def all_of(micro_batches: Iterable[Any]) -> list[Any]:
    """Return the micro-batches; ValueError if who gives them fills a tensor again that an earlier one has."""
    batches, versions = [], []
    for batch in micro_batches:
        batches.append(batch)
        versions += [(leaf, version_of(leaf)) for leaf in tree_flatten(batch)[0] if isinstance(leaf, torch.Tensor)]
    if any(version_of(tensor) != version for tensor, version in versions):
        raise ValueError("engine.accumulate: a micro-batch was filled again for the next one: clone what is given")
    return batches


def check_loss(loss: torch.Tensor) -> None:
    """Raise TypeError, ValueError or RuntimeError for what cannot be the loss of a backward."""
    if not isinstance(loss, torch.Tensor):
        raise TypeError(
            f"engine.backward needs the loss itself, not {type(loss).__name__}: a Hugging Face model that was "
            "given labels has it in outputs.loss"
        )
    if loss.numel() != 1:
        raise ValueError(f"engine.backward needs a scalar loss, not one of shape {tuple(loss.shape)}: take its mean")
    if not loss.requires_grad:
        raise RuntimeError(
            "engine.backward needs a loss with a graph, and this one has none: compute it from what engine(...) "
            "returned, without detach(), and outside torch.no_grad()"
        )


def check_loss_of(loss_of: object) -> None:
    """Raise TypeError for what cannot compute the loss of a micro-batch."""
    if not callable(loss_of):
        how = "write engine.accumulate(loss_of, micro_batches), where loss_of(micro_batch) returns a loss"
        raise TypeError(f"engine.accumulate: loss_of = a {type(loss_of).__name__}, which nobody can call: {how}")
