"""The configuration section: one model per section, one field per key, each default written once, here.

`OffloadConfig.from_dict` and `OffloadConfig.from_file` are the doors. They take what a DeepSpeed user's file
says where it means the same, warn once about keys that have no meaning here, and turn all that is wrong into
one `ConfigError`. To add a section, add a model and a field for it: the reader (`offload.config.reader`), the error
messages, the reference page (`scripts/configuration_page.py`) and the JSON schema follow.
"""

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, GetPydanticSchema, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import core_schema

from nvme_offload.aio_native.registry import ENGINES, describe_engines
from ..errors import ConfigError
from ..units import GiB, KiB, MiB, format_bytes, parse_bytes_per_day
from ..user_path import user_path
from ..warn import door
from . import deepspeed_keys, tiers, training
from .keys import (
    TRUE_WORDS,
    ByteBudget,
    ByteCount,
    Contradiction,
    Count,
    DeepSpeedModel,
    DeviceBudget,
    Section,
    Whole,
    each,
    key,
    parts,
)
from .optimizer import OptimizerConfig
from .overlap import OVERLAPS, Overlap, OverlapStep
from .reader import WRAPPER, is_wrapped, parse_file, read
from .training_arguments import resolve

_PAGE = 4 * KiB
_SUBGROUP_SIZE = 8_388_608
_MANY_SUBGROUPS = 64  # more only add to what each takes the host beside its update, some 0.5 ms

Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
Weights = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False)]


RUN_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_DEFAULT_RUN = "default"


def _run_name(value: Any) -> bool | str:
    if isinstance(value, bool) or (isinstance(value, str) and RUN_NAME.fullmatch(value)):
        return value
    raise ValueError("is neither true nor false nor a name of 1..64 letters, digits, dots, underscores and hyphens")


RunName = Annotated[
    bool | str, PlainValidator(_run_name), WithJsonSchema({"type": ["boolean", "string"], "pattern": RUN_NAME.pattern})
]


WearLimit = Annotated[
    int | None,
    PlainValidator(lambda value: None if value is None else parse_bytes_per_day(value)),
    WithJsonSchema({"type": "string", "pattern": r"^[0-9.]+ *[kKMGT]i?B */ *day$"}),
]


def _rewrite_every(value: Any) -> int | Literal["auto"]:
    if value == "auto":
        return "auto"
    if isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_PERIOD:
        return value
    raise ValueError(f'is neither a whole number, 1..{MAX_PERIOD}, nor "auto"')


MAX_PERIOD = 16
"""The longest period: beyond, the gradients themselves are nearly all that is written."""
RewriteEvery = Annotated[
    int | Literal["auto"],
    PlainValidator(_rewrite_every),
    WithJsonSchema(
        {"anyOf": [{"type": "integer", "minimum": 1, "maximum": MAX_PERIOD}, {"const": "auto"}], "x-words": ["auto"]}
    ),
]


EngineName = Annotated[
    Literal["auto"] | str, GetPydanticSchema(lambda _source, _handler: core_schema.literal_schema(["auto", *ENGINES]))
]
_ABOUT_ENGINES = (
    f"The engine that does the I/O. `auto` takes the first of {describe_engines()} that works, and says which and why."
)


