"""Mark which 16-bit parameters have changed since a version of the weights that somebody has.

A version is a text that stands for all weights as they were when it was read. The marks have every change since the
first of the `known` versions was, perhaps more: so they lead on from each of these. Nothing is marked before `begin`.
"""

import secrets
from collections import Counter
from collections.abc import Iterable

import torch

from ..layout.master import MARKS_IN_WORD, TILE_NUMEL, num_marks
from ..layout.subgroup import Run

Found = tuple[torch.Tensor, torch.Tensor]
"""Numbers of elements that have changed, and what they are: see `KernelPool.marked`."""


class LatestChanges:
    """Has what has changed of runs since the latest patch, from the step after which the next one is expected.

    That is as many steps after the latest patch as that one was after the patch before.
    """

    def __init__(self) -> None:
        self.numbers: dict[int, tuple[int, bool] | None] = {}
        """The number of the first element of a parameter, and whether they need int64; None: they are not in order."""
        self._kept: dict[int, dict[Run, Found]] = {}
        self._changes = -1
        self._step = self._begun = 0
        self._every = 1

    def expects_patch(self, step: int) -> bool:
        """Return whether this is that step."""
        return step == self._begun + self._every

    def keep(self, run: Run, found: Found) -> None:
        """Keep what that step has left of a run; it may still be in backward."""
        self._kept.setdefault(run.param, {})[run] = found

    def note_step(self, step: int, changes: int) -> None:
        """Note that a step was called, after which so many changes of weights were noticed."""
        self._step, self._changes = step, changes
        if not self.expects_patch(step):
            self.drop()

    def begin(self) -> None:
        """Note that a patch was gone through."""
        self.drop()
        self._begun, self._every = self._step, max(self._step - self._begun, 1)

    def drop(self) -> None:
        """Drop what was kept: its step is taken back, or another one has followed."""
        self._kept = {}

    def of(self, index: int, numel: int, changes: int) -> list[Found]:
        """Return what is kept of a parameter of so many elements; nothing unless it is all, and nothing came later."""
        kept = self._kept.get(index, {}) if changes == self._changes else {}
        return [kept[run] for run in sorted(kept)] if sum(run.numel for run in kept) == numel else []


class WeightMarks:
    """The marks of all parameters of a table, by index, 64 elements a number: bit 0 is the first."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        """The versions from which the marks lead on."""
        self.digests: dict[str, object] = {}
        """Tensors that have no marks were these at the first known version, by name."""
        self.num_begun = 0
        """Another number whenever marks of parameters begin or end."""
        self.updates: Counter[int] = Counter()
        """Steps since the history began that had a gradient of a parameter, by index."""
        self.changes = 0
        """Changes of weights since the process began that were noticed: steps, and whatever else."""
        self.history = ""
        """Drawn at random, the same on all ranks: versions of other histories are unknown; "": none has begun."""
        self.latest = LatestChanges()
        self._on_host: dict[int, torch.Tensor] = {}
        self._on_device: dict[int, torch.Tensor] = {}
        self._commit = "", 0

    @property
    def version(self) -> str:
        """The version of the weights as they are: the identity of their commit, if there is one."""
        return self._commit[0] if self.is_committed else f"{self.history}-{self.changes}"

    def draw_history(self) -> str:
        """Return a number for a history. It comes from the system: those of the training must not change by it."""
        return self.history or secrets.token_hex(16)

    def note_commit(self, commit: str) -> None:
        """Note that a commit has the weights as they are now."""
        self._commit = commit, self.changes

    def note_change(self, updated: Iterable[int] = (), *, step: int = 0) -> None:
        """Note that weights are about to change, perhaps by a step with gradients of these parameters."""
        self.changes += 1
        if step:
            self.latest.note_step(step, self.changes)
        if self.history:
            self.updates.update(list(updated))  # of a mapping it would add the values

    @property
    def is_committed(self) -> bool:
        """Whether a commit has the weights as they are."""
        commit, changes = self._commit
        return bool(commit) and changes == self.changes

    def agree(self, history: str, changes: int, *, is_committed: bool) -> None:
        """Take what ranks have found together."""
        self.history, self.changes = history, changes
        self._commit = (self._commit[0], changes) if is_committed else ("", 0)

    def forget(self, commit: str = "") -> None:
        """Note that all weights are others now, perhaps those of a commit: no version is known any more."""
        self.note_change()
        self.known, self.digests, self.history, self._commit = set(), {}, "", (commit, self.changes)
        self._on_host, self._on_device = {}, {}
        self.latest.drop()
        self.num_begun += 1  # what was is gone

    def begin(self, index: int, numel: int, numbers: tuple[int, bool] | None) -> None:
        """Begin to mark what changes of a parameter; see `LatestChanges.numbers`."""
        self.latest.numbers[index] = numbers
        self._on_host[index] = torch.zeros(num_marks(numel), dtype=torch.int64, device="cpu")
        self.num_begun += 1

    def has(self, index: int) -> bool:
        """Return whether changes of a parameter are marked."""
        return index in self._on_host

    def of(self, run: Run, device: torch.device | None = None) -> torch.Tensor | None:
        """Return the marks of a run, those on the device that has its state, if one has; None: there are none."""
        marks = self._on_host.get(run.param)
        if marks is not None and device is not None:
            if run.param not in self._on_device:
                self._on_device[run.param] = torch.zeros_like(marks, device=device)
            marks = self._on_device[run.param]
        return None if marks is None else marks[run.start // MARKS_IN_WORD : num_marks(run.stop)]

    @property
    def on_device(self) -> list[torch.Tensor]:
        """The marks that are where the state is: on a device."""
        return [*self._on_device.values()]

    def note(self, run: Run, tiles: Iterable[int] | None = None) -> None:
        """Mark all of a run, or these tiles of it, which somebody sets or has changed."""
        self.note_change()
        if (marks := self.of(run)) is None:
            return
        for tile in range(-(-run.numel // TILE_NUMEL)) if tiles is None else tiles:
            first = tile * TILE_NUMEL
            stop = min(first + TILE_NUMEL, run.numel)
            marks[first // MARKS_IN_WORD : stop // MARKS_IN_WORD] = -1
            if rest := stop % MARKS_IN_WORD:
                marks[stop // MARKS_IN_WORD] = (1 << rest) - 1

    def collected(self, index: int) -> torch.Tensor:
        """Return all marks of a parameter, in host memory."""
        on_host = self._on_host[index]
        if (there := self._on_device.get(index)) is not None:
            on_host |= there.cpu()
        return on_host

    def restart(self, version: str, digests: dict[str, object]) -> None:
        """Take all marks away: this version is known alone, and changes from here on are marked."""
        self.known, self.digests = {version}, digests
        self.latest.begin()
        for marks in (*self._on_host.values(), *self._on_device.values()):
            marks.zero_()
