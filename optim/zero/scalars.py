"""Parameters without dimensions, which FSDP2 cannot cut: every rank has each of them, with the same value."""

import weakref
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from nvme_offload.offload._torch_private import version_of
from ..ranks.collective import largest


def scalars_of(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a module that have no dimensions, its children's too."""
    return [param for param in module.parameters() if param.ndim == 0]


class ScalarGradients:
    """Gives all ranks the mean of their gradients of scalars, when a backward has ended.

    Each rank adds up its own micro-batches, and ``p.grad`` is the mean of these sums: so its bits do not depend on the
    order of blocks and micro-batches. As with FSDP2 a gradient that no rank has is None, and one that some have is
    everywhere.

    Args:
        params: the scalars, on one device.
        groups: the process groups, one of each dimension of the mesh.
        on_host: the same ranks, for what is in host memory.
    """

    def __init__(
        self, params: Sequence[torch.Tensor], groups: Sequence[dist.ProcessGroup], on_host: Sequence[dist.ProcessGroup]
    ) -> None:
        self._scalars = [_Scalar(param) for param in params]
        self._groups, self._on_host = groups, on_host

    @torch.no_grad()
    def reduce(self) -> None:
        """Set ``p.grad`` of each. Collective."""
        own = [scalar.own() for scalar in self._scalars]
        found = largest([grad is not None for grad in own], *self._on_host)
        if not any(found):
            return
        zero = torch.zeros((), device=self._scalars[0].param.device)
        sums = torch.stack([zero if grad is None else grad.float() for grad in own])
        for group in self._groups:
            dist.all_reduce(sums, group=group)
            sums /= group.size()
        for scalar, grad, mean, is_anywhere in zip(self._scalars, own, sums.unbind(), found, strict=True):
            if is_anywhere:
                scalar.set_mean(grad, mean)


class _Scalar:
    """A scalar, and what this rank alone has added up of its gradient."""

    def __init__(self, param: torch.Tensor) -> None:
        self.param = param
        self._own: torch.Tensor | None = None
        self._mean: torch.Tensor | None = None
        self._seen = 0
        known = weakref.ref(self)  # the parameter would keep itself alive

        def go_on(grad: torch.Tensor) -> None:
            if (scalar := known()) is not None and scalar._is_mean:
                scalar.param.grad = scalar._own

        trainable = param.requires_grad
        param.requires_grad_(True)  # torch takes no such hook otherwise
        param.register_hook(go_on)  # type: ignore[no-untyped-call]
        param.requires_grad_(trainable)

    @property
    def _is_mean(self) -> bool:
        """Whether the gradient is what `set_mean` set: nobody has dropped or changed it, and autograd added nothing."""
        mean = self._mean
        return mean is not None and self.param.grad is mean and version_of(mean) == self._seen

    def own(self) -> torch.Tensor | None:
        """Return this rank's own sum."""
        return self._own if self._is_mean else self.param.grad

    def set_mean(self, own: torch.Tensor | None, mean: torch.Tensor) -> None:
        """Set what the ranks have of it together; autograd adds to the own sum."""
        self._own = torch.zeros_like(self.param) if own is None else own
        self._mean = mean.to(self._own.dtype, copy=True)
        self._seen = version_of(self._mean)
        self.param.grad = self._mean
