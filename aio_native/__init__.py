"""Bytes between memory and files: engines, operations, completions. Knows no tensors; never imports torch."""

from aio_native.choice import ENGINES, OpenedEngine, open_engine
from aio_native.engine import (
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
from aio_native.faults import FaultSpec

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
]
