"""Which copies of a named tensor exist, and the one record per name that says so."""

from __future__ import annotations

import enum
from collections import deque
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from nvme_offload.offload.devices.device import Event
from nvme_offload.offload.errors import StateError
from nvme_offload.offload.storage.extent import Extent
from nvme_offload.offload.swapper.tensor_transfer import TensorTransfer


class TensorResidency(enum.Enum):
    """Which copies exist. The name of a state says what is happening, its description what may be relied on."""

    ABSENT = "absent"
    """No copy is kept: the tensor in the caller's hands is the only one."""
    WRITING = "writing"
    """The caller's tensor is the truth and on its way to the file, which still holds the older value, if any."""
    STORED = "stored"
    """The file holds the only copy."""
    READING = "reading"
    """The file holds the truth, and a tensor is being filled from it."""
    PREFETCHED = "prefetched"
    """The file holds the truth, and host memory an equal copy."""


_MAY_FOLLOW = {
    TensorResidency.ABSENT: {TensorResidency.WRITING},
    TensorResidency.WRITING: {TensorResidency.STORED, TensorResidency.ABSENT},
    TensorResidency.STORED: {TensorResidency.WRITING, TensorResidency.READING, TensorResidency.ABSENT},
    TensorResidency.READING: {TensorResidency.STORED, TensorResidency.PREFETCHED},
    TensorResidency.PREFETCHED: {TensorResidency.STORED, TensorResidency.WRITING, TensorResidency.ABSENT},
}


@dataclass(frozen=True)
class TensorSpec:
    """All of a tensor but its bytes."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorSpec:
        """The specification of `tensor`; its strides are not part of it."""
        return cls(tensor.shape, tensor.dtype, tensor.device)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensor's elements."""
        return self.shape.numel() * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


NO_TENSOR = TensorSpec(torch.Size([0]), torch.uint8, torch.device("cpu"))
"""The specification of an empty tensor, for tasks that move nothing."""


class Piece(NamedTuple):
    """A run of a tensor's bytes that fits into one staging buffer, and where it is stored."""

    start: int
    """Position of the piece's first byte in the tensor, in row-major order."""
    size_bytes: int
    """Bytes of the tensor; the extent may be longer, up to its alignment."""
    extent: Extent
    checksum: int | None = None
    """CRC-32 of the bytes, where the configuration asks for checksums."""


@dataclass(frozen=True)
class StoredValue:
    """A value that is complete on the file."""

    spec: TensorSpec
    pieces: list[Piece]


class Verb(enum.Enum):
    """What a task does to its record."""

    SWAP_OUT = "swap_out"
    SWAP_IN = "swap_in"
    PREFETCH = "prefetch"
    EVICT = "evict"
    DELETE = "delete"


@dataclass(kw_only=True, eq=False)
class Task:
    """One call of the caller, waiting for its turn or under way."""

    verb: Verb
    transfer: TensorTransfer[Any]
    spec: TensorSpec
    """Specification of the tensor that is moved."""
    tensor: torch.Tensor | None = None
    """Source of a swap_out, target of a swap_in or prefetch; detached."""
    result: torch.Tensor | None = None
    """The tensor that the transfer gives at the end; None where it gives none."""
    replaceable: bool = False
    """The caller has not seen `result`, so that a prefetched copy may be given in its place."""
    ready: Event | None = None
    """On a device: behind the work that was queued there when the caller called."""


@dataclass(eq=False)
class TensorRecord:
    """Everything about one name. Its tasks run one at a time, in the order in which they were called."""

    name: str
    residency: TensorResidency = TensorResidency.ABSENT
    stored: StoredValue | None = None
    """The value on the file; while an overwrite is under way, the older one."""
    prefetched: torch.Tensor | None = None
    """The host copy of `TensorResidency.PREFETCHED`."""
    tasks: deque[Task] = field(default_factory=deque)
    """Calls that wait for their turn; the first one is under way, if any is."""
    under_way: bool = False
    failure: str = ""
    """Why the last swap_out failed; empty if it did not."""
    deleted: bool = False
    """Whether its name was given up; another record may have it by now."""

    @property
    def newest(self) -> TensorSpec | None:
        """What a swap_in called now would return: the last value given, complete or not. None if there is none."""
        for task in reversed(self.tasks):
            if task.verb is Verb.DELETE:
                return None
            if task.verb is Verb.SWAP_OUT:
                return task.spec
        return self.stored.spec if self.stored else None

    @property
    def forgotten(self) -> bool:
        """Whether nobody may find it by its name: it was deleted, or nothing was ever begun."""
        if self.tasks:
            return self.tasks[-1].verb is Verb.DELETE
        return self.deleted or (self.stored is None and not self.failure)

    @property
    def prefetch_bytes(self) -> int:
        """Bytes of host memory promised to prefetched copies of the tensor."""
        due = sum(task.spec.size_bytes for task in self.tasks if task.verb is Verb.PREFETCH)
        return due + (self.prefetched.nbytes if self.prefetched is not None else 0)

    @property
    def prefetch_due(self) -> bool:
        """Whether a swap_in called now would find a host copy."""
        if self.tasks:
            return self.tasks[-1].verb is Verb.PREFETCH
        return self.prefetched is not None

    def become(self, residency: TensorResidency) -> None:
        """Change the residency.

        Raises:
            StateError: `residency` cannot follow the present one.
        """
        if residency not in _MAY_FOLLOW[self.residency]:
            expected = [state.value for state in TensorResidency if residency in _MAY_FOLLOW[state]]
            raise StateError(
                f"tensor {self.name!r}", f"{' or '.join(expected)} before {residency.value}", self.residency.value
            )
        self.residency = residency

    def drop_prefetched(self) -> None:
        """Let the host copy go, if there is one."""
        if self.prefetched is not None:
            # No call in between: a signal handler sees both or neither.
            self.prefetched = None
            self.residency = TensorResidency.STORED

    def require_value(self) -> TensorSpec:
        """What a swap_in called now would return.

        Raises:
            StateError: nothing is stored, because the only swap_out failed.
        """
        spec = self.newest
        if spec is None:
            what = f"{self.residency.value}, because its swap_out failed: {self.failure}"
            raise StateError(f"tensor {self.name!r}", "stored", what)
        return spec
