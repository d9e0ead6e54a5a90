"""A checkpoint holds counters, hyperparameters, loss scale, schedule and what the user adds, beside tensors."""

import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from nvme_offload.offload.errors import CheckpointError
from nvme_offload.offload.warn import warn_user
from ..durable.content import saved
from ..optimizer import OffloadOptimizer
from ..precision.loss_scale import LossScaler
from ..step.scalars import with_own_states
from .contents import Contents, Wanted

FORMAT = 1
STATE, OBJECTS = "state.json", "objects.pt"


@dataclass
class TrainingParts:
    """The parts of a training that a checkpoint is of."""

    model: nn.Module
    optimizer: OffloadOptimizer
    lr_scheduler: LRScheduler | None
    loss_scaler: LossScaler | None
    global_steps: int
    group: dist.ProcessGroup | None
    """The ranks that have the model; None: all."""
    stages: dist.ProcessGroup | None
    """The ranks that have the other stages of the model, and this one; None without a pipeline."""
    copies: Sequence[dist.ProcessGroup]
    """Groups of the ranks that each have all buffers of the model, or of their stage."""
    node_local: bool = False
    """Whether each host has a folder of its own for checkpoints: `checkpoint.use_node_local_storage`."""
    has_frozen: bool | None = None
    """Whether parameters that were always frozen are saved; None: those that are not read in place."""


@dataclass(frozen=True)
class Scalars:
    """A checkpoint says this of a run beside tensors, but for the user's own."""

    optimizer: str
    """Name of the optimizer's rule."""
    global_steps: int
    groups: Sequence[Mapping[str, Any]]
    """Parameter groups with their hyperparameters."""
    loss_scale: dict[str, Any] | None
    lr_scheduler_type: str | None
    """Name of the schedule's class; None: there is no schedule."""
    lr_scheduler: dict[str, Any] | None
    """Its state."""

    @classmethod
    def of(cls, training: TrainingParts) -> Self:
        """Return those of a training, as they are now."""
        scheduler, scaler = training.lr_scheduler, training.loss_scaler
        return cls(
            optimizer=training.optimizer.rule.name,
            global_steps=training.global_steps,
            groups=training.optimizer.param_groups,
            loss_scale=scaler.state_dict() if scaler else None,
            lr_scheduler_type=type(scheduler).__name__ if scheduler else None,
            lr_scheduler=scheduler.state_dict() if scheduler else None,
        )


@dataclass(frozen=True)
class RunState:
    """A checkpoint holds this beside tensors, checked against the `TrainingParts` it is for."""

    client_state: dict[str, Any]
    lr_scheduler: dict[str, Any] | None
    loss_scale: dict[str, Any] | None
    global_steps: int
    groups: list[dict[str, Any]]
    """Hyperparameters of each parameter group."""


def state_json(scalars: Scalars, contents: Contents) -> bytes:
    """Return counters, loss scale and hyperparameters; ValueError for one that is no plain value or sequence."""
    content = {
        "format": FORMAT,
        "global_steps": scalars.global_steps,
        "loss_scale": scalars.loss_scale,
        "lr_scheduler": scalars.lr_scheduler_type,
        "optimizer": scalars.optimizer,
        "param_groups": [
            {"params": names, "options": _options(group, number)}
            for number, (group, names) in enumerate(zip(scalars.groups, contents.group_names, strict=True))
        ],
        "tied": contents.tied,
        "in_files": contents.in_files,
    }
    return json.dumps(content, indent=1).encode()


def objects_bytes(scalars: Scalars, client_state: Mapping[str, Any] | None) -> bytes:
    """Return the schedule and what the user adds as ``torch.save`` has them; ValueError if loading could run code."""
    if not isinstance(client_state, Mapping | None):
        raise ValueError(f"client_state is a {type(client_state).__name__}: write a dict, such as {{'epoch': 3}}")
    objects = {"client_state": dict(client_state or {}), "lr_scheduler": scalars.lr_scheduler}
    for name, value in objects.items():
        try:
            torch.load(io.BytesIO(saved(value)), weights_only=True)
        except Exception as error:
            reason = str(error).splitlines()[0]
            raise ValueError(
                f"{name} cannot be saved ({reason}): keep to numbers, strings, lists, dicts and tensors, so that it "
                "can be loaded without running code from the file"
            ) from error
    return saved(objects)


