"""The only place that touches what torch does not promise to keep. Each name says why it is needed.

``tests/offload/test_torch_private.py`` names every function here: a torch upgrade breaks there and nowhere else.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import TensorMeta
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

P = ParamSpec("P")
R = TypeVar("R")

# ``torch.utils._pytree``: how every tensor subclass in torch itself walks the arguments of an operator.
__all__ = [
    "ATTENTION",
    "METADATA_GLOBALS",
    "TakingTurns",
    "argument_of",
    "base_of",
    "compute_on_shards",
    "drop_unsharded_grads",
    "fake_tensors",
    "foreach_of",
    "fsdp_groups",
    "fsdp_params",
    "gather_by_itself",
    "gathered_params",
    "give_shard",
    "hook_outputs",
    "install_extension",
    "is_cast",
    "is_view",
    "local_tensor",
    "make_wrapper",
    "not_compiled",
    "num_backwards_left",
    "own_initializer",
    "refuse_conversion",
    "refuse_writes",
    "replace_calls",
    "run_operators",
    "running_last_before_load",
    "shard_offsets",
    "sharded_like",
    "state_dict_hooks",
    "storage_identity",
    "storage_info",
    "storage_place",
    "store_of_all_ranks",
    "top_saved_tensor_hooks",
    "tree_flatten",
    "tree_unflatten",
    "version_of",
    "watching",
    "without_base",
    "without_torch_function",
    "written_arguments",
    "written_tensors",
]


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place: ``Tensor._version``. Writes through ``.data`` do not count."""
    return tensor._version


def base_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """Return the tensor that another is a view of (``Tensor._base``), or None. Views of one share its `version_of`."""
    return tensor._base


def is_view(op: Any) -> bool:
    """Whether an operator's result shares memory with its argument: ``OpOverload.is_view``, made from the schema."""
    return bool(op.is_view)


def is_cast(op: Any) -> bool:
    """Whether an operator is ``aten._to_copy``, which ``Tensor.to`` and autocast come to: a copy in another dtype."""
    return op is torch.ops.aten._to_copy.default