class AioConfig(Section):
    """The way in which bytes move between memory and files."""

    engine: EngineName = key("auto", "one of these", description=_ABOUT_ENGINES)
    block_size: ByteCount = key(
        MiB, '4 KiB..1 GiB, a multiple of 4 KiB, as "1MiB"', "same", "bytes", ge=_PAGE, le=GiB, multiple_of=_PAGE
    )
    """Bytes of one request, 4 KiB..1 GiB, a multiple of 4 KiB; a larger transfer is split."""
    queue_depth: Whole = key(32, "a whole number, 1..4096", "same, default 8", "requests", ge=1, le=4096)
    """Requests in flight on one ring, 1..4096. The bytes in flight decide the bandwidth."""
    rings: Whole = key(1, "a whole number, 1..64", "intra_op_parallelism, accepted too", "rings", ge=1, le=64)
    """Submission queues, 1..64, each with a thread that owns it. More than one pays on fast drives."""
    direct: Literal["required", "optional", "disabled"] = key("required", "one of these")
    """Direct I/O (O_DIRECT): `required` makes a file system without it an error, `optional` falls back to the
    page cache there and says so once, `disabled` always uses the page cache."""
    checksums: bool = key(False, "true or false")
    """Keep a checksum of what is written and verify it when it is read back."""
    path_weights: Weights | None = key(None, "a list of positive numbers, one for each path", "", "shares")
    """Share of each path of `nvme_path` in a striped extent: as many positive numbers as paths, for example
    the measured bandwidths. Without it all shares are equal."""

    SPELLINGS: ClassVar = {"intra_op_parallelism": "rings"}
    IGNORED: ClassVar = {
        "thread_count": "nothing reads it in DeepSpeed either; aio.rings sets the number of I/O threads",
        "single_submit": "requests are always submitted in batches",
        "overlap_events": "submitting and reaping always overlap",
        "use_gds": "every transfer goes through host memory",
        "enabled": "DeepSpeed does not read it either; what goes through it is said by each device",
    }


_OF_DURABLE = {"rewrite_every": "is of the state of", "rewind_steps": "goes back in", "copies": "is of"}
"""These keys mean something in a durable run alone; elsewhere they are 1."""


class OffloadOptimizerConfig(tiers.TierConfig):
    """The place of the optimizer state between steps."""

    device: Literal["none", "cpu", "nvme"] = key("none", "one of these", "same")
    """The tier of the optimizer state. `nvme` and `cpu` run the same kernel and give the same bits."""
    nvme_path: tiers.PathTuple = key((), "a path or a list of different paths", "same, one path")
    """Folder for the swap files, or a list of folders, which are striped by `aio.path_weights` and need no
    RAID. Needed for `device: nvme`, and only used there. `~` is the home folder. Held as a tuple."""
    buffer_count: Whole = key(4, "a whole number, 2..64", "same", "buffers", ge=2, le=64)
    """Number of staging buffers, 2..64: one is updated while others are read and written."""
    staging_budget: ByteCount = key(512 * MiB, '8 KiB or more, as "512MiB"', "", "bytes", ge=2 * _PAGE)
    """Host memory for all staging buffers together, 8 KiB or more. The effective subgroup is the smaller of
    `sub_group_size` and what fits into one buffer of `staging_budget` / `buffer_count` bytes."""
    pin_memory: bool | None = key(None, "true or false", "same, default false")
    """Pin what a GPU copies to and from in host memory (page-locked for CUDA). Left out, that is done where the driver
    allows it; where it refuses, one warning says so. With `true` a refusal is an error."""

    durable: RunName = key(False, 'true, false, or the name of the run, as "my-run"')
    """Keep the state on the drive so that a killed run goes on from its latest step: see `docs/durable.md`. A name
    tells runs on the same paths apart; `true` is the name "default". Needs `device: nvme`, twice the space, and 2 bytes
    more written per 16-bit parameter and step (4 in fp32)."""
    rewrite_every: RewriteEvery = key(1, 'a whole number, 1..16, or "auto"', "", "steps")
    """Every how many steps the state of a `durable` run is rewritten, 1..16; the gradients of the steps in between are
    kept. With 3 a 16-bit parameter costs 5.3 bytes written and 13.3 read in a step, and not 12 and 10. `auto` measures
    the drive when a run begins, and takes what is fastest there, 4 at most; with `wear_limit` the fastest that keeps
    it, up to 16. A run goes on with what it began with."""
    rewind_steps: Whole = key(1, "a whole number, 1..16", "", "steps", ge=1, le=16)
    """A `durable` run can go back so many steps with `rewind`, 1..16. Each one beyond the first takes the space of
    the state once more; nothing more is moved."""

    copies: Whole = key(1, "1..2", "", "copies", ge=1, le=2)
    """1..2. With 2 a `durable` run is on two drives: each half of the folders of `nvme_path` has all of it, and a lost
    drive does not lose the run. The halves must be on different devices. Twice the space, twice the bytes written."""

    wear_limit: WearLimit = key(None, 'bytes a day, as "1TB/day"', "", "bytes/day")
    """The most that the ranks of a host may write in a day. With `rewrite_every: "auto"` a durable run begins with a
    period that keeps it, however fast steps follow each other. A run that writes more says so once, with what writes
    less."""

    IGNORED: ClassVar = {
        **each("pipeline pipeline_read pipeline_write", "reads always run ahead and writes behind"),
        "ratio": "device_budget says how many bytes of the state stay on a GPU",
        "fast_init": "the state is always created on its tier",
        "convert_grad_on_cpu": "a gradient becomes fp32 in registers, inside the update",
    }
    REFUSED: ClassVar = {
        "super_offload": 'leave it out and choose a device of "none", "cpu" or "nvme"',
        "endurance": "leave it out: `offload plan --tbw` says how long drives last",
        "cpuadam_cores_perc": "leave it out: the update runs on a thread pool of its own",
    }

    def contradictions(self) -> Iterator[Contradiction]:
        """A folder that is missing, or that nothing uses; buffers that would be too small."""
        yield from super().contradictions()
        if self.staging_budget < (least := self.buffer_count * _PAGE):
            why = f"too little for buffer_count = {self.buffer_count}; write {format_bytes(least)} or more"
            yield Contradiction("staging_budget", why, ("buffer_count",))
        if self.durable and self.device != "nvme":
            why = f'needs device = "nvme", which keeps the state on a drive, and device is "{self.device}"'
            yield Contradiction("durable", f"{why}; write that, or leave durable out", ("device",))
        for name, what in _OF_DURABLE.items():
            if getattr(self, name) != 1 and not self.durable:
                why = f"{what} a durable run, and this is none; write durable = true, or leave it out"
                yield Contradiction(name, why, ("durable",))
        if self.copies > 1 and (not self.nvme_path or len(self.nvme_path) % self.copies):
            why = f"each copy needs as many folders as the other, and nvme_path has {len(self.nvme_path)}"
            remedy = "name those of one copy and then those of the other, on another drive, or write copies = 1"
            yield Contradiction("copies", f"{why}; {remedy}", ("nvme_path",))

    @property
    def run_name(self) -> str | None:
        """The name of the durable run; None where the state ends with the process."""
        return _DEFAULT_RUN if self.durable is True else self.durable or None


