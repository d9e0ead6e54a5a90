"""The sections of the parameter tier, the gradient tier and activations."""

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, WithJsonSchema

from ..units import KiB
from ..user_path import user_path
from .keys import ByteBudget, ByteCount, Contradiction, DeepSpeedModel, NumElements, Whole, key


def _paths(value: Any) -> tuple[Path, ...]:
    items = [] if value is None else value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str | Path) and item != "" for item in items):
        raise ValueError("is neither a path nor a list of paths")
    paths = tuple(map(user_path, items))
    if len(set(paths)) < len(paths):
        raise ValueError("names one path twice")
    return paths


_PATHS_SCHEMA = {"type": ["string", "array", "null"], "items": {"type": "string"}}
PathTuple = Annotated[tuple[Path, ...], BeforeValidator(_paths), WithJsonSchema(_PATHS_SCHEMA)]


def _file(value: Any) -> Path:
    if not isinstance(value, str | Path) or value == "":
        raise ValueError("is no path")
    return user_path(value)


FilePath = Annotated[Path, BeforeValidator(_file), WithJsonSchema({"type": "string"})]


class TierConfig(DeepSpeedModel):
    """The place of something: on a drive it has swap files."""

    device: Literal["none", "cpu", "nvme"] = key("none", "one of these")
    nvme_path: PathTuple = key((), "a path or a list of different paths")
    """Folder for the swap files, or a list of folders, as in `offload_optimizer`; it may be the same one. Needed for
    `device: nvme`, and only used there."""

    IDLE: ClassVar = {"nvme_path": ("device", "nvme")}

    def contradictions(self) -> Iterator[Contradiction]:
        """A folder that is missing, or that nothing uses."""
        if self.device == "nvme" and not self.nvme_path:
            yield Contradiction("nvme_path", 'device = "nvme" needs it; write a folder on the drive', ("device",))
        if self.device != "nvme" and self.nvme_path:  # of a model that was not read; the reader has taken it out
            why = f'has no use beside device = "{self.device}"; leave it out or write device = "nvme"'
            yield Contradiction("nvme_path", why, ("device",))


class OffloadParamConfig(TierConfig):
    """The place of each rank's parameters between uses: what is gathered of them, and in fp32 that is all."""

    device: Literal["none", "cpu", "nvme"] = key("none", "one of these", "same")
    """The tier of the parameters, in any precision, with the same bits. Of a model on the CPU `none` and `cpu` are the
    same place: host memory. Off a GPU, where `none` leaves them, each group is copied when it is gathered."""
    nvme_path: PathTuple = key((), "a path or a list of different paths", "same, one path")
    """Folder for the swap files, or a list of folders, as in `offload_optimizer`; it may be the same one. Needed for
    `device: nvme`, and only used there."""
    buffer_count: Whole = key(4, "a whole number, 2..64", "same, default 5", "buffers", ge=2, le=64)
    """Number of staging buffers, 2..64: one is gathered from while others are read and written. They also keep the
    blocks that are needed next."""
    max_in_cpu: NumElements | None = key(None, "a whole number, 0 or more", "same, default 1e9", "elements")
    """Elements of parameters on one rank that stay in host memory although `device` is `nvme`, 0 or more: as many
    blocks as these hold, from the first. A `host_budget` takes its place. Left out, none stay."""

    frozen: Literal["in_place", "copy"] | None = key(None, "one of these")
    """The place of frozen parameters of a model born from files, with `device: nvme`. `in_place`: these files,
    of which nothing is copied: they are read there in every step, and what cannot be is refused by name. `copy`: in the
    swap files, to which they are copied once. Left out: in place where that can be."""

    IGNORED: ClassVar = {
        "buffer_size": "a staging buffer is as large as the largest block, which is what is gathered together",
        "pin_memory": "offload_optimizer.pin_memory is for all that is copied to and from a GPU",
    }
    REFUSED: ClassVar = {"read_ahead": "leave it out: blocks are always read before they are needed"}

    IDLE: ClassVar = {**TierConfig.IDLE, "max_in_cpu": ("device", "nvme"), "frozen": ("device", "nvme")}


class OffloadGradientsConfig(TierConfig):
    """The place of each rank's gradient partitions between their arrival and the step."""

    device: Literal["none", "cpu", "nvme"] = key("none", "one of these")
    """The tier of the gradient partitions, in any precision, with the same bits. Of a model on the CPU `none` and `cpu`
    are the same place: host memory. From a GPU, where `none` leaves them, they are copied as they become final."""
    buffer_count: Whole = key(4, "a whole number, 2..64", "", "buffers", ge=2, le=64)
    """Number of staging buffers, 2..64, each as large as the largest block of gradients."""


class ActivationsConfig(TierConfig):
    """The place of what a forward saves for backward."""

    keep: Literal["boundaries", "attention", "all"] = key("boundaries", "one of these")
    """Which of it is kept. `boundaries`: the input of each block, which is computed once more in backward.
    `attention`: its results, too, so that they are not computed again. `all`: everything that autograd saves. The bits
    are the same."""
    device: Literal["none", "cpu", "nvme"] = key("none", "one of these")
    """The tier of what is kept. `none` leaves a model as it is; `cpu` is host memory."""
    host_budget: ByteBudget = key("auto", '"auto", or 4 KiB or more, as "4GiB"', "", "bytes")
    """Host memory of one rank for what is kept, 4 KiB or more; the oldest of the rest goes to NVMe. Staging buffers
    take at most 64 MiB more, and memory for reads as much. `auto` is this rank's share of what is available when
    training begins, less a reserve."""
    min_bytes: ByteCount = key(64 * KiB, '0 B or more, as "64KiB"', "", "bytes", ge=0)
    """Smaller memory than this is not moved, 0 B or more."""
