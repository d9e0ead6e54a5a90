"""The sections that only `nvme_offload.initialize` reads, without the optimizer: precision, learning-rate schedule."""

from collections.abc import Iterator
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from ..errors import ConfigError
from .keys import Contradiction, Count, DeepSpeedModel, Factor, Section, Whole, each, key

_SPELLINGS = {
    "fp32": ("float32", "float", "torch.float32"),
    "bf16": ("bfloat16", "bfp16", "torch.bfloat16"),
    "fp16": ("float16", "half", "torch.float16"),
}
_DTYPES = {spelling: name for name, more in _SPELLINGS.items() for spelling in (name, *more)}


def _dtype(value: object) -> object:
    """Take DeepSpeed's and torch's spellings, and a torch.dtype itself."""
    return _DTYPES.get(str(value).lower(), value)


def _dtype_schema(*names: str) -> WithJsonSchema:
    return WithJsonSchema({"enum": [text for text, name in _DTYPES.items() if name in names], "x-choices": names})


DType = Annotated[Literal["fp32", "bf16", "fp16"], BeforeValidator(_dtype), _dtype_schema("fp32", "bf16", "fp16")]
HalfDType = Annotated[Literal["bf16", "fp16"], BeforeValidator(_dtype), _dtype_schema("bf16", "fp16")]
WarmUp = Annotated[Whole, AfterValidator(lambda steps: max(2, steps))]


class Bf16Config(DeepSpeedModel):
    """Forward and backward in bf16 with fp32 master weights."""

    enabled: bool = key(False, "true or false", "same")
    """Compute and gather in bf16. The weights stay fp32: two halves, of which the upper one is the bf16 weight."""
    bf16_optimizer_states: bool = key(False, "true or false", "same")
    """DeepSpeed's spelling of `optimizer.params.state_dtype: "bf16"`."""

    IGNORED: ClassVar = {
        "immediate_grad_update": "a gradient is always added to its partition as it arrives",
        "check_grad_overflow": "a step with a gradient that is not finite is always skipped and counted",
        **each(
            "auto_cast loss_scale initial_scale_power loss_scale_window hysteresis min_loss_scale",
            "bf16 has the range of fp32 and no loss scale; the key is of fp16",
        ),
    }
    ONLY: ClassVar = {"bf16_master_weights_and_grads": (False, "master weights are fp32")}


class Fp16Config(DeepSpeedModel):
    """Forward and backward in fp16 with fp32 master weights and loss scaling."""

    enabled: bool = key(False, "true or false", "same")
    """Compute and gather in fp16, with loss scaling as the keys below say; so has `torch_autocast` with fp16."""
    loss_scale: Factor = key(0.0, "a number, 0 or more", "same", "factor")
    """Constant loss scale, 0 or more. 0 is dynamic: it halves after overflows and doubles after good steps."""
    initial_scale_power: Whole = key(16, "a whole number, 0..126", "same", "power of 2", ge=0, le=126)
    """A dynamic loss scale begins at 2 to this power, 0..126: it and its inverse are then normal fp32 numbers."""
    loss_scale_window: Count = key(1000, "a whole number, 1 or more", "same", "steps")
    """Steps without overflow after which a dynamic loss scale doubles, 1 or more."""
    hysteresis: Count = key(2, "a whole number, 1 or more", "same", "overflows")
    """Overflows until a dynamic loss scale halves, 1 or more: the last of them halves it. 1 is torch.amp's rule."""
    consecutive_hysteresis: bool = key(False, "true or false", "same")
    """A step without overflow restores `hysteresis` at once, not only when the loss scale doubles."""
    min_loss_scale: Factor = key(1.0, "a number, 0 or more", "same", "factor")
    """A dynamic loss scale never goes below this, 0 or more. 0 is the least normal number of fp32, 2^-126."""

    IGNORED: ClassVar = {
        "fused_mode": "the update is always one fused kernel",
        "auto_cast": "inputs of floating-point numbers are cast to the dtype of the forward in any case",
        **each("opt_level fp16_scale_tolerance", "DeepSpeed does not read it either"),
    }
    ONLY: ClassVar = {"fp16_master_weights_and_grads": (False, "master weights and moments are fp32")}

    def contradictions(self) -> Iterator[Contradiction]:
        """A least scale above the first one."""
        if self.loss_scale == 0 and self.min_loss_scale > 2.0**self.initial_scale_power:
            what = f"is above the first loss scale, initial_scale_power = {self.initial_scale_power}"
            beside = ("initial_scale_power", "loss_scale")
            yield Contradiction("min_loss_scale", f"{what}; write that or less", beside)


