"""What one demo is asked to do, checked before anything starts."""

import os
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from nvme_offload.offload.host.proc import Mount, mount_of

HEAD_SIZE = 64
VOCABULARY = 256
PAIRS = VOCABULARY * VOCABULARY
SUBGROUPS_WANTED = 16
TILE_NUMEL = 64 * 1024
BUFFER_COUNT = 4
STATE_BYTES_PER_PARAMETER = 12  # the most any precision needs: fp32 master weight, exp_avg and exp_avg_sq
SLACK_BYTES = 64 * 2**20


class ComputeDevice(StrEnum):
    """Where forward and backward run."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, kw_only=True)
class ModelSize:
    """The shape of the GPT, and how long it trains unless told otherwise."""

    layers: int
    width: int
    steps: int = 20

    @property
    def num_parameters(self) -> int:
        """Elements of all parameters; `test_demo.py` compares it with the real module."""
        embeddings = (VOCABULARY + PAIRS + VOCABULARY) * self.width
        return embeddings + self.layers * (12 * self.width**2 + 2 * self.width) + self.width

    @property
    def sub_group_size(self) -> int:
        """Elements of one subgroup, so that a step has about sixteen and the pipeline can be seen."""
        blocks = -(-self.num_parameters // (SUBGROUPS_WANTED * TILE_NUMEL))
        return blocks * TILE_NUMEL

    @property
    def swap_bytes(self) -> int:
        """Space that the swap file may need, a little generous."""
        return self.num_parameters * STATE_BYTES_PER_PARAMETER * 21 // 20 + SLACK_BYTES


PRESETS = {
    "tiny": ModelSize(layers=2, width=64, steps=20),
    "small": ModelSize(layers=6, width=384, steps=60),
    "medium": ModelSize(layers=12, width=768, steps=20),
}


def parse_size(text: str) -> ModelSize:
    """Reads a preset's name, or layers and width as in `8x512`.

    Raises:
        ValueError: It is neither; the message says what would be.
    """
    if text in PRESETS:
        return PRESETS[text]
    layers, cross, width = text.lower().partition("x")
    if not (cross and layers.isdecimal() and width.isdecimal()):
        raise ValueError(f"{text!r} is not {', '.join(PRESETS)} or LAYERSxWIDTH such as 8x512")
    size = ModelSize(layers=int(layers), width=int(width))
    if not 1 <= size.layers <= 96:
        raise ValueError(f"{text!r} asks for {size.layers} layers; 1 to 96 are possible")
    if not HEAD_SIZE <= size.width <= 8192 or size.width % HEAD_SIZE:
        raise ValueError(f"{text!r} asks for width {size.width}; multiples of {HEAD_SIZE} up to 8192 are possible")
    return size


def mount_at(path: Path) -> Mount | None:
    """The mount that a folder is on; None where /proc does not say."""
    fd = os.open(path, os.O_PATH)
    try:
        return mount_of(fd)
    finally:
        os.close(fd)


def file_system_type(path: Path) -> str:
    """The type of the file system that holds `path`, such as ext4, or "unknown"."""
    mount = mount_at(path)
    return mount.kind if mount else "unknown"


def choose_swap_parent(path: Path | None, out: Path) -> Path:
    """The directory that will hold the swap directory: the one asked for, or one that is on a drive.

    Raises:
        ValueError: The directory is missing or lives in memory, or no candidate is on a drive.
    """
    if path is not None:
        if not path.is_dir():
            raise ValueError(f"{path} is not an existing directory")
        if not os.access(path, os.W_OK | os.X_OK):
            raise ValueError(f"{path} is not writable")
        if (mount := mount_at(path)) and mount.is_memory:
            raise ValueError(f"{path} is on {mount.kind}, which is memory and not a drive; choose another directory")
        return path
    candidates = [out, Path.cwd(), Path.home(), Path("/var/tmp")]
    for candidate in candidates:
        if os.access(candidate, os.W_OK | os.X_OK) and not ((mount := mount_at(candidate)) and mount.is_memory):
            return candidate
    raise ValueError(f"none of {', '.join(map(str, candidates))} is on a drive; name a directory with --path")
