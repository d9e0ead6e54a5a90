"""A durable run of a few small slots, whose bytes are known for every commit, and the whole life of one."""

import hashlib
import json
import struct
import zlib
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from typer.testing import CliRunner

from nvme_offload import OffloadConfig
from nvme_offload.offload.durable.chain import SlotLayout, Written
from nvme_offload.offload.durable.identity import Encoded
from nvme_offload.offload.durable.manifest import Manifest
from nvme_offload.offload.durable.run import DurableRun
from nvme_offload.offload.durable.seal import SUMMED_BYTES, ExtentLayout, Sums, check_sums
from nvme_offload.offload.host.buffer_pool import BufferPool
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.storage.tier import Memory
from nvme_offload.perf import cli

LAYOUTS = [
    SlotLayout(ExtentLayout(8192, 4096, 4096)),
    SlotLayout(ExtentLayout(12288, 64, 4096)),
    SlotLayout(ExtentLayout(64, 0, 4096)),
]
IDENTITY = {"model": "three slots"}
UUID = "the-run"
HOSTS = {"0": "here", "4": "there"}

HEADER = struct.Struct("<8sQQqQ32s")
"""Of a manifest: magic, sequence, incarnation, step, bytes of the body, digest of all else."""

_BLOB_PIECES = 800  # a manifest has several sectors

Values = tuple[int, ...]  # what each slot holds


def sums_of(memory: Memory, layout: ExtentLayout) -> Sums:
    """Of the bytes in a buffer."""

    def sums(at: int, size_bytes: int) -> torch.Tensor:
        content = memory.view(torch.uint8, at, size_bytes).numpy().tobytes()
        blocks = [content[start : start + SUMMED_BYTES] for start in range(0, size_bytes, SUMMED_BYTES)]
        return torch.tensor([zlib.crc32(block) for block in blocks], dtype=torch.int64)

    return Sums(sums(0, layout.state_bytes), sums(layout.tail_at, layout.tail_bytes))


