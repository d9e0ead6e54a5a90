"""From events to what the drive may hold: every event as changes that reach the drive each on its own."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.support.power_loss.events import (
    Allocated,
    Completed,
    Event,
    Linked,
    Made,
    Marked,
    Removed,
    Renamed,
    Resized,
    Synced,
    Wrote,
)

SECTORS = (512, 4096)  # what a drive writes whole or not at all, in bytes: a seed chooses one

STALE = 0xA5  # what may stand where a file grew and its bytes are lost, beside zeros

Image = dict[str, "bytes | Symlink | None"]  # paths with what is there; None: a folder


@dataclass(frozen=True)
class Symlink:
    target: str


@dataclass(eq=False)
class Node:
    """A file, folder or symbolic link, whatever it is called, and as the drive has it from the beginning."""

    number: int
    names: dict[str, Node] | None = None
    content: bytes = b""
    target: str | None = None


@dataclass
class Files:
    """What was there before the first event."""

    root: Node = field(default_factory=lambda: Node(0, {}))
    by_inode: dict[int, Node] = field(default_factory=dict)

    @staticmethod
    def found_in(folder: Path) -> Files:
        """Everything below a folder that exists."""
        found = Files()
        found.root = found._read(os.fspath(folder))
        return found

    def _read(self, path: str) -> Node:
        inode = os.lstat(path).st_ino
        if inode in self.by_inode:
            return self.by_inode[inode]
        node = self.by_inode[inode] = Node(inode)
        if os.path.islink(path):
            node.target = os.readlink(path)
        elif os.path.isdir(path):
            node.names = {name: self._read(os.path.join(path, name)) for name in os.listdir(path)}
        else:
            node.content = Path(path).read_bytes()
        return node


@dataclass(eq=False)
class Change:
    """Something that is on the drive or not, whatever else is."""

    node: Node
    at: int  # index of the event that made it
    token: int | None = field(default=None, kw_only=True)  # of the transfer that makes it and is not known to be done
    durable_at: float = field(default=float("inf"), kw_only=True)  # index of the event from which on it is on the drive
    needs: Change | None = field(default=None, kw_only=True)  # a change without which it is not there

    @property
    def begins(self) -> int:
        """Index of the event from which on part of it may be there: what O_DSYNC writes, before the call returns."""
        return self.at - 1 if self.durable_at == self.at else self.at


@dataclass(eq=False)
class Names(Change):
    """Names in one folder, each with what it stands for from now on, or None."""

    entries: dict[str, Node | None]

    def __str__(self) -> str:
        return ", ".join(f"{'-' if node is None else '+'}{name}" for name, node in self.entries.items())


@dataclass(eq=False)
class Bytes(Change):
    offset: int
    data: bytes

    def __str__(self) -> str:
        return f"{len(self.data)} bytes at {self.offset}"

    def sectors(self, size: int) -> list[Bytes]:
        """Its parts that are written whole or not at all."""
        first, end = self.offset - self.offset % size, self.offset + len(self.data)
        parts = []
        for start in range(first, end, size):
            low, high = max(start, self.offset), min(start + size, end)
            parts.append(replace(self, offset=low, data=self.data[low - self.offset : high - self.offset]))
        return parts


@dataclass(eq=False)
class Length(Change):
    size_bytes: int
    exact: bool  # whether a longer file becomes shorter
    zeros: bool = False  # whether what it grows by is zeros for certain

    def __str__(self) -> str:
        return f"length {self.size_bytes}"


@dataclass
class Crash:
    """One thing that the drive may hold."""

    at: int  # index of the last event before it; -1: before the first
    marks: tuple[str, ...]  # names of the moments that had passed
    what: str  # the event, and which of the changes that nothing covered are there
    image: Image

    def restore(self, folder: Path) -> Path:
        """Make a folder that holds this; `folder` must not exist, or be empty."""
        os.makedirs(folder, exist_ok=True)
        for path, content in self.image.items():
            where = os.path.join(folder, path)
            if content is None:
                os.mkdir(where)
            elif isinstance(content, Symlink):
                os.symlink(content.target, where)
            else:
                with open(where, "wb", buffering=0) as file:
                    file.write(content)
        return folder

    def committed(self) -> set[str | None]:
        """What may be found: the latest that was marked as done, and what had begun since; None: nothing was done."""
        done, begun = (
            [mark.removeprefix(f"{kind} ") for mark in self.marks if mark.startswith(f"{kind} ")]
            for kind in ("done", "begin")
        )
        return {done[-1] if done else None, *begun[-1:]} if len(begun) > len(done) else {done[-1] if done else None}

    def __str__(self) -> str:
        return self.what


class History:
    """What happened below a folder since `base` was there, and from it what a crash at any moment may leave there."""

    def __init__(self, base: Files, events: Sequence[Event]) -> None:
        self.base = base
        self.events = list(events)
        self.changes: list[Change] = []
        self._nodes = dict(base.by_inode)
        self._numbers = itertools.count(1)
        self._live = {node: dict(node.names) for node in self._nodes.values() if node.names is not None}
        self._sizes = {node: len(node.content) for node in self._nodes.values() if node.names is None}
        for at, event in enumerate(self.events):
            getattr(self, f"_on_{type(event).__name__.lower()}")(at, event)

    @staticmethod
    def merged(folder: Path, recordings: Iterable[tuple[Files, Sequence[Event]]]) -> History:
        """Of several processes that recorded the same folder, in the order in which things happened."""
        recordings = sorted(recordings, key=lambda recording: recording[1][0].time_ns)  # what the first one found
        events = sorted((event for _, events in recordings for event in events), key=lambda event: event.time_ns)
        history = History(recordings[0][0], events)
        history.check_same_as(folder)
        return history

    @property
    def syncs(self) -> list[Synced]:
        """Every fsync and fdatasync, in order."""
        return [event for event in self.events if isinstance(event, Synced)]

    def without(self, sync: Synced) -> History:
        """The same as if one sync had been left out."""
        return History(self.base, [event for event in self.events if event is not sync])

    def losses_without(self, sync: Synced) -> Iterator[Crash]:
        """What a power loss could leave if one sync had been left out, and cannot as it is; the likeliest first.

        At every later moment something that this sync alone covered is lost, in one of these ways: all of it and
        nothing else, all of it and whatever else nothing covers, all of it and all but one of the others, each alone.
        """
        other, left_out = self.without(sync), self.events.index(sync)
        both = zip(self.changes, other.changes, strict=True)
        covered = [theirs for mine, theirs in both if mine.durable_at == left_out]
        seen: set[Any] = set()
        for at in range(left_out - 1, len(other.events)):
            pending = other._pending(at)
            if lost := {change for change in covered if change in pending}:
                ways = [[change for change in pending if change not in lost], []]
                ways += [[one] for one in pending if one not in lost]
                ways += [[change for change in pending if change is not one] for one in lost]
                for kept, fill in itertools.product(ways, (0, STALE)):
                    yield from other._lost(seen, at, pending, kept, fill)

    def check_same_as(self, folder: Path) -> None:
        """AssertionError: the events do not lead to what the folder holds: something went past the recording."""
        mine, found = self._image(self.changes), _image_of(Files.found_in(folder).root)
        wrong = sorted(path for path in mine.keys() | found.keys() if mine.get(path, 0) != found.get(path, 0))
        assert not wrong, f"changed past the recording, or not as it says: {', '.join(wrong)}"

    def kills(self, seed: int = 0) -> Iterator[Crash]:
        """Every moment at which the process may have been killed: all changes so far, of transfers under way a part."""
        chance = random.Random(seed)
        seen: set[Any] = set()
        for at in range(-1, len(self.events)):
            so_far = [change for change in self.changes if change.at <= at]
            done = self._completed(at)
            under_way = [c for c in so_far if c.token is not None and c.token not in done]
            parts = [frozenset(so_far)]
            if under_way:
                certain = frozenset(so_far) - set(under_way)
                parts += [certain, *(certain | {c for c in under_way if chance.random() < 0.5} for _ in range(2))]
            for part in parts:
                yield from self._unless_seen(seen, at, [c for c in so_far if c in part], "killed", 0)

    def power_losses(self, *, at_most: int = 64, num_random: int = 0, seed: int = 0) -> Iterator[Crash]:
        """What a drive may hold after a power loss; each thing once for each set of marks that had passed.

        At every moment all subsets of what nothing covers are tried, if there are `at_most` so many; otherwise all,
        none, each alone and all but each; and `num_random` subsets in addition, with sectors lost one by one.
        """
        seen: set[Any] = set()
        for at in range(-1, len(self.events)):
            pending = self._pending(at)
            for kept in _subsets(pending, at_most):
                for fill in (0, STALE):
                    yield from self._lost(seen, at, pending, kept, fill)
        chance = random.Random(seed)
        for _ in range(num_random):
            yield from self._some_power_loss(seen, chance)

    def some_crash(self, chance: random.Random) -> Crash:
        """A kill or a power loss, at any moment, with any part of what nothing covers."""
        if chance.random() < 0.3:
            at = chance.randrange(-1, len(self.events))
            return next(self._unless_seen(set(), at, [c for c in self.changes if c.at <= at], "killed", 0))
        return next(self._some_power_loss(set(), chance))

    def _some_power_loss(self, seen: set[Any], chance: random.Random) -> Iterator[Crash]:
        at, sector = chance.randrange(-1, len(self.events)), chance.choice(SECTORS)
        share, fill = chance.choice((0.05, 0.3, 0.5, 0.7, 0.95)), chance.choice((0, STALE))
        pending = self._pending(at)
        parts = (change.sectors(sector) if isinstance(change, Bytes) else [change] for change in pending)
        pieces = itertools.chain.from_iterable(parts)
        yield from self._lost(seen, at, pending, [piece for piece in pieces if chance.random() < share], fill)

    def _pending(self, at: int) -> list[Change]:
        return [change for change in self.changes if change.begins <= at < change.durable_at]

    def _lost(self, seen: set[Any], at: int, pending: list[Change], kept: list[Change], fill: int) -> Iterator[Crash]:
        there = [change for change in self.changes if change.durable_at <= at]
        whole = {id(change) for change in kept} | {id(change) for change in there}
        kept = [change for change in kept if change.needs is None or id(change.needs) in whole]
        text = "; ".join(f"{change} of {change.node.number}" for change in kept) or "nothing"
        what = f"power lost, of {len(pending)} changes that nothing covers there are: {text}"
        both = sorted([*there, *kept], key=lambda change: change.at)
        yield from self._unless_seen(seen, at, both, what, fill)

    def _unless_seen(self, seen: set[Any], at: int, there: list[Change], how: str, fill: int) -> Iterator[Crash]:
        image = self._image(there, fill)
        marks = tuple(event.name for event in self.events[: at + 1] if isinstance(event, Marked))
        key = (marks, frozenset(image.items()))
        if key not in seen:
            seen.add(key)
            after = f"after event {at} ({self.events[at]})" if at >= 0 else "before the first event"
            yield Crash(at, marks, f"{how}, {after}", image)

    def _image(self, there: Iterable[Change], fill: int = 0) -> Image:
        names: dict[Node, dict[str, Node]] = {}
        contents: dict[Node, bytearray] = {}
        lengths: dict[Node, int] = {}
        for change in there:
            node = change.node
            if isinstance(change, Names):
                entries = names.setdefault(node, dict(node.names or {}))
                for name, value in change.entries.items():
                    if value is None:
                        entries.pop(name, None)
                    else:
                        entries[name] = value
            elif isinstance(change, Bytes):
                _put(contents.setdefault(node, bytearray(node.content)), change.offset, change.data, fill)
            elif isinstance(change, Length):
                content, length = contents.setdefault(node, bytearray(node.content)), lengths.get(node)
                length = len(node.content) if length is None else length
                if change.exact and change.size_bytes < length:
                    content[change.size_bytes :] = b""
                if change.exact or change.size_bytes > length:
                    lengths[node] = change.size_bytes
                    _put(content, change.size_bytes, b"", 0 if change.zeros else fill)

        def content_of(node: Node) -> bytes:
            if node not in contents:
                return node.content
            return bytes(contents[node][: lengths.get(node, len(node.content))])

        return _image_of(self.base.root, lambda node: names.get(node, node.names or {}), content_of)

    def _completed(self, at: int) -> set[int]:
        return {event.token for event in self.events[: at + 1] if isinstance(event, Completed)}

    # How each event becomes changes.

    def _add(self, change: Change) -> None:
        self.changes.append(change)

    def _folder(self, path: str) -> tuple[Node, str]:
        node = self.base.root
        *folders, name = path.split("/")
        for folder in folders:
            node = self._live[node][folder]
        return node, name

    def _on_made(self, at: int, event: Made) -> None:
        node = self._nodes[event.inode] = Node(-next(self._numbers), {} if event.kind == "folder" else None)
        node.target = event.target if event.kind == "link" else None
        if event.kind == "folder":
            self._live[node] = {}
        else:
            self._sizes[node] = 0
        self._name(at, event.path, node)

    def _on_linked(self, at: int, event: Linked) -> None:
        self._name(at, event.path, self._nodes[event.inode])

    def _name(self, at: int, path: str, node: Node) -> None:
        folder, name = self._folder(path)
        self._live[folder][name] = node
        self._add(Names(folder, at, {name: node}))

    def _on_renamed(self, at: int, event: Renamed) -> None:
        (source, old), (target, new) = self._folder(event.source), self._folder(event.target)
        if (source, old) == (target, new):
            return
        node = self._live[source].pop(old)
        self._live[target][new] = node
        if source is target:
            self._add(Names(source, at, {old: None, new: node}))
        else:
            added = Names(target, at, {new: node})
            self._add(added)
            self._add(Names(source, at, {old: None}, needs=added))

    def _on_removed(self, at: int, event: Removed) -> None:
        folder, name = self._folder(event.path)
        del self._live[folder][name]
        self._add(Names(folder, at, {name: None}))

    def _on_wrote(self, at: int, event: Wrote) -> None:
        node = self._nodes[event.inode]
        changes: list[Change] = [Bytes(node, at, event.offset, event.data)]
        end = event.offset + len(event.data)
        if end > self._sizes[node]:
            self._sizes[node] = end
            changes.append(Length(node, at, end, False))
        for change in changes:
            change.token = event.token
            change.durable_at = at if event.durable else float("inf")
            self._add(change)

    def _on_resized(self, at: int, event: Resized) -> None:
        node = self._nodes[event.inode]
        self._sizes[node] = event.size_bytes
        self._add(Length(node, at, event.size_bytes, True, True))

    def _on_allocated(self, at: int, event: Allocated) -> None:
        node = self._nodes[event.inode]
        if event.size_bytes > self._sizes[node]:
            self._sizes[node] = event.size_bytes
            self._add(Length(node, at, event.size_bytes, False, True))

    def _on_synced(self, at: int, event: Synced) -> None:
        node, done = self._nodes[event.inode], self._completed(at)
        for change in self.changes:
            if change.node is node and (change.token is None or change.token in done):
                covered: Change | None = change
                while covered is not None:
                    covered.durable_at = min(covered.durable_at, at)
                    covered = covered.needs

    def _on_nothing(self, at: int, event: Event) -> None:
        """No change of a file."""

    _on_completed = _on_marked = _on_nothing


def _put(content: bytearray, offset: int, data: bytes, fill: int) -> None:
    if len(content) < offset:
        content.extend(bytes([fill]) * (offset - len(content)))
    content[offset : offset + len(data)] = data


def _subsets(changes: list[Change], at_most: int) -> Iterator[list[Change]]:
    if 2 ** len(changes) <= at_most:
        for size in range(len(changes) + 1):
            yield from map(list, itertools.combinations(changes, size))
        return
    yield changes
    yield []
    for one in changes:
        yield [one]
        yield [change for change in changes if change is not one]


def _image_of(
    root: Node,
    names_of: Callable[[Node], dict[str, Node]] = lambda node: node.names or {},
    content_of: Callable[[Node], bytes] = lambda node: node.content,
) -> Image:
    """Paths with what is there, a folder before what is in it."""
    image: Image = {}

    def visit(folder: Node, prefix: str, above: tuple[Node, ...]) -> None:
        for name, node in names_of(folder).items():
            if node in above:
                continue  # a folder cannot hold itself; no drive keeps that
            path = prefix + name
            if node.target is not None:
                image[path] = Symlink(node.target)
            elif node.names is None:
                image[path] = content_of(node)
            else:
                image[path] = None
                visit(node, f"{path}/", (*above, node))

    visit(root, "", (root,))
    return image
