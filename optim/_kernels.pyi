"""Types of the native module. `optim.kernels` is the door that takes tensors.

Addresses are what ``Tensor.data_ptr()`` gives; the caller keeps the memory alive. Every kernel releases the GIL. It
raises ValueError, before touching anything, for arguments that cannot be right, and RuntimeError when a thread
cannot be started.
"""

from collections.abc import Sequence
from typing import Final

BLOCK_NUMEL: Final[int]

class ThreadPool:
    def __init__(self, num_threads: int) -> None: ...
    @property
    def num_threads(self) -> int: ...
    @property
    def num_workers(self) -> int: ...
    def end_workers(self) -> None: ...

class AdamWScalars:
    def __init__(
        self,
        *,
        decay: float,
        beta1_complement: float,
        beta2: float,
        beta2_complement: float,
        step_size: float,
        bias_correction2_sqrt: float,
        eps: float,
        grad_scale: float,
    ) -> None: ...
    @property
    def decay(self) -> float: ...
    @property
    def beta1_complement(self) -> float: ...
    @property
    def beta2(self) -> float: ...
    @property
    def beta2_complement(self) -> float: ...
    @property
    def step_size(self) -> float: ...
    @property
    def bias_correction2_sqrt(self) -> float: ...
    @property
    def eps(self) -> float: ...
    @property
    def grad_scale(self) -> float: ...

class Segment:
    param: int
    grad: int
    master: int
    exp_avg: int
    exp_avg_sq: int
    checksums: int
    numel: int
    form: int
    grad_dtype: int
    scalars: AdamWScalars
    def __init__(
        self,
        *,
        param: int,
        grad: int,
        master: int,
        exp_avg: int,
        exp_avg_sq: int,
        checksums: int,
        numel: int,
        form: int,
        grad_dtype: int,
        scalars: AdamWScalars,
    ) -> None: ...

def available_isas() -> list[str]: ...
def adamw_update(pool: ThreadPool, isa: str, segments: Sequence[Segment]) -> list[int]: ...
def split(pool: ThreadPool, isa: str, src: int, hi: int, lo: int, numel: int) -> None: ...
def join(pool: ThreadPool, isa: str, hi: int, lo: int, dst: int, numel: int) -> None: ...
def fp16_to_fp32(pool: ThreadPool, isa: str, src: int, dst: int, numel: int) -> None: ...
def fp32_to_fp16(pool: ThreadPool, isa: str, src: int, dst: int, numel: int) -> None: ...
def checksum(pool: ThreadPool, isa: str, address: int, itemsize: int, numel: int, out: int) -> None: ...
def grad_sq_sums(pool: ThreadPool, isa: str, address: int, grad_dtype: int, numel: int, out: int) -> None: ...
def ordered_sum(address: int, numel: int) -> float: ...
