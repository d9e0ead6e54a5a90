"""Optimizers with torch's names and arguments, over rules whose state lives on a tier."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from nvme_offload.offload.config.section import SectionLike
from .optimizer import OffloadOptimizer, Params
from .rules.elementwise import SGD, Adagrad, Adam, AdamW, Lion
from .rules.muon import BESIDE_MATRICES, Muon


def optimizer_class(name: str) -> Callable[..., OffloadOptimizer]:
    """Return ``OffloadX`` for the optimizer called X in a section: see `offload.config.optimizer`."""
    found: Callable[..., OffloadOptimizer] = globals()[f"Offload{name}"]
    return found


class OffloadAdamW(OffloadOptimizer):
    """`torch.optim.AdamW` with its state on NVMe or in host memory, the same bits either way.

    Use it as any optimizer::

        with OffloadAdamW(model.parameters(), lr=3e-4, offload=section) as optimizer:
            for batch in batches:
                model(batch).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()

    The gradient is used where it is: ``p.grad``, in whatever dtype it was accumulated, becomes fp32 in registers.
    Clipping by the global norm (``gradient_clipping`` of the section), torch's ``clip_grad_norm_``, ``GradScaler``,
    schedulers, parameter groups and ``state_dict`` work as with any torch optimizer. A step with a gradient that is
    not finite is skipped and counted.

    Master weights are fp32. bf16 parameters are their upper halves, fp16 ones are copies, fp32 ones are masters.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer. bf16, fp16 or fp32, strided,
            dense, on the CPU or a CUDA device.
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        state_dtype: dtype of the moments, "fp32", "bf16" or "int8". "bf16" keeps 6 bytes per bf16 parameter and "int8"
            4.06, not 10. Each is a different optimizer: see docs/precision.md.
        bias_correction: correct the moments for their start at zero; BERT's first Adam does not.
        offload: the configuration section, as `OffloadConfig`, dict or path of a JSON, TOML or YAML file; or a folder
            on a drive: state that fits into memory stays there, the rest is in the folder.
        norm_group: ranks with other parameters whose gradients belong to the same global norm: the process group of a
            pipeline's stages. Ranks that share a sharded parameter need no group.
        torch_arguments: what else ``torch.optim.AdamW`` takes. ``fused`` and ``foreach`` change nothing; ``amsgrad``,
            ``capturable`` and ``differentiable`` must be false.

    Raises:
        ConfigError: the section is wrong.
        TypeError: an argument that this optimizer does not have.
        ValueError: a hyperparameter or a parameter cannot be used; names it.
        OutOfSpaceError: the paths cannot hold the state; names bytes needed and free, and leaves nothing behind.
        SwapIOError: a path cannot be used.
    """

    rule = AdamW()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
        bias_correction: bool = True,
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **torch_arguments: Any,
    ) -> None:
        self.rule = self.rule.of({"state_dtype": state_dtype})
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults |= {"state_dtype": state_dtype} if state_dtype != "fp32" else {}
        defaults |= {} if bias_correction else {"bias_correction": False}
        super().__init__(params, defaults, offload, norm_group, torch_arguments)


class OffloadAdam(OffloadOptimizer):
    """`torch.optim.Adam` with its state on NVMe or in host memory, the same bits either way.

    Weight decay is an L2 penalty, added to the gradient; `OffloadAdamW` decays the weights themselves.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer.
        lr: learning rate.
        betas: decay of the two moments, each in [0, 1).
        eps: added to the denominator.
        weight_decay: factor of the L2 penalty.
        maximize: ascend instead of descend.
        state_dtype: dtype of the moments, "fp32", "bf16" or "int8": see `OffloadAdamW`.
        bias_correction: correct the moments for their start at zero; BERT's first Adam does not.
        offload: see `OffloadAdamW`.
        norm_group: see `OffloadAdamW`.
        torch_arguments: what else ``torch.optim.Adam`` takes. ``fused`` and ``foreach`` change nothing; ``amsgrad``,
            ``capturable``, ``differentiable`` and ``decoupled_weight_decay`` must be false.
    """

    rule = Adam()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
        bias_correction: bool = True,
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **torch_arguments: Any,
    ) -> None:
        self.rule = self.rule.of({"state_dtype": state_dtype})
        defaults = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
        defaults |= {"state_dtype": state_dtype} if state_dtype != "fp32" else {}
        defaults |= {} if bias_correction else {"bias_correction": False}
        super().__init__(params, defaults, offload, norm_group, torch_arguments)


class OffloadLion(OffloadOptimizer):
    """Lion with its state on NVMe or in host memory, the same bits either way.

    It moves every weight by the learning rate, up or down, and keeps one state: 6 bytes per bf16 parameter. Its authors
    advise a learning rate 3 to 10 times smaller than AdamW's, and a weight decay larger by as much.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer.
        lr: learning rate.
        betas: how much of the mean counts beside the gradient, and how much of it is kept; each in [0, 1).
        weight_decay: decoupled weight decay.
        maximize: ascend instead of descend.
        state_dtype: dtype of the mean, "fp32" or "int8": see `OffloadAdamW`.
        offload: see `OffloadAdamW`.
        norm_group: see `OffloadAdamW`.
        torch_arguments: other arguments of torch's optimizers. ``fused`` and ``foreach`` change nothing; ``capturable``
            and ``differentiable`` must be false.
    """

    rule = Lion()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **torch_arguments: Any,
    ) -> None:
        self.rule = self.rule.of({"state_dtype": state_dtype})
        defaults = {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize}
        defaults |= {"state_dtype": state_dtype} if state_dtype != "fp32" else {}
        super().__init__(params, defaults, offload, norm_group, torch_arguments)


class OffloadAdagrad(OffloadOptimizer):
    """`torch.optim.Adagrad` with its state on NVMe or in host memory, the same bits either way.

    One state, the sum of squared gradients: 6 bytes per bf16 parameter.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer. Their gradients must be dense.
        lr: learning rate.
        lr_decay: the learning rate is divided by 1 + (step - 1) * lr_decay.
        weight_decay: factor of an L2 penalty, which is added to the gradient.
        initial_accumulator_value: what ``sum`` begins with; a group keeps the value with which it was added.
        eps: added to the denominator.
        maximize: ascend instead of descend.
        offload: see `OffloadAdamW`.
        norm_group: see `OffloadAdamW`.
        torch_arguments: what else ``torch.optim.Adagrad`` takes. ``fused`` and ``foreach`` change nothing;
            ``differentiable`` must be false.
    """

    rule = Adagrad()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-2,
        lr_decay: float = 0.0,
        weight_decay: float = 0.0,
        initial_accumulator_value: float = 0.0,
        eps: float = 1e-10,
        *,
        maximize: bool = False,
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **torch_arguments: Any,
    ) -> None:
        defaults = {"lr": lr, "lr_decay": lr_decay, "weight_decay": weight_decay, "eps": eps, "maximize": maximize}
        defaults["initial_accumulator_value"] = initial_accumulator_value
        super().__init__(params, defaults, offload, norm_group, torch_arguments)


class OffloadSGD(OffloadOptimizer):
    """`torch.optim.SGD` with its state on NVMe or in host memory, the same bits either way.

    With momentum it has one state, 6 bytes per bf16 parameter; without, none: only the lower halves of bf16 parameters
    and the masters of fp16 parameters are on the tier.

    Args:
        params: parameters, or dicts of parameter groups, as for any torch optimizer.
        lr: learning rate.
        momentum: how much of the buffer is kept. A group that is added with 0 has no buffer and never gets one.
        dampening: how much of the gradient does not enter the buffer, but for the first.
        weight_decay: factor of an L2 penalty, which is added to the gradient.
        nesterov: look ahead along the buffer. Needs a momentum and no dampening.
        maximize: ascend instead of descend.
        state_dtype: dtype of the buffer, "fp32" or "int8": see `OffloadAdamW`.
        offload: see `OffloadAdamW`.
        norm_group: see `OffloadAdamW`.
        torch_arguments: what else ``torch.optim.SGD`` takes. ``fused`` and ``foreach`` change nothing;
            ``differentiable`` must be false.
    """

    rule = SGD()

    def __init__(
        self,
        params: Params,
        lr: float = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        state_dtype: str = "fp32",
        offload: SectionLike | None = None,
        norm_group: dist.ProcessGroup | None = None,
        **torch_arguments: Any,
    ) -> None:
        self.rule = self.rule.of({"momentum": 1.0, "state_dtype": state_dtype})
        defaults: dict[str, Any] = {
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
        }
        defaults |= {"nesterov": nesterov, "maximize": maximize}
        defaults |= {"state_dtype": state_dtype} if state_dtype != "fp32" else {}
        super().__init__(params, defaults, offload, norm_group, torch_arguments)


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
        offload: see `OffloadAdamW`.
        norm_group: see `OffloadAdamW`.

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
        defaults: dict[str, Any] = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "eps": eps,
        }
        defaults |= {"ns_coefficients": ns_coefficients, "ns_steps": ns_steps, "adjust_lr_fn": adjust_lr_fn}
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
    if isinstance(given, torch.nn.Module | set | frozenset):
        return given  # which is refused by name
    params: list[Any] = list(given)
    if not all(isinstance(param, torch.Tensor) for param in params):
        return params
    others = [param for param in params if param.ndim != 2]
    if not others or len(others) == len(params):
        return params
    matrices: dict[str, Any] = {"params": [param for param in params if param.ndim == 2], "rule": "Muon"}
    return [matrices, {"params": others, **BESIDE_MATRICES}]
