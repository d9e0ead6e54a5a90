"""Small trainings to compare: configuration sections, gradients from a seed, a reference twin, bitwise equality."""

import contextlib
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Parameter

import nvme_offload.optim.durable.state
from nvme_offload import FaultSpec, OffloadAdamW, OffloadConfig, UpdateRule
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.optim.layout.geometry import Part
from nvme_offload.optim.rules.elementwise import AdamW
from tests.support.forked import ROOT, output_of, printed, run_code
from tests.support.twins import round_states, split_reference, step_reference, twin_of

BLOCK = 65536
MILLION = 10**6
SETTINGS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "maximize": False}
AWKWARD_SHAPES = [(1,), (0,), (3, 0), (7,), (), (251, 257), (65535,), (65536,), (65537,), (2, 3, 5, 7), (200_003,)]


def section(
    path: Path | str | None = None,
    *,
    buffers: int = 4,
    sub_group_size: int = 1,
    clip: float = 0.0,
    host_budget: int | str | None = None,
    pin_memory: bool | None = None,
    device_budget: int | str | None = None,
    **aio: Any,
) -> dict[str, Any]:
    """A configuration section: state on NVMe below `path`, or in host memory without one."""
    offload: dict[str, Any] = {"device": "cpu", "buffer_count": buffers, "pin_memory": pin_memory}
    if path is not None:
        offload |= {"device": "nvme", "nvme_path": str(path)}
    zero = {"sub_group_size": sub_group_size, "offload_optimizer": offload}
    budgets = {"host_budget": host_budget, "device_budget": device_budget}
    return {"zero_optimization": zero, "aio": aio, "gradient_clipping": clip, **budgets}


def nvme_tier(path: Path, **aio: Any) -> NvmeTier:
    """A tier below `path`; `aio`: keys of that section."""
    return NvmeTier(OffloadConfig.from_dict(section(path, **aio)))


def param(shape: Sequence[int], dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Parameter:
    generator = torch.Generator().manual_seed(seed)
    return Parameter((torch.randn(shape, generator=generator) * 0.05).to(dtype))


def params_of(shapes: Iterable[Sequence[int]], *dtypes: torch.dtype) -> list[Parameter]:
    """Parameters from a fixed seed each; the dtypes take turns."""
    return [param(shape, dtypes[i % len(dtypes)], seed=i) for i, shape in enumerate(shapes)]


def params_in(optimizer: OffloadAdamW) -> list[Parameter]:
    """Return the parameters of an optimizer's first group."""
    return optimizer.param_groups[0]["params"]


def set_grads(params: Sequence[Parameter], step: int, *, without: Iterable[int] = (), scale: float = 0.1) -> None:
    """The gradients of a step: the same in every run."""
    for i, p in enumerate(params):
        generator = torch.Generator().manual_seed(1000 * step + i)
        grad = torch.randn(p.shape, generator=generator) * scale
        p.grad = None if i in without else grad.to(p.dtype).to(p.device)


def bits(tensor: torch.Tensor) -> np.ndarray:
    """The bits of a tensor in logical order, 1D."""
    signed = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    return tensor.detach().contiguous().reshape(-1).view(signed).numpy()


def assert_same_bits(one: Any, other: Any, where: str = "") -> None:
    """Tensors, or containers of them, are equal bit for bit; so are their shapes and dtypes."""
    if isinstance(one, torch.Tensor):
        assert (one.shape, one.dtype) == (other.shape, other.dtype), where
        np.testing.assert_array_equal(bits(one), bits(other), err_msg=where)
    elif isinstance(one, Mapping):
        assert one.keys() == other.keys(), where
        for key in one:
            assert_same_bits(one[key], other[key], f"{where}[{key!r}]")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), where
        for i, pair in enumerate(zip(one, other, strict=True)):
            assert_same_bits(*pair, f"{where}[{i}]")
    else:
        assert one == other, where


def snapshot(optimizer: OffloadAdamW) -> dict[str, Any]:
    """Everything that training changes: parameters and the whole state."""
    state = optimizer.state_dict()
    return {
        "params": [p.detach().clone() for group in optimizer.param_groups for p in group["params"]],
        "state": state["state"],
        "param_groups": state["param_groups"],
    }


def assert_same_training(one: OffloadAdamW, other: OffloadAdamW) -> None:
    """Parameters, masters and moments of two optimizers are equal bit for bit."""
    assert_same_bits(snapshot(one), snapshot(other))


