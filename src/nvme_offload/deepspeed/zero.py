"""As ``deepspeed.zero``: models that are built without their weights, and whole values of sharded parameters."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from enum import Enum
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from nvme_offload.deepspeed.accelerator import Accelerator
from nvme_offload.deepspeed.launch import init_distributed
from nvme_offload.deepspeed.refusal import refused_names
from nvme_offload.offload._torch_private import own_initializer, version_of
from nvme_offload.optim.access.full_values import set_full_param
from nvme_offload.optim.ranks.collective import device_of

_VALUES = WeakTensorKeyDictionary()
"""Parameters that `Init` put on meta -> the value that the constructor had computed for each."""

_DATA_WRITES = WeakTensorKeyDictionary()
"""Parameters on meta -> how often they were written to through ``.data``."""

_SET_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a property

_MOVES = ("to", "cpu", "cuda")
"""Methods of a tensor that say a place."""

_EXTERNAL: weakref.WeakKeyDictionary[nn.Module, list[nn.Parameter]] = weakref.WeakKeyDictionary()
"""Modules -> parameters of others that their forward uses."""


class Init(AbstractContextManager[None]):
    """Build a model whose parameters are on the meta device; `initialize` gives them their values block by block.

    Buffers, and all else that a constructor computes, are computed. A parameter that is made of values, as of
    ``torch.ones``, gets these values; one of ``torch.empty`` gets those of its module's initialiser. There is a process
    group afterwards.

    Args:
        enabled: False does nothing.
        unused: what else DeepSpeed's takes: where and how parameters are kept is up to the section.
    """

    def __init__(self, *unused: Any, enabled: bool = True, **also_unused: Any) -> None:
        self._mode: _Building | None = _Building() if enabled else None
        self._register: Callable[..., None] | None = None
        if enabled:
            init_distributed()

    def __enter__(self) -> None:
        if self._mode is None:
            return
        self._mode.__enter__()  # type: ignore[no-untyped-call]  # of torch, as below
        self._register, moved = nn.Module.register_parameter, self._mode.moved

        def register_parameter(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(self, name, param if param is None else moved(param))

        register = self._register
        nn.Module.register_parameter = register_parameter  # type: ignore[method-assign]

    def __exit__(self, *exception: Any) -> None:
        if self._mode is not None and self._register is not None:
            nn.Module.register_parameter = self._register  # type: ignore[method-assign]
            self._mode.__exit__(*exception)  # type: ignore[no-untyped-call]


_REGISTER = nn.Module.register_parameter


@contextmanager
def outside_of_init() -> Iterator[None]:
    """Within, parameters are registered as they are, also inside an `Init`."""
    inside = nn.Module.register_parameter
    nn.Module.register_parameter = _REGISTER  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = inside  # type: ignore[method-assign]


class _Writes(TorchFunctionMode):
    """Counts writes to parameters on meta that go through ``.data``, which no version tells."""

    def __init__(self, params: Iterable[nn.Parameter] = ()) -> None:
        super().__init__()
        self._params: dict[StorageWeakRef, weakref.ref[nn.Parameter]] = {}
        for param in params:
            self.watch(param)

    def watch(self, param: nn.Parameter) -> None:
        """Count the writes to a parameter, too."""
        self._params[_storage_of(param)] = weakref.ref(param)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        param = self._written(func, args)
        before = version_of(param) if param is not None else 0
        made = func(*args, **(kwargs or {}))
        if param is not None and version_of(param) == before:
            _DATA_WRITES[param] = _data_writes_to(param) + 1
            self.watch(param)
        return made

    def _written(self, func: Any, args: tuple[Any, ...]) -> nn.Parameter | None:
        """Return the parameter on meta that a function writes to, if it does."""
        name = getattr(func, "__name__", "")
        writes = name == "__setitem__" or func == _SET_DATA or (name.endswith("_") and not name.endswith("__"))
        if not (writes and args and isinstance(args[0], torch.Tensor) and args[0].is_meta):
            return None
        found = self._params.get(_storage_of(args[0]))
        return found() if found is not None else None


class _Building(_Writes):
    """Knows which memory ``torch.empty`` and its kind gave, and makes parameters on meta of others."""

    _EMPTY = (torch.empty, torch.empty_like, torch.empty_strided, torch.Tensor.new_empty)
    _CASTS = (torch.Tensor.to, torch.Tensor.half, torch.Tensor.bfloat16, torch.Tensor.float, torch.Tensor.double)

    def __init__(self) -> None:
        super().__init__()
        self._empty: set[StorageWeakRef] = set()
        self._cast: set[StorageWeakRef] = set()
        self._moved = WeakTensorKeyDictionary()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        of_meta = bool(args) and isinstance(args[0], nn.Parameter) and args[0].is_meta
        made = super().__torch_function__(func, types, args, kwargs)
        if func in self._EMPTY and not made.is_meta:
            self._empty.add(_storage_of(made))
        if of_meta and func in self._CASTS:
            self._cast.add(_storage_of(made))
        if of_meta and func == _SET_DATA:
            self.watch(args[0])
        return made

    def _written(self, func: Any, args: tuple[Any, ...]) -> nn.Parameter | None:
        if func == _SET_DATA and (
            args[1] is args[0] or (_storage_of(args[1]) in self._cast and version_of(args[1]) == 0)
        ):
            return None  # a module's `to`: what it will have is the same
        return super()._written(func, args)

    def moved(self, param: nn.Parameter) -> nn.Parameter:
        """Return a parameter on meta in the place of one that has memory, the same for the same."""
        if param.is_meta or nn.parameter.is_lazy(param):
            return param
        if param not in self._moved:
            is_empty = _storage_of(param) in self._empty and version_of(param) == 0
            self._moved[param] = on_meta(param, None if is_empty else param.detach())
            self.watch(self._moved[param])
        made: nn.Parameter = self._moved[param]
        return made


def _storage_of(tensor: torch.Tensor) -> StorageWeakRef:
    return StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]  # of torch


def _staying(given: Any) -> Any:
    """Return the arguments of a tensor's `to` with the place that it has."""
    if isinstance(given, dict):
        return {name: "meta" if name == "device" else value for name, value in given.items()}
    return tuple("meta" if type(value) in (str, int, torch.device) else value for value in given)


