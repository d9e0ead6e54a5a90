"""The precision plan: which dtype every parameter and buffer has, for what. Everything else asks it."""

import importlib
import json
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import nn

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import is_device
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.warn import warn_user
from ..layout.blocks import params_matching
from ..layout.master import FORM_OF_DTYPE, MASTER_DTYPE, MasterForm, state_itemsize
from ..rules.registry import rule_of
from ..rules.rule import UpdateRule
from .parameter import DTYPES, NAMES, SIXTEEN_BITS, ParameterPrecision, stays_as_it_came
from .watch import Lowered, Watch

_MASTERS = {MasterForm.SPLIT: "split", MasterForm.FULL: "full fp32", MasterForm.ITSELF: "itself"}
_COLUMNS = ("storage", "compute", "gather", "reduce", "accumulate", "master")


@dataclass
class PlanRow:
    """Parameters whose names differ in numbers only, with one precision."""

    names: str
    """Names of the row's parameters, with ``*`` for a number."""
    trainable: bool
    precision: ParameterPrecision
    bytes: dict[str, float]
    """Bytes of each parameter, by tier."""
    states: str
    """Dtypes of what the optimizer keeps for it besides."""
    tensors: int = 0
    numel: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return one entry of ``parameters`` in the plan's JSON."""
        precision = self.precision
        dtypes = {name: name_of(getattr(precision, name)) for name in _COLUMNS[:-1]}
        if not self.trainable:
            dtypes |= dict.fromkeys(("reduce", "accumulate"), "-")
        if precision.gathered is precision.kept_as:  # nobody casts it
            dtypes |= dict.fromkeys(("compute", "gather"), dtypes["storage"])
        return {
            "names": self.names,
            "tensors": self.tensors,
            "parameters": self.numel,
            "trainable": self.trainable,
            **dtypes,
            "master": _MASTERS[precision.master],
            "states": self.states,
            "bytes_per_parameter": self.bytes,
        }


def name_of(dtype: torch.dtype | None) -> str:
    """Return the name of a dtype in the plan; None is what autocast chooses."""
    return "autocast" if dtype is None else NAMES.get(dtype) or str(dtype).removeprefix("torch.")