class ZeroOptimizationConfig(DeepSpeedModel):
    """It says what is sharded, and what is offloaded."""

    stage: Whole = key(0, "a whole number, 0..3", "same", ge=0, le=3)
    """ZeRO stage, 0..3: what `initialize` shards over ranks is nothing (plain data parallelism), optimizer state,
    gradients too, parameters too."""
    sub_group_size: Whole = key(0, "a whole number, 0 or more", "same, default 1e9", "elements", ge=0)
    """Elements of one subgroup, 0 or more. A subgroup is the unit of the optimizer's read-update-write;
    `staging_budget` may make it smaller. 0 is 8 Mi; or, where parameters are on a GPU and no state is on NVMe, a 64th
    of a rank's elements, 8 to 64 Mi. 1e9 is taken for the whole number it is."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """The place of the optimizer state between steps."""
    offload_param: tiers.OffloadParamConfig = tiers.OffloadParamConfig()
    """The place of each rank's bf16 parameters, the upper halves of the master weights."""

    IGNORED: ClassVar = deepspeed_keys.ZERO_IGNORED
    TRANSLATED: ClassVar = deepspeed_keys.ZERO_TRANSLATED
    ONLY: ClassVar = deepspeed_keys.ZERO_ONLY
    REFUSED: ClassVar = deepspeed_keys.ZERO_REFUSED

    def max_subgroup_numel(self, numel: int, *, on_device: bool) -> int:
        """Return the most elements of a subgroup on a rank that has so many, and whose model computes on a device."""
        if self.sub_group_size or not on_device or self.offload_optimizer.device == "nvme":
            return self.sub_group_size or _SUBGROUP_SIZE
        return min(max(numel // _MANY_SUBGROUPS, _SUBGROUP_SIZE), 8 * _SUBGROUP_SIZE)


class OffloadConfig(Section):
    """The whole configuration section."""

    zero_optimization: ZeroOptimizationConfig = ZeroOptimizationConfig()
    """It says what is sharded, and what is offloaded."""
    aio: AioConfig = AioConfig()
    """The way in which bytes move between memory and files."""
    gradient_clipping: float = key(0.0, "a number, 0 or more", "same, default 1.0 since June 2026", "total norm", ge=0)
    """Largest total norm of all gradients, 0 or more. 0 is off."""
    overlap_step: OverlapStep | None = key(None, "one of these")
    """When subgroups are updated. `off`: inside `step()`. `forward`: behind it, under the next forward, each before its
    parameters are gathered. `backward`: as soon as a gradient is final, what is left as with `forward`; needs
    `gradient_clipping` 0 and `skip_non_finite: false`. `speculate`: as `backward`, also with clipping and skipped
    steps, while the latest steps did neither; what was guessed wrong is taken back from what a `durable` run, which it
    needs, has committed. The bits are the same. Left out, it is `forward` for shards in parts of FSDP2 (what
    `initialize` makes of all) where parameters are on a GPU or state is on NVMe, and for plain modules on the CPU given
    to `optimizer.overlap_with` with state on NVMe. It is `off` for the rest: other modules, Muon. Parameters on a tier
    of their own, and those whose gradients are on NVMe, begin in backward with `micro_batch_order` vertical alone. One
    warning says where it does nothing."""
    skip_non_finite: bool = key(True, "true or false")
    """Skip a step with a gradient that is not finite, and count it. `false`: such a gradient is an error."""
    offload: Literal["auto"] | None = key(None, '"auto", or leave it out')
    """`auto`: what leaves memory is chosen before anything is placed, and told. `host_budget` is `auto` where nothing
    else is written, and so is `rewrite_every` of a `durable` run. `initialize` puts parameters and gradients on NVMe,
    too, where they do not fit into memory, and in the first forward what is kept for backward; all ranks choose alike.
    A durable run goes on with what it began with. Needs `offload_optimizer.device: nvme`, whose `nvme_path` takes all
    of it. The bits are the same. See `docs/tiers.md`."""
    host_budget: ByteBudget | None = key(None, '"auto", or 4 KiB or more, as "8GiB"', "", "bytes")
    """Host memory that one rank may use for staging buffers and for what stays in it of a kind whose tier is NVMe
    (optimizer state, blocks of parameters, blocks of gradients), 4 KiB or more; the rest goes to NVMe. `auto` is this
    rank's share of what is available, less a reserve and what training takes beside it: gradients, gathered layers,
    parameters of a model on meta. Left out, everything is where its `device` says."""
    device_budget: DeviceBudget | None = key(None, '4 KiB or more, as "20GiB"', "", "bytes")
    """Memory of its GPU that one rank may use for optimizer state, 4 KiB or more: as many subgroups as fit stay there
    and are updated there, with the same bits; the rest is where `device` and `host_budget` say. Parameters must be on
    the GPU. Whole matrices (Muon) stay with the rest."""
    train_batch_size: Count | None = key(None, "a whole number, 1 or more", "same", "samples")
    """Samples of one optimizer step over all ranks, 1 or more: the product of the next two keys and the number of
    data-parallel ranks. Of the three keys, one that is left out is derived."""
    train_micro_batch_size_per_gpu: Count | None = key(None, "a whole number, 1 or more", "same", "samples")
    """Samples of one forward and backward on one rank, 1 or more."""
    gradient_accumulation_steps: Count | None = key(None, "a whole number, 1 or more", "same", "micro-batches")
    """Forwards and backwards for one optimizer step, 1 or more; 1 where nothing says otherwise."""
    micro_batch_order: Literal["auto", "horizontal", "vertical"] = key("auto", "one of these")
    """The order in which `engine.accumulate` takes the micro-batches of a step. `horizontal`: one after the other.
    `vertical`: all through one block of the model, then all through the next, so that a block is gathered twice in a
    step and not twice for each; what enters a block is kept, and its inside computed again. `auto`: vertical where
    parameters or gradients are on NVMe and there are several micro-batches, if the model allows it; a warning says what
    does not. It knows no rates: `offload plan` compares both orders, and `offload init` writes the faster one. The bits
    are the same, but for dropout. See `docs/block_by_block.md`."""
    bf16: training.Bf16Config = training.Bf16Config()
    """Forward and backward in bf16 with fp32 master weights."""
    fp16: training.Fp16Config = training.Fp16Config()
    """Forward and backward in fp16 with fp32 master weights and loss scaling."""
    torch_autocast: training.TorchAutocastConfig = training.TorchAutocastConfig()
    """Forward under `torch.autocast`, with parameters and gradients in fp32."""
    offload_gradients: tiers.OffloadGradientsConfig = tiers.OffloadGradientsConfig()
    """The place of each rank's gradient partitions between their arrival and the step."""
    activations: tiers.ActivationsConfig = tiers.ActivationsConfig()
    """The place of what a forward saves for backward."""
    communication_data_type: training.DType | None = key(None, "one of these", "same")
    """Gradients are reduced in this. Left out, it follows the compute dtype: bf16 reduces in bf16, fp16 in fp16, all
    else in fp32; with `torch_autocast` the classes listed there reduce in its dtype. torch's spellings do as well."""
    gradient_accumulation_dtype: training.DType | None = key(
        None, "one of these", "data_types.grad_accum_dtype, accepted too"
    )
    """Gradients are added up over micro-batches and reach the optimizer in this. Left out, it follows the compute
    dtype. fp32 goes with everything, bf16 with `bf16`, fp16 with `fp16`. torch's spellings do as well."""
    fp32_modules: Patterns = key((), 'a list of patterns, as ["*.router", "LayerNorm"]')
    """Modules that stay fp32 in a `bf16` or `fp16` model, with all that is in them: shell patterns of qualified names,
    of modules or parameters, or of class names, alone or with the package that they are imported from, as
    `torch.nn.LayerNorm`. Parameters that came in fp32 in a model that also has 16-bit ones stay fp32 without it."""
    run_log: tiers.FilePath | None = key(None, "a path")
    """A file to which the optimizer appends what it does, a line of JSON at most every second, for `offload top` while
    it runs and afterwards. Ranks after the first write beside it, as `run.rank1.jsonl`. Made if it is missing; that it
    cannot be written is said once and stops nothing."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer that `initialize` makes."""
    checkpoint: training.CheckpointConfig = training.CheckpointConfig()
    """The place of checkpoints."""
    scheduler: training.SchedulerConfig | None = None
    """The learning-rate schedule that `initialize` makes; without this section there is none."""

    SPELLINGS: ClassVar = {
        "bfloat16": "bf16",
        "data_types.grad_accum_dtype": "gradient_accumulation_dtype",
        "zero_optimization.aio": "aio",  # where Hugging Face's documentation has it
    }
    IS_OPEN: ClassVar = True
    TAKEN_FOR: ClassVar = {
        ("zero_optimization", False): ({}, "an old spelling of stage 0"),
        ("zero_optimization", True): ({"stage": 1}, "an old spelling of stage 1"),
    }
    IGNORED: ClassVar = deepspeed_keys.TOP_IGNORED
    ONLY: ClassVar = deepspeed_keys.TOP_ONLY
    REFUSED: ClassVar = deepspeed_keys.TOP_REFUSED
    OTHERWISE: ClassVar = {
        "gradient_clipping": "DeepSpeed clips at 1.0 (0.0 before June 2026), here nothing is; write 1.0, or 0.0"
    }

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The folders for swap files; empty unless `offload_optimizer.device` is `nvme`."""
        return self.zero_optimization.offload_optimizer.nvme_path

    @property
    def paths_of_tiers(self) -> dict[str, tuple[Path, ...]]:
        """The folders for swap files of each section that has any, by its key."""
        found = {prefix[:-1]: part for prefix, part in parts(self) if isinstance(part, tiers.TierConfig)}
        return {name: tier.nvme_path for name, tier in found.items() if tier.nvme_path}

    @property
    def compute_dtype(self) -> training.DType:
        """Parameters are gathered and computed in this; under `torch_autocast` fp32, of which autocast departs."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def autocast_dtype(self) -> training.HalfDType | None:
        """Return what autocast computes in; None where it is not enabled."""
        return self.torch_autocast.dtype if self.torch_autocast.enabled else None

    @property
    def rounds(self) -> int:
        """Times that a step goes through all blocks: once for each micro-batch, or once for all of them."""
        return 1 if self.goes_by_blocks else self.gradient_accumulation_steps or 1

    @property
    def goes_by_blocks(self) -> bool:
        """Whether `engine.accumulate` takes micro-batches block by block, as far as the model allows it."""
        pays = self.has_block_tiers and (self.gradient_accumulation_steps or 1) > 1
        return self.micro_batch_order == "vertical" or (self.micro_batch_order == "auto" and pays)

    @property
    def has_block_tiers(self) -> bool:
        """Whether parameters or gradients go to NVMe, in blocks."""
        return "nvme" in (self.zero_optimization.offload_param.device, self.offload_gradients.device)

    @property
    def overlap(self) -> Overlap:
        """The schedule that ``overlap_step`` names; where it is left out, that of steps that hide."""
        return OVERLAPS[self.overlap_step or "forward"]

    def hides_steps(self, *, on_device: bool) -> bool:
        """Whether updates go on behind a step, as far as who reads the parameters can wait for them.

        Args:
            on_device: parameters are on a device, beside which the host updates.
        """
        if self.overlap_step is not None:
            return self.overlap.hides
        return on_device or self.zero_optimization.offload_optimizer.device == "nvme"

    def batch_sizes(self, world_size: int) -> training.BatchSizes:
        """Complete the three batch keys for a number of data-parallel ranks.

        Raises:
            ConfigError: they do not go together; names the three and a right value.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        return training.complete_batch_sizes(train, micro, self.gradient_accumulation_steps, world_size)

    def completed_for(self, world_size: int) -> Self:
        """Return the section with its gradient accumulation steps, which the tier plan counts uses with."""
        steps = self.batch_sizes(world_size).gradient_accumulation_steps
        return self.model_copy(update={"gradient_accumulation_steps": steps})

    @model_validator(mode="before")
    @classmethod
    def _with_moments(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Read DeepSpeed's switch of the moments' dtype, where the section does not say that dtype."""
        bf16, optimizer = data.get("bf16"), data.get("optimizer", {})
        if not (isinstance(bf16, dict) and isinstance(optimizer, dict)):
            return data
        if str(bf16.get("bf16_optimizer_states")).lower() not in TRUE_WORDS:
            return data
        if str(optimizer.get("type", "AdamW")).lower() not in ("adam", "adamw"):  # which is told
            return data
        return {**data, "optimizer": {**optimizer, "params": {"state_dtype": "bf16", **optimizer.get("params", {})}}}

    def contradictions(self) -> Iterator[Contradiction]:
        """Weights without paths, precisions beside each other, updates that nothing may undo."""
        yield from self._weights_and_paths()
        yield from self._choice()
        yield from self._precision()
        yield from self._overlap()
        yield from self._device_budget()

    def _weights_and_paths(self) -> Iterator[Contradiction]:
        weights = self.aio.path_weights
        state, copies = "zero_optimization.offload_optimizer", self.zero_optimization.offload_optimizer.copies
        for name, paths in (self.paths_of_tiers or {state: ()}).items():
            num_paths = len(paths) // (copies if name == state else 1)
            if weights is not None and len(weights) != num_paths:
                of_copy = " in each copy" if num_paths != len(paths) else ""
                why = f"{name}.nvme_path has {num_paths} path(s){of_copy}; write as many weights or leave it out"
                yield Contradiction("aio.path_weights", why, (f"{name}.nvme_path", f"{name}.device"))

    def _choice(self) -> Iterator[Contradiction]:
        zero, at = self.zero_optimization, "zero_optimization.offload_optimizer.device"
        if self.offload is None:
            return
        if zero.offload_optimizer.device != "nvme":
            why = f'chooses what goes to NVMe; write {at} = "nvme" and an nvme_path beside it, or leave offload out'
            yield Contradiction("offload", why, (at,))
        others = {"zero_optimization.offload_param": zero.offload_param, "offload_gradients": self.offload_gradients}
        for name, tier in others.items():
            if tier.device != "none":
                yield Contradiction(f"{name}.device", 'offload = "auto" chooses it; leave one out', ("offload",))

    def _precision(self) -> Iterator[Contradiction]:
        modes = {"bf16": self.bf16.enabled, "fp16": self.fp16.enabled, "torch_autocast": self.torch_autocast.enabled}
        keys = tuple(f"{name}.enabled" for name in modes)
        enabled = [f"{name}.enabled" for name in modes if modes[name]]
        if len(enabled) > 1:
            what = f"{' and '.join(enabled[:-1])} = true beside it; write true in one of them only"
            yield Contradiction(enabled[-1], what, keys)
        if self.fp32_modules and self.compute_dtype == "fp32":
            why = "goes with bf16.enabled or fp16.enabled = true"
            if self.autocast_dtype:
                why += "; under torch_autocast all but lower_precision_safe_modules is gathered in fp32"
            yield Contradiction("fp32_modules", f"{why}; leave it out, or enable one of the two", keys)
        moments = self.optimizer.hyperparameters.get("state_dtype", "fp32")
        if self.bf16.bf16_optimizer_states and moments != "bf16":
            what = f"the moments of {self.optimizer.kind} are {moments} here; write false or leave it out"
            yield Contradiction("bf16.bf16_optimizer_states", what, ("optimizer.type", "optimizer.params.state_dtype"))
        mode = f"{enabled[0]} = true" if enabled else "neither bf16.enabled nor fp16.enabled is true"
        for name, dtype, half in (
            ("gradient_accumulation_dtype", self.gradient_accumulation_dtype, self.compute_dtype),
            ("communication_data_type", self.communication_data_type, self.autocast_dtype or self.compute_dtype),
        ):
            free = name == "communication_data_type" and not enabled
            if not free and dtype not in (None, "fp32", half):
                choice = '"fp32"' if half == "fp32" else f'"{half}" or "fp32"'
                yield Contradiction(name, f"{mode}; write {choice} or leave it out", (*keys, "torch_autocast.dtype"))

    def _device_budget(self) -> Iterator[Contradiction]:
        """State on a device is beside its parameters, and in no file."""
        zero, other = self.zero_optimization, "leave one of the two out"
        if self.device_budget is None:
            return
        if zero.offload_param.device != "none":
            why = (
                f'is for a model on a GPU, and offload_param.device = "{zero.offload_param.device}" takes it from there'
            )
            yield Contradiction("device_budget", f"{why}; {other}", ("zero_optimization.offload_param.device",))
        if zero.offload_optimizer.durable:
            why = "keeps state on the GPU alone, and a durable run writes all of it"
            yield Contradiction("device_budget", f"{why}; {other}", ("zero_optimization.offload_optimizer.durable",))

    def _overlap(self) -> Iterator[Contradiction]:
        if not self.skip_non_finite and self.fp16.enabled:
            why = "fp16.enabled = true looks for its loss scale by skipping steps; leave it out"
            yield Contradiction("skip_non_finite", why, ("fp16.enabled",))
        other = 'or write overlap_step = "forward"'
        state = self.zero_optimization.offload_optimizer
        if self.overlap.needs_durable and not state.durable:
            why = "what was guessed wrong is taken back from what a durable run has committed"
            at = "zero_optimization.offload_optimizer.durable"
            yield Contradiction("overlap_step", f"{why}; write {at} = true, {other}", (at,))
        if not self.overlap.forbids_clipping:
            return
        beside = ("gradient_clipping", "skip_non_finite")
        if self.gradient_clipping:
            why = f"gradient_clipping = {self.gradient_clipping} needs all gradients before the first update"
            yield Contradiction("overlap_step", f"{why}; write gradient_clipping = 0, {other}", beside)
        if self.skip_non_finite:
            why = "a step that may be skipped needs all gradients before the first update"
            yield Contradiction("overlap_step", f"{why}; write skip_non_finite = false, {other}", beside)

    @classmethod
    @door
    def of(cls, section: "SectionLike | None") -> "OffloadConfig":
        """Take a section in any form that the public classes accept: itself, a dict, a file, or a folder on a drive."""
        if isinstance(section, OffloadConfig):
            return section
        if isinstance(section, str | Path):
            return cls.on_drive(section) if user_path(section).is_dir() else cls.from_file(section)
        if isinstance(section, Mapping):
            return cls.from_dict(section)
        what = "no section was given" if section is None else f"{section!r} is no section"
        raise ConfigError([f"{what}; pass an OffloadConfig, a dict, a file or a folder on a drive"])

    @classmethod
    @door
    def on_drive(cls, folder: str | Path, **keys: Any) -> "OffloadConfig":
        """Make the section that a folder stands for: ``"offload": "auto"``, and `keys` as written beside it.

        Raises:
            ConfigError: see `from_dict`.
        """
        offload = {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(folder)}}
        return cls.from_dict({"offload": "auto", "zero_optimization": offload, **keys})

    @classmethod
    @door
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a dict that looks as it would in a file. Hugging Face's "auto" means the default, with a warning.

        Raises:
            ConfigError: every problem, by its full key, with what to write instead.
        """
        return read(cls, data, "config")

    @classmethod
    @door
    def from_training_arguments(
        cls, section: Mapping[str, Any] | str | Path, args: Any, num_training_steps: int | None = None
    ) -> Self:
        """Read a section with Hugging Face's "auto" in it, and put the values in its place that `Trainer` does.

        Args:
            section: a dict, or the path of a file.
            args: ``transformers.TrainingArguments``, or an object with its attributes: batch size, accumulation and
                world size, clipping, learning rate, betas, epsilon and weight decay, warm-up, fp16 and bf16 are taken.
                A section that names no optimizer gets AdamW with these, as `Trainer` makes.
            num_training_steps: optimizer steps of the whole run, where a schedule of the section needs them;
                ``args.max_steps`` where that is positive.

        Raises:
            ConfigError: every problem, by its full key; also a key that says something else than `args`.
            OSError: the file cannot be read.
        """
        data: Any = section
        if isinstance(section, str | Path):
            data = parse_file(user_path(section))
        data = data[WRAPPER] if is_wrapped(data) else data
        resolved, problems = resolve(data, args, num_training_steps) if isinstance(data, Mapping) else (data, {})
        return read(cls, resolved, str(section) if isinstance(section, str | Path) else "config", problems)

    @classmethod
    @door
    def from_file(cls, path: str | Path) -> Self:
        """Read a .json, .toml or .yaml file; a relative `nvme_path` is relative to the working folder.

        YAML is read as YAML 1.2, and needs PyYAML.

        Raises:
            ConfigError: every problem, by its full key or by line and column.
            OSError: the file cannot be read.
        """
        path = user_path(path)
        return read(cls, parse_file(path), str(path))


SectionLike = OffloadConfig | Mapping[str, Any] | str | Path
"""A section in any form that the public classes accept; see `OffloadConfig.of`."""
