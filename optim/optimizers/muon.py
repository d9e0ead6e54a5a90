"""Muon whose state lives on a tier, and AdamW beside it for what is no matrix: Keller Jordan et al., 2024."""

from typing import Any

import torch
import torch.distributed as dist

from nvme_offload.offload.config.section import SectionLike
from nvme_offload.optim.optimizer import OffloadOptimizer, Params
from nvme_offload.optim.rules.muon import BESIDE_MATRICES, Muon


class OffloadMuon(OffloadOptimizer):
    """`torch.optim.Muon` with its state on NVMe or in host memory, the same bits either way.

    Its one state and the lower half make 6 bytes per bf16 parameter. A matrix is never cut on its way: its state must
    fit into a staging buffer. Of a sharded parameter the momentum is gathered over its ranks, in bf16, and every rank
    orthogonalizes the whole.

    A parameter group with ``rule = "AdamW"`` has AdamW instead, with its own ``betas``, ``eps``, ``lr`` and
    ``weight_decay``: for biases and norms, and for embeddings and heads, whose rows mean one token each. If you
    pass plain parameters and no groups, parameters that are no matrices become such a group.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer.
        lr: learning rate.
        weight_decay: decoupled weight decay.
        momentum: how much of the buffer is kept.
        nesterov: look ahead along the buffer.
        ns_coefficients: coefficients of the Newton-Schulz iterations.
        eps: smallest norm that a matrix is divided by.
        ns_steps: number of iterations.
        adjust_lr_fn: how the learning rate follows the shape of a matrix: None or "original",
            "match_rms_adamw", or "spectral_unclamped".
        rule: rule of groups that do not name one: "Muon" or "AdamW".
        betas: decay of the two moments in groups with AdamW, each in [0, 1).
        offload: the configuration section, as `OffloadConfig`, dict or path of a JSON or TOML file; or a folder on a
            drive: state that fits into memory stays there, the rest is in the folder.
        norm_group: ranks with other parameters whose gradients belong to the same global norm.

    Raises:
        ConfigError: the section is wrong, or a staging buffer does not hold the state of a matrix; names it.
        ValueError: a hyperparameter or a parameter cannot be used; names it.
        OutOfSpaceError: the paths cannot hold the state; names bytes needed and free, and leaves nothing behind.
        SwapIOError: a path cannot be used.
    """

    rule = Muon()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = (3.4445, -4.7750, 2.0315),
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        rule: str = "Muon",
        betas: tuple[float, float] = (0.9, 0.999),
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
        }
        self._of_groups = {"rule": rule, "betas": betas}
        super().__init__(_grouped(params), defaults, offload, norm_group)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see `OffloadOptimizer`. A group of matrices has the keys of torch's Muon, unless it has more.

        Raises:
            ValueError, OutOfSpaceError: see `OffloadOptimizer.add_param_group`.
        """
        rule = param_group.get("rule", self._of_groups["rule"])
        ours = {} if rule == "Muon" else {"rule": rule, "betas": self._of_groups["betas"]}
        super().add_param_group({**ours, **param_group})


def _grouped(given: Params) -> Params:
    """Return plain parameters as a group of matrices and one of all else; anything but plain parameters as it is."""
    if isinstance(given, set):
        return given  # it has no order: torch says so
    params: list[Any] = list(given)
    if not all(isinstance(param, torch.Tensor) for param in params):
        return params
    others = [param for param in params if param.ndim != 2]
    if not others or len(others) == len(params):
        return params
    matrices: dict[str, Any] = {"params": [param for param in params if param.ndim == 2], "rule": "Muon"}
    return [matrices, {"params": others, **BESIDE_MATRICES}]
