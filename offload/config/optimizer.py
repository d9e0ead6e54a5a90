"""The section that says which optimizer `nvme_offload.initialize` makes, and the one table of those there are."""

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, GetPydanticSchema
from pydantic_core import core_schema

from .keys import Contradiction, Section, each, key

_OF_ADAM = {
    "lr": 1e-3,
    "betas": (0.9, 0.999),
    "eps": 1e-8,
    "weight_decay": 0.0,
    "state_dtype": "fp32",
    "bias_correction": True,
}
OPTIMIZERS: Mapping[str, Mapping[str, Any]] = {
    "AdamW": _OF_ADAM,
    "Adam": _OF_ADAM,
    "Lion": {"lr": 1e-4, "betas": (0.9, 0.99), "weight_decay": 0.0, "state_dtype": "fp32"},
    "Adagrad": {"lr": 1e-2, "lr_decay": 0.0, "weight_decay": 0.0, "initial_accumulator_value": 0.0, "eps": 1e-10},
    "Muon": {
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": (3.4445, -4.7750, 2.0315),
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "betas": (0.9, 0.999),
    },
    "SGD": {
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "state_dtype": "fp32",
    },
}
"""Every optimizer with its hyperparameters and their defaults: torch's, but for DeepSpeed's weight decay of AdamW.

The section, the reference page, `offload plan` and `initialize` follow. An optimizer called X is ``OffloadX`` in
``optim/named_optimizers.py``, over the rule ``X`` in ``optim/rules``.
"""

_OF_TYPE = "of the type"
_SPELLINGS = {name.lower(): name for name in OPTIMIZERS}


def _spelled(value: Any) -> Any:
    """Return a type in its own spelling. ValueError: it is bitsandbytes', torchao's or transformers' name of 8 bits."""
    if not isinstance(value, str):
        return value
    bare = re.sub(r"^paged_?|_?(bnb_?)?8_?bit$", "", value.lower())
    kind = _SPELLINGS.get(bare)
    if kind is None or bare == value.lower():
        return _SPELLINGS.get(value.lower(), value)
    if "state_dtype" in OPTIMIZERS[kind]:
        remedy = f'type = "{kind}" with params.state_dtype = "int8" has states in 8 bits, in a format of its own'
    else:
        remedy = f'type = "{kind}" has its states in fp32'
    raise ValueError(f"is an optimizer of another library; {remedy}")


Beta = Annotated[float, Field(ge=0, lt=1)]
OptimizerType = Annotated[
    str,
    GetPydanticSchema(lambda _source, _handler: core_schema.literal_schema(list(OPTIMIZERS))),
    BeforeValidator(_spelled),
]


class Hyperparameters(Section):
    """Hyperparameters in torch's spelling; which of them there are depends on `optimizer.type`."""

    lr: float | None = key(None, "a number, 0 or more", "same", shown=_OF_TYPE, ge=0)
    """Learning rate, 0 or more; a scheduler changes it."""
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] | None = key(
        None, "two numbers, each 0 or more and below 1, as [0.9, 0.999]", "same", shown=_OF_TYPE
    )
    """Decay of the moments: two numbers, each 0 or more and below 1."""
    eps: float | None = key(None, "a number, 0 or more", "same", shown=_OF_TYPE, ge=0)
    """This is added to the denominator, 0 or more."""
    weight_decay: float | None = key(None, "a number, 0 or more", "same", shown=_OF_TYPE, ge=0)
    """Weight decay, 0 or more. AdamW's default is DeepSpeed's; `OffloadAdamW` by itself has torch's 0.01."""
    lr_decay: float | None = key(None, "a number, 0 or more", "same", shown=_OF_TYPE, ge=0)
    """The learning rate is divided by 1 + (step - 1) * lr_decay, 0 or more."""
    initial_accumulator_value: float | None = key(None, "a number, 0 or more", "same", shown=_OF_TYPE, ge=0)
    """The sum of squares begins with this, 0 or more."""
    momentum: float | None = key(None, "a number, 0 or more", "same", shown=_OF_TYPE, ge=0)
    """The share of the buffer of gradients that is kept, 0 or more; with 0 there is no buffer."""
    dampening: float | None = key(None, "a number, 0 or more", "same", shown=_OF_TYPE, ge=0)
    """The share of a gradient that does not enter the buffer, 0 or more."""
    nesterov: bool | None = key(None, "true or false", "same", shown=_OF_TYPE)
    """Look ahead along the buffer; needs a momentum, and no dampening."""
    ns_coefficients: Annotated[tuple[float, float, float], Field(strict=False)] | None = key(
        None, "three numbers, as [3.4445, -4.775, 2.0315]", "same", shown=_OF_TYPE
    )
    """The three coefficients of the Newton-Schulz iterations."""
    ns_steps: Annotated[int, Field(ge=0, le=99)] | None = key(None, "a whole number, 0..99", "same", shown=_OF_TYPE)
    """Number of Newton-Schulz iterations, 0..99."""
    adjust_lr_fn: Literal["original", "match_rms_adamw", "spectral_unclamped"] | None = key(
        None, "one of these", "same", shown=_OF_TYPE
    )
    """The way in which the learning rate follows the shape of a matrix."""


