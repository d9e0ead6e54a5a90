from collections.abc import Sequence

def direct_io_alignment(fd: int) -> tuple[int, int] | None: ...

class FaultSpec:
    def __init__(
        self,
        *,
        seed: int,
        short_transfer: float,
        eintr: float,
        eagain: float,
        eio: float,
        enospc: float,
        delay: float,
        reorder: float,
        max_delay_us: int,
    ) -> None: ...

class Operation:
    @property
    def size_bytes(self) -> int: ...
    @property
    def submitted_ns(self) -> int: ...
    @property
    def completed_ns(self) -> int: ...
    @property
    def failure(self) -> tuple[int, int, int, int, bool] | None: ...
    def done(self) -> bool: ...
    def wait(self, timeout: float | None = None) -> bool: ...
    def add_waker(self, eventfd: int) -> None: ...

class RingStats:
    requests: int
    retries: int
    bytes_read: int
    bytes_written: int
    depth_ns: int
    busy_ns: int
    cpu_ns: int

class UringEngine:
    def __init__(
        self,
        *,
        queue_depth: int,
        block_size: int,
        alignment: int,
        rings: int,
        max_operations: int,
        no_io: bool,
        faults: FaultSpec | None,
    ) -> None: ...
    def submit(self, op: int, segments: Sequence[tuple[int, int, int, int]]) -> Operation | None: ...
    def register(self, buffers: Sequence[tuple[int, int]], fds: Sequence[int]) -> tuple[int, int]: ...
    def under_way(self) -> int: ...
    def breakdown(self) -> tuple[int, bool]: ...
    def stats(self) -> RingStats: ...
    def close(self) -> None: ...
