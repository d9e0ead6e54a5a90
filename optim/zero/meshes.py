"""The mesh of a training: where none is given, what each dimension is for, and whether its ranks were given alike."""

import hashlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from itertools import chain
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import HOST
from nvme_offload.offload.errors import ConfigError
from ..access.same_values import differing, first_difference, take_from_first
from ..ranks.collective import gather
from ..ranks.drives import join

PIPELINE, TENSOR = "pp", "tp"
DATA_PARALLEL = (("dp_shard",), ("dp",), ("dp_replicate", "dp_shard"))
"""A mesh may have these data-parallel dimensions, in this order: sharded, or replicated and sharded (hybrid)."""

_KNOWN = (PIPELINE, "dp_replicate", "dp_shard", "dp", TENSOR)
_LOCAL = ("aio.", "offload_gradients.", "zero_optimization.offload_")
"""These keys of the section may differ between ranks: where bytes are changes neither numbers nor collectives."""
_SHARED = ("zero_optimization.offload_optimizer.durable",)
"""These keys may not: ranks commit together."""


@dataclass(frozen=True)
class MeshRoles:
    """The parts of a mesh by what happens over them. Dimensions have the names that torchtitan gives them."""

    data_parallel: DeviceMesh
    """The dimensions that FSDP2 shards over: 1-D, or 2-D (replicate, shard)."""
    tensor_parallel: DeviceMesh | None
    """1-D: what parameters may be DTensors over before FSDP2 shards them."""
    pipeline: DeviceMesh | None
    """The ranks of other stages, which have other parameters, 1-D; None without a pipeline."""

    @classmethod
    def of(cls, mesh: DeviceMesh) -> Self:
        """Read the names of a mesh's dimensions; without any of the known names it is data-parallel as a whole."""
        names = mesh.mesh_dim_names or ()
        if not set(names) & set(_KNOWN):
            if mesh.ndim > 2:
                raise ValueError(f"mesh: {mesh.ndim} dimensions need names; name them from {', '.join(_KNOWN)}")
            if mesh.ndim == 2 and not names:
                example = 'mesh_dim_names=("dp_replicate", "dp_shard")'
                raise ValueError(f"mesh: FSDP2 needs names of the dimensions of a 2-D mesh; make it with {example}")
            return cls(mesh, None, None)
        if unknown := [name for name in names if name not in _KNOWN]:
            raise ValueError(f"mesh: nothing is known of a dimension {unknown[0]!r}; known are {', '.join(_KNOWN)}")
        sharded = tuple(name for name in names if name not in (PIPELINE, TENSOR))
        if sharded not in DATA_PARALLEL:
            choices = " or ".join(f"({', '.join(choice)})" for choice in DATA_PARALLEL)
            found = f"({', '.join(sharded)})" if sharded else "none"
            raise ValueError(
                f"mesh: its data-parallel dimensions must be {choices}, in this order, perhaps of size 1; "
                f"there are {found}"
            )
        return cls(
            mesh[sharded], mesh[TENSOR] if TENSOR in names else None, mesh[PIPELINE] if PIPELINE in names else None
        )

    @property
    def num_data_parallel_ranks(self) -> int:
        """Number of ranks that see different samples: replicate x shard."""
        return self.data_parallel.size()

    @property
    def groups_of_copies(self) -> list[dist.ProcessGroup]:
        """Groups of the ranks that each have all buffers of a stage."""
        meshes = (self.data_parallel, self.tensor_parallel)
        return [group for mesh in meshes if mesh is not None for group in mesh.get_all_groups()]

    @property
    def pipeline_group(self) -> dist.ProcessGroup | None:
        """Ranks whose gradients belong to the same norm although they have other parameters."""
        return self.pipeline.get_group() if self.pipeline is not None else None


