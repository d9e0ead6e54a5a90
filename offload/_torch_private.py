"""This module and `_fsdp_passes` alone touch what torch does not promise to keep. Each name says why it is needed.

``tests/offload/test_torch_private.py`` names every function here: a torch upgrade breaks there and nowhere else.
"""

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any, NamedTuple, ParamSpec, Self, TypeGuard, TypeVar, cast

import torch
from torch.distributed.distributed_c10d import Store, _get_default_store
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import Optimizer
from torch.utils import checkpoint as checkpointing
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten as tree_flatten  # as every tensor subclass of torch's walks arguments
from torch.utils._pytree import tree_unflatten as tree_unflatten
from torch.utils.hooks import RemovableHandle

P = ParamSpec("P")
R = TypeVar("R")


def recorded(name: str) -> AbstractContextManager[object]:
    """Show the time of a ``with`` block in torch's profiler.

    ``torch.profiler.record_function`` takes twenty times as long, and a step has three of these for each subgroup.
    """
    block: AbstractContextManager[object] = torch._C._profiler._RecordFunctionFast(name)
    return block


def is_transformed() -> bool:
    """Whether ``torch.func.grad`` or its kind is computing: a gradient is a function's value then, and no step's."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def version_of(tensor: torch.Tensor) -> int:
    """Return how often a tensor was changed in place, but for writes through ``.data``; 0 where inference made it."""
    return 0 if tensor.is_inference() else tensor._version


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


def is_dtensor(value: object) -> TypeGuard[Any]:
    """Whether a value is a DTensor. Nothing is imported for it: to load that class takes a third as long as torch.

    ``DTensor._local_tensor``: no other tensor has it. To look for it takes a tenth of what `isinstance` takes.
    """
    return hasattr(value, "_local_tensor")


def is_fsdp(module: object) -> TypeGuard[Any]:
    """Whether FSDP2 shards a module. Nothing is imported for it: see `is_dtensor`."""
    return isinstance(module, getattr(sys.modules.get("torch.distributed.fsdp"), "FSDPModule", ()))


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a DTensor, or the tensor itself.

    ``DTensor._local_tensor``: ``to_local()`` goes through autograd and returns a view; the optimizer needs the object
    that FSDP2 keeps.
    """
    return getattr(tensor, "_local_tensor", tensor)


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


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Return whether the class of a tensor runs its operators on other tensors, in which its values are.

    ``Tensor._make_wrapper_subclass`` leaves no trace but this: operators of its own (``__torch_dispatch__``), elements,
    and no memory. A subclass with memory, as bitsandbytes has, is an ordinary tensor.
    """
    has_operators = type(tensor).__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
    return has_operators and tensor.numel() > 0 and tensor.data_ptr() == 0


def sharded_like(local: torch.Tensor, like: R) -> R:
    """Make a DTensor with the layout of `like` around another local tensor.

    ``DTensor._spec``: ``DTensor.from_local`` cannot express a shard that is empty or uneven without communication.
    """
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor._dtensor_spec import TensorMeta

    laid_out: Any = like
    spec = replace(laid_out._spec, tensor_meta=TensorMeta(laid_out.shape, laid_out.stride(), local.dtype))
    return DTensor(local, spec, requires_grad=False)  # type: ignore[no-untyped-call, return-value]


def has_context(device: torch.device) -> bool:
    """Return whether this process has a context on a device of CUDA's: asking torch for anything else would open one.

    ``torch._C._cuda_hasPrimaryContext``: torch itself asks it before it leaves a device for another.
    """
    return bool(getattr(torch._C, f"_{device.type}_hasPrimaryContext")(device.index))


def fsdp_groups(module: torch.nn.Module) -> list[list[Any]]:
    """Return FSDP2's records of the parameters that `module` manages (not its children), by what is gathered together.

    ``FSDPModule._get_fsdp_state()._fsdp_param_group``: nothing public leads from a sharded parameter to its group.
    """
    return [list(group.fsdp_params) for group in fsdp_param_groups(module)]


def fsdp_param_groups(module: torch.nn.Module) -> list[Any]:
    """Return what FSDP2 gathers together for `module` (not its children); see `fsdp_groups`."""
    if not is_fsdp(module):
        return []
    state = module._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group] if state._fsdp_param_group else []
    return list(groups)


Lent = tuple[torch.Tensor, Callable[[bool], None]]
"""Bytes, uint8 [n], and what is told when they are let go whether they were changed."""


class Offered(NamedTuple):
    """Our shards say so how long there is what a lone rank gathers, as ``ExtensionsData.all_gather_metadata``."""

    stays: bool = False
    """Whether it is valid for good, and changes with the parameter."""
    lend: Callable[[Callable[[], object]], Lent | None] | None = None
    """It lends the memory; see `Loans.lend`."""


def fsdp_params(module: torch.nn.Module) -> list[Any]:
    """Return the records of all `fsdp_groups` of a module."""
    return [param for group in fsdp_groups(module) for param in group]


def gathered_params(modules: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """Yield the parameters of modules that FSDP2 has gathered at this moment; it frees their memory when it reshards.

    ``FSDPParamGroup.is_unsharded``, ``FSDPParam._unsharded_param``: the gathered parameter stays the same object, and
    between two uses its storage has no bytes.
    """
    for module in modules:
        for group in fsdp_param_groups(module):
            if group.is_unsharded:
                yield from (local_tensor(record._unsharded_param) for record in group.fsdp_params)


def num_backwards_left(module: torch.nn.Module) -> int:
    """Return how often backward still comes through the parameters that `module` gathers (not those of its children).

    ``FSDPParamGroup._post_forward_indices``: FSDP2's record of forwards whose backward has not come yet. A parameter
    that was used twice is reduced twice, and only the second gradient is whole.
    """
    return max((len(group._post_forward_indices) for group in fsdp_param_groups(module)), default=0)


def shards_of(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Return parameters as the optimizer needs them: shards in the place of what FSDP2 shows gathered after a forward.

    ``_module_state_mapping``: nothing public leads from a gathered parameter to its shard. Every call of a module that
    has some of the shards is reduced from here on: see `reduce_every_call`.
    """
    known = sys.modules.get("torch.distributed._composable_state")
    modules = list(known._module_state_mapping) if known is not None else []
    records = [(module, record) for module in modules for record in fsdp_params(module)]
    shards = {id(getattr(record, "_unsharded_param", None)): record.sharded_param for _, record in records}
    found = [shards.get(id(param), param) for param in params]
    members = {id(param) for param in found}
    for module in {module for module, record in records if id(record.sharded_param) in members}:
        reduce_every_call(module)
    return found