def _class_names(value: Any) -> Any:
    for name in value if isinstance(value, list | tuple) else ():
        if isinstance(name, str) and not ("." in name and name.replace(".", "_").isidentifier()):
            raise ValueError(f'"{name}" is no class name with its package')
    return value


ClassNames = Annotated[tuple[str, ...], Field(strict=False), BeforeValidator(_class_names)]


class TorchAutocastConfig(Section):
    """Forward under `torch.autocast`, with parameters and gradients in fp32."""

    enabled: bool = key(False, "true or false", "same")
    """Run forward under `torch.autocast`; with fp16 the loss is scaled as the keys of `fp16` say."""
    dtype: HalfDType | None = key(None, "one of these", "same, default the device's")
    """Autocast computes in this. Needed when enabled. torch's spellings do as well, as `bfloat16`."""
    lower_precision_safe_modules: ClassNames = key(
        ("torch.nn.Linear", "torch.nn.Conv1d", "torch.nn.Conv2d", "torch.nn.Conv3d"),
        'a list of class names with their packages, as ["torch.nn.Linear"]',
        "same",
    )
    """Classes, by name with package, whose parameters are gathered and whose gradients are reduced in `dtype`; all
    others stay fp32 there. Left out, these and whatever module is seen to have autocast cast its parameters, when its
    forward is run without data. What is computed in `dtype` is autocast's own choice."""

    def contradictions(self) -> Iterator[Contradiction]:
        """Autocast without its dtype."""
        if self.enabled and self.dtype is None:
            yield Contradiction("dtype", 'enabled = true needs it; write "bfloat16" or "float16"', ("enabled",))


class CheckpointConfig(Section):
    """The place of checkpoints."""

    use_node_local_storage: bool = key(False, "true or false", "same")
    """Each host has a folder of its own: `save_checkpoint` writes there what its ranks have, and a load finds each part
    on the host that has it, in whatever order the hosts are then. Left out, all ranks see one folder."""

    IS_OPEN: ClassVar = True
    IGNORED: ClassVar = each(
        "tag_validation load_universal parallel_write",
        "each rank writes its part, all have to agree on the tag, and any number of ranks loads it",
    )


class SchedulerParams(Section):
    """Parameters of the schedule; which of them there are depends on `scheduler.type`."""

    warmup_min_lr: float = key(0.0, "a number, 0 or more", "same", ge=0)
    """Learning rate at step 0, 0 or more. WarmupLR, WarmupDecayLR."""
    warmup_max_lr: float | None = key(None, "a number, more than 0", "same", gt=0)
    """Learning rate after the warm-up, more than 0; left out, the optimizer's. A group with another one than the
    optimizer's keeps its own. WarmupLR, WarmupDecayLR (which needs it, because DeepSpeed takes 0.001 there whatever the
    optimizer's is)."""
    warmup_min_ratio: float = key(0.0, "a number, 0..1", "same", "of lr", ge=0, le=1)
    """Learning rate at step 0 as a fraction of the optimizer's, 0..1. WarmupCosineLR."""
    warmup_num_steps: WarmUp = key(1000, "a whole number, 0 or more", "same", "steps", ge=0)
    """Length of the warm-up in optimizer steps, 0 or more; less than 2 counts as 2, as in DeepSpeed. All types."""
    warmup_type: Literal["log", "linear"] = key("log", "one of these", "same")
    """Shape of the warm-up: the logarithm of the step, or the step. All types."""
    total_num_steps: Count | None = key(None, "a whole number, 1 or more", "same", "steps")
    """Optimizer steps of the whole run, 1 or more. WarmupDecayLR and WarmupCosineLR, which need it."""
    cos_min_ratio: float = key(1e-4, "a number, 0..1", "same", "of lr", ge=0, le=1)
    """Learning rate at the end as a fraction of the optimizer's, 0..1. WarmupCosineLR."""

    TAKEN_FOR: ClassVar = {("warmup_type", "cosine"): ("log", 'DeepSpeed has no such shape, and takes "log" as well')}
    ONLY: ClassVar = {"last_batch_iteration": (-1, "a schedule begins at step 0; load_checkpoint moves it")}
    REFUSED: ClassVar = {
        **each(
            "cycle_first_step_size cycle_second_step_size cycle_first_stair_count cycle_second_stair_count "
            "decay_step_size cycle_min_lr cycle_max_lr decay_lr_rate cycle_momentum cycle_min_mom cycle_max_mom "
            "decay_mom_rate",
            "of OneCycle; leave it out, and give initialize(lr_scheduler=...) torch's OneCycleLR",
        ),
        **each(
            "lr_range_test_min_lr lr_range_test_step_size lr_range_test_step_rate lr_range_test_staircase",
            "of LRRangeTest; leave it out, and give initialize(lr_scheduler=...) torch's LambdaLR",
        ),
    }