def is_launched() -> bool:
    """Whether a launcher has said which of several ranks this process is."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_mesh(device_type: str, config: object = None) -> DeviceMesh:
    """Return a mesh of all ranks, which follow the drives of a read `config`; without a launcher, of this process."""
    if not dist.is_initialized():
        backend = _backend_for(device_type)
        if is_launched():
            join(backend, config if isinstance(config, OffloadConfig) else None)
        else:
            store = dist.HashStore()  # type: ignore[attr-defined]  # public, but not in torch's list of exports
            dist.init_process_group(backend, rank=0, world_size=1, store=store, timeout=timedelta(hours=1))
    return init_device_mesh(device_type, (dist.get_world_size(),))


def _backend_for(device_type: str) -> str:
    """Return the backend of a device beside one for the CPU, where state is gathered for who looks at it."""
    on_host = dist.get_default_backend_for_device(HOST.type)
    if device_type == HOST.type:
        return on_host
    return f"{HOST.type}:{on_host},{device_type}:{dist.get_default_backend_for_device(device_type)}"


def replicated(mesh: DeviceMesh) -> DeviceMesh:
    """Return the mesh for ZeRO stage 0: one whose ranks each have the whole model; ConfigError if there is none."""
    num_ranks = MeshRoles.of(mesh).data_parallel.size(-1)
    if num_ranks == 1:
        return mesh
    if mesh.ndim == 1 and mesh.size() == dist.get_world_size():
        return DeviceMesh(mesh.device_type, mesh.mesh.unsqueeze(1), mesh_dim_names=("dp_replicate", "dp_shard"))
    what = (
        f"nothing is sharded, and the mesh shards over {num_ranks} ranks; give initialize one whose dimension "
        f"dp_replicate has these ranks and dp_shard one, or write 1"
    )
    raise ConfigError([f"zero_optimization.stage = 0: {what}"])


def dtypes_of_stages(model: nn.Module, roles: MeshRoles) -> set[torch.dtype] | None:
    """Dtypes of the parameters of all stages of a pipeline; None without one. Every rank must call it."""
    if roles.pipeline is None:
        return None
    of_stages = gather({param.dtype for param in model.parameters()}, roles.pipeline_group)
    return set().union(*of_stages.values())


def check_not_sharded(model: nn.Module, roles: MeshRoles) -> None:
    """Raise ValueError for a parameter that is sharded over anything but the mesh's tensor-parallel dimension."""
    for name, param in model.named_parameters():
        if isinstance(param, DTensor) and param.device_mesh != roles.tensor_parallel:
            if roles.tensor_parallel is None:
                remedy = f"pass a plain module, or a mesh whose dimension {TENSOR!r} is the one it is sharded over"
            else:
                remedy = f"shard it over mesh[{TENSOR!r}] of the mesh that initialize gets, or not at all"
            what = (
                f"{name} is sharded already, over {param.device_mesh}, perhaps for an engine that the model had before"
            )
            raise ValueError(f"initialize: {what}; {remedy}")


def check_same_on_ranks(mesh: DeviceMesh, roles: MeshRoles, config: OffloadConfig, model: nn.Module) -> None:
    """Compare what ranks were given, before a difference becomes a collective that never ends.

    The section must be the same everywhere, but for ``aio`` and ``offload_*``; names, shapes, dtypes and
    ``requires_grad`` of the parameters and buffers on the ranks of one pipeline stage. `check_same_values` follows.
    """
    mine = dict(_flat(config.model_dump(mode="json")))
    (first_rank, first), *sections = gather(mine, *mesh.get_all_groups()).items()
    problems = []
    compared = (key for section in (first, *dict(sections).values()) for key in section)
    for key in dict.fromkeys(key for key in compared if key in _SHARED or not key.startswith(_LOCAL)):
        for rank, section in sections:
            if section.get(key) != first.get(key):
                what = f"on rank {first_rank} and {section.get(key)!r} on rank {rank}"
                problems.append(f"{key} = {first.get(key)!r} {what}; give every rank the same section")
                break
    if problems:
        raise ConfigError(problems)
    named = chain(model.named_parameters(), model.named_buffers())
    layout = repr([(name, tuple(t.shape), t.dtype, t.requires_grad, t.device.type) for name, t in named])
    digest = hashlib.sha256(layout.encode()).hexdigest()
    (first_rank, own), *models = gather(digest, *roles.data_parallel.get_all_groups()).items()
    for rank, other in models:
        if other != own:
            raise ValueError(
                f"initialize: the models of ranks {first_rank} and {rank} differ in names, shapes, dtypes, devices or "
                "requires_grad of their parameters or buffers; build the same one on every rank of a stage"
            )


def check_same_values(roles: MeshRoles, model: nn.Module, *, take_first: bool) -> None:
    """Compare parameters and buffers over data-parallel ranks. ValueError, unless any rank asks to `take_first` one's.

    Collective. Those on meta have no values yet, and get the same on all ranks.
    """
    named = chain(model.named_parameters(), model.named_buffers())
    tensors = {name: tensor for name, tensor in named if not tensor.is_meta}
    groups = roles.data_parallel.get_all_groups()
    names = differing(tensors, groups)
    if any(gather(take_first, *groups).values()):
        take_from_first([tensors[name] for name in names], groups)
    elif names:
        where = first_difference(names[0], tensors[names[0]], groups)
        more = f", and {len(names) - 1} more differ" if len(names) > 1 else ""
        raise ValueError(
            f"initialize: {where}{more}: the model would be a mixture. Build it from one seed or file on every rank, "
            "or write initialize(sync_module_states=True), which takes the first rank's values"
        )


def _flat(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in section.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
