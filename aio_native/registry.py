"""Which engine does the I/O: the one that was asked for, or the first that works."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module

from .engine import Engine, EngineOptions, EngineUnavailable

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class EngineEntry:
    """An entry says where an engine is, and when it is taken."""

    module: str
    class_name: str
    rank: int | None
    """When ``auto`` tries it: fastest first. None: it moves no bytes, and only `offload bench` offers it."""
    summary: str

    def open(self, options: EngineOptions) -> Engine:
        """Import the engine and open it; raises EngineUnavailable if it cannot run here."""
        engine: Engine = getattr(import_module(self.module), self.class_name)(options)
        return engine


_HERE = "nvme_offload.aio_native"
REGISTRY: Mapping[str, EngineEntry] = {
    "io_uring": EngineEntry(f"{_HERE}.uring", "UringEngine", 1, "C++, liburing"),
    "pyuring": EngineEntry(f"{_HERE}.pyuring", "PyuringEngine", 2, "its binding from PyPI"),
    "aiofiles": EngineEntry(f"{_HERE}.aiofiles_engine", "AiofilesEngine", 3, "runs anywhere"),
    "null": EngineEntry(f"{_HERE}.null", "NullEngine", None, "no byte moves"),
}
"""Every engine. The section, its reference page, bench, tune, doctor and demo offer what stands here."""

_RANKED = [(entry.rank, name) for name, entry in REGISTRY.items() if entry.rank is not None]
ENGINES = tuple(name for _, name in sorted(_RANKED))
"""The engines that move bytes, in the order in which ``auto`` tries them."""

_said: set[str] = set()


@dataclass(frozen=True)
class OpenedEngine:
    """An engine, and in one sentence why it and no other."""

    engine: Engine
    reason: str


def describe_engines() -> str:
    """Name the engines that ``auto`` tries, in its order, in words."""
    *others, last = [f"{name} ({REGISTRY[name].summary})" for name in ENGINES]
    return f"{', '.join(others)} and {last}"


def open_engine(name: str, options: EngineOptions) -> OpenedEngine:
    """Open the engine called `name`, or with ``auto`` the first of `ENGINES` that works here.

    What ``auto`` passed over, and why, is logged as a warning once per process. Raises ValueError where no engine has
    this name, and EngineUnavailable where the named engine, or with ``auto`` every one, cannot run here.
    """
    if name != "auto":
        if name not in REGISTRY:
            known = ", ".join(("auto", *REGISTRY))
            raise ValueError(f"aio.engine = {name!r}: there is no such engine; choose one of {known}")
        try:
            return OpenedEngine(REGISTRY[name].open(options), "asked for")
        except EngineUnavailable as error:
            refusal = str(error).rstrip(".")
            raise EngineUnavailable(f"aio.engine = {name!r}: {refusal}. Or set aio.engine to auto") from error
    return _open_first(ENGINES, options, "")


def open_next_engine(broken: Engine) -> OpenedEngine:
    """Open the first of `ENGINES` after one that broke, or raise EngineUnavailable; logs it once per process."""
    assert broken.breakdown is not None
    cause = f"{broken.name} has stopped working: {os.strerror(broken.breakdown.errno)}"
    return _open_first(ENGINES[ENGINES.index(broken.name) + 1 :], broken.options, cause)


def _open_first(candidates: Sequence[str], options: EngineOptions, cause: str) -> OpenedEngine:
    """Open the first that works, and say why it is not the one before it."""
    passed_over: dict[str, list[str]] = {}
    """Names by why not: io_uring and pyuring mostly fail for the same reason, which is then said once."""
    for candidate in candidates:
        try:
            engine = REGISTRY[candidate].open(options)
        except EngineUnavailable as error:
            passed_over.setdefault(str(error).rstrip("."), []).append(candidate)
            continue
        reason = "; ".join(filter(None, (cause, _not_available(passed_over))))
        if reason:
            say_once(f"engine {candidate} does the I/O{' from now on' if cause else ''} ({reason})")
        return OpenedEngine(engine, reason or "the first choice")
    raise EngineUnavailable("; ".join(filter(None, (cause, _not_available(passed_over)))))


def _not_available(names_by_reason: dict[str, list[str]]) -> str:
    return "; ".join(
        f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} not available: {reason}"
        for reason, names in names_by_reason.items()
    )


def say_once(sentence: str) -> None:
    """Warn in the log, once in this process."""
    if sentence not in _said:
        _said.add(sentence)
        logger.warning(sentence)