def written_arguments(op: Any) -> list[int | str]:
    """Return positions (or keyword-only names) of what an operator changes in place; ``OpOverload._schema`` says so."""
    return [
        argument.name if argument.kwarg_only else place
        for place, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


def written_tensors(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Return the tensors, also in lists, that an operator changes in place: see `written_arguments`."""
    places = written_arguments(op)
    arguments = [
        kwargs.get(place) if isinstance(place, str) else args[place] if place < len(args) else None for place in places
    ]
    return [leaf for leaf in tree_flatten(arguments)[0] if isinstance(leaf, torch.Tensor)]


def foreach_of(op: Any) -> Any:
    """Return the operator on one tensor that ``aten._foreach_zero_`` runs on each of a list; None for other operators.

    ``Optimizer.zero_grad(set_to_none=False)`` calls it for all gradients at once.
    """
    return torch.ops.aten.zero_.default if op is torch.ops.aten._foreach_zero_.default else None


def store_of_all_ranks() -> Store:
    """Return the store through which the ranks of the default process group found each other.

    ``distributed_c10d._get_default_store``: the only channel between ranks that is no collective, and that exists
    whichever way the process group was made.
    """
    return _get_default_store()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself.

    ``DTensor._local_tensor``: ``to_local()`` goes through autograd and returns a view; the optimizer needs the object
    that FSDP2 keeps.
    """
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def without_base(tensor: torch.Tensor) -> torch.Tensor:
    """Return the memory of a tensor as one that is no view: for results whose base nobody holds, as of ``nn.Linear``.

    ``Tensor._base``, ``aten::_unsafe_view``: what matrix products use for their own results. FSDP2 hooks what a module
    returns, and an operation in place on a view drops the hook.
    """
    if tensor._base is None:
        return tensor
    unviewed: torch.Tensor = torch.ops.aten._unsafe_view(tensor, tensor.shape)
    return unviewed


def make_wrapper(cls: Any, like: torch.Tensor, device: torch.device, dtype: torch.dtype = torch.float32) -> Any:
    """Make a tensor of class `cls` that declares `dtype` and the shape and strides of `like`, and holds no data.

    ``Tensor._make_wrapper_subclass``: the documented way to write such a class, with an undocumented name.
    ``torch._C._set_throw_on_mutable_data_ptr``: without it C++ (DLPack, storages) hands out address 0, and who reads
    there is killed. With it there is an error.
    """
    tensor = torch.Tensor._make_wrapper_subclass(
        cls, like.shape, strides=like.stride(), dtype=dtype, device=device, storage_size=0
    )
    torch._C._set_throw_on_mutable_data_ptr(tensor)
    return tensor


def sharded_like(local: torch.Tensor, like: DTensor) -> DTensor:
    """Make a DTensor with the layout of `like` around another local tensor.

    ``DTensor._spec``: ``DTensor.from_local`` cannot express a shard that is empty or uneven without communication.
    """
    spec = replace(like._spec, tensor_meta=TensorMeta(like.shape, like.stride(), local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call]


def fsdp_groups(module: torch.nn.Module) -> list[list[Any]]:
    """Return FSDP2's records of the parameters that `module` manages (not its children), by what is gathered together.

    ``FSDPModule._get_fsdp_state()._fsdp_param_group``: nothing public leads from a sharded parameter to its group.
    """
    return [list(group.fsdp_params) for group in _param_groups(module)]


def _param_groups(module: torch.nn.Module | FSDPModule) -> list[Any]:
    if not isinstance(module, FSDPModule):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


def fsdp_params(module: torch.nn.Module) -> list[Any]:
    """Return the records of all `fsdp_groups` of a module."""
    return [param for group in fsdp_groups(module) for param in group]


def gathered_params(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters of modules that FSDP2 has gathered at this moment; it frees their memory when it reshards.

    ``FSDPParamGroup.is_unsharded``, ``FSDPParam._unsharded_param``: the gathered parameter stays the same object, and
    between two uses its storage has no bytes.
    """
    for module in modules:
        for group in _param_groups(module):
            if group.is_unsharded:
                yield from (local_tensor(record._unsharded_param) for record in group.fsdp_params)


def num_backwards_left(module: FSDPModule) -> int:
    """Return how often backward still comes through the parameters that `module` gathers (not those of its children).

    ``FSDPParamGroup._post_forward_indices``: FSDP2's record of forwards whose backward has not come yet. A parameter
    that was used twice is reduced twice, and only the second gradient is whole.
    """
    return max((len(group._post_forward_indices) for group in _param_groups(module)), default=0)


def drop_unsharded_grads(model: torch.nn.Module) -> None:
    """Forget the gradients that FSDP2 keeps before it reduces them: accumulated, or left by a pass that was cut off.

    ``FSDPParam.unsharded_accumulated_grad`` and the gradient of ``FSDPParam._unsharded_param``, which is made when it
    is first gathered: ``zero_grad`` reaches sharded gradients alone, and ``reset_iter_state`` leaves these. From torch
    2.15 on the first is a property that shows the second.
    """
    for module in model.modules():
        for record in fsdp_params(module):
            _take_unsharded_grad(record)


@torch.no_grad()
def _take_unsharded_grad(fsdp_param: Any) -> torch.Tensor | None:
    """The gradient of a gathered parameter, with what was added up before; FSDP2 has none any more."""
    if not hasattr(fsdp_param, "_unsharded_param"):
        return None
    latest: torch.Tensor | None = fsdp_param._unsharded_param.grad
    earlier: torch.Tensor | None = None
    if not isinstance(getattr(type(fsdp_param), "unsharded_accumulated_grad", None), property):
        earlier, fsdp_param.unsharded_accumulated_grad = fsdp_param.unsharded_accumulated_grad, None
    fsdp_param._unsharded_param.grad = None
    if earlier is None or latest is None:
        return latest if earlier is None else earlier
    return earlier.add_(latest)


class TakingTurns:
    """Let the passes of several micro-batches go through `blocks` of one FSDP2 model by turns.

    FSDP2 (2.11 to 2.15) knows of one forward at a time (``FSDPState._training_state``, ``_modules_to_run_forward``,
    ``FSDPStateContext.iter_forward_root``), frees what it gathered after every call (``FSDPParamGroup.reshard``), and
    reduces what any group has at the end of every backward (``FSDPState._root_post_backward_final_callback``, unless
    ``FSDPStateContext.post_backward_final_callback_queued``). While turns are taken, a forward that waits is put aside,
    and whoever takes them says when a group is freed, and when it is reduced.
    """

    def __init__(self, root: torch.nn.Module, blocks: Iterable[torch.nn.Module]) -> None:
        others = {root, *(module for block in blocks for module in block.modules())}
        parts = [module for module in root.modules() if isinstance(module, FSDPModule)]
        self.units: list[Any] = [module for module in parts if module not in others]
        """Modules that gather by themselves and are neither the root nor in a block."""
        self._root: Any = root
        self._is_under_way = False
        for group in {id(group): group for module in root.modules() for group in _param_groups(module)}.values():
            group.reshard = partial(self._reshard, group.reshard)

    def _reshard(self, reshard: Callable[[], None]) -> None:
        if not self._is_under_way:
            reshard()

    @property
    def _context(self) -> Any:
        return self._root._get_fsdp_state()._state_ctx

    def begin(self) -> None:
        """Free and reduce nothing by itself from here on."""
        self._is_under_way = True
        self._context.post_backward_final_callback_queued = True

    def end(self) -> None:
        """End all passes: do what FSDP2 does after the last backward of a step."""
        self._is_under_way = False
        self._root._get_fsdp_state()._root_post_backward_final_callback()

    def stop(self) -> None:
        """Leave FSDP2 to itself again, wherever an exception came; ``reset_iter_state`` does the rest. Idempotent."""
        self._is_under_way = False
        self._context.post_backward_final_callback_queued = False

    def put_aside(self) -> Any:
        """Take FSDP2's record of the forward that runs, for `take_up`. Another one may begin."""
        owners = [self._root._get_fsdp_state(), *_param_groups(self._root)]
        for module in self.units:
            owners += [module._get_fsdp_state(), *_param_groups(module)]
        record = [(one, one._training_state, set(getattr(one, "_modules_to_run_forward", ()))) for one in owners]
        began, context = self._context.iter_forward_root, self._context
        for one in owners:
            one._training_state = type(one._training_state).IDLE
            getattr(one, "_modules_to_run_forward", set()).clear()
        context.iter_forward_root = None
        return record, began

    def take_up(self, aside: Any) -> None:
        """Go on with the forward that was put aside."""
        record, self._context.iter_forward_root = aside
        for one, training_state, to_run in record:
            one._training_state = training_state
            getattr(one, "_modules_to_run_forward", set()).update(to_run)

    def end_pass(self, modules: Sequence[torch.nn.Module], *, reduces: bool) -> None:
        """End these modules' part in a pass. With `reduces` their gradients are whole, for one micro-batch."""
        for module in modules:
            for group in _param_groups(module):
                if reduces and group._training_state.name != "POST_BACKWARD":  # else it reduced by itself
                    group.post_backward()
                group._training_state = type(group._training_state).IDLE
            if isinstance(module, FSDPModule):
                state: Any = module._get_fsdp_state()
                state._training_state = type(state._training_state).IDLE
        # What FSDP2 would gather ahead is what came before in a forward: here something else comes next.
        for module in (*modules, *self.units, self._root):
            for group in _param_groups(module):
                group._post_forward_indices.clear()
        self._root._get_fsdp_state()._comm_ctx.post_forward_order.clear()

    def free(self, modules: Sequence[torch.nn.Module], *, after_forward: bool) -> None:
        """Free what was gathered for these modules, where their stage frees it after a forward, or after a backward."""
        for group in (group for module in modules for group in _param_groups(module)):
            if group._reshard_after_forward if after_forward else group.reshard_after_backward:
                group._to_sharded()

    def gathered(self, module: torch.nn.Module) -> list[tuple[Any, torch.Tensor]]:
        """Return the records of what a module gathers (not its children), with the parameters that autograd sees."""
        records = fsdp_params(module)
        return [(record, record._unsharded_param) for record in records if hasattr(record, "_unsharded_param")]

    @torch.no_grad()
    def exchange(self, gradients: Sequence[tuple[Any, torch.Tensor | None]]) -> list[tuple[Any, torch.Tensor | None]]:
        """Give gathered parameters these gradients, which are not reduced yet, in place of theirs; returns theirs."""
        before = [(record, record._unsharded_param.grad) for record, _ in gradients]
        for record, grad in gradients:
            record._unsharded_param.grad = grad
        return before

    @torch.no_grad()
    def add_up(self, earlier: Sequence[tuple[Any, torch.Tensor | None]]) -> None:
        """Add what gathered parameters have now to these gradients of earlier micro-batches; they get the sum."""
        for record, grad in earlier:
            latest = record._unsharded_param.grad
            if grad is not None:
                record._unsharded_param.grad = grad if latest is None else grad.add_(latest)


def hook_outputs(module: torch.nn.Module, tensors_in: Callable[[object], Iterable[torch.Tensor]]) -> None:
    """Have backward through an FSDP2 module (not its children) begin with every tensor in what its forward returns.

    ``FSDPState._register_pre_backward_hook``, ``_pre_backward``: torch hooks the tensors in tuples, lists and dicts,
    from 2.13 on those in dataclasses, and not one in any other object. ``Tensor._backward_hooks`` says which it did.
    """
    if not isinstance(module, FSDPModule):
        return
    state: Any = module._get_fsdp_state()
    hook_known = partial(type(state)._register_pre_backward_hook, state)  # its modules may be several

    def hook_all(output: Any) -> Any:
        output = hook_known(output)
        if torch.is_grad_enabled():
            tensors = (tensor for tensor in tensors_in(output) if tensor.requires_grad)
            hook_known([one for one in tensors if state._pre_backward not in (one._backward_hooks or {}).values()])
        return output

    state._register_pre_backward_hook = hook_all


def compute_on_shards(module: torch.nn.Module) -> None:
    """Let a module (not its children) that is sharded over one rank compute with its shards, and train them.

    ``FSDPParamGroup.unshard``, ``wait_for_unshard``, ``post_backward``: for a group of one rank FSDP2 (2.11 to 2.15)
    copies every shard into a gathered parameter, and every gradient four times: into the input of a reduction, into its
    output, to the dtype of the shard, and to that of the partition. Here a gathered parameter is the shard's own memory
    (where a cast is due, or the memory is only lent, a copy), and ``p.grad`` is the gradient that autograd made. A
    module with tensor-parallel parameters is left as it is.
    """
    for group in _param_groups(module):
        if not any(record.is_dtensor for record in group.fsdp_params):
            alone = _GroupOfOne(group)
            group.unshard = alone.unshard
            group.wait_for_unshard = alone.wait_for_unshard
            group.post_backward = alone.post_backward


class _Lent(NamedTuple):
    """A group of one rank computes with this next, in the place of an ``AllGatherResult``, which FSDP2 waits for."""

    shards: list[tuple[torch.Tensor, bool]]
    """The memory of each shard, or of its copy on a device, and whether it stays where it is."""
    all_gather_event: Any
    """Behind what brings it to a device."""
    all_gather_work: None = None


class _GroupOfOne:
    """These take the place of three methods of an ``FSDPParamGroup`` of one rank.

    On a device, what is not there sets out on FSDP2's copy-in stream as soon as it is known to be needed
    (``FSDPCommContext.get_all_gather_streams``, ``FSDPParamGroup._all_gather_result``): before the device has come to
    where it is needed, and in backward one group ahead. Its memory belongs to that stream, which takes it back when the
    computing stream has copied it out of there.
    """

    def __init__(self, group: Any) -> None:
        self._group = group
        self._end_backward = group.post_backward

    def unshard(self, async_op: bool = False) -> None:
        group = self._group
        if group.is_unsharded or group._all_gather_result is not None or group.device.type == "cpu":
            return  # on the CPU there is nothing to send
        stream = self._copy_in_stream(async_op)
        with group.device_handle.stream(stream):
            # All are asked before the first is answered: what is lent is held until then.
            shards = [_lent(record) for record in group.fsdp_params]
        group._all_gather_result = _Lent(shards, stream.record_event())

    def _copy_in_stream(self, async_op: bool) -> Any:
        group = self._group
        if not hasattr(group.comm_ctx, "all_gather_copy_in_stream"):  # before the first forward
            return group.device_handle.current_stream()
        return group.comm_ctx.get_all_gather_streams(async_op, group._training_state)[0]

    def wait_for_unshard(self) -> None:
        group = self._group
        if group.is_unsharded:
            return
        if group.device.type == "cpu":
            self._unshard_from([_lent(record) for record in group.fsdp_params])
            return
        self.unshard()
        group.device_handle.current_stream().wait_event(group._all_gather_result.all_gather_event)
        self._unshard_from(group._all_gather_result.shards)
        group._wait_all_gather_streams_on_event(group.device_handle.current_stream().record_event())
        group._all_gather_result = None

    def _unshard_from(self, lent: Sequence[tuple[torch.Tensor, bool]]) -> None:
        records = self._group.fsdp_params
        shards = [_shard_or_copy(record, *shard) for record, shard in zip(records, lent, strict=True)]
        for record, shard in zip(records, shards, strict=True):
            _unshard_alone(record, shard)
        self._group._to_unsharded()

    def post_backward(self, *unused: Any) -> None:
        group = self._group
        # FSDP2 itself reduces for whoever asked it to divide, or to call him; without gradients it only reshards.
        if group.reduce_grads and group.gradient_divide_factor is None and group._all_reduce_hook is None:
            for record in group.fsdp_params:
                if (grad := _take_unsharded_grad(record)) is not None:
                    _give_grad(record, grad)
        self._end_backward()


@torch.no_grad()
def _lent(fsdp_param: Any) -> tuple[torch.Tensor, bool]:
    """Return what a lone rank gathers, and if it stays, as ``ExtensionsData.all_gather_metadata`` of ours says."""
    if hasattr(local_tensor(fsdp_param.sharded_param), "fsdp_pre_all_gather"):
        [shard] = fsdp_param.all_gather_inputs
        return shard, bool(fsdp_param._extensions_data.all_gather_metadata)
    return fsdp_param._sharded_param_data, fsdp_param.param_dtype is None


@torch.no_grad()
def _shard_or_copy(fsdp_param: Any, shard: torch.Tensor, stays: bool) -> torch.Tensor | None:
    """The memory of a shard that its rank can compute with; None where it got a copy of it.

    What stands in ``FSDPParam.all_gather_outputs`` FSDP2 frees when it reshards: never the memory of a shard.
    """
    gathered = getattr(fsdp_param, "_unsharded_param", None)
    was_shard = not fsdp_param.all_gather_outputs
    if gathered is not None and (was_shard != stays or (stays and gathered.data_ptr() != shard.data_ptr())):
        del fsdp_param._unsharded_param  # of memory that is no longer the shard's
        fsdp_param.all_gather_outputs = []
    if stays:
        return shard
    if not fsdp_param.all_gather_outputs:
        has_cast = hasattr(local_tensor(fsdp_param.sharded_param), "fsdp_pre_all_gather")
        dtype = shard.dtype if has_cast else fsdp_param.param_dtype or shard.dtype
        fsdp_param.all_gather_outputs = [torch.empty(shard.numel(), dtype=dtype, device=shard.device)]
    fsdp_param.alloc_all_gather_outputs()
    [copy] = fsdp_param.all_gather_outputs
    with torch.autograd._unsafe_preserve_version_counter(copy):  # type: ignore[attr-defined]
        copy.copy_(shard)
    return None


@torch.no_grad()
def _unshard_alone(fsdp_param: Any, shard: torch.Tensor | None) -> None:
    """Make the gathered parameter of one rank from what `_shard_or_copy` gave."""
    if shard is None:
        fsdp_param.init_unsharded_param()
        return
    fsdp_param.all_gather_outputs = [shard]
    try:
        fsdp_param.init_unsharded_param()
    finally:
        fsdp_param.all_gather_outputs = []


@torch.no_grad()
def _give_grad(fsdp_param: Any, grad: torch.Tensor) -> None:
    """Add the gradient of one rank to its shard's, rounded as a reduction would, and call who waits for it.

    ``Tensor._post_accumulate_grad_hooks``: FSDP2 itself calls them, as autograd knows nothing of the shard.
    """
    param = fsdp_param.sharded_param
    if fsdp_param.reduce_dtype in (torch.bfloat16, torch.float16):
        grad = grad.to(fsdp_param.reduce_dtype)  # to fp32 it would lose nothing
    if param.grad_dtype is not None:
        grad = grad.to(param.grad_dtype)
    if param.grad is None:
        param.grad = sharded_like(grad.contiguous(), param)
    else:
        param.grad._local_tensor += grad
    for hook in (param._post_accumulate_grad_hooks or {}).values():
        hook(param)


def gather_by_itself(fsdp_param: Any, policy: MixedPrecisionPolicy) -> None:
    """Give one parameter of an FSDP2 group a gather dtype of its own, as all others of the group must have then.

    ``FSDPParam.init_dtype_attrs``: FSDP2 takes the dtypes of all parameters of a group from the group's policy when it
    first runs. ``FSDPParam.init_unsharded_param``: the gathered parameter, whose gradient has to be fp32 because a
    group's gradients have one dtype, is made when it is first gathered.
    """
    fsdp_param.mp_policy = policy
    orig_dtype, init_unsharded_param = fsdp_param.sharded_param.dtype, fsdp_param.init_unsharded_param

    def init_dtype_attrs(of_group: MixedPrecisionPolicy) -> None:
        fsdp_param.orig_dtype = orig_dtype
        fsdp_param.param_dtype = None if policy.param_dtype == orig_dtype else policy.param_dtype
        fsdp_param.reduce_dtype = policy.reduce_dtype

    def init_and_take_fp32_gradients() -> None:
        init_unsharded_param()
        fsdp_param.unsharded_param.grad_dtype = torch.float32

    fsdp_param.init_dtype_attrs = init_dtype_attrs
    fsdp_param.init_unsharded_param = init_and_take_fp32_gradients


def install_extension(fsdp_param: Any, local: torch.Tensor) -> None:
    """Make FSDP2 gather a parameter through `local`'s all-gather extension, and forget its own copy.

    ``FSDPParam`` decides at construction whether a shard has an extension (``_init_extensions``), keeps a padded copy
    (``_sharded_param_data``), and would replace an uneven shard by a plain tensor whenever a state dict is loaded
    (``reset_sharded_param``).
    """
    fsdp_param.sharded_param._local_tensor = local
    fsdp_param._sharded_param_data = torch.empty(0, dtype=local.dtype, device="cpu")
    fsdp_param.reset_sharded_param = lambda: None
    fsdp_param._init_extensions()


def give_shard(fsdp_param: Any, local: torch.Tensor, padded: torch.Tensor | None = None) -> None:
    """Replace a shard on the meta device by `local`: another Parameter, wherever the module uses the old one.

    ``FSDPParam``: a DTensor keeps the device it was made with, so ``_local_tensor`` cannot just be exchanged, and
    ``Module.to_empty`` would allocate all shards of a module at once. `padded` is the memory around `local`, in the
    shape that FSDP2 gathers (``_sharded_param_data``); None for a tensor with an all-gather extension.
    """
    old = fsdp_param.sharded_param
    sharded = DTensor(local, old._spec, requires_grad=False)  # type: ignore[no-untyped-call]
    fsdp_param.sharded_param = torch.nn.Parameter(sharded, requires_grad=old.requires_grad)
    fsdp_param._setattr_on_modules(fsdp_param.sharded_param)
    if padded is None:
        install_extension(fsdp_param, local)
    else:
        fsdp_param._sharded_param_data = padded.view(-1)


def own_initializer(module: torch.nn.Module) -> Callable[[], object] | None:
    """Return what a module fills its parameters and buffers with when it is built; None if it has no such method.

    ``MultiheadAttention._reset_parameters``: the one module of torch whose ``reset_parameters`` is private.
    """
    name = "_reset_parameters" if isinstance(module, torch.nn.MultiheadAttention) else "reset_parameters"
    found: Callable[[], object] | None = getattr(module, name, None)
    return found


def refuse_conversion(module: torch.nn.Module, why: str) -> None:
    """Let ``module.to`` and its kind do nothing where they have nothing to do, and else raise ValueError, with `why`.

    ``Module._apply``: what all of them go through. It puts other tensors in the place of sharded parameters, also of
    those that stay as they are, and the hooks of their gradients are lost.
    """

    def _apply(change: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> torch.nn.Module:
        for name, tensor in chain(module.named_parameters(), module.named_buffers()):
            like = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            if change(like) is not like:
                raise ValueError(f"{name} {why}")
        return module

    module._apply = _apply  # type: ignore[method-assign]


class refuse_writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801  # a context manager
    """While it is active, an operator that writes to a tensor for which `forbidden` holds raises ValueError instead.

    ``TorchDispatchMode``: the documented way to see every operator, also on ``.data``, in a module with a private name.
    """

    def __init__(self, forbidden: Callable[[torch.Tensor], bool], message: str) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forbidden = forbidden
        self._message = message

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what `func` writes to, and run it."""
        if any(self._forbidden(tensor) for tensor in written_tensors(func, args, kwargs or {})):
            raise ValueError(self._message)
        return func(*args, **(kwargs or {}))


@contextmanager
def fake_tensors() -> Iterator[None]:
    """Have tensors that are made in the block have a device and no data, and operators give such tensors for them.

    ``torch._subclasses.fake_tensor.FakeTensorMode``: on meta autocast does nothing. Its log, which tells of operators
    that fail, is silent meanwhile.
    """
    from torch._subclasses import fake_tensor  # here, because not every import of ours needs it

    log = logging.getLogger(fake_tensor.__name__)
    was_silent, log.disabled = log.disabled, True
    try:
        with fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
            yield
    finally:
        log.disabled = was_silent


class watching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801  # a context manager
    """While it is active, it tells of every operator that computes: itself, the leaves of its arguments, its result."""

    def __init__(self, note: Callable[[Any, list[Any], dict[str, Any], Any], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, and tell of it."""
        result = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # which asks for the device and the like
            self._note(func, tree_flatten((args, kwargs))[0], kwargs or {}, result)
        return result


def shard_offsets(tensor: DTensor) -> tuple[int, ...]:
    """Return where this rank's part of a DTensor begins in the whole, in every dimension.

    ``DTensor.__create_chunk_list__``: what distributed checkpoints ask for it; the functions behind it are private.
    They compute with tensors, on the default device, whatever that is.
    """
    with torch.device("cpu"):
        [chunk] = tensor.__create_chunk_list__()  # type: ignore[no-untyped-call]
    return tuple(chunk.offsets)


def not_compiled(method: Callable[P, R]) -> Callable[P, R]:
    """Have ``torch.compile`` call a method as it is, without looking inside.

    ``torch._disable_dynamo``: what torch's own optimizers use. ``torch.compiler.disable`` imports the whole compiler as
    soon as it decorates something.
    """
    wrapped: Callable[P, R] = torch._disable_dynamo(method)  # type: ignore[attr-defined]
    return wrapped


def without_torch_function() -> AbstractContextManager[None]:
    """Ask no classes of tensors in the block: ``torch._C.DisableTorchFunctionSubclass``, which torch's pages use."""
    context: AbstractContextManager[None] = torch._C.DisableTorchFunctionSubclass()
    return context


def storage_identity(storage: torch.UntypedStorage) -> Hashable:
    """Return what is equal for one storage, and for no other while it is held; it keeps no bytes alive.

    ``StorageWeakRef`` of ``torch.multiprocessing.reductions``: with ``UntypedStorage._weak_ref``, the only way to tell
    a storage from a later one at the same address.
    """
    return StorageWeakRef(storage)  # type: ignore[no-untyped-call]


def top_saved_tensor_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the innermost hooks that this thread has for tensors that autograd saves; None if there are none.

    ``torch._C._autograd._top_saved_tensors_default_hooks``: how a region that is checkpointed is told from others.
    """
    hooks: tuple[Any, Any] | None = torch._C._autograd._top_saved_tensors_default_hooks(False)
    return hooks


class _ReplacedCall:
    """It runs in the place of a module's own call."""

    def __init__(self, call: Callable[..., Any], inner: Callable[..., Any], *, is_compiled: bool) -> None:
        self._call = call
        self._inner = inner
        self.is_compiled = is_compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._inner, args, kwargs)


def replace_calls(
    modules: Iterable[torch.nn.Module], call: Callable[[Callable[..., Any], Any, Any], Any]
) -> Callable[[], None]:
    """Have calls of some modules run `call(inner, args, kwargs)`, where `inner` is what ran before, hooks included.

    ``Module._compiled_call_impl``: what ``Module.compile`` sets. Copies and pickles of a module leave it out, and its
    class stays as it is. Returns a function that undoes it.
    """
    replaced: list[tuple[torch.nn.Module, Any]] = []
    for module in modules:
        before = module.__dict__.get("_compiled_call_impl")
        inner = before if before is not None else module._call_impl
        # Not by setattr, which the module of torch.compile hands on to the one inside it.
        module.__dict__["_compiled_call_impl"] = _ReplacedCall(call, inner, is_compiled=before is not None)
        replaced.append((module, before))

    def undo() -> None:
        for module, before in replaced:
            if before is None:
                module.__dict__.pop("_compiled_call_impl", None)
            else:
                module.__dict__["_compiled_call_impl"] = before

    return undo


ATTENTION: frozenset[Any] = frozenset(
    getattr(torch.ops.aten, name).default
    for name in (
        "_scaled_dot_product_flash_attention_for_cpu",
        "_scaled_dot_product_flash_attention",
        "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_cudnn_attention",
        "_scaled_dot_product_fused_attention_overrideable",
        "_flash_attention_forward",
        "_efficient_attention_forward",
    )
    if hasattr(torch.ops.aten, name)
)
"""The operators that ``F.scaled_dot_product_attention`` runs where it is not put together from matrix products.
Selective checkpointing asks its users for the same names of ``torch.ops.aten``."""


def argument_of(op: Any, name: str, args: Sequence[Any], kwargs: Mapping[str, Any], default: Any) -> Any:
    """Return an operator's argument, or `default` where it was left out: ``OpOverload._schema`` has the names."""
    names = [argument.name for argument in op._schema.arguments]
    return kwargs.get(name, dict(zip(names, args, strict=False)).get(name, default))


class run_operators(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801  # a context manager
    """While it is active, `run(op, args, kwargs)` is called below autograd in the place of each operator.

    ``ignore_compile_internals``: compiled code in it stays compiled, as with selective checkpointing. `begin` is called
    whenever it becomes active.
    """

    def __init__(self, run: Callable[[Any, Any, Any], Any], begin: Callable[[], object]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._run = run
        self._begin = begin

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Tell ``torch.compile`` to go on."""
        return True

    def __enter__(self) -> Any:
        self._begin()
        return super().__enter__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Have `run` run it."""
        return self._run(func, args, kwargs or {})


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether calls of a module run compiled code, which may know nothing of hooks that are registered later.

    ``torch.compile(module)`` keeps the module as ``_orig_mod``, ``module.compile()`` sets ``_compiled_call_impl``.
    """
    call = getattr(module, "_compiled_call_impl", None)
    in_place = call.is_compiled if isinstance(call, _ReplacedCall) else call is not None
    return in_place or hasattr(module, "_orig_mod") or isinstance(module, torch.jit.ScriptModule)


def state_dict_hooks(optimizer: Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return what the user has registered to run before and after ``state_dict``.

    ``Optimizer._optimizer_state_dict_pre_hooks`` and ``_post_hooks``: only ``Optimizer.state_dict`` runs them, which
    packs whatever ``optimizer.state`` holds and fails for a parameter that was taken out of the groups.
    """
    before, after = optimizer._optimizer_state_dict_pre_hooks, optimizer._optimizer_state_dict_post_hooks
    return list(before.values()), list(after.values())


@contextmanager
def running_last_before_load(optimizer: Optimizer, hook: Callable[..., Any]) -> Iterator[None]:
    """Have a ``load_state_dict`` inside run a hook once, after those that the user has registered.

    ``Optimizer._optimizer_load_state_dict_pre_hooks``: the handle that torch gives for a hook may be lost to an
    exception before anybody has it, and the hook would then run twice in the next load.
    """
    hooks = optimizer._optimizer_load_state_dict_pre_hooks

    def remove() -> None:
        for number in [number for number, known in hooks.items() if known is hook]:
            del hooks[number]

    remove()
    try:
        optimizer.register_load_state_dict_pre_hook(hook)
        yield
    finally:
        remove()


def storage_info(relative_path: str, offset: int, length: int) -> Any:
    """Make what readers of distributed checkpoints look for: where a tensor is, as ``filesystem._StorageInfo``."""
    return _StorageInfo(relative_path, offset, length)


def storage_place(info: Any) -> tuple[str, int, int]:
    """Return file, offset and length of what `storage_info` made."""
    return info.relative_path, info.offset, info.length


METADATA_GLOBALS: set[tuple[str, str]] = {
    ("torch", "Size"),
    ("torch.serialization", "_get_layout"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    *(
        ("torch.distributed.checkpoint.metadata", name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    ),
    *(("torch", name) for name, value in vars(torch).items() if isinstance(value, torch.dtype)),
}
"""Module and name of everything that the pickled metadata of a distributed checkpoint refers to. All of it holds data
and does nothing. There is no public reader of that file that keeps to such a list."""
