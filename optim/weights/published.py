"""Names and shapes that Hugging Face publishes, where transformers holds weights fused, or under other names."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from nvme_offload.offload._torch_private import tree_flatten
from nvme_offload.offload.warn import warn_user
from ..birth.published_names import Revert, revert_of


@dataclass(frozen=True)
class Conversion:
    """Tensors of the files are made of these of the model, all at once."""

    sources: Sequence[str]
    """Names in the model."""
    made: Mapping[str, tuple[torch.Size, torch.dtype]]
    """Shapes and dtypes of the tensors by their names in the files."""
    revert: Revert | None
    """None: the one source under another name, or its own."""

    def values(self, whole: Callable[[str], torch.Tensor]) -> dict[str, torch.Tensor]:
        """Make the tensors; `whole` gives each source. ValueError: they are not those that were planned."""
        wholes = {name: whole(name) for name in self.sources}
        if self.revert is None:
            return dict(zip(self.made, wholes.values(), strict=True))
        made = self.revert(wholes)
        if kinds_of(made) != self.made:
            raise ValueError(f"other tensors are made of {', '.join(self.sources)} alone than were of all together")
        return dict(made)


def kinds_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Return shape and dtype of each tensor."""
    return {name: (tensor.shape, tensor.dtype) for name, tensor in tensors.items()}


def conversions_of(model: nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[Conversion]:
    """Return how to make the files of a model's tensors, on meta: of all, in their order, each once.

    A model of transformers goes through its own reverse conversion, which is told of few tensors at a time.
    """
    if (revert := revert_of(model)) is not None:
        try:
            return conversions_by(revert, tensors)
        except Exception as error:
            kind = type(model).__name__
            what = f"transformers cannot turn the weights of this {kind} into the published ones ({error})"
            warn_user(f"{what}: they have the model's own names and shapes, which other programs may not know")
    return as_they_are(tensors)


def as_they_are(tensors: Mapping[str, torch.Tensor]) -> list[Conversion]:
    """Return how to make files of tensors under their own names."""
    return [Conversion([name], {name: kind}, None) for name, kind in kinds_of(tensors).items()]


def conversions_by(revert: Revert, tensors: Mapping[str, torch.Tensor], *, uses_all: bool = True) -> list[Conversion]:
    """Return how `revert` makes tensors of these on meta, told of few at a time.

    ValueError if it should use all and makes nothing of one of them; LookupError if it makes a tensor of none of them.
    """
    made: Any = revert({name: _Traced.of(name, tensor) for name, tensor in tensors.items()})
    if of_none := [name for name, each in made.items() if not getattr(each, "sources", None)]:
        raise LookupError(f"{of_none[0]} is made of none of these tensors")
    sets: dict[str, set[str]] = {name: {name} for name in tensors}
    for each in made.values():
        joined = set().union(*(sets[name] for name in each.sources))
        sets.update(dict.fromkeys(joined, joined))
    together: dict[int, tuple[list[str], dict[str, Any]]] = {}  # of each set what is in it, and what is made of it
    for name in tensors:
        together.setdefault(id(sets[name]), ([], {}))[0].append(name)
    for new, each in made.items():
        together[id(sets[next(iter(each.sources))])][1][new] = each
    found = []
    for sources, targets in together.values():
        if not targets and not uses_all:
            continue
        if not targets:
            raise ValueError(f"nothing is made of {sources[0]}")
        is_same = len(targets) == 1 and next(iter(targets.values())).is_untouched
        found.append(Conversion(sources, kinds_of(targets), None if is_same else revert))
    return found


class _Traced(torch.Tensor):
    """A tensor on meta that knows of which it was made."""

    sources: frozenset[str] = frozenset()
    is_untouched = False

    @classmethod
    def of(cls, name: str, tensor: torch.Tensor) -> "_Traced":
        """Return a tensor of the model."""
        made = tensor.as_subclass(cls)
        made._come_from(frozenset([name]), is_untouched=True)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # of torch
        given = [each.sources for each in tree_flatten((args, kwargs))[0] if isinstance(each, cls)]
        for each in tree_flatten(made)[0]:
            if isinstance(each, cls) and not each.is_untouched:
                each._come_from(each.sources.union(*given))
        return made

    def _come_from(self, sources: frozenset[str], *, is_untouched: bool = False) -> None:
        self.sources, self.is_untouched = sources, is_untouched
