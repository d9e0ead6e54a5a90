"""A checkpoint leaves out what is read in place of files that others wrote, and notes these files."""

from collections.abc import Mapping, Sequence
from typing import Any

from nvme_offload.offload.storage.file_ranges import FileIdentity
from ..ranks.collective import gather
from ..tiers.parts import parts_of
from .contents import MODEL, Contents
from .run_state import TrainingParts

Bases = Mapping[str, FileIdentity]
"""Files by name, as they were when a run began with them."""


def leave_out(contents: Contents, training: TrainingParts) -> None:
    """Leave out what every rank reads in place, and note the files. Collective."""
    own = {
        f"{MODEL}.{name}"
        for name, param in training.model.named_parameters()
        if (parts := parts_of(param)) is not None and parts.stored.has_value
    }
    in_files = set.intersection(*gather(own, training.group).values())
    if in_files:
        contents.in_files.update(names=sorted(in_files), files=as_json(training.optimizer.store.blocks.bases))
        contents.keep(contents.kinds.keys() - in_files)


def as_json(bases: Bases) -> dict[str, list[int]]:
    """Return what `changes` takes, as JSON has it."""
    return {name: list(identity) for name, identity in bases.items()}


def changes(noted: Mapping[str, Sequence[int]], bases: Bases) -> list[str]:
    """Say which files are not those that were noted. Copies that kept their time of modification are the same."""
    problems = []
    for name, said in noted.items():
        before = FileIdentity(*said)
        if (now := bases.get(name)) is None:
            problems.append(f"frozen parameters were read from {name}, and are not here")
        elif (before.size_bytes, before.mtime_ns) != (now.size_bytes, now.mtime_ns):
            seconds, rest = divmod(before.mtime_ns, 10**9)
            remedy = f"if its bytes are the same, `touch -d @{seconds}.{rest:09}` it"
            problems.append(f"{name} is another file than it began with: {before.differences(now)}; {remedy}")
    return problems


def narrow(contents: Contents, said: Any, saved: Mapping[str, object], bases: Bases) -> None:
    """Leave out of a load what a checkpoint has left to the files; ValueError if these are others."""
    if not said:
        return
    if problems := changes(said["files"], bases):
        raise ValueError(f"the checkpoint has no base; nothing was changed: {'; '.join(problems)}")
    contents.keep(contents.kinds.keys() - (set(said["names"]) - saved.keys()))