@dataclass
class Twin:
    """A rule by its reference over numpy masters: shares with the optimizer nothing but the formula's scalars.

    It works on logical order where the optimizer works on order of memory, keeps every master whole, and sums the norm
    exactly.
    """

    params: Sequence[torch.Tensor]
    settings: Mapping[str, Any] = field(default_factory=lambda: SETTINGS)
    clip: float = 0.0
    rule: UpdateRule = field(default_factory=AdamW)

    def __post_init__(self) -> None:
        self.dtypes = [p.dtype for p in self.params]
        self.masters = [p.detach().float().reshape(-1).numpy().copy() for p in self.params]
        births = {state.name: state.birth for state in self.rule.states}
        self.states = {name: [np.full_like(master, birth) for master in self.masters] for name, birth in births.items()}
        self.steps = [0] * len(self.params)
        self.own_settings: dict[int, Mapping[str, Any]] = {}  # by parameter index, where they differ from `settings`

    def step(self, grads: Sequence[torch.Tensor | None]) -> float:
        """One step over gradients as stored; returns the norm."""
        upcast = [None if grad is None else grad.detach().float().reshape(-1).numpy() for grad in grads]
        squares = (np.square(grad, dtype=np.float64).tolist() for grad in upcast if grad is not None)
        norm = math.sqrt(math.fsum(itertools.chain.from_iterable(squares))) if self.clip else math.nan
        coef = min(1.0, self.clip / (norm + 1e-6)) if self.clip else 1.0
        for i, grad in enumerate(upcast):
            if grad is None:
                continue
            self.steps[i] += 1
            settings = {**self.settings, **self.own_settings.get(i, {})}
            scalars, scale = self.rule.scalars(settings, self.steps[i]), -coef if settings.get("maximize") else coef
            states = [values[i] for values in self.states.values()]
            twin, of_param = twin_of(self.rule.name), Part.of(self.params[i])
            self.masters[i], *states = step_reference(twin, self.masters[i], grad, states, scalars, scale)
            rule = self.rule.of_param(of_param.whole, of_param.order)
            states = round_states(rule, states, self.steps[i], i)
            for values, updated in zip(self.states.values(), states, strict=True):
                values[i] = updated
        return norm

    def take_over(self, index: int, start: int, stop: int, values: torch.Tensor) -> None:
        """Somebody changed these elements: their masters are what is found now."""
        self.masters[index][start:stop] = values.detach().float().reshape(-1).numpy()

    def param_bits(self, index: int) -> np.ndarray:
        master, dtype = self.masters[index], self.dtypes[index]
        if dtype is torch.bfloat16:
            return split_reference(master)[0].view(np.int16)
        if dtype is torch.float16:
            with np.errstate(over="ignore"):
                return master.astype(np.float16).view(np.int16)
        return master.view(np.int32)

    def assert_equals(self, optimizer: OffloadAdamW) -> None:
        """Parameters, masters, moments and steps are the twin's, bit for bit."""
        params = [p for group in optimizer.param_groups for p in group["params"]]
        state = optimizer.state_dict()["state"]
        for i, p in enumerate(params):
            np.testing.assert_array_equal(bits(p), self.param_bits(i), err_msg=f"parameter {i}")
            if i not in state:
                assert self.steps[i] == 0
                continue
            expected = {name: values[i] for name, values in self.states.items()}
            if p.dtype is not torch.float32:
                expected["master"] = self.masters[i]
            if optimizer.rule.counts_steps:
                assert float(state[i].pop("step")) == self.steps[i]
            assert state[i].keys() == expected.keys()
            for name, values in expected.items():
                found = bits(state[i][name])
                np.testing.assert_array_equal(found, values.view(np.int32), err_msg=f"{name} of parameter {i}")


def take_steps(optimizer: Any, params: list[Parameter], *steps: int, twin: Twin | None = None, **grads: Any) -> None:
    """Steps of an optimizer, and of a twin beside it, each with its gradients as `set_grads` makes them."""
    for step in steps:
        set_grads(params, step, **grads)
        if twin is not None:
            twin.step([p.grad for p in params])
        optimizer.step()


@contextlib.contextmanager
def noted(words: str) -> Iterator[None]:
    """What fails inside says these words, too."""
    try:
        yield
    except BaseException as error:
        error.add_note(words)
        raise


@contextlib.contextmanager
def faulty_drive(faults: FaultSpec | None = None) -> Iterator[list[NvmeTier]]:
    """Optimizers made inside have these faults injected below their engine's retries; yields their tiers."""
    tiers: list[NvmeTier] = []

    class FaultyTier(NvmeTier):
        def __init__(self, config: Any, **more: Any) -> None:
            super().__init__(config, faults=faults, **more)
            tiers.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nvme_offload.optim.durable.state, "NvmeTier", FaultyTier)
        yield tiers


def storage_io() -> tuple[int, int]:
    """Bytes that this process made the block layer read and write."""
    fields = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(fields["read_bytes"]), int(fields["write_bytes"])


def run_child(
    code: str, *arguments: object, timeout: float = 120, fresh: bool = False, prefix: Sequence[str] = ()
) -> str:
    """Run Python code in a child below the repository; its output, or a failure with its stderr.

    `fresh`, or with a `prefix` of the command: in a process that has imported nothing, whose exit handlers run.
    """
    if fresh or prefix:
        return output_of(*prefix, sys.executable, "-c", code, *arguments, cwd=ROOT, timeout=timeout)
    return printed(run_code(code, [*map(str, arguments)], timeout))


def returned_in_child(function: Callable[..., Any], *arguments: object, **options: Any) -> Any:
    """What a function of a module returns, called with the arguments as texts in a child that `run_child` runs."""
    code = f"import json, sys; from {function.__module__} import {function.__name__} as call"
    return json.loads(
        run_child(f"{code}; print(json.dumps(call(*sys.argv[1:])))", *arguments, **options).splitlines()[-1]
    )
