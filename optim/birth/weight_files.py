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
from nvme_offload.optim.birth.new_tensors import BirthPlan, NewTensor

_MAX_PROBLEMS = 12


class StoredPiece(NamedTuple):
    """Elements of a parameter, flat, from `start` on: those of a stored tensor, from its `first` on."""

    start: int
    numel: int
    entry: HeaderEntry
    first: int = 0


class WeightSource:
    """Weight files that fit a model. WeightsError lists what is missing, left over, damaged or of another shape."""

    def __init__(self, path: str | os.PathLike[str], model: nn.Module, plan: BirthPlan) -> None:
        self._reader = SafetensorsReader(path)
        wanted = [*plan.params, *(buffer for buffer in plan.buffers if buffer.persistent)]
        self._names, problems = _match(wanted, self._reader.tensors, _ignored(model, plan))
        if problems:
            more = [f"and {len(problems) - _MAX_PROBLEMS} more"] if len(problems) > _MAX_PROBLEMS else []
            raise WeightsError(path, *_quantized(self._reader), *problems[:_MAX_PROBLEMS], *more)

    def read(self, new: NewTensor, start: int, stop: int) -> torch.Tensor:
        """Return elements `start` to `stop` of a parameter or buffer in row-major order: 1D, in the stored dtype."""
        return self._reader.read(self._names[new], start, stop)

    def pieces(self, new: NewTensor) -> list[StoredPiece] | None:
        """Return where the elements of a parameter are, in their order; None where they lie in another order."""
        return [StoredPiece(0, new.shape.numel(), self._reader.tensors[self._names[new]])]

    def close(self) -> None:
        """Close the files, which the first read opened."""
        self._reader.close()


def _ignored(model: nn.Module, plan: BirthPlan) -> re.Pattern[str]:
    """Return what files may hold beside the weights: buffers that models used to save, and what Hugging Face lists."""
    patterns = {rf"^{re.escape(name)}$" for buffer in plan.buffers for name in buffer.names}
    patterns |= set(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ())
    return re.compile("|".join(sorted(patterns)) or r"(?!)")


def _match(
    wanted: Iterable[NewTensor], stored: Mapping[str, HeaderEntry], ignored: re.Pattern[str]
) -> tuple[dict[NewTensor, str], list[str]]:
    """Return stored names by tensor, and what does not fit, in words."""
    names, missing, misfits, known = dict[NewTensor, str](), list[NewTensor](), list[str](), set[str]()
    for new in wanted:
        known.update(new.names)
        name = next((name for name in new.names if name in stored), None)
        if name is None:
            missing.append(new)
            continue
        names[new] = name
        found = stored[name]
        if found.shape != tuple(new.shape):
            misfits.append(f"{name} has shape {found.shape} in {found.path.name}; the model has {tuple(new.shape)}")
        elif not _may_be_cast(found.dtype, new):
            misfits.append(f"{name} is {found.dtype} in {found.path.name}; the model has {new.dtype}")
    left_over = [name for name in stored if name not in known and not ignored.search(name)]
    problems = [_missing(new, left_over) for new in missing[:_MAX_PROBLEMS]]
    problems += [f"{new.name} is missing" for new in missing[_MAX_PROBLEMS:]] + misfits
    return names, problems + [f"{name} is in no place of the model" for name in left_over]


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
        "weights. Take the weights as they were before that, or let the library that reads them make weights of them "
        "(model.dequantize() of transformers) and save these; or load the model into host memory with its quantizer"
    ]


def _missing(new: NewTensor, left_over: list[str]) -> str:
    near = get_close_matches(new.name, left_over, n=1, cutoff=0.6)
    hint = f"; the nearest name in the files is {near[0]}" if near else ""
    tied = f" (also called {', '.join(new.names[1:])})" if len(new.names) > 1 else ""
    return f"{new.name}{tied} of shape {tuple(new.shape)} is missing{hint}"
