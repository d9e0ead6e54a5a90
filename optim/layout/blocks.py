"""Parts of a model that are used one after the other: what is gathered, or waited for, one by one."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from torch import nn


def find_blocks(model: nn.Module) -> list[nn.Module]:
    """The repeated layers of a model, which are worth gathering one by one.

    They are what Hugging Face models name in ``_no_split_modules``, and the members of every ``nn.ModuleList`` or
    ``nn.Sequential`` that holds two or more modules of one class with parameters.
    """
    named = set(getattr(model, "_no_split_modules", None) or ())
    blocks: dict[nn.Module, None] = {}
    for module in model.modules():
        if type(module).__name__ in named:
            blocks[module] = None
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        members = [child for child in module if _can_be_gathered(child)]
        kinds = [type(child) for child in members]
        blocks.update({child: None for child in members if kinds.count(type(child)) > 1})
    return _outermost(blocks, model)


def find_units(model: nn.Module) -> list[nn.Module]:
    """Return what of a model is gathered, or waited for, one by one: repeated layers, and large ends."""
    blocks = find_blocks(model)
    return blocks + find_ends(model, blocks)


def find_ends(model: nn.Module, blocks: Collection[nn.Module]) -> list[nn.Module]:
    """Embeddings and heads beside the repeated layers that are worth gathering by themselves, in the model's order.

    What is gathered with the model itself is needed first in forward, and its gradients are final last in backward. So
    that should be little. Theirs are `nn.Embedding` and `nn.Linear` with half the parameters of the largest layer, or
    more, that share none with other modules.

    Args:
        model: as a whole.
        blocks: its repeated layers.
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
    """Modules whose class name or qualified name is one of `patterns`.

    Raises:
        ValueError: a pattern matches nothing.
    """
    blocks: dict[nn.Module, None] = {}
    for pattern in patterns:
        found = [module for name, module in model.named_modules() if pattern in (type(module).__name__, name)]
        if not found:
            names = sorted({type(module).__name__ for module in model.modules()})
            raise ValueError(f"blocks: {pattern!r} names no module; classes in this model are {', '.join(names)}")
        blocks.update(dict.fromkeys(found))
    return _outermost(blocks, model)


def params_outside(module: nn.Module, blocks: Collection[nn.Module]) -> Iterator[nn.Parameter]:
    """All parameters of a module that are not in a block inside it; some perhaps twice."""
    yield from module.parameters(recurse=False)
    for child in module.children():
        if child not in blocks:
            yield from params_outside(child, blocks)


def _numel(module: nn.Module) -> int:
    return sum(param.numel() for param in module.parameters())


def _can_be_gathered(module: nn.Module) -> bool:
    """Whether it has parameters, and a forward, in which FSDP2 gathers them."""
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict)
    return not is_container and next(module.parameters(), None) is not None


def _outermost(blocks: dict[nn.Module, None], model: nn.Module) -> list[nn.Module]:
    """The blocks without the model itself and without blocks inside blocks: FSDP2 would gather those twice as often."""
    inside = {inner for block in blocks for inner in block.modules() if inner is not block}
    return [block for block in blocks if block not in inside and block is not model]