class _GradientHooks:
    """Hooks of the whole gradient of a sharded parameter: on the gathered one, which FSDP2 makes when it needs it.

    ``FSDPParam.init_unsharded_param``: from there on ``_unsharded_param`` may be another tensor.
    """

    def __init__(self, fsdp_param: Any, hooks: MutableMapping[int, Callable[..., Any]]) -> None:
        self.hooks = hooks
        self._record = fsdp_param
        self._init = fsdp_param.init_unsharded_param
        self._hooked: torch.Tensor | None = None
        fsdp_param.init_unsharded_param = self._init_and_hook
        self._hook()

    def _init_and_hook(self) -> None:
        self._init()
        self._hook()

    def _hook(self) -> None:
        gathered = getattr(self._record, "_unsharded_param", None)
        if gathered is not None and gathered is not self._hooked:
            trainable = gathered.requires_grad
            gathered.requires_grad_(True).register_hook(self._run)
            gathered.requires_grad_(trainable)
            self._hooked = gathered

    def _run(self, grad: torch.Tensor) -> torch.Tensor:
        for hook in tuple(self.hooks.values()):
            changed = hook(grad)
            grad = grad if changed is None else changed
        return grad


def has_accumulation_hooks(param: torch.Tensor) -> bool:
    """Whether there are any of ``register_post_accumulate_grad_hook``: ``Tensor._post_accumulate_grad_hooks``."""
    return bool(param._post_accumulate_grad_hooks)


