"""Encode what a commit holds beside the state: step counts, hyperparameters, random numbers and the user's own."""

import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import torch

from nvme_offload.offload.errors import ResumeError
from ..state.table import ParamTable

FORMAT = 1
_LEAVES = (int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_NOT_OPTIONS = ("params", "param_names")


@dataclass(frozen=True)
class Content:
    """All that is committed with a step, as it was when that ended."""

    step: int
    """Steps that the run has taken or skipped."""
    tick: int
    """Number of the commit: ranks that commit the same have the same."""
    steps: torch.Tensor
    """Updates that each parameter has had, int64 [parameters]."""
    groups: list[dict[str, Any]]
    """Hyperparameters of each parameter group."""
    client_state: dict[str, Any]
    engine: dict[str, Any] = field(default_factory=dict)
    """A training engine adds this."""
    generators: dict[str, torch.Tensor] = field(default_factory=dict)
    """State of torch's random number generators, by device."""

    @classmethod
    def taken(
        cls,
        step: int,
        tick: int,
        table: ParamTable,
        counts: Mapping[int, int],
        groups: Iterable[Mapping[str, Any]],
        client_state: Mapping[str, Any],
        engine: Mapping[str, Any],
    ) -> Self:
        """Return what there is now, with `counts` of updates under way. Encode it before anything changes."""
        return cls(
            step=step,
            tick=tick,
            steps=torch.tensor(
                [counts.get(record.index, record.steps) for record in table], dtype=torch.int64, device="cpu"
            ),
            groups=[{key: value for key, value in group.items() if key not in _NOT_OPTIONS} for group in groups],
            client_state=dict(client_state),
            engine=dict(engine),
            generators=_generators(table.params),
        )

    def encode(self) -> bytes:
        """Return the bytes that `decode` takes. ValueError names what cannot be read again without running code."""
        for name, value in (("client_state", self.client_state), ("the engine's state", self.engine)):
            _check(value, name)
        for number, group in enumerate(self.groups):
            _check(group, f"parameter group {number}")
        return saved({"format": FORMAT, **vars(self)})

    @classmethod
    def decode(cls, blob: bytes, folder: Path) -> Self:
        """Read what `encode` made, without running code from it. ResumeError: it is none, or of another version."""
        try:
            found = torch.load(io.BytesIO(blob), map_location="cpu", weights_only=True)
            version = found.pop("format")
            if version == FORMAT:
                return cls(**found)._checked()
        except Exception as error:
            raise ResumeError(folder, f"has a manifest whose content cannot be read: {error}") from error
        raise ResumeError(folder, f"has a manifest of format {version}; this version reads {FORMAT}")

    def _checked(self) -> Self:
        """Return this, if each field is what `encode` was given; ValueError names one that is not."""
        for name, kind in (("step", int), ("tick", int), ("steps", torch.Tensor), ("groups", list)):
            if type(getattr(self, name)) is not kind:
                raise ValueError(f"its {name} is no {kind.__name__}")
        for name in ("client_state", "engine", "generators"):
            if not isinstance(getattr(self, name), dict):
                raise ValueError(f"its {name} is no dict")
        if self.steps.dtype is not torch.int64 or self.steps.dim() != 1 or min(self.step, self.tick) < 0:
            raise ValueError("its counts of steps are none")
        return self

    def restore_generators(self) -> None:
        """Let random numbers go on from where they were."""
        for device, state in self.generators.items():
            if device == "cpu":
                torch.set_rng_state(state)
            else:
                torch.get_device_module(torch.device(device)).set_rng_state(state, device)


def _generators(params: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    states = {"cpu": torch.get_rng_state()}
    for device in {param.device for param in params if param.device.type not in ("cpu", "meta")}:
        states[str(device)] = torch.get_device_module(device).get_rng_state(device)
    return states


def _check(value: Any, place: str) -> None:
    """Raise ValueError if a value, at this place, cannot be read again with ``torch.load(weights_only=True)``.

    Plain values are known by their type, which costs next to nothing; anything else is tried.
    """
    if type(value) in (dict, list, tuple):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            _check(key, f"{place}: the key {key!r}")
            _check(inner, f"{place}[{key!r}]")
        return
    if type(value) in (*_LEAVES, bool, torch.Tensor):
        return
    try:
        torch.load(io.BytesIO(saved(value)), weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{place} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be committed: keep to "
            "numbers, strings, lists, dicts and tensors, so that it can be read without running code from the file"
        ) from error


def saved(value: Any) -> bytes:
    """Return what ``torch.save`` makes of a value."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()
