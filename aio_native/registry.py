"""Which engine does the I/O: the one that was asked for, or the first that works."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

from nvme_offload.aio_native.engine import Engine, EngineOptions, EngineUnavailable

logger = logging.getLogger(__name__)

ENGINES = ("io_uring", "pyuring", "aiofiles")
"""In the order in which ``auto`` tries them: fastest first."""

_said: set[str] = set()


@dataclass(frozen=True)
class OpenedEngine:
    """An engine, and in one sentence why it and no other."""

    engine: Engine
    reason: str


def _io_uring(options: EngineOptions) -> Engine:
    from nvme_offload.aio_native.uring import UringEngine

    return UringEngine(options)


def _pyuring(options: EngineOptions) -> Engine:
    from nvme_offload.aio_native.pyuring import PyuringEngine

    return PyuringEngine(options)


def _aiofiles(options: EngineOptions) -> Engine:
    from nvme_offload.aio_native.aiofiles_engine import AiofilesEngine

    return AiofilesEngine(options)


def _null(options: EngineOptions) -> Engine:
    from nvme_offload.aio_native.null import NullEngine

    return NullEngine(options)


_OPEN: dict[str, Callable[[EngineOptions], Engine]] = {
    "io_uring": _io_uring,
    "pyuring": _pyuring,
    "aiofiles": _aiofiles,
    "null": _null,
}


def open_engine(name: str, options: EngineOptions) -> OpenedEngine:
    """Open the engine called `name`, or with ``auto`` the first of `ENGINES` that works here.

    What ``auto`` passed over, and why, is logged as a warning once per process.

    Raises:
        ValueError: no engine has this name.
        EngineUnavailable: the named engine cannot run here. ``auto`` raises it only if nothing works.
    """
    if name != "auto":
        if name not in _OPEN:
            raise ValueError(f"aio.engine = {name!r}: there is no such engine; choose one of auto, {', '.join(_OPEN)}")
        try:
            return OpenedEngine(_OPEN[name](options), "asked for")
        except EngineUnavailable as error:
            raise EngineUnavailable(
                f"aio.engine = {name!r}: {str(error).rstrip('.')}. Or set aio.engine to auto"
            ) from error
    passed_over: dict[str, list[str]] = {}
    """Names by why not: io_uring and pyuring mostly fail for the same reason, which is then said once."""
    for candidate in ENGINES:
        try:
            engine = _OPEN[candidate](options)
        except EngineUnavailable as error:
            passed_over.setdefault(str(error).rstrip("."), []).append(candidate)
            continue
        reason = _not_available(passed_over) or "the first choice"
        if passed_over:
            _say_once(f"engine {candidate} does the I/O ({reason})")
        return OpenedEngine(engine, reason)
    raise EngineUnavailable(_not_available(passed_over))


def _not_available(names_by_reason: dict[str, list[str]]) -> str:
    return "; ".join(
        f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not available: {reason}"
        for reason, names in names_by_reason.items()
    )


def _say_once(sentence: str) -> None:
    if sentence not in _said:
        _said.add(sentence)
        logger.warning(sentence)
