"""Match stored tensors to parameters: everything that can be wrong is found from the headers alone."""

import json
import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from difflib import get_close_matches
from typing import NamedTuple

import torch
from torch import nn

from nvme_offload.offload.errors import WeightsError
from nvme_offload.offload.weights.reader import HeaderEntry, SafetensorsReader
from .adapters import BaseNames
from .new_tensors import BirthPlan, NewTensor
from .published_names import Region, regions_of

_MAX_PROBLEMS = 12


class StoredPiece(NamedTuple):
    """Elements of a parameter, flat, from `start` on: those of a stored tensor."""

    start: int
    numel: int
    name: str
    entry: HeaderEntry


class WeightSource:
    """Weight files that fit a model. WeightsError lists what is missing, left over, damaged or of another shape."""

    def __init__(self, path: str | os.PathLike[str], model: nn.Module, plan: BirthPlan) -> None:
        self._reader = SafetensorsReader(path)
        base, stored = BaseNames.of(model), self._reader.tensors
        self.adapters = [new for new in plan.adapters if not any(base.of_file(name) in stored for name in new.names)]
        """Parameters that have initialisers of their own and are in no file."""
        params = [new for new in plan.params if new not in self.adapters]
        wanted, ignored = [*params, *(new for new in plan.buffers if new.persistent)], _ignored(base.module, plan)
        self._regions, problems = _match(base, wanted, stored, ignored, {})
        if problems and (published := _published(base, wanted)):
            regions, others = _match(base, wanted, stored, ignored, published)
            if len(others) < len(problems):
                self._regions, problems = regions, others
        if problems:
            more = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
            raise WeightsError(path, *_quantized(self._reader), *problems[:_MAX_PROBLEMS], *more)
        self._rearranged: dict[NewTensor, torch.Tensor] = {}
        """The latest tensor, whole, whose elements lie in another order in the files."""

    def read(self, new: NewTensor, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a parameter or buffer in row-major order: 1D, in the stored dtype."""
        if (pieces := self.pieces(new)) is None:
            return self._rearrange(new)[start:stop]
        found = []
        for piece in pieces:
            low, high = max(start, piece.start), min(stop, piece.start + piece.numel)
            if low < high or len(pieces) == 1:
                found.append(self._reader.read(piece.name, low - piece.start, high - piece.start))
        return found[0] if len(found) == 1 else torch.cat(found)

    def pieces(self, new: NewTensor) -> list[StoredPiece] | None:
        """Return where the elements of a parameter are, in their order; None where they lie in another order."""
        regions, stored = self._regions[new], self._reader.tensors
        if not all(region.is_range for region in regions):
            return None
        return [StoredPiece(each.offset, stored[each.name].numel, each.name, stored[each.name]) for each in regions]

    def _rearrange(self, new: NewTensor) -> torch.Tensor:
        if new not in self._rearranged:
            self._rearranged.clear()
            regions = self._regions[new]
            values = torch.empty(new.shape.numel(), dtype=self._reader.tensors[regions[0].name].dtype, device="cpu")
            for name, shape, strides, offset in regions:
                values.as_strided(shape, strides, offset).copy_(self._reader.read(name).view(shape))
            self._rearranged[new] = values
        return self._rearranged[new]

    def close(self) -> None:
        """Close the files, which the first read opened."""
        self._reader.close()


def _ignored(model: nn.Module, plan: BirthPlan) -> re.Pattern[str]:
    """Return what files may hold beside the weights: buffers that models used to save, and what Hugging Face lists."""
    patterns = {rf"^{re.escape(name)}$" for buffer in plan.buffers for name in buffer.names}
    patterns |= set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return re.compile("|".join(sorted(patterns)) or r"(?!)")


def _published(base: BaseNames, wanted: Iterable[NewTensor]) -> dict[str, list[Region]]:
    """Return what files of a model of transformers have, by name of a parameter; nothing where that is not known."""
    named = ((base.of_file(name), new) for new in wanted for name in new.names)
    tensors = {name: torch.empty(new.shape, dtype=new.dtype, device="meta") for name, new in named}
    with suppress(Exception):  # of transformers: what does not fit is said under the model's own names
        return regions_of(base.module, tensors)
    return {}


def _match(
    base: BaseNames,
    wanted: Iterable[NewTensor],
    stored: Mapping[str, HeaderEntry],
    ignored: re.Pattern[str],
    published: Mapping[str, list[Region]],
) -> tuple[dict[NewTensor, list[Region]], list[str]]:
    """Return what of the files is which tensor, and what does not fit, in words."""
    found, missing, misfits, known = dict[NewTensor, list[Region]](), list[NewTensor](), list[str](), set[str]()
    for new in wanted:
        names = [base.of_file(name) for name in new.names]
        choices = [published.get(name) or [Region.whole(name, new.shape)] for name in names]
        known.update(region.name for regions in choices for region in regions)
        chosen = next((regions for regions in choices if all(region.name in stored for region in regions)), None)
        if chosen is None:
            missing.append(new)
            continue
        found[new] = chosen
        for region in chosen:
            name, entry = region.name, stored[region.name]
            if entry.shape != region.shape:
                misfits.append(f"{name} has shape {entry.shape} in {entry.path.name}; the model has {region.shape}")
            elif not _may_be_cast(entry.dtype, new):
                misfits.append(f"{name} is {entry.dtype} in {entry.path.name}; the model has {new.dtype}")
    left_over = [name for name in stored if name not in known and not ignored.search(name)]
    problems = [_missing(new, left_over) for new in missing[:_MAX_PROBLEMS]]
    problems += [f"{new.name} is missing" for new in missing[_MAX_PROBLEMS:]] + misfits
    return found, problems + [f"{name} is in no place of the model" for name in left_over]


def _may_be_cast(stored: torch.dtype, new: NewTensor) -> bool:
    """Return whether values of a file may become those of a tensor: codes may not, nor parameters of integers."""
    if stored is new.dtype:
        return True
    is_number = new.dtype.is_floating_point or not isinstance(new.current, nn.Parameter)
    same_kind = stored.is_floating_point == new.dtype.is_floating_point
    return same_kind and is_number and not (_is_code(stored) or _is_code(new.dtype))


def _is_code(dtype: torch.dtype) -> bool:
    """Return whether numbers of this dtype are nothing without a scale: fp8."""
    return dtype.is_floating_point and dtype.itemsize == 1


def _quantized(reader: SafetensorsReader) -> list[str]:
    """Say how weights are quantized and what to do, if they are: ``config.json`` beside them says it, or fp8 does."""
    config = (reader.path if reader.path.is_dir() else reader.path.parent) / "config.json"
    said: object = None
    with suppress(OSError, ValueError, RecursionError, AttributeError):
        said = json.loads(config.read_bytes()).get("quantization_config") if config.is_file() else None
    if said is None and not any(_is_code(stored.dtype) for stored in reader.tensors.values()):
        return []
    method = said.get("quant_method") if isinstance(said, Mapping) else said
    how = f" ({config.name}: quantization_config.quant_method = {str(method)[:60]!r})" if said is not None else ""
    return [
        f"the weights are quantized{how}, and the model has no parameters for all codes and scales: codes alone are no "
        "weights. Have transformers give it some while it is on meta (AutoHfQuantizer.from_config(quantization_config, "
        "pre_quantized=True).preprocess_model(model=model)); or take the weights as they were before that, or let the "
        "library that reads them make weights of them (model.dequantize() of transformers) and save these"
    ]


def _missing(new: NewTensor, left_over: list[str]) -> str:
    near = get_close_matches(new.name, left_over, n=1, cutoff=0.6)
    hint = f"; the nearest name in the files is {near[0]}" if near else ""
    tied = f" (also called {', '.join(new.names[1:])})" if len(new.names) > 1 else ""
    return f"{new.name}{tied} of shape {tuple(new.shape)} is missing{hint}"
