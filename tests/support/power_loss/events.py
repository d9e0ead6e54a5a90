"""What happened to the files below a folder, call by call: plain data, so that several processes can be merged."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Event:
    """Files are known by their inode numbers, names by their paths from the recorded folder."""

    time_ns: int  # on the clock of `time.monotonic_ns`, which all processes share


@dataclass(frozen=True, slots=True)
class Made(Event):
    path: str
    inode: int
    kind: str  # ``file``, ``folder`` or ``link``
    target: str = ""  # where a symbolic link leads


@dataclass(frozen=True, slots=True)
class Linked(Event):
    path: str
    inode: int


@dataclass(frozen=True, slots=True)
class Renamed(Event):
    source: str
    target: str


@dataclass(frozen=True, slots=True)
class Removed(Event):
    path: str


@dataclass(frozen=True, slots=True)
class Wrote(Event):
    inode: int
    offset: int
    data: bytes
    durable: bool  # through a descriptor with O_DSYNC or O_SYNC: the drive has it when the call returns
    token: int | None = None  # of a transfer that goes on after the call, until `Completed` says that it is done

    def __str__(self) -> str:
        return f"Wrote {len(self.data)} bytes at {self.offset} of inode {self.inode}"


@dataclass(frozen=True, slots=True)
class Completed(Event):
    token: int


@dataclass(frozen=True, slots=True)
class Resized(Event):
    inode: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Allocated(Event):
    """The file has at least this length, and zeros where it had nothing."""

    inode: int
    size_bytes: int


@dataclass(frozen=True, slots=True)
class Synced(Event):
    inode: int
    what: str  # the path of what was synced
    caller: str  # where in the code it was asked for, and by whom


@dataclass(frozen=True, slots=True)
class Marked(Event):
    """A moment that the test names."""

    name: str