@contextmanager
def _reading_state(folder: Path) -> Iterator[None]:
    """Turn what Python itself stumbles over in a damaged `STATE` into a CheckpointError."""
    try:
        yield
    except (ValueError, LookupError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise CheckpointError(folder / STATE, f"is not the state of a run: {error!r}") from error


def check_same_optimizer(folder: Path, training: TrainingParts) -> None:
    """Check that the checkpoint is of this kind of optimizer, else ValueError: others have states of the same names."""
    with _reading_state(folder):
        found = json.loads((folder / STATE).read_bytes())["optimizer"]
    if found != (own := training.optimizer.rule.name):
        raise ValueError(f"the checkpoint is of a run with {found}, this run has {own}; nothing was changed")


def read_in_files(folder: Path) -> Any:
    """Return what a checkpoint says of parameters that are in files of others; see `bases`."""
    with _reading_state(folder):
        return json.loads((folder / STATE).read_bytes()).get("in_files")


def read_state(folder: Path, training: TrainingParts, contents: Contents, wanted: Wanted) -> RunState:
    """Read both files of a checkpoint and check them against this training, changing nothing; raises as `load` does."""
    with _reading_state(folder):
        state = json.loads((folder / STATE).read_bytes())
        if state["format"] != FORMAT:
            raise CheckpointError(folder / STATE, f"has format {state['format']}; this version reads {FORMAT}")
        groups = [(group["params"], dict(group["options"])) for group in state["param_groups"]]
        loss_scale, kind, global_steps = state["loss_scale"], state["lr_scheduler"], int(state["global_steps"])
        if global_steps < 0:
            raise CheckpointError(folder / STATE, f"has global_steps = {global_steps}, which must be 0 or more")
    try:
        objects = torch.load(folder / OBJECTS, map_location="cpu", weights_only=True)
        client_state, schedule = dict(objects["client_state"]), objects["lr_scheduler"]
    except Exception as error:
        reason = str(error).splitlines()[0]
        raise CheckpointError(folder / OBJECTS, f"cannot be loaded without running code: {reason}") from error
    own = type(training.lr_scheduler).__name__ if training.lr_scheduler else None
    if kind and own and kind != own and wanted.lr_scheduler:
        raise ValueError(f"the checkpoint has the schedule of a {kind}, this run a {own}; nothing was changed")
    known = {item.name for item in fields(LossScaler)}
    if loss_scale is not None and (not isinstance(loss_scale, dict) or loss_scale.keys() != known):
        raise CheckpointError(folder / STATE, f"has a loss scale without {', '.join(sorted(known))}")
    return RunState(
        client_state=client_state,
        lr_scheduler=schedule if kind else None,
        loss_scale=loss_scale,
        global_steps=global_steps,
        groups=_matched(training, contents, groups) if wanted.optimizer else [],
    )


def apply_state(state: RunState, training: TrainingParts, wanted: Wanted) -> None:
    """Take over what `read_state` checked. What only one side has stays as it is; that is said."""
    for group, options in zip(training.optimizer.param_groups, state.groups, strict=wanted.optimizer):
        group.update(options)
    if wanted.lr_scheduler:
        _apply("a schedule", training.lr_scheduler, state.lr_scheduler)
    if wanted.optimizer:
        _apply("a loss scale", training.loss_scaler, state.loss_scale)


def _apply(what: str, own: LRScheduler | LossScaler | None, saved: dict[str, Any] | None) -> None:
    if own is not None and saved is not None:
        own.load_state_dict(saved)
    elif own is not None:
        warn_user(f"this run has {what} and the checkpoint has none: it begins as configured")
    elif saved is not None:
        warn_user(f"the checkpoint has {what} and this run has none: it is left out")


def names_of_groups(optimizer: OffloadOptimizer, contents: Contents) -> list[list[str]]:
    """Return the names of the parameters of each parameter group; those that were always frozen have no state."""
    table = optimizer.store.table
    groups = [[table.of(param).index for param in group["params"]] for group in optimizer.param_groups]
    return [[contents.names[index] for index in group if index in contents.names] for group in groups]


def _options(group: Mapping[str, Any], number: int) -> dict[str, Any]:
    options = {}
    for key, value in group.items():
        if key in ("params", "param_names"):
            continue
        plain = value.item() if isinstance(value, torch.Tensor) and value.numel() == 1 else value
        try:
            same = _retyped(json.loads(json.dumps(plain)), plain) == plain
        except (TypeError, ValueError):
            same = False
        if not same:
            raise ValueError(f"parameter group {number}: {key} = {value!r} cannot be saved; keep to plain numbers")
        options[key] = plain
    return options


def _matched(
    training: TrainingParts, contents: Contents, saved: list[tuple[list[str], dict[str, Any]]]
) -> list[dict[str, Any]]:
    """Return the hyperparameters of each group; ValueError where the groups are not the same."""
    own = training.optimizer.param_groups
    if len(saved) != len(own):
        raise ValueError(f"the checkpoint has {len(saved)} parameter groups, this run {len(own)}; nothing was changed")
    matched = []
    given = with_own_states(training.optimizer.rule, own, [options for _, options in saved])
    for number, (group, (names, _), options) in enumerate(zip(own, saved, given, strict=True)):
        if differing := sorted(set(names) ^ set(contents.group_names[number])):
            raise ValueError(
                f"parameter group {number} holds other parameters in the checkpoint ({', '.join(differing[:10])}); "
                "nothing was changed"
            )
        typed = {key: _retyped(value, group.get(key)) for key, value in options.items()}
        training.optimizer.check_group({**group, **typed}, number)
        matched.append(typed)
    return matched


def _retyped(value: Any, like: Any) -> Any:
    return tuple(value) if isinstance(value, list) and isinstance(like, tuple) else value
