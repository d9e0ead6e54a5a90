"""The configuration section: one model per section, one field per key, each default written once, here.

`OffloadConfig.from_dict` and `OffloadConfig.from_file` are the doors. They take what a DeepSpeed user's file
says where it means the same, warn once about keys that have no meaning here, and turn all that is wrong into
one `ConfigError`. To add a section, add a model and a field for it: the reader (`offload.config.reader`), the error
messages, the reference page (`offload.config.reference`) and the JSON schema follow.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, GetPydanticSchema, model_validator
from pydantic_core import core_schema

from nvme_offload.aio_native.registry import ENGINES, describe_engines
from nvme_offload.offload.config.optimizer import OptimizerConfig
from nvme_offload.offload.config.reader import (
    WRAPPER,
    ByteBudget,
    ByteCount,
    Count,
    Section,
    Whole,
    contradiction,
    each,
    key,
    parse_file,
    read,
)
from nvme_offload.offload.config.tiers import OffloadGradientsConfig, OffloadParamConfig, PathTuple, check_path
from nvme_offload.offload.config.training import (
    BatchSizes,
    Bf16Config,
    DType,
    Fp16Config,
    HalfDType,
    SchedulerConfig,
    TorchAutocastConfig,
    complete_batch_sizes,
)
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.units import GiB, KiB, MiB, format_bytes

_PAGE = 4 * KiB


Patterns = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)]
Weights = Annotated[tuple[Annotated[float, Field(gt=0)], ...], Field(strict=False)]


EngineName = Annotated[
    Literal["auto"] | str, GetPydanticSchema(lambda _source, _handler: core_schema.literal_schema(["auto", *ENGINES]))
]
_ABOUT_ENGINES = (
    f"The engine that does the I/O. `auto` takes the first of {describe_engines()} that works, and says which and why."
)


class AioConfig(Section):
    """How bytes move between memory and files."""

    engine: EngineName = key("auto", "one of these", description=_ABOUT_ENGINES)
    block_size: ByteCount = key(
        MiB,
        '4 KiB..1 GiB, a multiple of 4 KiB, as "1MiB"',
        "same",
        "bytes",
        ge=_PAGE,
        le=GiB,
        multiple_of=_PAGE,
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
    }


class OffloadOptimizerConfig(Section):
    """Where the optimizer state lives between steps."""

    device: Literal["none", "cpu", "nvme"] = key("none", "one of these", "same")
    """The tier of the optimizer state. `nvme` and `cpu` run the same kernel and give the same bits."""
    nvme_path: PathTuple = key((), "a path or a list of different paths", "same, one path")
    """Folder for the swap files, or a list of folders, which are striped by `aio.path_weights` and need no
    RAID. Needed for `device: nvme` and only allowed there. `~` is the home folder. Held as a tuple."""
    buffer_count: Whole = key(4, "a whole number, 2..64", "same", "buffers", ge=2, le=64)
    """Number of staging buffers, 2..64: one is updated while others are read and written."""
    staging_budget: ByteCount = key(512 * MiB, '8 KiB or more, as "512MiB"', "", "bytes", ge=2 * _PAGE)
    """Host memory for all staging buffers together, 8 KiB or more. The effective subgroup is the smaller of
    `sub_group_size` and what fits into one buffer of `staging_budget` / `buffer_count` bytes."""
    pin_memory: bool | None = key(None, "true or false", "same, default false")
    """Pin the staging buffers (page-locked for CUDA). Left out, they are pinned where CUDA is used."""

    IGNORED: ClassVar = {
        **each("pipeline pipeline_read pipeline_write", "reads always run ahead and writes behind"),
        "fast_init": "the state is always created on its tier",
        "convert_grad_on_cpu": "a gradient becomes fp32 in registers, inside the update",
    }
    ONLY: ClassVar = {"ratio": (1.0, "the whole optimizer state is on the tier that `device` names")}
    REFUSED: ClassVar = {
        "super_offload": 'leave it out and choose a device of "none", "cpu" or "nvme"',
        "cpuadam_cores_perc": "leave it out: the update runs on a thread pool of its own",
    }

    @model_validator(mode="after")
    def _agree(self) -> Self:
        check_path(self.device, self.nvme_path)
        if self.staging_budget < (least := self.buffer_count * _PAGE):
            why = f"too little for buffer_count = {self.buffer_count}; write {format_bytes(least)} or more"
            raise contradiction("staging_budget", why)
        return self


class ZeroOptimizationConfig(Section):
    """What is sharded, and what is offloaded."""

    stage: Whole = key(0, "a whole number, 0..3", "same", ge=0, le=3)
    """ZeRO stage, 0..3: what `initialize` shards over ranks is nothing, optimizer state, gradients too, parameters
    too."""
    sub_group_size: Count = key(8_388_608, "a whole number, 1 or more", "same, default 1e9", "elements")
    """Elements of one subgroup, 1 or more. A subgroup is the unit of the optimizer's read-update-write;
    `staging_budget` may make it smaller. 1e9 is taken for the whole number it is."""
    offload_optimizer: OffloadOptimizerConfig = OffloadOptimizerConfig()
    """Where the optimizer state lives between steps."""
    offload_param: OffloadParamConfig = OffloadParamConfig()
    """Where the bf16 parameters of each rank, the upper halves of the master weights, live."""

    IGNORED: ClassVar = {
        **each(
            "overlap_comm contiguous_gradients reduce_scatter reduce_bucket_size round_robin_gradients "
            "use_multi_rank_bucket_allreduce allgather_partitions allgather_bucket_size "
            "stage3_allgather_sequential stage3_use_all_reduce_for_fetch_params",
            "PyTorch does the communication and chooses its own buckets and overlap",
        ),
        **each(
            "stage3_max_live_parameters stage3_max_reuse_distance stage3_prefetch_bucket_size "
            "stage3_param_persistence_threshold stage3_model_persistence_threshold "
            "stage3_module_granularity_threshold stage3_partition_stream_chunk_size",
            "PyTorch (FSDP2) gathers and frees parameters module by module",
        ),
        **each(
            "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
            "the model's state dict is PyTorch's own",
        ),
        **each(
            "load_from_fp32_weights ignore_unused_parameters memory_efficient_linear override_module_apply "
            "elastic_checkpoint legacy_stage1 log_trace_cache_warnings enable_sanity_checks",
            "it steers DeepSpeed's own engine",
        ),
    }
    ONLY: ClassVar = {
        "zero_quantized_weights": (False, "gathered weights are exact"),
        "zero_quantized_nontrainable_weights": (False, "gathered weights are exact"),
        "zero_quantized_gradients": (False, "reduced gradients are exact"),
        "zero_hpz_partition_size": (1, "a mesh of two dimensions does this in PyTorch"),
        "mics_shard_size": (-1, "a mesh of two dimensions does this in PyTorch"),
        "cpu_offload_param": (False, 'the old spelling; write "offload_param": {"device": "cpu"}'),
        "cpu_offload": (False, 'the old spelling; write "offload_optimizer": {"device": "cpu"}'),
    }
    REFUSED: ClassVar = {
        "cpu_offload_use_pin_memory": "the old spelling; write offload_optimizer.pin_memory",
        "zenflow": "it changes the result of a step; leave it out",
    }


class OffloadConfig(Section):
    """The whole configuration section."""

    zero_optimization: ZeroOptimizationConfig = ZeroOptimizationConfig()
    """What is sharded, and what is offloaded."""
    aio: AioConfig = AioConfig()
    """How bytes move between memory and files."""
    gradient_clipping: float = key(0.0, "a number, 0 or more", "same, default 1.0 since June 2026", "total norm", ge=0)
    """Largest total norm of all gradients, 0 or more. 0 is off."""
    overlap_step: Literal["off", "forward", "backward"] | None = key(None, "one of these")
    """When subgroups are updated. `off`: inside `step()`. `forward`: behind it, under the next forward, each before its
    parameters are gathered; plain modules need the model for that. `backward`: as soon as a gradient is final, what is
    left as with `forward`; needs `gradient_clipping` 0 and `skip_non_finite: false`. The bits are the same. Left out,
    it is `forward` for split shards of FSDP2 (what `initialize` makes of `bf16`) with state on NVMe, and `off` for the
    rest."""
    skip_non_finite: bool = key(True, "true or false")
    """Skip a step with a gradient that is not finite, and count it. `false`: such a gradient is an error."""
    host_budget: ByteBudget | None = key(None, '"auto", or 4 KiB or more, as "8GiB"', "", "bytes")
    """Host memory that one rank may use for staging buffers and for what stays in it of a kind whose tier is NVMe
    (optimizer state, blocks of parameters, blocks of gradients), 4 KiB or more; the rest goes to NVMe. `auto` is this
    rank's share of what is available, less a reserve. Left out, everything is where its `device` says."""
    train_batch_size: Count | None = key(None, "a whole number, 1 or more", "same", "samples")
    """Samples of one optimizer step over all ranks, 1 or more: the product of the next two keys and the number of
    data-parallel ranks. Of the three keys, one that is left out is derived."""
    train_micro_batch_size_per_gpu: Count | None = key(None, "a whole number, 1 or more", "same", "samples")
    """Samples of one forward and backward on one rank, 1 or more."""
    gradient_accumulation_steps: Count | None = key(None, "a whole number, 1 or more", "same", "micro-batches")
    """Forwards and backwards for one optimizer step, 1 or more; 1 where nothing says otherwise."""
    bf16: Bf16Config = Bf16Config()
    """Forward and backward in bf16 with fp32 master weights."""
    fp16: Fp16Config = Fp16Config()
    """Forward and backward in fp16 with fp32 master weights and loss scaling."""
    torch_autocast: TorchAutocastConfig = TorchAutocastConfig()
    """Forward under `torch.autocast`, with parameters and gradients in fp32."""
    offload_gradients: OffloadGradientsConfig = OffloadGradientsConfig()
    """Where the gradient partitions of each rank live between their arrival and the step."""
    communication_data_type: DType | None = key(None, "one of these", "same")
    """What gradients are reduced in. Left out, it follows the compute dtype: bf16 reduces in bf16, fp16 in fp16, all
    else in fp32; with `torch_autocast` the classes listed there reduce in its dtype. torch's spellings do as well."""
    gradient_accumulation_dtype: DType | None = key(None, "one of these", "data_types.grad_accum_dtype, accepted too")
    """What gradients are added up in over micro-batches, and reach the optimizer in. Left out, it follows the compute
    dtype. fp32 goes with everything, bf16 with `bf16`, fp16 with `fp16`. torch's spellings do as well."""
    fp32_modules: Patterns = key((), 'a list of patterns, as ["*.router", "LayerNorm"]')
    """Modules that stay fp32 in a `bf16` or `fp16` model, with all that is in them: shell patterns of qualified names,
    of modules or parameters, or of class names, with or without package. Parameters that came in fp32 in a model that
    also has 16-bit ones stay fp32 without it."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """The optimizer that `initialize` makes."""
    scheduler: SchedulerConfig | None = None
    """The learning-rate schedule that `initialize` makes; without this section there is none."""

    SPELLINGS: ClassVar = {"bfloat16": "bf16", "data_types.grad_accum_dtype": "gradient_accumulation_dtype"}
    IGNORED: ClassVar = {
        **each(
            "steps_per_print wall_clock_breakdown memory_breakdown dump_state",
            "nothing is printed per step; the optimizer's stats() has the figures",
        ),
        **each(
            "comms_logger flops_profiler tensorboard wandb csv_monitor comet",
            "nothing is logged or profiled from here; torch.profiler and the training loop can",
        ),
        **each("dataloader_drop_last vocabulary_size", "the training loop brings its own data"),
        "zero_allow_untested_optimizer": "there is no list of tested optimizers",
        "zero_force_ds_cpu_optimizer": "the update is always this package's own kernel",
    }
    ONLY: ClassVar = {
        "activation_checkpointing": (
            {"partition_activations": False, "cpu_checkpointing": False, "contiguous_memory_optimization": False},
            "the model checkpoints its activations itself, with torch.utils.checkpoint",
        ),
        "amp": ({"enabled": False}, "there is no Apex; enable bf16, fp16 or torch_autocast"),
        "autotuning": ({"enabled": False}, "nothing is tuned by trial runs"),
        "checkpoint": (
            {"load_universal": False, "use_node_local_storage": False},
            "checkpoints have the format of torch.distributed.checkpoint, in one folder that all ranks see",
        ),
        "elasticity": ({"enabled": False}, "a run keeps its ranks; write the three batch keys"),
        **each(
            "curriculum_learning data_efficiency eigenvalue progressive_layer_drop",
            ({"enabled": False}, "what is trained, and on what, is up to the training loop"),
        ),
        **each("prescale_gradients sparse_gradients disable_allgather", (False, "PyTorch does the communication")),
        "gradient_predivide_factor": (1.0, "PyTorch does the communication"),
        "gradient_allreduce_op": ("mean", "gradients are averaged over ranks"),
    }
    REFUSED: ClassVar = {
        **each(
            "compression_training quantize_training sparse_attention weight_quantization",
            "it changes what is computed; change the model itself and leave it out",
        ),
        **each(
            "data_types.param_dtype data_types.buffer_dtype",
            "bf16 and fp16 decide this; leave it out",
        ),
        "device_budget": "a CUDA model keeps its parameters and gradients on the device, all else is in host memory "
        "or on NVMe; write host_budget, or leave it out",
        WRAPPER: "it holds the whole section only where it stands alone; move the keys beside it into it",
    }

    OTHERWISE: ClassVar = {
        "gradient_clipping": "DeepSpeed clips at 1.0 (0.0 before June 2026), here nothing is; write 1.0, or 0.0",
    }

    @property
    def nvme_paths(self) -> tuple[Path, ...]:
        """The folders for swap files; empty unless `offload_optimizer.device` is `nvme`."""
        return self.zero_optimization.offload_optimizer.nvme_path

    @property
    def compute_dtype(self) -> DType:
        """What parameters are gathered and computed in; under `torch_autocast` fp32, of which autocast departs."""
        return "bf16" if self.bf16.enabled else "fp16" if self.fp16.enabled else "fp32"

    @property
    def autocast_dtype(self) -> HalfDType | None:
        """What autocast computes in; None where it is not enabled."""
        return self.torch_autocast.dtype if self.torch_autocast.enabled else None

    def batch_sizes(self, world_size: int) -> BatchSizes:
        """Complete the three batch keys for a number of data-parallel ranks.

        Raises:
            ConfigError: they do not go together; names the three and a right value.
        """
        train, micro = self.train_batch_size, self.train_micro_batch_size_per_gpu
        return complete_batch_sizes(train, micro, self.gradient_accumulation_steps, world_size)

    @model_validator(mode="after")
    def _agree(self) -> Self:
        for wrong, what in (*self._weights_and_paths(), *self._precision(), *self._overlap()):
            raise contradiction(wrong, what)
        return self

    def _weights_and_paths(self) -> Iterator[tuple[str, str]]:
        weights = self.aio.path_weights
        sections = {"zero_optimization.offload_optimizer": self.nvme_paths}
        zero = self.zero_optimization
        for name, paths in (
            ("zero_optimization.offload_param", zero.offload_param.nvme_path),
            ("offload_gradients", self.offload_gradients.nvme_path),
        ):
            if paths:
                sections[name] = paths
        if len(sections) > 1 and not self.nvme_paths:
            del sections["zero_optimization.offload_optimizer"]
        for name, paths in sections.items():
            if weights is not None and len(weights) != len(paths):
                why = f"{name}.nvme_path has {len(paths)} path(s)"
                yield "aio.path_weights", f"{why}; write as many weights or leave it out"

    def _precision(self) -> Iterator[tuple[str, str]]:
        modes = {"bf16": self.bf16.enabled, "fp16": self.fp16.enabled, "torch_autocast": self.torch_autocast.enabled}
        enabled = [f"{name}.enabled" for name in modes if modes[name]]
        if len(enabled) > 1:
            yield enabled[-1], f"{' and '.join(enabled[:-1])} = true beside it; write true in one of them only"
        if self.fp32_modules and self.compute_dtype == "fp32":
            why = "goes with bf16.enabled or fp16.enabled = true"
            if self.autocast_dtype:
                why += "; under torch_autocast all but lower_precision_safe_modules is gathered in fp32"
            yield "fp32_modules", f"{why}; leave it out, or enable one of the two"
        mode = f"{enabled[0]} = true" if enabled else "neither bf16.enabled nor fp16.enabled is true"
        for name, dtype, half in (
            ("gradient_accumulation_dtype", self.gradient_accumulation_dtype, self.compute_dtype),
            ("communication_data_type", self.communication_data_type, self.autocast_dtype or self.compute_dtype),
        ):
            free = name == "communication_data_type" and not enabled
            if not free and dtype not in (None, "fp32", half):
                choice = '"fp32"' if half == "fp32" else f'"{half}" or "fp32"'
                yield name, f"{mode}; write {choice} or leave it out"

    def _overlap(self) -> Iterator[tuple[str, str]]:
        if not self.skip_non_finite and self.fp16.enabled:
            why = "fp16.enabled = true looks for its loss scale by skipping steps"
            yield "skip_non_finite", f"{why}; leave it out"
        if self.overlap_step != "backward":
            return
        other = 'or write overlap_step = "forward"'
        if self.gradient_clipping:
            why = f"gradient_clipping = {self.gradient_clipping} needs all gradients before the first update"
            yield "overlap_step", f"{why}; write gradient_clipping = 0, {other}"
        if self.skip_non_finite:
            why = "a step that may be skipped needs all gradients before the first update"
            yield "overlap_step", f"{why}; write skip_non_finite = false, {other}"

    @classmethod
    def of(cls, section: "OffloadConfig | Mapping[str, Any] | str | Path") -> "OffloadConfig":
        """Take a section in any form that the public classes accept: itself, a dict, or the path of a file."""
        if isinstance(section, OffloadConfig):
            return section
        if isinstance(section, str | Path):
            return cls.from_file(section)
        if isinstance(section, Mapping):
            return cls.from_dict(section)
        raise ConfigError([f"{section!r} is no section; pass an OffloadConfig, a dict or the path of a file"])

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read a dict that looks as it would in a file.

        Raises:
            ConfigError: every problem, by its full key, with what to write instead.
        """
        return read(cls, data, "config")

    @classmethod
    def from_file(cls, path: str | Path) -> Self:
        """Read a .json or .toml file; a relative `nvme_path` is relative to the working folder.

        Raises:
            ConfigError: every problem, by its full key or by line and column.
            OSError: the file cannot be read.
        """
        path = Path(path)
        return read(cls, parse_file(path), str(path))
