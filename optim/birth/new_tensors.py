"""Write down the parameters and buffers of a model on the meta device before it is sharded."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from nvme_offload.offload._torch_private import version_of
from ..layout.master import FORM_OF_DTYPE
from .adapters import adapter_units


@dataclass(eq=False)
class NewTensor:
    """A parameter or buffer that is to get its values, and where the model uses it."""

    shape: torch.Size
    dtype: torch.dtype
    """The dtype that the model was built with, which may be 16 bits."""
    names: list[str] = field(default_factory=list)
    """Qualified names; several where weights are tied."""
    module: nn.Module = field(default_factory=nn.Module)
    attribute: str = ""
    persistent: bool = True
    """Whether the tensor is in the state dict."""

    @property
    def name(self) -> str:
        """The first of the tensor's names."""
        return self.names[0]

    @property
    def current(self) -> torch.Tensor:
        """The tensor that the model has there now."""
        tensor: torch.Tensor = getattr(self.module, self.attribute)
        return tensor

    def put(self, name: str, module: nn.Module, attribute: str) -> None:
        """Note one more place of the tensor; it is reached at the first."""
        if not self.names:
            self.module, self.attribute = module, attribute
        self.names.append(name)

    def set_buffer(self, value: torch.Tensor) -> None:
        """Replace the buffer by `value`."""
        self.module.register_buffer(self.attribute, value, persistent=self.persistent)


class BirthPlan:
    """Parameters and buffers of a model on the meta device, by where they are."""

    def __init__(self, model: nn.Module, *, from_files: bool) -> None:
        self.params: list[NewTensor] = []
        """The parameters, tied ones once, in the order of ``model.named_parameters()``."""
        self.buffers: list[NewTensor] = []
        self.param_at: dict[tuple[nn.Module, str], NewTensor] = {}
        """The parameter that a module has under a name of its own."""
        self._buffer_at: dict[tuple[nn.Module, str], NewTensor] = {}
        known: dict[int, NewTensor] = {}
        for name, param in model.named_parameters(remove_duplicate=False):
            if param.dtype not in FORM_OF_DTYPE and not from_files:
                what = "initialisers give values in fp32, bf16 and fp16 only"
                raise ValueError(f"initialize: {name} is {param.dtype}: {what}; pass weights= with the files")
            if id(param) not in known:
                known[id(param)] = NewTensor(param.shape, param.dtype)
                self.params.append(known[id(param)])
            self._put(model, name, known[id(param)], self.param_at)
        persistent = model.state_dict(keep_vars=True).keys()
        for name, buffer in model.named_buffers(remove_duplicate=False):
            place = _place_of(model, name)
            if place not in self._buffer_at:
                self.buffers.append(NewTensor(buffer.shape, buffer.dtype, persistent=name in persistent))
            self._put(model, name, self._buffer_at.get(place, self.buffers[-1]), self._buffer_at)

        of_adapters = (
            (module, name)
            for unit in adapter_units(model)
            for module in unit
            for name, _ in module.named_parameters(recurse=False, remove_duplicate=False)
        )
        self.adapters = list(dict.fromkeys(self.param_at[place] for place in of_adapters if place in self.param_at))
        """The parameters of adapters, which have initialisers of their own."""

    def unborn_buffers(self, module: nn.Module) -> Iterator[NewTensor]:
        """Yield buffers of a module (not of its children) that are still on the meta device."""
        for attribute, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if buffer.is_meta:
                yield self._buffer_at[module, attribute]

    @staticmethod
    def _put(model: nn.Module, name: str, new: NewTensor, at: dict[tuple[nn.Module, str], NewTensor]) -> None:
        place = _place_of(model, name)
        new.put(name, *place)
        at[place] = new


def units(model: nn.Module, blocks: Iterable[nn.Module]) -> Iterator[list[nn.Module]]:
    """Yield the modules of a model in groups in which they are born, children before parents as in ``Module.apply``.

    A group is a block, or a part of the model without blocks in it; what lies above blocks is born module by module.
    """
    chosen, seen = set(blocks), set[nn.Module]()
    above = {module for module in model.modules() if chosen & set(module.modules()) - {module}}

    def visit(module: nn.Module) -> Iterator[list[nn.Module]]:
        if module in above:
            for child in module.children():
                yield from visit(child)
        unit = [module] if module in above else _children_first(module)
        if fresh := [part for part in unit if part not in seen]:
            seen.update(fresh)
            yield fresh

    return visit(model)


def has_new_value(buffer: torch.Tensor, version_before: int, placeholder: torch.Tensor) -> bool:
    """Return whether somebody wrote to a buffer, or put another one in its place."""
    return not buffer.is_meta and (buffer is not placeholder or version_of(buffer) > version_before)


def _children_first(module: nn.Module) -> list[nn.Module]:
    parts: list[nn.Module] = []
    module.apply(parts.append)
    return list(dict.fromkeys(parts))


def _place_of(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
