"""Go on from a committed step: find one that all ranks have, verify it, and bring all of it back to its place."""

import socket
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from functools import partial
from itertools import combinations, takewhile
from typing import Any, NamedTuple

import torch

from nvme_offload.offload.durable.chain import SlotLayout
from nvme_offload.offload.durable.committed import PinnedReader
from nvme_offload.offload.durable.identity import Encoded
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.errors import CorruptionError, ResumeError, StateError, SwapIOError
from nvme_offload.offload.warn import warn_user
from ..ranks.collective import this_rank
from ..ranks.drives import Reach, misplaced
from ..state.condition import Need
from ..tiers.parts import drop_gathered
from .commits import Commits, random_id
from .content import Content

Check = Callable[[Mapping[str, Any], int], None]
"""Looks whether hyperparameters can take the place of those of the group with this number."""

_UNCHANGED = (
    "Nothing of it has changed. Make model and optimizer as that run had them (parameters that were unfrozen, and "
    "groups that were added, later: in the same order, with place() after each), or begin anew under another name"
)


class _Offer(NamedTuple):
    """One rank could go on from these steps."""

    host: str
    folder: str
    steps: dict[str, int]
    """By the identity of the commit, the newest first."""
    drawn: str
    """For the history that begins: see `Commits.begin_history`."""

    def __str__(self) -> str:
        steps = [f"step {step} ({commit[:8]})" for commit, step in self.steps.items()]
        return f"{' and '.join(steps) or 'nothing'} in {self.folder} on host {self.host}"