def content_of(value: int, num_bytes: int) -> torch.Tensor:
    """uint8 [num_bytes] that only this value has."""
    return (torch.arange(num_bytes // 8, dtype=torch.int64) * 0x9E3779B97F4A7C1 + value).view(torch.uint8)


class SmallRun:
    """A run that is open, with a tier and one staging buffer.

    It keeps `steps_back` commits before the newest; `note` is called with what is about to be committed, and what was.
    """

    def __init__(
        self,
        paths: Sequence[Path],
        *,
        layouts: Sequence[SlotLayout] = LAYOUTS,
        engine: str = "aiofiles",
        name: str = "small",
        rank: int = 0,
        steps_back: int = 1,
        note: Callable[[str], None] = lambda moment: None,
    ) -> None:
        place = {"device": "nvme", "nvme_path": [str(path) for path in paths]}
        sections = {"zero_optimization": {"offload_optimizer": place}, "aio": {"engine": engine, "direct": "optional"}}
        config = OffloadConfig.from_dict(sections)
        self.layouts = list(layouts)
        self.run = DurableRun(paths, name=name, rank=rank, direct="optional", steps_back=steps_back)
        self.tier = NvmeTier(config, space=self.run.space)
        self.pool = BufferPool(1, max(layout.base.size_bytes for layout in layouts))
        self.values = [0] * len(layouts)
        self.truth: dict[str, Values] = {}  # what the slots hold, by the names of commits
        self._note = note

    def begin(self) -> None:
        """A run that is new."""
        self.run.identify(Encoded.of(IDENTITY), UUID, HOSTS)
        self.run.extents.add(self.layouts)

    def write(self, values: dict[int, int]) -> None:
        """Write slots, and wait for it."""
        self.run.extents.begin_turn()
        for slot, value in values.items():
            with self.pool.acquire() as buffer:
                layout = self.layouts[slot].base
                buffer.view(torch.uint8, 0, layout.state_bytes).copy_(content_of(value, layout.state_bytes))
                buffer.view(torch.uint8, layout.tail_at, layout.tail_bytes).copy_(content_of(~value, layout.tail_bytes))
                extent = self.run.extents.to_rewrite(slot)
                self.run.extents.seal_base(slot, buffer, sums_of(buffer, layout))
                self.tier.write(extent, buffer, what=f"slot {slot}", kind="state", size_bytes=layout.size_bytes).wait()
                self.values[slot] = value

    def guess(self, slots: Iterable[int]) -> None:
        """Write something into slots, and take it back."""
        values = list(self.values)
        self.write({slot: ~values[slot] for slot in slots})
        for slot in slots:
            self.run.extents.take_back_write(slot)
        self.values = values

    def commit(self, name: str, step: int, slots: Iterable[int] | None = None) -> None:
        """A step that changes slots (all of them by default), and its commit."""
        chosen = range(len(self.layouts)) if slots is None else slots
        changed = {slot: zlib.crc32(f"{self.values[slot]} {name} {slot}".encode()) for slot in chosen}
        after = [changed.get(slot, value) for slot, value in enumerate(self.values)]
        self.truth[name] = tuple(after)
        self._note(f"begin {name}")
        self.write(changed)
        blob = json.dumps([name] * _BLOB_PIECES).encode()
        self.run.commit(step, blob, self.run.extents.tables, hashlib.md5(name.encode()).hexdigest())
        self._note(f"done {name}")

    def snapshot(self, name: str) -> None:
        """Keep the newest step under a name."""
        self.run.prepare_snapshot(name)
        self.run.snapshots.publish(name)

    def remove_snapshot(self, name: str) -> None:
        """Give it up."""
        self.run.snapshots.withdraw(name)
        self.run.delete_snapshot(name)

    def adopt(self, manifest: Manifest) -> None:
        """Go on from there."""
        name = name_of(manifest)
        self._note(f"begin {name}")
        self.run.identify(Encoded.of(IDENTITY), UUID, HOSTS)
        self.run.adopt(manifest, self.layouts)
        self._note(f"done {name}")
        self.values = list(self.read())

    def read(self) -> Values:
        """What every slot holds, after all sums were verified."""
        return tuple(self._read(slot, layout.base) for slot, layout in enumerate(self.layouts))

    def _read(self, slot: int, layout: ExtentLayout) -> int:
        extent = base_of(self.run, slot).extent
        with self.pool.acquire() as buffer:
            self.tier.read(extent, buffer, what=f"slot {slot}", kind="state", size_bytes=layout.size_bytes).wait()
            return checked_value(self.run, slot, buffer, layout)

    def close(self) -> None:
        self.tier.close()
        self.run.close()


def committed(paths: Sequence[Path], *steps: int, snapshot: str | None = None, **more: Any) -> SmallRun:
    """A run that is open, with commits of these steps, called by their place, and maybe a snapshot of the newest."""
    run = SmallRun(paths, **more)
    run.begin()
    for number, step in enumerate(steps):
        run.commit(str(number), step)
    if snapshot is not None:
        run.snapshot(snapshot)
    return run


def base_of(run: DurableRun, slot: int) -> Written:
    """What was last written of a slot."""
    return run.extents.slots[slot].current.base


def name_of(manifest: Manifest) -> str:
    """What `SmallRun.commit` called it."""
    (name,) = set(json.loads(manifest.blob))
    return str(name)


def checked_value(run: DurableRun, slot: int, memory: Memory, layout: ExtentLayout) -> int:
    """What a buffer with the extent of a slot holds; CorruptionError where it is not what the manifest refers to."""
    expected, actual = run.extents.open_sealed(slot, base_of(run, slot), memory), sums_of(memory, layout)
    check_sums(expected.state, actual.state, path="swap", what=f"state of slot {slot}")
    check_sums(expected.tail, actual.tail, path="swap", what=f"tail of slot {slot}")
    return int(memory.view(torch.int64, 0, 1))


def read_past_the_tier(run: DurableRun) -> Values:
    """As `SmallRun.read`, of a run that was adopted, without an engine."""
    contents = {fd: run.space.path_of(fd).read_bytes() for fd in run.space.fds}
    values = []
    for slot, record in enumerate(run.extents.slots):
        layout = record.layout.base
        memory = HostRegion(layout.size_bytes)
        parts = [contents[fd][offset : offset + size] for fd, offset, size in base_of(run, slot).extent.stripes]
        content = bytearray(b"".join(parts)[: layout.size_bytes])
        memory.view(torch.uint8, 0, len(content)).copy_(torch.frombuffer(content, dtype=torch.uint8))
        values.append(checked_value(run, slot, memory, layout))
    return tuple(values)


def offload_runs(*arguments: object) -> tuple[int, str]:
    """Return the exit status of `offload runs`, and what it prints."""
    done = CliRunner().invoke(cli.app, ["runs", *map(str, arguments)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return done.exit_code, done.output


def sealed(manifest: Manifest, body: bytes) -> bytes:
    """A manifest of this body, with the digest that belongs to it."""
    fields = (b"nvmerun1", manifest.sequence, manifest.incarnation, manifest.step, len(body))
    digest = hashlib.blake2b(HEADER.pack(*fields, bytes(32)) + body, digest_size=32).digest()
    return HEADER.pack(*fields, digest) + body


def live(paths: Sequence[Path], note: Callable[[str], None]) -> dict[str, Values]:
    """All that can happen to a run; returns what its slots hold, by the names of commits.

    Steps with parts that do not change, an end and another beginning, going back, a snapshot and going back to that,
    and values loaded from elsewhere.
    """
    small = SmallRun(paths, note=note)
    small.begin()
    small.commit("0", 0)
    small.commit("1", 1, [0, 1])
    small.guess([1, 2])
    small.commit("2", 2, [1, 2])
    small.guess([0, 1])
    small.commit("3", 3, [2])
    truth = small.truth
    small.close()
    small = SmallRun(paths, note=note)
    small.truth = truth
    small.adopt(small.run.found[0])
    small.commit("4", 4, [0, 1])
    small.commit("5", 5)
    small.adopt(small.run.committed[1])  # a rewind
    small.commit("5 again", 5, [2, 0])
    small.commit("6", 6, [1])
    small.snapshot("kept")
    note("pinned 6")
    small.commit("7", 7)
    small.commit("8", 8, [0])
    small.adopt(small.run.snapshots["kept"])
    small.commit("7 again", 7, [0])
    small.commit("loaded", 2)  # values of an earlier training: its step is lower, and nothing was destroyed
    small.commit("3 once more", 3, [1])
    small.commit("4 once more", 4)
    small.close()
    return truth