def name_pattern(name: str, most: int = 0) -> str:
    """Return a qualified name with ``*`` for each part that is a number, or for the first `most` of them."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", name, count=most)


def as_text(plan: Mapping[str, Any]) -> str:
    """Return a plan, as `PrecisionPlan.to_dict` gives it, as a table."""
    tiers = list(dict.fromkeys(tier for row in plan["parameters"] for tier in row["bytes_per_parameter"]))
    head = ["parameters", "tensors", "numel", *_COLUMNS, "states", *(f"B/{tier}" for tier in tiers)]
    lines = [
        [
            row["names"],
            str(row["tensors"]),
            str(row["parameters"]),
            *(row[column] for column in (*_COLUMNS, "states")),
            *(str(row["bytes_per_parameter"].get(tier, 0)) for tier in tiers),
        ]
        for row in plan["parameters"]
    ]
    scaling = "the loss is scaled" if plan["loss_scaling"] else "no loss scaling"
    table = [f"precision {plan['mode']}, {scaling}", *_aligned([head, *lines])]
    if plan["buffers"]:
        buffers = [[name, dtype] for name, dtype in plan["buffers"].items()]
        table += ["", *_aligned([["buffers", "dtype"], *buffers])]
    return "\n".join(table)


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    padded = [[cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines]
    return ["  ".join(cells).rstrip() for cells in padded]


_SCALAR = ParameterPrecision(torch.float32, torch.float32, torch.float32, torch.float32)
"""Every rank has a parameter without dimensions. For fp32 without dimensions no operator in 16 bits gives fp32."""


class PrecisionPlan:
    """The dtypes of one training run, computed once from the section and the model. Prints as a table.

    Made by `PrecisionPlan.of`. ``plan["name"]`` is the `ParameterPrecision` of a parameter.
    """

    def __init__(
        self,
        config: OffloadConfig,
        parameters: Mapping[str, ParameterPrecision],
        rows: Iterable[PlanRow],
        buffers: Mapping[str, torch.dtype],
        *,
        arrived_mixed: bool = False,
        named_fp32: Collection[str] = (),
    ) -> None:
        self.parameters = dict(parameters)
        """The precision of each parameter by qualified name; of tied parameters, by each of their names."""
        self.buffers = dict(buffers)
        """The dtype of each buffer by qualified name: buffers keep the dtype they came with."""
        self.rows = list(rows)
        """The rows of the table, each for parameters that look alike."""
        plain = "none" if config.compute_dtype == "fp32" else config.compute_dtype
        self.mode = f"autocast-{config.autocast_dtype}" if config.autocast_dtype else plain
        """``none``, ``bf16``, ``fp16``, ``autocast-bf16`` or ``autocast-fp16``."""
        self.autocast = DTYPES[config.autocast_dtype] if config.autocast_dtype else None
        """Dtype with which forward runs under `torch.autocast`; None where it does not."""
        self.loss_scaling = self.mode in ("fp16", "autocast-fp16")
        """Whether the loss is scaled, as the keys of the ``fp16`` section say."""
        names_classes = "lower_precision_safe_modules" in config.torch_autocast.model_fields_set
        self.watches_modules = self.autocast is not None and not names_classes
        """Whether autocast runs, and the section does not name the classes whose parameters it may round."""
        self.arrived_mixed = arrived_mixed
        """Whether a 16-bit model came with 16-bit and with fp32 parameters: its own code casts."""
        self.named_fp32 = frozenset(named_fp32)
        """Names of the parameters that are fp32 because the section says so, and did not come so in a mixed model."""

    @classmethod
    def of(
        cls,
        config: OffloadConfig,
        model: nn.Module,
        elsewhere: Collection[torch.dtype] | None = None,
        rule: UpdateRule | None = None,
        *,
        on_device: bool = False,
    ) -> Self:
        """Plan a plain module, before it is sharded and in the dtypes it came with.

        What is unset in the section follows the compute dtype of each parameter. In a model with 16-bit and fp32
        parameters those in fp32 stay so. `elsewhere` are the dtypes of other pipeline stages; a name in the section may
        match nothing here then. `on_device` says that the model is on a device, which all of it may have to leave.

        Raises:
            ConfigError: keys that do not go together for this model; a name in the section that matches nothing.
        """
        arrived_fp32 = _arrived_fp32(config, model, elsewhere)
        named_fp32 = _named_fp32(config, model, elsewhere) - arrived_fp32
        kept = arrived_fp32 | named_fp32
        safe = _safe_params(config, model)
        whole = kept if config.autocast_dtype is None else set(model.parameters()) - safe
        own = [set(module.parameters(recurse=False)) for module in model.modules()]
        beside = {param for params in own if params & whole for param in params - whole}  # 16-bit ones beside kept ones
        parameters = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            if param.ndim == 0 and not stays_as_it_came(param):
                parameters[name] = _SCALAR
                continue
            parameters[name] = precision = precision_of(
                config,
                kept=param in kept,
                safe=param in safe,
                beside_fp32=param in beside,
                on_device=on_device,
                kept_as=param.dtype if stays_as_it_came(param) else None,
            )
            if precision.accumulate in SIXTEEN_BITS and param in kept:
                half = config.gradient_accumulation_dtype
                why = f'"{name}" stays fp32 (fp32_modules, or the dtypes of the model); write "fp32", or leave it out'
                what = f"{why}: {half} parameters then accumulate in {half}, others in fp32"
                raise ConfigError([f'gradient_accumulation_dtype = "{half}": parameter {what}'])
        return cls(
            config,
            parameters,
            _rows(config, model, parameters, rule or rule_of(config.optimizer)),
            {name: item.dtype for name, item in model.named_buffers()},
            arrived_mixed=_is_mixed(config, model, elsewhere),
            named_fp32=[name for name, param in model.named_parameters() if param in named_fp32],
        )

    def __getitem__(self, name: str) -> ParameterPrecision:
        return self.parameters[name]

    def policy_of(self, name: str) -> Any:
        """Return a parameter's policy for ``fully_shard``. It has a reduce dtype: torch's default differs by version.

        Modules cast their inputs to the dtype they compute in, but in a model that arrived in mixed dtypes and for fp32
        modules of a 16-bit model (`optim.precision.casts`), and under autocast, where every operator does.
        """
        from torch.distributed.fsdp import MixedPrecisionPolicy  # here, because a plan alone needs none

        precision = self[name]
        casts = (precision.compute in SIXTEEN_BITS and not self.arrived_mixed) or self.mode == "none"
        return MixedPrecisionPolicy(precision.gather, precision.reduce, cast_forward_inputs=casts)

    @property
    def own(self) -> dict[str, torch.dtype]:
        """Return the dtype of each parameter by name, as the forward has it; see `ParameterPrecision.own`."""
        return {name: precision.own for name, precision in self.parameters.items()}

    def to_dict(self) -> dict[str, Any]:
        """Return plain lists, dicts, strings and numbers: what `to_json` writes."""
        return {
            "mode": self.mode,
            "autocast": self.autocast and NAMES[self.autocast],
            "loss_scaling": self.loss_scaling,
            "parameters": [row.to_dict() for row in self.rows],
            "buffers": {name: str(dtype).removeprefix("torch.") for name, dtype in self.buffers.items()},
        }

    def to_json(self) -> str:
        """Return the whole plan as JSON."""
        return json.dumps(self.to_dict(), indent=2)

    def __str__(self) -> str:
        return as_text(self.to_dict())


def precision_of(
    config: OffloadConfig,
    *,
    kept: bool = False,
    safe: bool = False,
    beside_fp32: bool = False,
    on_device: bool = False,
    kept_as: torch.dtype | None = None,
) -> ParameterPrecision:
    """Apply the rule: a key that is set holds for every parameter; one that is unset follows the parameter's own dtype.

    A parameter that is `kept` stays fp32 in a 16-bit model; one that is `safe` is cast by autocast wherever it is used.
    `beside_fp32`: its module also has parameters that stay fp32, and FSDP2 reduces a module's own parameters together.
    `kept_as` is its dtype, if it `stays_as_it_came`: autocast would cast to its own dtype what is in that already.
    """
    reduce, accumulate = config.communication_data_type, config.gradient_accumulation_dtype
    if config.autocast_dtype:
        low = DTYPES[config.autocast_dtype]
        gather, compute = low if safe or kept_as is low else torch.float32, None
    else:
        gather = compute = torch.float32 if kept else DTYPES[config.compute_dtype]
    # Autocast rounds fp32 parameters, to even, where upper halves round ties away from zero: there they stay whole.
    master = MasterForm.ITSELF if kept_as else FORM_OF_DTYPE[compute or torch.float32]
    may_leave = on_device or config.has_block_tiers or config.hides_steps(on_device=False)  # all leave a device to park
    tiered = master is not MasterForm.ITSELF or may_leave
    return ParameterPrecision(
        compute=compute,
        gather=gather,
        reduce=DTYPES[reduce] if reduce else torch.float32 if beside_fp32 else gather,
        accumulate=DTYPES[accumulate] if accumulate else compute or torch.float32,
        master=master,
        in_parts=tiered or kept_as is not None,  # FSDP2 would cast it
        kept_as=kept_as,
    )


def _rows(
    config: OffloadConfig, model: nn.Module, parameters: Mapping[str, ParameterPrecision], rule: UpdateRule
) -> Iterable[PlanRow]:
    """Return a row for all parameters whose names differ in numbers only; tied ones count once."""
    named = list(model.named_parameters())
    alike: dict[str, set[tuple[bool, ParameterPrecision]]] = {}
    for name, param in named:
        alike.setdefault(name_pattern(name), set()).add((param.requires_grad, parameters[name]))
    rows: dict[tuple[str, bool, ParameterPrecision, UpdateRule], PlanRow] = {}
    for name, param in named:
        pattern = name_pattern(name)
        if len(alike[pattern]) > 1:
            pattern = name_pattern(name, most=1)  # the layer; the numbers after it tell them apart
        precision, trainable = parameters[name], param.requires_grad
        strides = param.stride()
        own = rule.of_param(param.shape, sorted(range(param.ndim), key=lambda dim: (-strides[dim], dim)))
        states = dict.fromkeys(name_of(state.dtype) for state in own.states) if trainable else ()
        sizes = _bytes(config, param, precision, own)
        row = PlanRow(pattern, trainable, precision, sizes, " ".join(states) or "-")
        row = rows.setdefault((pattern, trainable, precision, own), row)
        row.tensors += 1
        row.numel += param.numel()
    return rows.values()


def _bytes(
    config: OffloadConfig, param: nn.Parameter, precision: ParameterPrecision, rule: UpdateRule
) -> dict[str, float]:
    """Return bytes per parameter of one shard by tier: what is kept between steps, with the gradient at its largest."""
    zero = config.zero_optimization
    memory = param.device.type if is_device(param.device) else "memory"  # one on meta is born in memory
    tier_of = (
        {"none": memory, "cpu": "memory", "nvme": "nvme"}
        if param.ndim
        else dict.fromkeys(("none", "cpu", "nvme"), memory)
    )
    storage = tier_of[zero.offload_param.device]
    if precision.kept_as:
        return {storage: precision.kept_as.itemsize}
    kept: list[tuple[str, float]] = [(storage, precision.storage.itemsize)]
    if param.requires_grad:
        state = "nvme" if zero.offload_optimizer.device == "nvme" else "memory"
        kept.append((tier_of[config.offload_gradients.device], precision.accumulate.itemsize))
        kept.append((state, state_itemsize(precision.master, rule.states)))
    elif (rest := MASTER_DTYPE[precision.master]) is not None and param.dtype is not precision.storage:
        kept.append((memory, rest.itemsize))
    sizes: dict[str, float] = {memory: 0}
    for tier, size in kept:
        sizes[tier] = sizes.get(tier, 0) + size
    return sizes


def _is_mixed(config: OffloadConfig, model: nn.Module, elsewhere: Collection[torch.dtype] | None) -> bool:
    """Whether a model that is computed in 16 bits came with 16-bit and with fp32 parameters."""
    dtypes = {param.dtype for param in model.parameters()} | set(elsewhere or ())
    return config.compute_dtype != "fp32" and torch.float32 in dtypes and not dtypes.isdisjoint(SIXTEEN_BITS)


def _arrived_fp32(
    config: OffloadConfig, model: nn.Module, elsewhere: Collection[torch.dtype] | None
) -> set[nn.Parameter]:
    """Return parameters that stay fp32 because the user left them so, in a model with 16-bit ones."""
    if config.compute_dtype == "fp32" and any(param.dtype in SIXTEEN_BITS for param in model.parameters()):
        why = "neither bf16.enabled nor fp16.enabled is true"
        warn_user(f"the model has 16-bit parameters and {why}: they become fp32 and are computed in fp32")
    if not _is_mixed(config, model, elsewhere):
        return set()
    return {param for param in model.parameters() if param.dtype is torch.float32}


def _named_fp32(
    config: OffloadConfig, model: nn.Module, elsewhere: Collection[torch.dtype] | None
) -> set[nn.Parameter]:
    """Return parameters that stay fp32 because the section names them; ConfigError if a pattern matches nothing."""
    named: set[nn.Parameter] = set()
    if config.compute_dtype == "fp32":
        return named
    for pattern in config.fp32_modules:
        found = params_matching(model, pattern)
        if not found and elsewhere is None:
            classes = ", ".join(sorted({type(module).__name__ for module in model.modules()}))
            what = f'"{pattern}" names no module or parameter of this model; its classes are {classes}'
            raise ConfigError([f"fp32_modules: {what}"])
        named.update(found)
    return named


def _safe_params(config: OffloadConfig, model: nn.Module) -> set[nn.Parameter]:
    """Return parameters that may be gathered in 16 bits under autocast, because all of their modules have it cast them.

    They are those of the classes that the section names; where it names none, a forward of each module shows them.
    """
    if config.autocast_dtype is None:
        return set()
    section = config.torch_autocast
    classes = {_class_named(name) for name in section.lower_precision_safe_modules}
    is_named = "lower_precision_safe_modules" in section.model_fields_set
    watch = Watch(DTYPES[config.autocast_dtype])
    safe, unsafe = set[nn.Parameter](), set[nn.Parameter]()
    for module in model.modules():
        own = dict(module.named_parameters(recurse=False))
        if type(module) in classes:
            safe |= set(own.values())
            continue
        lowered = Lowered() if is_named else watch.lowered(module)
        safe |= {own[name] for name in lowered}
        unsafe |= {param for name, param in own.items() if name not in lowered}
    safe -= unsafe
    if is_named and classes and not safe:
        warn_user("torch_autocast.lower_precision_safe_modules names no class of this model: all is gathered in fp32")
    return safe


def _class_named(name: str) -> type:
    home, _, last = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(home), last)
    except (ImportError, AttributeError) as error:
        what = f'"{name}" cannot be imported ({error}); write a class with the package it is imported from'
        raise ConfigError([f"torch_autocast.lower_precision_safe_modules: {what}"]) from None
    if not isinstance(found, type):
        raise ConfigError([f'torch_autocast.lower_precision_safe_modules: "{name}" is no class'])
    return found
