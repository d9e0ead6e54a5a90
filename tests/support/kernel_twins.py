"""One parameter with the state that an optimizer holds for it, in native kernels and in the twin of its rule."""

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from nvme_offload import UpdateRule, rounded
from nvme_offload.optim import kernels
from nvme_offload.optim.kernels import KernelPool, available_isas, make_segment
from nvme_offload.optim.layout.codes import loaded
from nvme_offload.optim.layout.flat import Origin
from nvme_offload.optim.layout.master import MasterForm
from nvme_offload.optim.updates.work import StepScalars
from tests.support.rules import CASES, RuleCase
from tests.support.twins import round_states, split_reference, step_reference, twin_of

POOLS = [KernelPool(threads, isa=isa) for isa in available_isas() for threads in (1, 2, 3)]


ADAMW = CASES[0]


def scalars_at(step: int, case: RuleCase = ADAMW, *, grad_scale: float = 0.37, **changes) -> StepScalars:
    settings = {**case.settings, "lr": 1e-2, **changes}
    [scale] = rounded(-grad_scale if settings.get("maximize") else grad_scale)
    return StepScalars(case.rule.scalars(settings, step), scale, (float(step),) if case.rule.dithers else ())


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Unlike torch.equal, tells -0 from 0 and takes a NaN for itself."""
    bits = {2: torch.int16, 4: torch.int32, 8: torch.int64}[left.element_size()]
    return left.dtype == right.dtype and torch.equal(left.view(bits), right.view(bits))


@dataclass
class State:
    """What the optimizer holds for one parameter."""

    param: torch.Tensor
    master: torch.Tensor | None
    rule: UpdateRule
    states: list[torch.Tensor]
    checksums: torch.Tensor

    @classmethod
    def of(cls, weights: np.ndarray, form: MasterForm, case: RuleCase = ADAMW) -> "State":
        param, master = stored(weights, form)
        births = [state.birth for state in case.rule.states]
        pairs = zip_longest(case.rule.kept, births, fillvalue=0.0)
        states = [torch.full((len(weights) // kept.per,), birth, dtype=kept.dtype) for kept, birth in pairs]
        return cls(param, master, case.rule, states, POOLS[0].tile_checksums(param))

    def update(self, pool: KernelPool, grad: torch.Tensor | None, scalars: StepScalars, **log: Any) -> int:
        return pool.update([self.segment(grad, scalars, **log)])[0]

    def segment(self, grad: torch.Tensor | None, scalars: StepScalars, **log: Any) -> kernels.Segment:
        origin = Origin(0, 0, (self.param.numel(),), (1,)) if self.rule.dithers else None
        tensors = {"param": self.param, "grad": grad, "master": self.master, "states": self.states}
        how = {"rule": self.rule, "scalars": scalars.of_kernel, "grad_scale": scalars.grad_scale, "origin": origin}
        return make_segment(**tensors, **how, checksums=self.checksums, **log)

    def copied(self) -> "State":
        tensors = (self.param, self.master, self.checksums)
        param, master, checksums = (None if tensor is None else tensor.clone() for tensor in tensors)
        return State(param, master, self.rule, [state.clone() for state in self.states], checksums)

    def differs_from(self, twin: "Twin") -> list[str]:
        param, master = twin.stored
        pairs = {"param": (self.param, param)}
        if master is not None:
            pairs["master"] = self.master, master
        named = zip(self.rule.states, loaded(self.states), twin.states, strict=True)
        pairs |= {state.name: (settled(own), settled(torch.as_tensor(other))) for state, own, other in named}
        return [name for name, pair in pairs.items() if not same_bits(*pair)]


def settled(values: torch.Tensor) -> torch.Tensor:
    """A block of 8 bits that is NaN has NaNs of the decoder's."""
    return values.masked_fill(values.isnan(), math.nan)


def stored(weights: np.ndarray, form: MasterForm) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Parameter and master as the form keeps them, made without native code of ours."""
    if form is MasterForm.SPLIT:
        hi, lo = split_reference(weights)
        return torch.from_numpy(hi).view(torch.bfloat16), torch.from_numpy(lo)
    if form is MasterForm.FULL:
        with np.errstate(over="ignore"):
            return torch.from_numpy(weights.astype(np.float16)), torch.from_numpy(weights.copy())
    return torch.from_numpy(weights.copy()), None


class Twin:
    def __init__(self, weights: np.ndarray, form: MasterForm, case: RuleCase = ADAMW) -> None:
        self.form = form
        self.formula, self.rule = twin_of(case.name), case.rule
        self.master = weights
        self.states = [np.full_like(weights, state.birth) for state in case.rule.states]
        self.stored = stored(weights, form)

    def update(self, grad: torch.Tensor, scalars: StepScalars) -> None:
        self.master, *self.states = step_reference(
            self.formula, self.master, grad.float().numpy(), self.states, scalars.of_rule, scalars.grad_scale
        )
        self.states = round_states(self.rule, self.states, int(sum(scalars.dither)))
        self.stored = stored(self.master, self.form)


@contextlib.contextmanager
def flushed_denormals(on: bool) -> Iterator[None]:
    torch.set_flush_denormal(on)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def awkward(numel: int, seed: int) -> torch.Tensor:
    """Numbers from every corner of fp32: zeros of both signs, denormals, huge ones, infinities, NaNs of all kinds."""
    bits = torch.randint(-(2**31), 2**31, (numel,), generator=torch.Generator().manual_seed(seed)).to(torch.int32)
    specials = [0, -(2**31), 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x7F800000, 0x7FC00001, 0x7F800001, -1, -0x800000]
    bits[: len(specials) * 4] = torch.tensor(specials * 4, dtype=torch.int32)[:numel]
    return bits.view(torch.float32)
