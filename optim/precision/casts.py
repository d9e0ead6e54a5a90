"""The casts that a model lacks: in a 16-bit model with fp32 modules, and around the whole model under autocast."""

import functools
import threading
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Partial

from nvme_offload.offload._torch_private import tree_flatten, tree_unflatten, without_base
from nvme_offload.offload.devices.device import autocast_dtype
from nvme_offload.offload.errors import BlockOrderError
from nvme_offload.offload.warn import Once
from .parameter import NAMES, SIXTEEN_BITS
from .plan import PrecisionPlan

CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
"""Classes of modules that only hold others and have no forward."""

ONE_DTYPE = (
    nn.Linear,
    nn.Bilinear,
    *(nn.Conv1d, nn.Conv2d, nn.Conv3d),
    *(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d),
    *(nn.RNN, nn.LSTM, nn.GRU, nn.RNNCell, nn.LSTMCell, nn.GRUCell),
    nn.MultiheadAttention,
    nn.PReLU,
)
"""Classes of modules whose operators raise where inputs and parameters differ in dtype."""
NORMS = (nn.LayerNorm, nn.GroupNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Classes of modules whose operators raise where parameters are 16-bit and inputs are not; on the CPU only there."""


def cast_where_needed(model: nn.Module, plan: PrecisionPlan) -> None:
    """Give a 16-bit model in which some parameters are fp32 the casts that it lacks; autograd casts backward.

    A model that arrived in mixed dtypes casts by hand. It is computed as plain PyTorch computes it: a module whose
    forward is torch's own and takes one dtype only has its floating inputs cast to that of its parameters, and nothing
    else is cast.

    A model that arrived in one dtype knows nothing of the modules that the section names. Each of them casts 16-bit
    inputs to fp32, and its fp32 outputs to the dtype in which its first floating input came; called with fp32 inputs it
    gives fp32. What the model returns straight from such a module is fp32, wherever that was registered; and so is, for
    the model's own code, what the last module that has parameters gives: nothing after it computes in 16 bits.
    """
    if not {plan[name].compute for name, param in model.named_parameters() if param.ndim} > {torch.float32}:
        return
    named = {param for name, param in model.named_parameters() if name in plan.named_fp32}
    bordered = list(_outermost_within(model, named))
    inside = {inner for module in bordered for inner in module.modules()}
    for name, module in model.named_modules():
        if module not in inside and (dtype := _own_dtype(name, module, plan)) is not None:
            _cast_to_own(module, dtype)
    half = next(item.compute for item in plan.parameters.values() if item.compute in SIXTEEN_BITS)
    owners = [module for module in model.modules() if any(True for _ in module.parameters(recurse=False))]
    latest = _Unrounded([])
    for module in bordered:
        is_last = any(inner is owners[-1] for inner in module.modules())
        _wrap_forward(module, functools.partial(_in_fp32, without_inputs=half, stays_fp32=is_last, latest=latest))
    if bordered:
        _wrap_forward(model, latest.returned)


def guard_autocast(model: nn.Module, plan: PrecisionPlan) -> None:
    """Run the model's forward under autocast as the plan says, and look whether somebody else does already.

    With autocast in the plan, an autocast context around the model changes nothing, and is warned about. Without, such
    a context is an error. Inside the forward, autocast means what it means in PyTorch.
    """
    device_type, once = next(model.parameters()).device.type, Once()

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        around = autocast_dtype(device_type)
        if plan.autocast is None:
            if around is not None:
                raise RuntimeError(_autocast_without_section(around))
            return forward(*args, **kwargs)
        if around is not None:
            once.warn(
                "autocast outside",
                f"there is an autocast context ({NAMES.get(around, around)}) around the engine, which enters one of its"
                f" own: torch_autocast.dtype = {NAMES[plan.autocast]} holds; leave the outer one out",
            )
            # It may span steps, and its cache would hold the weights of the step before.
            torch.clear_autocast_cache()
        with torch.autocast(device_type, plan.autocast):
            return forward(*args, **kwargs)

    _wrap_forward(model, run)


def gather_fp32_outside_autocast(model: nn.Module, plan: PrecisionPlan) -> None:
    """Let a module that is gathered in autocast's dtype have its fp32 parameters where the model switches autocast off.

    They are gathered and their gradients reduced once more, in fp32, for each such call: an autocast context in the
    model's own forward means what it means in PyTorch.
    """
    for prefix, module in model.named_modules():
        # Attention computes with the parameters of its projection, whose forward it does not call.
        recurse = isinstance(module, nn.MultiheadAttention)
        shards = dict(module.named_parameters(recurse=recurse))
        if any(plan[f"{prefix}.{name}" if prefix else name].gather is plan.autocast for name in shards):
            _wrap_forward(module, functools.partial(_with_fp32_parameters, module=module, shards=shards, plan=plan))


def _with_fp32_parameters(
    forward: Callable[..., Any],
    *args: Any,
    module: nn.Module,
    shards: dict[str, nn.Parameter],
    plan: PrecisionPlan,
    **kwargs: Any,
) -> Any:
    device_type = next(iter(shards.values())).device.type
    if autocast_dtype(device_type) is plan.autocast:
        return forward(*args, **kwargs)
    places = [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in shards]
    gathered = [getattr(owner, name) for owner, name in places]
    try:
        for (owner, name), shard in zip(places, shards.values(), strict=True):
            delattr(owner, name)  # else only a Parameter could take its place
            setattr(owner, name, _whole(shard))
        return forward(*args, **kwargs)
    finally:
        for (owner, name), param in zip(places, gathered, strict=True):
            delattr(owner, name)
            setattr(owner, name, param)


def _whole(shard: nn.Parameter) -> torch.Tensor:
    """Gather a sharded parameter; the gradient is averaged over ranks, as FSDP2 does."""
    if not isinstance(shard, DTensor):
        return shard
    mesh = shard.device_mesh
    if sum(not placement.is_replicate() for placement in shard.placements) > 1:
        raise RuntimeError(
            "the model switches autocast off around a tensor-parallel module that is gathered in autocast's dtype: "
            "take its class out of torch_autocast.lower_precision_safe_modules"
        )
    whole = shard.full_tensor(grad_placements=[Partial()] * mesh.ndim)
    if whole.requires_grad:
        whole.register_hook(lambda grad: grad / mesh.size())  # type: ignore[no-untyped-call]
    return whole


def return_no_views(linear: nn.Linear) -> None:
    """Let a Linear that is gathered by itself be followed by operations in place, as FSDP2 else warns of."""
    _wrap_forward(linear, lambda forward, *args, **kwargs: without_base(forward(*args, **kwargs)))


def _autocast_without_section(dtype: torch.dtype) -> str:
    return (
        "there is an autocast context around the engine, and the section has torch_autocast.enabled = false: operators "
        "would compute in another dtype than the plan says, and parameters would still be gathered and gradients "
        f'reduced as if there were none. Write "torch_autocast": {{"enabled": true, "dtype": "{NAMES.get(dtype, dtype)}'
        '"}, which enters autocast by itself, or leave the context out'
    )


def _outermost_within(module: nn.Module, params: set[nn.Parameter]) -> Iterator[nn.Module]:
    """Yield the largest parts of `module` that are called and have no parameters but these."""
    for child in dict.fromkeys(module.children()):
        own = set(child.parameters())
        if own and own <= params and not isinstance(child, CONTAINERS):
            yield child
        else:
            yield from _outermost_within(child, params)


class _Unrounded(threading.local):
    """Knows what the fp32 module called last gave before the cast: what the model returns of it is not cast.

    In each thread, for forwards of several micro-batches go on by turns. Their blocks are computed in another one:
    `of_block`, which all threads share, has the addresses of what the latest of them gave after the cast.
    """

    def __init__(self, of_block: list[int]) -> None:
        super().__init__()
        self._pairs: list[tuple[Any, Any]] | None = None
        self._of_block = of_block

    def note(self, rounded: Any, exact: Any) -> None:
        """Remember an output and what it was cast from, while the model's forward runs."""
        leaves, _ = tree_flatten(rounded)
        if self._pairs is not None:
            self._pairs = list(zip(leaves, tree_flatten(exact)[0], strict=True))
        else:
            self._of_block[:] = _addresses(leaves)

    def returned(self, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Call the model's `forward`; BlockOrderError where it returns what cannot be had without the cast."""
        self._pairs = []
        self._of_block.clear()
        try:
            output = forward(*args, **kwargs)
            leaves, layout = tree_flatten(output)
            if self._of_block and not set(self._of_block).isdisjoint(_addresses(leaves)):
                raise BlockOrderError("the model returns what an fp32 block gives, which is rounded there and not here")
            exact = {id(rounded): exact for rounded, exact in self._pairs}
            if exact.keys().isdisjoint(map(id, leaves)):
                return output
            return tree_unflatten([exact.get(id(leaf), leaf) for leaf in leaves], layout)
        finally:
            self._pairs = None


def _addresses(leaves: Iterable[Any]) -> list[int]:
    return [leaf.data_ptr() for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _in_fp32(
    forward: Callable[..., Any],
    *args: Any,
    without_inputs: torch.dtype | None,
    stays_fp32: bool,
    latest: _Unrounded,
    **kwargs: Any,
) -> Any:
    """Call `forward` in fp32 and return what it gives in the dtype that it was given."""
    leaves, _ = tree_flatten((args, kwargs))
    came = [leaf.dtype for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    args, kwargs = _cast((args, kwargs), SIXTEEN_BITS, torch.float32)
    output = forward(*args, **kwargs)
    goes = came[0] if came else without_inputs
    if stays_fp32 or goes not in SIXTEEN_BITS:
        return output
    rounded = _cast(output, (torch.float32,), goes)
    latest.note(rounded, output)
    return rounded


def _own_dtype(name: str, module: nn.Module, plan: PrecisionPlan) -> torch.dtype | None:
    """Return what a module's floating inputs have to be, where its operators take one dtype only; else None.

    In a model that arrived in one dtype only 16-bit modules are asked: what is fp32 there has borders.
    """
    named = module.named_parameters(recurse=False)
    own = [f"{name}.{each}" if name else each for each, param in named if param.ndim]
    dtypes = {plan[param].compute for param in own}
    if len(dtypes) != 1 or not (_is_one_of(module, ONE_DTYPE) or _is_one_of(module, NORMS)):
        return None
    [dtype] = dtypes
    return dtype if plan.arrived_mixed or dtype in SIXTEEN_BITS else None


def _cast_to_own(module: nn.Module, dtype: torch.dtype) -> None:
    """Have a module's floating inputs cast to the dtype of its own parameters."""
    if dtype is torch.float32 and _is_one_of(module, NORMS):
        _wrap_forward(module, _norm_in_fp32)
        return
    others = tuple({torch.float32, *SIXTEEN_BITS} - {dtype})

    def run(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        args, kwargs = _cast((args, kwargs), others, dtype)
        return forward(*args, **kwargs)

    _wrap_forward(module, run)


def _norm_in_fp32(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Have an fp32 norm give 16 bits for 16 bits: as PyTorch's does on the CPU; CUDA has no kernel for it."""
    leaves, _ = tree_flatten((args, kwargs))
    if all(leaf.device.type == "cpu" for leaf in leaves):
        return forward(*args, **kwargs)
    return _in_fp32(forward, *args, without_inputs=None, stays_fp32=False, latest=_Unrounded([]), **kwargs)


def _is_one_of(module: nn.Module, classes: Iterable[type[nn.Module]]) -> bool:
    """Whether a module's forward is that of one of these classes: one that is written anew casts as it wants."""
    return any(type(module).forward is one.forward for one in classes)


def _cast(tree: Any, those: tuple[torch.dtype, ...], dtype: torch.dtype) -> Any:
    leaves, layout = tree_flatten(tree)
    cast = [leaf.to(dtype) if isinstance(leaf, torch.Tensor) and leaf.dtype in those else leaf for leaf in leaves]
    return tree_unflatten(cast, layout)


def _wrap_forward(module: nn.Module, around: Callable[..., Any]) -> None:
    """Call ``around(forward, ...)`` in place of a module's forward, inside all of its hooks."""
    forward = module.forward

    @functools.wraps(forward)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return around(forward, *args, **kwargs)

    module.forward = wrapped