class PutOn(NamedTuple):
    """Attributes and hooks that were put on a parameter. They do not keep the parameter, whose memory may be freed."""

    attributes: dict[str, Any]
    hooks: Any

    @classmethod
    def of(cls, param: torch.Tensor) -> Self:
        """``Tensor._backward_hooks``: what ``register_hook`` fills."""
        return cls(vars(param), param._backward_hooks)


def take_the_place_of(
    old: torch.Tensor | None, before: PutOn, fsdp_param: Any, refuse: Callable[[torch.Tensor], None]
) -> None:
    """Give a sharded parameter what was put on the one before it, whose handles go on removing hooks.

    `refuse` is called when a gradient reaches the `old` one; None: nobody has it any more.
    """
    vars(fsdp_param.sharded_param).update(before.attributes)
    if before.hooks:
        fsdp_param.hooks_of_gradient = _GradientHooks(fsdp_param, before.hooks)
    if old is not None and old.requires_grad:
        old.register_post_accumulate_grad_hook(refuse)  # type: ignore[no-untyped-call]


def guard_shards(
    record_of: Callable[[torch.Tensor], Any], is_own: Callable[[torch.Tensor, torch.Tensor], bool], why: str
) -> None:
    """Have the parameters for which `record_of` finds FSDP2's record refuse ``.data = tensor``, with `why`, and hook.

    ``.data += 1`` changes the data and then assigns what `is_own`.

    ``DTensor.data``, ``DTensor.register_hook``: torch takes the first and changes nothing, and never runs a hook of a
    shard: autograd knows the gathered parameter alone, so it is that which is hooked. Idempotent.
    """
    from torch.distributed.tensor import DTensor

    plain, sharded = cast("Any", torch.Tensor), cast("Any", DTensor)

    def set_data(tensor: torch.Tensor, value: torch.Tensor) -> None:
        if record_of(tensor) is not None:
            if is_own(tensor, value):
                return
            raise ValueError(why)
        plain.data.__set__(tensor, value)

    def register_hook(tensor: torch.Tensor, hook: Callable[[torch.Tensor], Any]) -> Any:
        if (record := record_of(tensor)) is None or not tensor.requires_grad:
            return plain.register_hook(tensor, hook)
        if not hasattr(record, "hooks_of_gradient"):
            record.hooks_of_gradient = _GradientHooks(record, OrderedDict())
        hooks = record.hooks_of_gradient.hooks
        handle = RemovableHandle(hooks)
        hooks[handle.id] = hook
        return handle

    sharded.data = property(plain.data.__get__, set_data)
    sharded.register_hook = register_hook


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
    from torch.distributed.tensor import DTensor

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


class _Refusal:
    def __init__(self, why: str) -> None:
        self._why = why

    def __iter__(self) -> Iterator[str]:
        raise TypeError(self._why)


def refuse_ddp(module: torch.nn.Module, why: str) -> None:
    """Let ``DistributedDataParallel`` around a module raise TypeError, with `why`.

    ``_ddp_params_and_buffers_to_ignore``: what it asks a module for first.
    """
    module.__dict__["_ddp_params_and_buffers_to_ignore"] = _Refusal(why)