def on_meta(param: nn.Parameter, value: torch.Tensor | None) -> nn.Parameter:
    """Return a parameter on meta that is like another; `value` is what `initialize` will give it."""
    made = nn.Parameter(torch.empty_like(param, device="meta"), param.requires_grad)
    made.__class__ = type(param)
    made.__dict__.update(param.__dict__)
    mark_sharded([made])
    # A module's own `to` finds these in front of the tensor's, which cannot leave the meta device.
    vars(made).update({name: partial(_stay, getattr(torch.Tensor, name), made) for name in _MOVES})
    if value is not None:
        _VALUES[made] = value
    return made


def _stay(move: Callable[..., torch.Tensor], param: nn.Parameter, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Do what a tensor's `to`, `cpu` or `cuda` does but for the place, which `initialize` decides."""
    if move is not torch.Tensor.to:
        return param
    return torch.Tensor.to(param, *_staying(args), **_staying(kwargs))


def be_all_on_meta(model: nn.Module) -> dict[nn.Parameter, nn.Parameter]:
    """Put what was added to a model outside of `Init` on meta, too, and its buffers where it will compute.

    Returns each parameter of before with what it is now; nothing, and nothing is done, for a model that has values.
    """
    params = list(model.parameters())
    if not any(param.is_meta for param in params):
        return {}
    made = {param: param if param.is_meta else on_meta(param, param.detach()) for param in params}
    for param in made.values():
        for name in _MOVES:
            vars(param).pop(name, None)  # else they would be attributes of what is trained
    device = Accelerator().current_device_name()
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            module.register_parameter(name, made[param])
        for name, buffer in list(module.named_buffers(recurse=False)):
            if not buffer.is_meta:
                setattr(module, name, buffer.to(device))
    return made


def initializer_of(model: nn.Module) -> Callable[[nn.Module], None] | None:
    """Return what gives the modules of a model on meta what `Init` kept, and calls each ``_init_weights`` of its own.

    Raises:
        ValueError: a parameter was initialised by other code, which had nothing to work on.
    """
    written = {param: _writes_to(param) for param in model.parameters()}
    kept = {param: _VALUES[param] for param in written if not written[param] and param in _VALUES}
    is_hugging_face = any(base.__name__ == "PreTrainedModel" for base in type(model).__mro__)  # whose own is called
    asked = () if is_hugging_face else model.modules()
    owners = [(module, set(module.modules())) for module in asked if hasattr(module, "_init_weights")]
    of_module = {
        (module, name): kept[param]
        for module in model.modules()
        for name, param in module.named_parameters(recurse=False)
        if param in kept
    }

    def init(module: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            if (value := of_module.get((module, name))) is not None and not param.is_meta:
                param.copy_(_of_first_rank(value))
        for owner, inside in owners:
            if module in inside:
                owner._init_weights(module)  # type: ignore[operator]  # a method of the model's

    if is_hugging_face:
        return init if kept else None
    with torch.no_grad(), _Writes(written):
        for module in model.modules():
            (own_initializer(module) or (lambda: None))()
            init(module)
    for name, param in model.named_parameters():
        if written[param] > _writes_to(param) - written[param]:
            raise ValueError(
                f"zero.Init: {name} was initialised by code of the model that is neither reset_parameters nor "
                "_init_weights, and within zero.Init that wrote to nothing: put it into a method _init_weights(module) "
                "of the model, or build the model without zero.Init"
            )
    return init if owners or kept else None


def _writes_to(param: nn.Parameter) -> int:
    return version_of(param) + _data_writes_to(param)


def _data_writes_to(param: nn.Parameter) -> int:
    return int(_DATA_WRITES[param]) if param in _DATA_WRITES else 0


def _of_first_rank(value: torch.Tensor) -> torch.Tensor:
    """Return what rank 0 has: other ranks may have drawn other random numbers."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return value
    sent = value.to(device_of(), copy=True).contiguous()
    dist.broadcast(sent, 0)
    return sent


class GatheredParameters(TorchFunctionMode):
    """Have whole values in the place of an engine's parameters; every rank must enter it, and leave it.

    Args:
        params: one, or several. What else torch's functions are called with is as it is.
        modifier_rank: every rank takes the values that they have on this one at the end; None changes nothing.
        fwd_module: not used.
        enabled: False does nothing.

    Raises:
        ValueError: parameters have no values yet; or, at the end, no optimizer of this package knows one.
    """

    def __init__(
        self, params: Any, modifier_rank: int | None = None, fwd_module: nn.Module | None = None, enabled: bool = True
    ) -> None:
        super().__init__()
        listed = [params] if isinstance(params, torch.Tensor) else list(params)
        if enabled and any(param.is_meta for param in listed):
            raise ValueError("GatheredParameters: parameters made within zero.Init have values after initialize alone")
        self._sharded = [param for param in listed if enabled and isinstance(param, DTensor)]
        self._modifier_rank = modifier_rank
        self._whole: dict[int, torch.Tensor] = {}
        self._made_whole: list[Any] = []

    def __enter__(self) -> GatheredParameters:
        self._whole = {id(param): param.full_tensor().detach().clone() for param in self._sharded}
        self._made_whole = [param for param in self._sharded if getattr(param, "ds_status", None) is _PARTED]
        for param in self._made_whole:
            param.ds_status = ZeroParamStatus.AVAILABLE
        super().__enter__()  # type: ignore[no-untyped-call]  # of torch, as below
        return self

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = tree_map(lambda value: self._whole.get(id(value), value), (args, kwargs or {}))
        return func(*args, **kwargs)

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        for param in self._made_whole:
            param.ds_status = _PARTED
        for param in self._sharded:
            whole = self._whole.pop(id(param))
            if self._modifier_rank is not None and kind is None:
                dist.broadcast(whole, self._modifier_rank)
                set_full_param(param, whole)


def register_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Say before `initialize` that the forward of `module` uses a parameter of another module.

    The module that has the parameter is gathered with the whole model then, and not as a block of its own.

    Raises:
        RuntimeError: `parameter` is no parameter.
    """
    if not isinstance(parameter, nn.Parameter):
        raise RuntimeError("Parameter is not a torch.nn.Parameter")
    _EXTERNAL.setdefault(module, []).append(parameter)


def unregister_external_parameter(module: nn.Module, parameter: nn.Parameter) -> None:
    """Take `register_external_parameter` back. Raises RuntimeError: it was not called with these two."""
    known = _EXTERNAL.get(module, [])
    if not any(each is parameter for each in known):
        raise RuntimeError("Parameter is not a registered external parameter of module.")
    _EXTERNAL[module] = [each for each in known if each is not parameter]


def external_parameters(model: nn.Module) -> set[nn.Parameter]:
    """Return what was registered for the modules of a model."""
    return {param for module in model.modules() for param in _EXTERNAL.get(module, ())}


class ZeroParamStatus(Enum):
    """DeepSpeed's states of a parameter, its ``ds_status``: it is available within `GatheredParameters`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


_PARTED = ZeroParamStatus.NOT_AVAILABLE
_IDS = itertools.count()


def mark_sharded(params: Iterable[Any]) -> None:
    """Give what is sharded, or will be, the attributes by which scripts for DeepSpeed know that it must be gathered."""
    for param in params:
        if param.is_meta or isinstance(param, DTensor):
            about = {"ds_id": next(_IDS), "ds_shape": param.shape, "ds_numel": param.numel()}
            vars(param).update(about, ds_status=_PARTED, ds_persist=False)


__getattr__ = refused_names(__name__)
