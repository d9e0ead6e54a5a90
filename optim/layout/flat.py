"""Show parameters and gradients as the kernels see them: one dimension, in the order of memory."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple, Protocol, Self

import torch
from torch.distributed.device_mesh import DeviceMesh

from nvme_offload.offload._torch_private import is_dtensor, is_wrapper, local_tensor, without_torch_function
from nvme_offload.offload.devices.device import KINDS, is_device, is_host
from nvme_offload.offload.shards.split_tensor import SplitTensor
from nvme_offload.offload.shards.stand_in import MemorylessTensor, StandIn
from .master import FORM_OF_DTYPE

GRAD_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Origin(NamedTuple):
    """Tells where the elements of this rank's part of a parameter are in the whole, both in order of memory.

    Dimensions come slowest first, and those that lie together in the part as in the whole are one.
    """

    param: int
    """Number of the parameter in the optimizer."""
    offset: int
    """Index of the part's first element in the whole."""
    sizes: tuple[int, ...]
    """Sizes of the part's dimensions."""
    strides: tuple[int, ...]
    """Strides of these in the whole."""

    def has_whole_blocks(self, block: int) -> bool:
        """Return whether each so many elements of the part that follow each other are such in the whole."""
        if 0 in self.sizes:
            return True
        return all(each % block == 0 for each in (self.offset, self.sizes[-1], *self.strides[:-1]))


Sharding = tuple[DeviceMesh, tuple[bool, ...]]
"""A mesh, and over which of its dimensions a parameter is sharded; over the others it is copied."""


class Layout(NamedTuple):
    """Says how the elements of a parameter lie in memory. Its state follows it, so it must stay."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_split: bool
    """Whether this is what is stored of a split parameter, which has its other parts elsewhere."""
    sharding: Sharding | None
    """Which ranks have the rest of it; None: it is no DTensor."""

    @classmethod
    def of(cls, leaf: torch.Tensor, param: torch.Tensor) -> Self:
        """Return the present layout of ``param``, the `storage_of` a parameter."""
        is_split = isinstance(local_tensor(leaf), SplitTensor)
        sharding = None
        if is_dtensor(leaf):
            sharding = leaf.device_mesh, tuple(not placement.is_replicate() for placement in leaf.placements)
        return cls(param.dtype, param.device, tuple(param.shape), param.stride(), is_split, sharding)

    def fits(self, leaf: torch.Tensor, param: torch.Tensor) -> bool:
        """Return whether `of` them would be equal, as far as this rank's part goes."""
        is_split = param is not leaf and isinstance(local_tensor(leaf), SplitTensor)
        return self[:-1] == (param.dtype, param.device, param.shape, param.stride(), is_split)

    def __str__(self) -> str:
        kind = "a shard in parts" if self.is_split else "a tensor"
        return f"{kind} of {self.dtype} on {self.device}, shape {self.shape}, strides {self.strides}"


def is_dense(tensor: torch.Tensor) -> bool:
    """Return whether the elements fill one run of memory without gaps or overlap, in whatever order of dimensions."""
    if tensor.numel() == 0:
        return True
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size == 1:
            continue
        if stride != expected:
            return False
        expected *= size
    return True


