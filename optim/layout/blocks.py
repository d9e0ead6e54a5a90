"""Find and name parts of a model: those that are gathered, or waited for, one by one, and those that own tensors."""

import sys
from collections.abc import Collection, Iterable, Iterator
from fnmatch import fnmatchcase

from torch import nn

from nvme_offload.offload.activations.blocks import find_blocks, outermost


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return what of a model is gathered, or waited for, one by one: repeated layers, and large ends."""
    blocks = find_blocks(model)
    return blocks + find_ends(model, blocks)


def find_ends(model: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """Return embeddings and heads beside the repeated `blocks` that are worth gathering alone, in the model's order.

    What is gathered with the model itself is needed first in forward, and its gradients are final last in backward. So
    that should be little. Theirs are `nn.Embedding` and `nn.Linear` with half the parameters of the largest layer, or
    more, that share none with other modules.
    """
    largest = max((_numel(block) for block in blocks), default=0)
    owners: dict[nn.Parameter, int] = {}
    for module in model.modules():
        for param in module.parameters(recurse=False):
            owners[param] = owners.get(param, 0) + 1
    inside = {module for block in blocks for module in block.modules()}
    return [
        module
        for module in model.modules()
        if type(module) in (nn.Embedding, nn.Linear)
        and module is not model
        and module not in inside
        and 2 * _numel(module) >= largest > 0
        and all(owners[param] == 1 for param in module.parameters())
    ]


def match_blocks(model: nn.Module, patterns: Iterable[str]) -> list[nn.Module]:
    """Return modules whose class name or qualified name is one of `patterns`. ValueError: one matches nothing."""
    blocks: dict[nn.Module, None] = {}
    for pattern in patterns:
        found = [module for name, module in model.named_modules() if pattern in (type(module).__name__, name)]
        if not found:
            names = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(f"blocks: {pattern!r} names no module; classes in this model are {', '.join(names)}")
        blocks.update(dict.fromkeys(found))
    return outermost(blocks, model)


def check_own_parameters(model: nn.Module, blocks: Collection[nn.Module]) -> None:
    """Raise ValueError for a parameter that is in a block and elsewhere, too: it is gathered with one of them."""
    names = {name: block for name, block in model.named_modules(remove_duplicate=False) if block in blocks}
    found: dict[nn.Parameter, tuple[str, nn.Module | None]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        path = name
        while path and path not in names:
            path, _, _ = path.rpartition(".")
        first, block = found.setdefault(param, (name, names.get(path)))
        if names.get(path) is not block:
            raise ValueError(
                f"blocks: {first!r} is {name!r}, too, and a parameter is gathered with one block: give blocks= the "
                "names of those that share nothing with others; [] has all of the model gathered at once"
            )


def params_outside(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Parameter]:
    """Yield all parameters of a module that are not in a block inside it; some perhaps twice."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in blocks:
            yield from params_outside(child, blocks)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def params_matching(model: nn.Module, pattern: str) -> dict[nn.Parameter, None]:
    """Return the parameters of which a shell pattern matches a name, in the model's order.

    Names are those of a parameter (a tied one has several) and of the modules that it is in, and these modules' class
    names, alone or with the package they are imported from, as ``torch.nn.LayerNorm``.
    """
    found = (param for param, names in _names_of_owners(model) if any(fnmatchcase(name, pattern) for name in names))
    return dict.fromkeys(found)


def _names_of_owners(model: nn.Module) -> Iterator[tuple[nn.Parameter, set[str]]]:
    """Yield every parameter with its own name, and names and class names of the modules it is in, but the model's."""
    for module_name, module in model.named_modules(remove_duplicate=False):
        parts = module_name.split(".")
        paths = [".".join(parts[: depth + 1]) for depth in range(len(parts))] if module_name else []
        names = set(paths)
        for path in paths:
            names |= _names_of_class(type(model.get_submodule(path)))
        for name, param in module.named_parameters(recurse=False):
            yield param, {*names, f"{module_name}.{name}" if module_name else name}


def _names_of_class(kind: type) -> set[str]:
    """Return a class's name, and that with each package it is imported from: torch.nn.LayerNorm is defined deeper."""
    parts = kind.__module__.split(".")
    packages = (".".join(parts[:depth]) for depth in range(1, len(parts)))
    public = {package for package in packages if getattr(sys.modules.get(package), kind.__qualname__, None) is kind}
    return {kind.__name__, *(f"{package}.{kind.__qualname__}" for package in (*public, kind.__module__))}
