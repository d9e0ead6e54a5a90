"""``loss.backward()`` in the place of ``engine.backward(loss)``, as DeepSpeed has it since 0.18."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from nvme_offload.offload._torch_private import is_transformed
from nvme_offload.optim.zero.engine import OffloadEngine


class PlainBackward:
    """Divides gradients that come to what a forward returned, unless the loss itself was divided before."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self.is_divided = False
        """Whether the losses of this micro-batch were divided and scaled before."""

    def watched(self, outputs: Any) -> Any:
        """Return what a forward gave, with tensors that divide the gradients that come to them."""
        if not torch.is_grad_enabled() or is_transformed():
            return outputs
        if self._engine.gradient_accumulation_steps == 1 and not self._is_scaled:
            return outputs
        return tree_map(self._watched, outputs)

    @contextmanager
    def divided(self) -> Iterator[None]:
        """Within, a loss was divided and scaled before its backward."""
        before, self.is_divided = self.is_divided, True
        try:
            yield
        finally:
            self.is_divided = before

    def share_of(self, gradient: torch.Tensor) -> torch.Tensor:
        """Return the share of a gradient that one micro-batch has in a step; RuntimeError where it needs a scale."""
        if self.is_divided:
            return gradient
        if self._is_scaled:
            raise RuntimeError(
                "loss.backward(): Loss scaling is required under fp16: write engine.backward(loss), or "
                "engine.scale(loss).backward(). engine.zero_grad() drops gradients that are there"
            )
        self._engine.note_backward()
        return gradient / self._engine.gradient_accumulation_steps

    @property
    def _is_scaled(self) -> bool:
        return self._engine.loss_scaler is not None

    def _watched(self, value: Any) -> Any:
        is_computed = isinstance(value, torch.Tensor) and value.grad_fn is not None
        return _Output.apply(value, self) if is_computed else value  # type: ignore[no-untyped-call]  # of torch


class _Output(torch.autograd.Function):
    """A tensor as it is, which is no view: it may be written to in place."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, owner: PlainBackward) -> torch.Tensor:
        ctx.owner = owner
        return value.detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        return ctx.owner.share_of(gradient), None