def flat_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return 1D [numel] over the memory of a dense tensor, outside autograd, also where its readers wait."""
    with without_torch_function():
        return tensor.detach() if tensor.dim() == 1 else tensor.detach().as_strided((tensor.numel(),), (1,))


def room_like(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return new memory with the shape and strides of a dense tensor, without its values."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype, device=device)


def unflatten(flat: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """View a flat tensor with the shape and strides of the parameter `like`."""
    return flat if like.ndim == 1 else flat.as_strided(like.shape, like.stride())


def storage_of(leaf: torch.Tensor) -> torch.Tensor:
    """Return what of a parameter is in this process's memory.

    The parameter itself; of a sharded one (DTensor) this rank's shard; of a split shard what is stored of it, without
    padding, or where that is on a tier a stand-in for it.
    """
    local = local_tensor(leaf)
    return local.parts.declared(local.shape) if isinstance(local, SplitTensor) else local


def check_is_no_wrapper(param: torch.Tensor, name: str) -> None:
    """Raise ValueError for a tensor of a class that keeps its values in other tensors, as those of torchao do."""
    if not is_wrapper(param) or isinstance(param, MemorylessTensor):
        return
    raise ValueError(
        f"{name} is a {type(param).__name__}, which keeps its values in other tensors: these can be neither moved nor "
        "updated here, and an all-gather of its own would be lost. Give its module a plain torch.nn.Parameter with the "
        "values. torchao's float8 has plain ones with Float8LinearConfig(enable_fsdp_float8_all_gather=False)"
    )


def check_param(param: torch.Tensor, name: str) -> None:
    """Raise ValueError for a parameter that cannot be offloaded."""
    check_is_no_wrapper(param, name)
    if param.layout is not torch.strided:
        raise ValueError(f"{name} has layout {param.layout}: only strided parameters can be offloaded")
    if param.dtype not in FORM_OF_DTYPE:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in FORM_OF_DTYPE)
        raise ValueError(f"{name} is {param.dtype}: parameters must be {allowed}; leave it to another optimizer")
    if not (is_host(param.device) or is_device(param.device)):
        raise ValueError(f"{name} is on {param.device}: parameters must be on {KINDS}")
    if not is_dense(param):
        raise ValueError(
            f"{name} has gaps in memory (shape {tuple(param.shape)}, strides {param.stride()}): "
            "make it dense, for example with nn.Parameter(param.detach().contiguous())"
        )


def check_no_overlap(params: Sequence[torch.Tensor], names: Sequence[str]) -> None:
    """Raise ValueError when two parameters share memory: one optimizer state cannot describe both."""
    ranges = sorted(
        (param.data_ptr(), param.data_ptr() + param.numel() * param.element_size(), index)
        for index, param in enumerate(params)
        if param.numel() and not isinstance(param, StandIn)
    )
    for (_, stop, first), (start, _, second) in pairwise(ranges):
        if start < stop:
            remedy = "tie weights by using one Parameter in both places"
            raise ValueError(f"{names[first]} and {names[second]} share memory: {remedy}")


def flat_grad(leaf: torch.Tensor, layout: Layout, name: str) -> torch.Tensor | None:
    """Return the gradient of a parameter with this layout, 1D [numel], in its order of memory; None if there is none.

    Of a sharded parameter it is this rank's part; where that is on a tier the stand-in for it. A DTensor laid out
    otherwise than its parameter (a sum that is still in parts on the ranks of tensor parallelism) is brought into its
    layout first, which all of these ranks must do. ValueError: the kernels cannot take it.
    """
    sharded = leaf.grad
    if sharded is None:
        return None
    if is_dtensor(leaf) and is_dtensor(sharded) and sharded.placements != leaf.placements:
        sharded = sharded.redistribute(placements=leaf.placements)
    grad = local_tensor(sharded)
    if grad.layout is not torch.strided:
        raise ValueError(
            f"the gradient of {name} is sparse ({grad.layout}): dense gradients are needed; build the module with "
            "sparse=False, or give this parameter to torch.optim.SparseAdam"
        )
    if grad.dtype not in GRAD_DTYPES:
        allowed = ", ".join(str(dtype).removeprefix("torch.") for dtype in GRAD_DTYPES)
        raise ValueError(f"the gradient of {name} is {grad.dtype}: it must be {allowed}")
    if grad.shape != layout.shape or grad.device != layout.device:
        raise ValueError(
            f"the gradient of {name} has shape {tuple(grad.shape)} on {grad.device}, the parameter "
            f"{layout.shape} on {layout.device}"
        )
    if isinstance(grad, StandIn):
        return grad
    is_contiguous = grad.is_contiguous()
    if grad.stride() != layout.strides:
        ordered = torch.empty_strided(layout.shape, layout.strides, dtype=grad.dtype, device=grad.device)
        if not (is_contiguous and ordered.is_contiguous()):
            grad, is_contiguous = ordered.copy_(grad), ordered.is_contiguous()
    if grad.requires_grad or not is_contiguous:
        return flat_view(grad)
    return grad.view(-1)


class StoredGrad(Protocol):
    """A gradient on a tier is this to whoever finds a stand-in for it."""

    num_changes: int
    """Number of gradients that arrived, and of changes in place."""

    @property
    def landed_sums(self) -> torch.Tensor:
        """The fp64 sums of squares of its tiles, which the norm needs."""

    def view(self) -> torch.Tensor:
        """Return it in memory, 1D, while its block is held."""

    def copy(self) -> torch.Tensor:
        """Copy it into memory of its own."""

    def set(self, values: torch.Tensor) -> None:
        """Overwrite it with values of its shape."""


class PartitionStandIn(StandIn):
    """``p.grad`` is this while the gradient partition is on the tier."""

    partition: StoredGrad
