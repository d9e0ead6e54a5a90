"""A committed step of a run that nobody is in, as all its ranks left it: read without a model, and not changed."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, closing
from dataclasses import dataclass
from typing import NamedTuple

from nvme_offload.offload.durable.committed import CommittedRank
from nvme_offload.offload.durable.inventory import RunFound, locked
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.errors import ResumeError
from ..access.values import CommittedValues
from ..durable.content import Content
from ..durable.identity import RecordedRun
from ..kernels import KernelPool
from ..updates.logs import SlotLogs


@dataclass(frozen=True)
class RankOfStep:
    """It reads what one rank left of a step."""

    run: RecordedRun
    content: Content
    values: CommittedValues


@dataclass(frozen=True)
class CommittedStep(AbstractContextManager["CommittedStep"]):
    """A step as all ranks of a run left it. Until the end of a ``with`` nobody else can be in the run."""

    name: str
    """The run's own."""
    ranks: list[RankOfStep]
    _files: ExitStack

    def __exit__(self, *exception: object) -> None:
        self._files.close()

    @property
    def step(self) -> int:
        """Steps that the run had taken or skipped."""
        return self.ranks[0].content.step

    @property
    def missing(self) -> list[str]:
        """Names of parameters that the run does not keep: they were frozen, or not the optimizer's."""
        kept = {param.name for rank in self.ranks for param in rank.run.params if param.has_state}
        named = [param.name for rank in self.ranks for param in rank.run.params]
        named += [name for rank in self.ranks for name in rank.run.elsewhere]
        return [name for name in dict.fromkeys(named) if name not in kept]


class _Found(NamedTuple):
    manifest: Manifest
    content: Content


def open_step(run: RunFound, *, step: int | None = None, snapshot: str | None = None) -> CommittedStep:
    """Open a committed step of a run, for the time of a ``with``; nobody can be in the run meanwhile.

    The step is the newest that all ranks have, or the one of this number or snapshot. What is read is verified; nothing
    is read before somebody asks for it.

    Raises:
        StateError: somebody is in the run; names the process.
        ResumeError: it has no such step on all ranks, ranks or paths are missing, it is damaged, or of another version.
        SwapIOError: a file cannot be opened.
    """
    with ExitStack() as files:
        files.enter_context(locked(run))
        if run.missing:
            raise ResumeError(
                run.name,
                f"is a run of {run.num_ranks} ranks, and of ranks {run.missing} no directory is here: name the folders "
                f"that they had. Mount or copy here those of another host (nvme-durable-{run.name}-rank*). Or start "
                "the run once more on all hosts, resume(), and engine.save_16bit_model(dir) or save_checkpoint(dir)",
            )
        ranks = {
            rank.rank: files.enter_context(closing(CommittedRank(rank.copies.read_from, rank.copies.others)))
            for rank in run.ranks
        }
        if len({rank.uuid for rank in ranks.values()}) > 1:
            raise ResumeError(run.name, "is the name of several runs here, with other ranks each: remove the others")
        chosen = _chosen(run.name, ranks, step, snapshot)
        recorded = {
            number: RecordedRun.of(ranks[number].identity(found.manifest), ranks[number].folder)
            for number, found in chosen.items()
        }
        _check_stages(run.name, recorded)
        states = [
            RankOfStep(recorded[number], found.content, _values_of(ranks[number], recorded[number], found.manifest))
            for number, found in chosen.items()
        ]
        return CommittedStep(run.name, states, files.pop_all())


def _chosen(name: str, ranks: Mapping[int, CommittedRank], step: int | None, snapshot: str | None) -> dict[int, _Found]:
    of_ranks = {number: _commits_of(rank, snapshot) for number, rank in ranks.items()}
    common = set.intersection(*(set(of_rank) for of_rank in of_ranks.values()))
    first = next(iter(of_ranks.values()))
    asked = [key for key in first if key in common and (step is None or first[key].content.step == step)]
    if not asked:
        held = ", ".join(str(held) for held in sorted({first[key].content.step for key in common})) or "none"
        what = "no step that all ranks have" if step is None else f"no step {step} that all ranks have"
        raise ResumeError(name, f"has {what}; held are: {held}")
    return {number: of_rank[asked[0]] for number, of_rank in of_ranks.items()}


def _commits_of(rank: CommittedRank, snapshot: str | None) -> dict[str, _Found]:
    manifests = rank.steps if snapshot is None else [rank.snapshot(snapshot)]
    return {found.commit_id: _Found(found, Content.decode(found.blob, rank.folder)) for found in manifests}


def _check_stages(name: str, recorded: Mapping[int, RecordedRun]) -> None:
    """Check that no two stages of a pipeline have a name in common: it would be one tensor in what is written."""
    stages: dict[str, int] = {}
    for run in recorded.values():
        for param in run.params:
            if stages.setdefault(param.name, run.stage) != run.stage:
                raise ResumeError(
                    name,
                    f"has two parameters {param.name!r}, on stages {stages[param.name]} and {run.stage} of a pipeline: "
                    "stages need the names of the whole model",
                )


def _values_of(rank: CommittedRank, run: RecordedRun, manifest: Manifest) -> CommittedValues:
    extents = rank.extents(run.alignment)
    logs = SlotLogs(extents, run, KernelPool(1), run.period)
    extents.lay_out(logs.layout_of(slot.subgroup) for slot in run.slots)
    return CommittedValues(run.slots, logs, rank.space, manifest)
