"""One line per optimizer: what every test needs that runs over all of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch

import nvme_offload
from nvme_offload import OffloadOptimizer, UpdateRule
from tests.support.training import Twin

Params = Iterable[torch.Tensor]


@dataclass(frozen=True)
class RuleCase:
    """An optimizer with hyperparameters that make every part of its formula count."""

    name: str
    settings: Mapping[str, Any]
    torch_class: Callable[..., torch.optim.Optimizer]  # the same over fp32 parameters, by somebody else
    variants: tuple[Mapping[str, Any], ...] = field(default=({},))
    """Changes of `settings` that take another way through the formula."""
    smooth: bool = True
    """Whether a last place of a gradient moves a weight by little, so that each element can be compared."""
    tolerance: float = 1e-6
    """By how much of their norm weights may differ from torch's after 100 steps."""
    block: int = 128
    """Elements of a row of the parameters that `rule` is for."""

    def __str__(self) -> str:
        shaping = [key for key in self.rule.shaping if key in self.settings]
        return ",".join([self.name, *(f"{key}={self.settings[key]}" for key in shaping)])

    def changed(self, **changes: Any) -> RuleCase:
        return replace(self, settings={**self.settings, **changes})

    @property
    def kind(self) -> Callable[..., OffloadOptimizer]:
        found: Callable[..., OffloadOptimizer] = getattr(nvme_offload, f"Offload{self.name}")
        return found

    @property
    def rule(self) -> UpdateRule:
        return self.kind.rule.of(self.settings).of_param((128, self.block), (0, 1))

    def with_block(self, block: int) -> RuleCase:
        """The same of parameters whose rows are of blocks of so many elements, where states are in 8 bits."""
        return replace(self, block=3 * block)

    def make(self, params: Params, offload: Any, **changes: Any) -> OffloadOptimizer:
        return self.kind(params, **{**self.settings, **changes}, offload=offload)

    @property
    def section_params(self) -> dict[str, Any]:
        """`settings` as a file has them."""
        params = {key: list(value) if isinstance(value, tuple) else value for key, value in self.settings.items()}
        return {**params, "adam_w_mode": False} if self.name == "Adam" else params

    def make_torch(self, params: Params, **changes: Any) -> torch.optim.Optimizer:
        settings = {**self.settings, **changes}
        settings.pop("state_dtype", None)
        return self.torch_class(params, **settings)

    def twin(self, params: list[torch.Tensor], **options: Any) -> Twin:
        return Twin(params, settings={"maximize": False, **self.settings}, rule=self.rule, **options)


class PlainLion(torch.optim.Optimizer):
    """Lion over fp32 parameters, written from the paper: torch has none."""

    def __init__(self, params: Params, lr: float, betas: tuple[float, float], weight_decay: float, maximize=False):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            lr, (beta1, beta2) = group["lr"], group["betas"]
            for p in group["params"]:
                grad = -p.grad if group["maximize"] else p.grad
                state = self.state[p]
                mean = state.get("exp_avg", torch.zeros_like(p))
                update = torch.sign(beta1 * mean + (1 - beta1) * grad)
                state["exp_avg"] = beta2 * mean + (1 - beta2) * grad
                p.copy_(p * (1 - lr * group["weight_decay"]) - lr * update)


_MOMENTS = {"betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
_MOMENT_VARIANTS = ({}, {"betas": (0.0, 0.99)}, {"betas": (0.3, 0.9)}, {"weight_decay": 0.0}, {"maximize": True})

CASES = [
    RuleCase("AdamW", {"lr": 1e-3, **_MOMENTS}, torch.optim.AdamW, _MOMENT_VARIANTS),
    RuleCase("Adam", {"lr": 1e-3, **_MOMENTS}, torch.optim.Adam, _MOMENT_VARIANTS),
    RuleCase("Lion", {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.1}, PlainLion,
     ({}, {"betas": (0.0, 0.5)}, {"weight_decay": 0.0}, {"maximize": True}), smooth=False),
    RuleCase("Adagrad",
     {"lr": 1e-2, "lr_decay": 0.01, "weight_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-10},
     torch.optim.Adagrad,
     ({}, {"lr_decay": 0.0}, {"weight_decay": 0.0}, {"maximize": True}, {"initial_accumulator_value": 0.0})),
    RuleCase("SGD", {"lr": 1e-2, "momentum": 0.9, "dampening": 0.25, "weight_decay": 0.1, "nesterov": False},
     torch.optim.SGD, ({}, {"dampening": 0.0, "nesterov": True}, {"weight_decay": 0.0}, {"maximize": True})),
    RuleCase("SGD", {"lr": 1e-2, "momentum": 0.0, "dampening": 0.0, "weight_decay": 0.1, "nesterov": False},
     torch.optim.SGD, ({}, {"weight_decay": 0.0}, {"maximize": True})),
]  # fmt: skip
IN_BF16 = [
    replace(case.changed(state_dtype="bf16"), variants=({}, {"betas": (0.3, 0.9)}), smooth=False, tolerance=2e-3)
    for case in CASES[:2]
]
CASES[-1:-1] = IN_BF16
IN_INT8 = [replace(case.changed(state_dtype="int8"), tolerance=2e-2) for case in (*CASES[:3], CASES[4])]
"""They keep 8 bits of matrices alone, so tests over shapes that have none say more of them elsewhere."""
NAMES = {case.name: case for case in reversed(CASES)}  # one case of each optimizer
VARIANTS = [(case, changes) for case in CASES for changes in case.variants]
