"""Tensors in what a forward returns, whatever object holds them: FSDP2 alone looks into tuples, lists and dicts."""

from collections import deque
from collections.abc import Iterator, Mapping
from contextlib import suppress
from functools import partial
from types import FunctionType, MemberDescriptorType, ModuleType
from weakref import WeakKeyDictionary

import torch
from torch import nn

from nvme_offload.offload._fsdp_passes import hook_outputs

_HOLDS_NONE = (str, bytes, bytearray, int, float, complex, type, FunctionType, ModuleType, nn.Module)


def train_through_any_output(model: nn.Module) -> None:
    """Let backward find its way into a sharded model from every tensor that a forward returned, in whatever object.

    FSDP2 gathers parameters again, and reduces their gradients, when a gradient comes to a tensor that a forward has
    returned. Where it sees none of them, nothing is trained, or backward computes with parameters that are freed.
    """
    for name, module in model.named_modules():
        hook_outputs(module, partial(_seen_in, module, name))


_HIDING: WeakKeyDictionary[nn.Module, str] = WeakKeyDictionary()
"""Modules whose latest output was an object in which no tensor was found, with what to say of them."""


def _seen_in(module: nn.Module, name: str, output: object) -> list[torch.Tensor]:
    found = tensors_in(output)
    _HIDING.pop(module, None)
    if not found and output is not None and not isinstance(output, str | bytes | int | float):
        _HIDING[module] = f"{name or type(module).__name__} returned a {type(output).__name__}"
    return found


def instead_of(error: RuntimeError, model: nn.Module) -> Exception:
    """Return what to raise for an error of backward: for torch's of freed weights, TypeError with what hid tensors."""
    hiding = [_HIDING[module] for module in model.modules() if module in _HIDING]
    if "storage of size 0" not in str(error) or not hiding:
        return error
    return TypeError(
        f"backward read gathered weights that had been freed: {hiding[0]}, in which no tensor was found, so that "
        "nothing said that backward had come to it. Items, values of mappings, attributes and slots are looked into, "
        "closures and classes are not: return the tensors in a tuple, a dict or a dataclass"
    )


def tensors_in(output: object) -> list[torch.Tensor]:
    """Return all tensors that an object leads to through items, values of mappings, attributes and slots, at any depth.

    Modules are not looked into: their parameters are no results. TypeError for an iterator, which looking would use up.
    """
    found: list[torch.Tensor] = []
    seen: dict[int, object] = {}  # they are kept, as no other object gets their id then
    left: list[object] = [output]
    while left:
        value = left.pop()
        if value is None or id(value) in seen or isinstance(value, _HOLDS_NONE):
            continue
        seen[id(value)] = value
        if isinstance(value, torch.Tensor):
            found.append(value)
        else:
            left += _parts_of(value)
    return found


def _parts_of(value: object) -> Iterator[object]:
    attributes = getattr(value, "__dict__", None)
    if isinstance(value, Iterator) and attributes is None:
        raise TypeError(
            f"a forward returned a {type(value).__name__}, and backward would not find the tensors that it gives: "
            "return a list, or call the model under torch.no_grad()"
        )
    if isinstance(value, Mapping):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset | deque):
        yield from value
    if isinstance(attributes, dict):
        yield from attributes.values()
    for cls in type(value).__mro__:
        for slot in vars(cls).values() if "__slots__" in vars(cls) else ():
            if isinstance(slot, MemberDescriptorType):
                with suppress(AttributeError):  # it has not been set
                    yield slot.__get__(value, cls)
