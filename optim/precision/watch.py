"""Which modules autocast computes in its lower dtype: a forward of each is watched, on tensors without data."""

import copy
from collections.abc import Hashable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from nvme_offload.offload._torch_private import fake_tensors, is_cast, is_dtensor, is_view, watching
from nvme_offload.offload.devices.device import default_device_type
from nvme_offload.offload.warn import warn_user

Lowered = frozenset[str]
"""Names of a module's own parameters that autocast casts to its lower dtype whenever the module's forward uses them."""


class Watch:
    """Calls the forward of a copy of each module with tensors of shapes that its parameters suggest.

    Where a forward takes none of them, nothing is known; `say_what_is_lowered` looks at such modules later.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._known: dict[Hashable, Lowered] = {}

    def lowered(self, module: nn.Module) -> Lowered:
        """Return what autocast lowers of a module that is not sharded; modules that look alike are watched once."""
        own = dict(module.named_parameters(recurse=False))
        shapes = [(name, param.shape, param.requires_grad) for name, param in own.items()]
        key = (type(module), repr(module), module.training, *shapes)
        if key not in self._known:
            is_sharded = any(is_dtensor(param) for param in module.parameters())
            has_matrix = any(param.ndim > 1 for param in own.values())
            self._known[key] = self._watched(module, own) if has_matrix and not is_sharded else Lowered()
        return self._known[key]

    def _watched(self, module: nn.Module, own: Mapping[str, nn.Parameter]) -> Lowered:
        device = next(iter(own.values())).device.type
        device = default_device_type() if device == "meta" else device
        for shape in dict.fromkeys(_input_shapes(module, own.values())):
            for num_inputs in (1, 2, 3):
                casts = _Casts(self._dtype)
                try:
                    with fake_tensors(), torch.autocast(device, self._dtype):
                        stand_ins: dict[int, Any] = {id(param): _like(param, device) for param in module.parameters()}
                        stand_ins |= {id(item): torch.empty_like(item, device=device) for item in module.buffers()}
                        casts.known = {id(stand_ins[id(param)]): name for name, param in own.items()}
                        copied = copy.deepcopy(module, stand_ins)
                        with watching(casts.note):
                            copied.forward(*(torch.empty(shape, device=device) for _ in range(num_inputs)))
                except Exception:  # it wants other arguments, and may say so in any way
                    continue
                return Lowered(casts.cast - casts.used)
        return Lowered()


def say_what_is_lowered(model: nn.Module, names: Mapping[nn.Module, str], dtype: torch.dtype) -> None:
    """Warn, in their first forward, of modules that are computed in `dtype` although they are gathered in fp32."""
    said: set[type[nn.Module]] = set()

    def look(module: nn.Module, inputs: Any, output: Any) -> None:
        handles.pop(module).remove()
        kind = type(module)
        first = next(iter(output), None) if isinstance(output, tuple | list) else output
        if kind not in said and isinstance(first, torch.Tensor) and first.dtype is dtype:
            said.add(kind)
            size = sum(param.numel() for param in module.parameters(recurse=False))
            warn_user(
                f"torch_autocast: {names[module]} gives {str(dtype).removeprefix('torch.')}, and its {size} elements "
                "are gathered and reduced in fp32, because its forward could not be watched: if it rounds them, write "
                f'"{kind.__module__}.{kind.__qualname__}" into lower_precision_safe_modules, beside the classes that '
                "the model has there now",
                of_this_rank=True,
            )

    handles = {module: module.register_forward_hook(look) for module in names}


class _Casts:
    """Notes which parameters were cast to the lower dtype, and which were used in any other way."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.known: dict[int, str] = {}
        """Names of parameters by the id of their stand-in, or of a view of it."""
        self.cast: set[str] = set()
        self.used: set[str] = set()
        self._dtype = dtype
        self._views: list[torch.Tensor] = []  # an id is that of one tensor as long as the tensor is there

    def note(self, op: Any, leaves: list[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Look what an operator does with parameters; see `watching`."""
        for param in {self.known[id(leaf)] for leaf in leaves if id(leaf) in self.known}:
            if is_cast(op) and kwargs.get("dtype") is self._dtype:
                self.cast.add(param)
            elif is_view(op):
                views = [result] if isinstance(result, torch.Tensor) else result
                self._views += views
                self.known.update({id(view): param for view in views})
            else:
                self.used.add(param)


def _like(param: nn.Parameter, device: str) -> nn.Parameter:
    return nn.Parameter(torch.empty(param.shape, dtype=param.dtype, device=device), requires_grad=param.requires_grad)


def _input_shapes(module: nn.Module, own: Iterable[nn.Parameter]) -> Iterator[tuple[int, ...]]:
    """Yield shapes that its matrices and kernels suggest: their sizes as features, or as channels of a convolution."""
    groups = getattr(module, "groups", 1)
    for weight in own:
        kernel = [2 * length for length in weight.shape[2:]]
        for size in reversed(weight.shape[:2] if weight.ndim > 1 else ()):
            if kernel:
                yield from ((2, size * groups, *kernel), (2, size, *kernel))
            else:
                yield from ((2, 4, size), (4, size))