class OptimizerParams(Hyperparameters):
    """Hyperparameters, in torch's spelling. `optimizer.type` decides which of them there are."""

    muon_lr: float | None = key(None, "a number, 0 or more", "same", shown="lr", ge=0)
    """Read with `type: Muon` only: the learning rate of the matrices in place of `lr`, 0 or more."""
    adam_lr: float | None = key(None, "a number, 0 or more", "same", shown="lr", ge=0)
    """Read with `type: Muon` only: the learning rate of what has AdamW beside them, 0 or more."""
    state_dtype: Literal["fp32", "bf16", "int8"] | None = key(None, "one of these", "-", shown=_OF_TYPE)
    """Dtype of the moments, or of the momentum: `fp32`, with AdamW and Adam `bf16`, or `int8`. With two moments in
    `bf16` the state takes 4 bytes less per parameter, in `int8` 6 less, and it is
    [another optimizer](precision.md#moments-in-bf16)."""
    adam_w_mode: bool = key(True, "true or false", "same")
    """Read with `type: Adam` only: `false` asks for L2 instead of decoupled weight decay, that is for `OffloadAdam`."""

    bias_correction: bool | None = key(None, "true or false", "same", shown=_OF_TYPE)
    """Correct the moments for their start at zero; BERT's first Adam does not (`false`). AdamW and Adam."""

    IGNORED: ClassVar = {"torch_adam": "the update is always this package's own kernel, and its result is torch's"}
    ONLY: ClassVar = {
        "amsgrad": (False, "there is no AMSGrad"),
        "fp32_optimizer_states": (True, "state_dtype says the dtype of the moments"),
    }
    REFUSED: ClassVar = {
        "learning_rate": "in torch's spelling it is lr; write lr",
        "wd": "in torch's spelling it is weight_decay; write weight_decay",
        **each("beta1 beta2", "write both as betas, as [0.9, 0.999]"),
        "max_grad_norm": "write gradient_clipping at the top level",
        **each(
            "freeze_step cuda_aware comm_backend_name var_freeze_step var_update_scaler local_step_scaler "
            "local_step_clipper",
            "of optimizers that compress gradients, which are not here; leave it out, and choose another type",
        ),
        **each(
            "max_coeff min_coeff coeff_beta factor_max factor_min factor_threshold",
            "of LAMB, which is not here; leave it out, and choose another type",
        ),
        "ns_method": "the iterations are torch's; leave it out",
    }


class OptimizerGroup(Hyperparameters):
    """Parameters that have hyperparameters of their own."""

    match: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, min_length=1)]
    """Shell patterns, as in `fp32_modules`."""
    rule: Literal["Muon", "AdamW"] | None = None
    """The group's own rule, with `type: Muon` alone."""

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Options of the parameter group: what it says."""
        return {name: value for name, value in self if name != "match" and value is not None}


class OptimizerConfig(Section):
    """The optimizer that `initialize` makes."""

    type: OptimizerType = key(
        "AdamW", "one of these, or give initialize(optimizer=...) a rule of your own", "same, no default"
    )
    """The optimizer. `Adam` is AdamW, as in DeepSpeed, unless `params.adam_w_mode` is `false`. `Lamb`, `OneBitAdam`,
    `OneBitLamb`, `ZeroOneAdam`, `MuAdam`, `MuAdamW` and `MuSGD` are not here: `initialize(optimizer=...)` takes a rule
    of your own."""
    params: OptimizerParams = OptimizerParams()
    """Hyperparameters of the optimizer, in torch's spelling."""
    groups: Annotated[tuple[OptimizerGroup, ...], Field(strict=False)] = key(
        (), 'a list of groups, as [{"match": ["*.bias", "*norm*"], "weight_decay": 0.0}]', "-"
    )
    """Parameters with hyperparameters of their own: `match`, shell patterns as in `fp32_modules`, and any of
    `optimizer.params`; with Muon also `rule`, `Muon` or `AdamW`. A parameter that two groups match, and a pattern that
    matches nothing, are errors. What no group matches comes first, as group 0, with `optimizer.params`."""

    IGNORED: ClassVar = {"legacy_fusion": "the update is always this package's own kernel"}

    @property
    def kind(self) -> str:
        """Return its name in `OPTIMIZERS`."""
        return "AdamW" if self.type == "Adam" and self.params.adam_w_mode else self.type

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Keyword arguments for the optimizer."""
        given = {name: getattr(self.params, name) for name in OPTIMIZERS[self.kind]}
        if self.params.muon_lr is not None:
            given["lr"] = self.params.muon_lr
        return {**OPTIMIZERS[self.kind], **{name: value for name, value in given.items() if value is not None}}

    def contradictions(self) -> Iterator[Contradiction]:
        """Parameters that the type does not have."""
        of_params = [*OPTIMIZERS[self.kind]]
        of_groups = [name for name in of_params if name in OptimizerGroup.model_fields]
        if self.kind == "Muon":
            of_params += ["muon_lr", "adam_lr"]
            of_groups += ["rule"]
        for name in OptimizerParams.model_fields:
            if name not in of_params and name != "adam_w_mode" and getattr(self.params, name) is not None:
                what = f'type = "{self.type}" has no such parameter; write {", ".join(of_params)}'
                yield Contradiction(f"params.{name}", what, ("type",))
        if self.params.state_dtype == "bf16" and self.kind not in ("AdamW", "Adam"):
            what = f'type = "{self.type}" keeps its state in fp32 or int8'
            yield Contradiction("params.state_dtype", f'{what}; write "int8" or leave it out', ("type",))
        if self.params.state_dtype == "int8" and self.kind == "SGD" and not self.params.momentum:
            what = "without params.momentum there is no state; leave it out"
            yield Contradiction("params.state_dtype", what, ("params.momentum",))
        for number, group in enumerate(self.groups):
            if unknown := [name for name in group.hyperparameters if name not in of_groups]:
                what = f'type = "{self.type}" has no parameter {unknown[0]}, which groups[{number}] sets'
                yield Contradiction("groups", f"{what}; write match and any of {', '.join(of_groups)}", ("type",))