_ALL_TYPES = {"warmup_num_steps", "warmup_type"}
_SCHEDULES = {
    "WarmupLR": {*_ALL_TYPES, "warmup_min_lr", "warmup_max_lr"},
    "WarmupDecayLR": {*_ALL_TYPES, "warmup_min_lr", "warmup_max_lr", "total_num_steps"},
    "WarmupCosineLR": {*_ALL_TYPES, "warmup_min_ratio", "cos_min_ratio", "total_num_steps"},
}


class SchedulerConfig(Section):
    """The learning-rate schedule that `initialize` makes; without this section there is none."""

    type: Literal["WarmupLR", "WarmupDecayLR", "WarmupCosineLR"] = key(
        "WarmupLR", "one of these, or give initialize(lr_scheduler=...) a torch scheduler", "same, no default"
    )
    """After the warm-up: constant, down to `warmup_min_lr` in a line, or down along half a cosine. `OneCycle` and
    `LRRangeTest` are not here: `initialize(lr_scheduler=...)` takes any torch scheduler."""
    params: SchedulerParams = SchedulerParams()
    """Parameters of the schedule; which of them there are depends on `scheduler.type`."""

    def contradictions(self) -> Iterator[Contradiction]:
        """Parameters that the type does not have, or needs."""
        there = _SCHEDULES[self.type]
        for name, field in SchedulerParams.model_fields.items():
            if name not in there and getattr(self.params, name) != field.default:
                known = ", ".join(part for part in SchedulerParams.model_fields if part in there)
                what = f'type = "{self.type}" has no such parameter; write {known}'
                yield Contradiction(f"params.{name}", what, ("type",))
        if "total_num_steps" in there and self.params.total_num_steps is None:
            what = f'type = "{self.type}" needs it; write the steps of the run'
            yield Contradiction("params.total_num_steps", what, ("type",))
        if self.type == "WarmupDecayLR" and self.params.warmup_max_lr is None:
            what = f'type = "{self.type}" needs it; write the learning rate, or 0.001, which is DeepSpeed\'s'
            yield Contradiction("params.warmup_max_lr", what, ("type",))


class BatchSizes(NamedTuple):
    """Samples per step over all ranks, per micro-batch on one rank, and micro-batches per step.

    The first two are None where the section gives neither.
    """

    train_batch_size: int | None
    train_micro_batch_size_per_gpu: int | None
    gradient_accumulation_steps: int


def complete_batch_sizes(train: int | None, micro: int | None, steps: int | None, world_size: int) -> BatchSizes:
    """Derive what is left out: train = micro x steps x world size. ConfigError names a number that would do."""
    train_key, micro_key, steps_key = BatchSizes._fields
    if train is None:
        steps = steps or 1
        return BatchSizes(micro and micro * steps * world_size, micro, steps)
    if micro is not None and steps is not None:
        if train != (right := micro * steps * world_size):
            product = f"{micro_key} = {micro} x {steps_key} = {steps} x {world_size} rank(s)"
            raise ConfigError([f"{train_key} = {train}: {product} is {right}; write {right}"])
        return BatchSizes(train, micro, steps)
    given, number, derived = (steps_key, steps or 1, micro_key) if micro is None else (micro_key, micro, steps_key)
    quotient, rest = divmod(train, unit := number * world_size)
    if rest:
        why = f"is no multiple of {given} = {number} x {world_size} rank(s), so no {derived} is right"
        raise ConfigError([f"{train_key} = {train}: {why}; write {(quotient + 1) * unit}"])
    return BatchSizes(train, quotient, number) if micro is None else BatchSizes(train, micro, quotient)
