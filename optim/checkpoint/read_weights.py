"""The weights of a checkpoint, read by one process alone, without the training that wrote it."""

from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load

from nvme_offload.offload.errors import CheckpointError
from nvme_offload.optim.checkpoint import files
from nvme_offload.optim.checkpoint.contents import MODEL
from nvme_offload.optim.checkpoint.storage import VerifiedReader, read_metadata


def read_weights(root: Path, tag: str | None = None) -> dict[str, torch.Tensor]:
    """Return parameters, in fp32, and buffers of a checkpoint, by name, in host memory.

    Args:
        root: the folder that it was saved into.
        tag: by default the latest.

    Raises:
        CheckpointError: there is no such checkpoint, or a file of it is missing or damaged.
    """
    folder = files.find(root, tag)
    if folder is None:
        raise CheckpointError(root, "holds no checkpoint")
    manifest = files.read_manifest(folder)
    for name, record in manifest.items():
        files.verify(folder / name, record, lambda size_bytes: None)
    metadata = read_metadata(folder, manifest)
    found = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype, device="cpu")
        for name, entry in metadata.state_dict_metadata.items()
        if name.startswith(f"{MODEL}.") and isinstance(entry, TensorStorageMetadata)
    }
    load(found, storage_reader=VerifiedReader(folder, metadata), no_dist=True)
    return {name.removeprefix(f"{MODEL}."): value for name, value in found.items()}