class Resumption:
    """Takes up what was committed, by this process or by one that has ended."""

    def __init__(self, commits: Commits, groups: Sequence[MutableMapping[str, Any]], check_group: Check) -> None:
        self._commits = commits
        self._store = commits.store
        self._run = commits.run
        self._durable = commits.durable
        self._ranks = commits.ranks()
        self._groups = groups
        self._check_group = check_group
        self._cannot_write = False
        self._identity: Encoded | None = None
        """The run as it is here, once that was compared."""

    def resume(self) -> Content | None:
        """Go on from the latest step that every rank has, or from the one before if that is damaged."""
        store = self._store
        with store.at_rest(), torch.no_grad():
            has_stopped = not self._ranks.all(bool(self._run.found) or not store.has_unfinished_step)
            self._ranks.together(partial(self._check_begins, has_stopped=has_stopped))
            reach = self._ranks.together(partial(Reach.of, self._store.config))
            if said := misplaced(self._ranks.gather(reach)):
                raise ResumeError(self._run.folder, f"cannot be resumed: {said}. Nothing of it has changed")
            self._commits.snapshots().agree()
            found = self._ranks.gather((bool(self._run.found), self._run.is_under_way)).values()
            if has_stopped:
                self._ranks.together(store.place_trainable)
                self._commits.settle()
                return self._go_back(self._common(lambda: self._run.committed))
            # Some rank has nothing yet, and the others have no more than the first commit of all.
            if not all(has_any for has_any, _ in found) and not any(is_under_way for _, is_under_way in found):
                self._ranks.together(self._begin_anew)
                return None
            self._ranks.together(store.place_trainable)
            return self._take_up(self._common(lambda: self._run.found))

    def resume_snapshot(self, name: str) -> Content:
        """Go on from a step that was kept under a name; see `Durable.resume`."""
        store = self._store
        with store.at_rest(), torch.no_grad():
            kept = self._commits.snapshots().find(name)
            self._ranks.together(store.place_trainable)
            self._commits.settle()
            return self._go_back(self._common(lambda: [kept]), begins_load=not self._run.found)

    def rewind(self, steps: int) -> Content:
        """Go back so many steps from the latest one that is committed; see `Durable.rewind`."""
        if not isinstance(steps, int) or steps < 1:
            raise ValueError(f"rewind({steps!r}): write how many steps to go back, 1 or more")
        with self._store.at_rest(), torch.no_grad():
            self._ranks.together(partial(self._store.check, Need.STATE))
            self._commits.settle()
            wanted = self._common(partial(self._back, steps))[:1]
            self._check_whole(wanted[0])
            return self._go_back(wanted)

    def _check_begins(self, *, has_stopped: bool) -> None:
        """Raise StateError after the first step, if no rank has a step or a load in this life that stopped halfway."""
        if not (has_stopped or self._run.found or self._commits.step == 0):
            raise StateError("resume", "a call before the first step", f"step {self._commits.step} is taken")

    def _go_back(self, candidates: Sequence[Manifest], *, begins_load: bool = True) -> Content:
        if begins_load:
            self._store.begin_load()
        try:
            return self._take_up(candidates)
        except Exception as error:
            error.add_note(f"{self._store.condition.situation}. {self._store.condition.way_on}.")
            raise

    def _back(self, steps: int) -> list[Manifest]:
        committed = self._run.committed
        whole = committed[: 0 if self._run.extents.uncommitted else None]
        found = [manifest for manifest in whole if manifest.step == committed[0].step - steps]
        if not found:
            there = ", ".join(str(manifest.step) for manifest in whole) or "none"
            wanted = f"the commit of the step that is {steps} steps before the latest"
            kept = "rewind_steps of the section says how many are kept behind the latest; 1 by default"
            raise StateError(f"rewind({steps})", wanted, f"commits of steps {there} alone ({kept})")
        return found

    def _check_whole(self, manifest: Manifest) -> None:
        """Read and verify a step past what is there: a life that was killed in a step may have written over it."""
        if said := self._said_by_any(self._damage_of(manifest)):
            raise StateError("rewind", f"a committed step {manifest.step} that is whole", said)

    def _damage_of(self, manifest: Manifest) -> str:
        reader, extents = PinnedReader(self._run.space), self._run.extents
        try:
            chains = extents.chains_of(manifest.tables, self._layouts())
            for slot, chain in zip(self._store.slots, chains, strict=True):
                reader.read(chain, partial(self._durable.logs.check, slot.subgroup, chain))
        except (CorruptionError, SwapIOError, ResumeError) as damage:
            return str(damage)
        return ""

    def _begin_anew(self) -> None:
        """Destroy what was committed first: training begins with the state that was born beside it."""
        assert not self._run.is_under_way
        self._run.forget_commits()
        self._store.be_whole()

    def _common(self, find: Callable[[], Sequence[Manifest]]) -> list[Manifest]:
        """Return those of this rank's manifests, as `find` gives them, that all ranks have; newest first."""
        own = self._ranks.together(lambda: {found.commit_id: found for found in find()})
        steps = {commit: manifest.step for commit, manifest in own.items()}
        of_all = self._ranks.gather(_Offer(socket.gethostname(), str(self._run.folder), steps, random_id()))
        common = set.intersection(*(set(offer.steps) for offer in of_all.values()))
        self._refuse_other_histories(of_all, common)
        self._commits.begin_history(offer.drawn for offer in of_all.values())
        in_order = next(iter(of_all.values())).steps  # all go by the order of one rank
        candidates = [own[commit] for commit in in_order if commit in common]
        self._identity = identity = self._commits.identity()
        different = self._ranks.together(lambda: [self._run.differences(one, identity) for one in candidates])
        more = f", and {len(different[0]) - 5} more" if len(different[0]) > 5 else ""
        if said := self._said_by_any("; ".join(different[0][:5]) + more):
            raise ResumeError(self._run.folder, f"is of another run than this: {said}. {_UNCHANGED}")
        return [manifest for manifest, lines in zip(candidates, different, strict=True) if not lines]

    def _refuse_other_histories(self, of_all: Mapping[int, _Offer], common: set[str]) -> None:
        """Raise ResumeError on every rank where ranks have no commit in common, or parted behind the one they have."""
        newer = [set(takewhile(lambda commit: commit not in common, offer.steps)) for offer in of_all.values()]
        have_parted = any(one and other and not one & other for one, other in combinations(newer, 2))
        if common and not have_parted:
            return
        if not any(offer.steps for offer in of_all.values()):
            raise ResumeError(self._run.folder, "has no committed step yet: load a checkpoint, or begin anew")
        what = "steps of different histories" if common else "no step that all ranks have of one history"
        offers = "; ".join(f"rank {rank} has {offer}" for rank, offer in of_all.items())
        raise ResumeError(
            self._run.folder,
            f"has {what}: {offers}. Nothing has changed. "
            "A folder may be older than the others, as one restored from a backup is: put back the one that "
            "belongs to the others. Or go on from a snapshot that all ranks have, with resume(NAME), or from a "
            "checkpoint in a run of another name, which leaves this one as it is",
        )

    def _said_by_any(self, problem: str) -> str:
        """Return the problems of all ranks, with rank and host where there are several."""
        if not self._ranks.several:
            return problem
        of_all = self._ranks.gather(f"on {this_rank()}, {problem}" if problem else "")
        return "; ".join(filter(None, of_all.values()))

    def _take_up(self, candidates: Sequence[Manifest]) -> Content:
        """Bring the first manifest back that is whole on every rank, and destroy what is newer."""
        problems: list[str] = []
        self._store.table.marks.forget()
        for manifest in candidates:
            content, problem = self._ranks.together(partial(self._bring_back, manifest))
            said = self._said_by_any(problem)
            if not said:
                self._ranks.together(partial(self._commits.identify, self._identity))
                # All ranks have it among their commits before the first destroys another one, and nobody goes on while
                # another rank still has a newer one: whoever is killed at any moment, there is one that all have.
                self._ranks.together(partial(self._run.bring_to_front, manifest, self._layouts()))
                self._ranks.together(partial(self._adopt, manifest))
                self._go_on_from(content)
                return content
            if not self._ranks.all(not self._cannot_write):
                raise ResumeError(
                    self._run.folder,
                    f"is whole, and cannot go on now: {said}. Remove the cause, and call resume() again",
                )
            problems.append(f"step {manifest.step}: {said}")
            warn_user(f"a committed step is damaged ({problems[-1]}): the one before it is looked at")
        raise ResumeError(
            self._run.folder,
            f"cannot be resumed: {'; '.join(problems)}. Parameters may have changed; load a checkpoint",
        )

    def _bring_back(self, manifest: Manifest) -> tuple[Content, str]:
        """Read and verify every subgroup, and set its parameters; return the other content, and what went wrong."""
        content = Content.decode(manifest.blob, self._run.folder)
        if len(content.groups) != len(self._groups):
            raise ResumeError(
                self._run.folder,
                f"is of another run than this: {len(content.groups)} parameter groups were committed, "
                f"{len(self._groups)} are here. {_UNCHANGED}",
            )
        for number, (group, options) in enumerate(zip(self._groups, content.groups, strict=True)):
            self._check_group({**group, **options}, number)
        store, extents = self._store, self._run.extents
        try:
            extents.adopt(manifest.tables, self._layouts(), where=str(self._run.folder))
            for slot in store.slots:
                if not self._durable.seal.find(slot, store.pipeline):
                    return content, f"it has nothing of subgroup {slot.index}"
            for position, slot in enumerate(store.slots):
                memory = store.pipeline.acquire(store.slots, position, for_change=False, replay=False)
                self._durable.seal.bring_back(slot, memory)
        except (CorruptionError, SwapIOError, ResumeError) as error:
            for slot in store.slots:
                store.pipeline.forget(slot)
            self._cannot_write = isinstance(error, SwapIOError) and error.direction != "read"
            return content, str(error)
        return content, ""

    def _adopt(self, manifest: Manifest) -> None:
        self._run.adopt(manifest, self._layouts())
        self._store.table.marks.forget(manifest.commit_id)
        for slot in self._store.slots:
            self._durable.seal.point(slot)

    def _layouts(self) -> list[SlotLayout]:
        return [self._durable.logs.layout_of(slot.subgroup) for slot in self._store.slots]

    def _go_on_from(self, content: Content) -> None:
        store = self._store
        store.table.count_steps(dict(enumerate(content.steps.tolist())))
        for leaf in store.table.leaves:
            drop_gathered(leaf)
        for group, options in zip(self._groups, content.groups, strict=True):
            group.update(options)
        content.restore_generators()
        self._commits.note_adopted(content)
        store.be_whole()