class refuse_writes(TorchDispatchMode):  # type: ignore[no-untyped-call]  # noqa: N801  # a context manager
    """While it is active, an operator that writes to a tensor for which `forbidden` holds raises ValueError instead.

    Without a `message` it leaves the tensor as it is, and says nothing.

    ``TorchDispatchMode``: the documented way to see every operator, also on ``.data``, in a module with a private name.
    """

    def __init__(self, forbidden: Callable[[torch.Tensor], bool], message: str | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._forbidden = forbidden
        self._message = message

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Look at what `func` writes to, and run it."""
        if found := [tensor for tensor in written_tensors(func, args, kwargs or {}) if self._forbidden(tensor)]:
            if self._message is None:
                return found[0]
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


def shard_offsets(tensor: Any) -> tuple[int, ...]:
    """Return where this rank's part of a DTensor begins in the whole, in every dimension.

    ``DTensor.__create_chunk_list__``: what distributed checkpoints ask for it; the functions behind it are private.
    They compute with tensors, on the default device, whatever that is.
    """
    with torch.device("cpu"):
        [chunk] = tensor.__create_chunk_list__()
    return tuple(chunk.offsets)


def not_compiled(method: Callable[P, R]) -> Callable[P, R]:
    """Have ``torch.compile`` call a method as it is, without looking inside.

    ``torch._disable_dynamo``: what torch's own optimizers use. ``torch.compiler.disable`` imports the whole compiler as
    soon as it decorates something.
    """
    wrapped: Callable[P, R] = torch._disable_dynamo(method)  # type: ignore[attr-defined]
    return wrapped


def reduce_every_call(model: torch.nn.Module) -> None:
    """Let every call of a module that backward computes again by itself gather, and reduce its gradients.

    ``FSDPState._pre_forward``: a checkpoint with ``use_reentrant=True`` runs each call again inside backward. There
    FSDP2 (2.11 to 2.15) takes any but the first for one that its hooks of outputs, which there are none of, have
    prepared. Gradients of the others stay in the gathered parameters, for the next step.
    """
    for module in model.modules():
        if is_fsdp(module) and _compute_again not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_compute_again, prepend=True, with_kwargs=True)


@not_compiled
def _compute_again(module: Any, args: Any, kwargs: Any) -> Any:
    state = module._get_fsdp_state()
    if torch.is_grad_enabled() and state._training_state.name == "PRE_BACKWARD":
        for group in fsdp_param_groups(module):
            if group._training_state.name == "POST_BACKWARD":
                group.pre_backward(not state._states_to_backward_prefetch)
                args, kwargs = group._register_post_backward_hook(args, kwargs)
    return args, kwargs


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


_selecting = threading.local()


class _Selected(checkpointing._VersionWrapper):
    def __init__(self, val: Any, *unpack_hook: Any) -> None:  # the hook since 2.14, where torch has packed it
        keep = getattr(_selecting, "keep", None)
        self.handle = None
        if keep is not None and isinstance(val, torch.Tensor):
            # As torch detaches it: aliases that are made here share its version.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                self.handle = keep(val)
        super().__init__(val if self.handle is None else self.handle.counter, *unpack_hook)

    def get_val(self, allow_cache_entry_mutation: bool) -> Any:
        val = super().get_val(allow_cache_entry_mutation)  # type: ignore[no-untyped-call]
        return val if self.handle is None else self.handle.take()


@contextmanager
def keeping_selected(keep: Callable[[torch.Tensor], Any]) -> Iterator[None]:
    """Have `keep` keep what selective checkpointing saves in this thread.

    It returns a handle, or None to leave the tensor. A handle has ``take()``, and a ``counter`` that shares the version
    of its tensor.

    ``torch.utils.checkpoint._VersionWrapper``: selective checkpointing stores its results in that, where hooks on saved
    tensors do not look. The class that takes its place stays, and does the same where nobody keeps.
    """
    checkpointing._VersionWrapper = _Selected  # type: ignore[misc]
    before = getattr(_selecting, "keep", None)
    _selecting.keep = keep
    try:
        yield
    finally:
        _selecting.keep = before


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
    from torch.distributed.checkpoint.filesystem import _StorageInfo

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
