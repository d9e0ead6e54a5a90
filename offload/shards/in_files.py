"""Shards whose bytes are in files that others wrote."""

from collections.abc import Sequence

import torch

from ..storage.file_ranges import FileRange, RangeLayout
from .stored import Padded, StoredShard, UnbornShard


class ShardInFiles(UnbornShard):
    """A shard whose bytes others wrote: those of these ranges, one after the other."""

    def __init__(self, form: Padded, device: torch.device, ranges: Sequence[FileRange]) -> None:
        super().__init__(form, device)
        self.ranges = ranges


def layout_of(stored: Sequence[StoredShard]) -> RangeLayout | None:
    """Lay out the shards of a block; None where the bytes of some are not in files of others, or not yet."""
    shards = [shard for shard in stored if isinstance(shard, ShardInFiles)]
    if len(shards) < len(stored):
        return None
    return RangeLayout.of([(shard.ranges, shard.form.numel * shard.form.dtype.itemsize) for shard in shards])
