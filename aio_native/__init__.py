"""Bytes between memory and files: engines, operations, completions. Knows no tensors; never imports torch."""

from nvme_offload.aio_native.engine import (
    Engine,
    EngineOptions,
    EngineStats,
    EngineUnavailable,
    Failure,
    Op,
    Operation,
    Registration,
    Segment,
)
from nvme_offload.aio_native.faults import FaultSpec
from nvme_offload.aio_native.registry import ENGINES, OpenedEngine, open_engine, open_next_engine

__all__ = [
    "ENGINES",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "EngineUnavailable",
    "Failure",
    "FaultSpec",
    "Op",
    "OpenedEngine",
    "Operation",
    "Registration",
    "Segment",
    "open_engine",
    "open_next_engine",
]
