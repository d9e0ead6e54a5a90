"""Find parameters by name: their own, those of the modules that they are in, and those modules' class names."""

import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase

from torch import nn


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
