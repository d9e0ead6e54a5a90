"""Types of the native module. `optim.kernels` is the door that takes tensors.

Addresses are what ``Tensor.data_ptr()`` gives; the caller keeps the memory alive. Every kernel releases the GIL. It
raises ValueError, before touching anything, for arguments that cannot be right, and RuntimeError when a thread
cannot be started.
"""

from collections.abc import Sequence
from typing import Final
from typing import Protocol as _Protocol

TILE_NUMEL: Final[int]

class ThreadPool:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    def end_workers(self) -> None: ...

class LoggedStep:
    entry: int
    entry_bytes: int
    offsets: int
    grad_dtype: int
    grad_scale: float
    scalars: Sequence[float]
    def __init__(
        self,
        *,
        entry: int,
        entry_bytes: int,
        offsets: int,
        grad_dtype: int,
        grad_scale: float,
        scalars: Sequence[float],
    ) -> None: ...

class Origin:
    def __init__(
        self, param: int, start: int, offset: int, sizes: Sequence[int], strides: Sequence[int], block: int
    ) -> None: ...

class Segment:
    param: int
    grad: int
    master: int
    states: list[int]
    checksums: int
    numel: int
    form: int
    grad_dtype: int
    rule: int
    grad_scale: float
    scalars: Sequence[float]
    log: list[LoggedStep]
    base: int
    offsets: int
    tail: int
    marks: int
    def __init__(
        self,
        *,
        param: int,
        grad: int,
        master: int,
        states: Sequence[int],
        checksums: int,
        numel: int,
        form: int,
        grad_dtype: int,
        rule: int,
        grad_scale: float,
        scalars: Sequence[float],
        log: Sequence[LoggedStep],
        base: int,
        offsets: int,
        tail: int,
        marks: int,
        origin: Origin,
    ) -> None: ...

class SummedMemory:
    def __init__(self, *, address: int, size_bytes: int, sums: int) -> None: ...

class _Scalars(_Protocol):
    """What a step takes beside tensors; `optim.updates.work.StepScalars` is one."""

    @property
    def grad_scale(self) -> float: ...
    @property
    def of_kernel(self) -> Sequence[float]: ...

def available_isas() -> list[str]: ...
def rules() -> list[str]: ...
def renew(
    segments: Sequence[Segment],
    params: Sequence[int],
    grads: Sequence[int],
    grad_dtypes: Sequence[int],
    scalars: Sequence[_Scalars],
) -> None: ...
def update(
    pool: ThreadPool,
    isa: str,
    segments: Sequence[Segment],
    entry: int,
    entry_bytes: int,
    summed: Sequence[SummedMemory],
) -> tuple[list[int], int]: ...
def split(pool: ThreadPool, isa: str, src: int, hi: int, lo: int, numel: int) -> None: ...
def join(pool: ThreadPool, isa: str, hi: int, lo: int, dst: int, numel: int) -> None: ...
def fp16_to_fp32(pool: ThreadPool, isa: str, src: int, dst: int, numel: int) -> None: ...
def fp32_to_fp16(pool: ThreadPool, isa: str, src: int, dst: int, numel: int) -> None: ...
def checksum(pool: ThreadPool, isa: str, address: int, itemsize: int, numel: int, out: int) -> None: ...
def grad_sq_sums(
    pool: ThreadPool, isa: str, addresses: Sequence[int], grad_dtypes: Sequence[int], numels: Sequence[int], out: int
) -> None: ...
def mark_changed(pool: ThreadPool, isa: str, before: int, after: int, numel: int, marks: int) -> None: ...
def num_marked(isa: str, marks: int, numel: int) -> int: ...
def marked(
    pool: ThreadPool,
    isa: str,
    marks: int,
    numel: int,
    first: int,
    source: int,
    indices: int,
    index_size: int,
    values: int,
    count: int,
) -> None: ...
def ordered_sum(address: int, numel: int) -> float: ...
