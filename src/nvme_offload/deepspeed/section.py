"""The section of a script for DeepSpeed, which reads files with comments and with less punctuation than JSON."""

from __future__ import annotations

import base64
import binascii
import importlib
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from nvme_offload.offload.config.reader import WRAPPER, is_wrapped, no_duplicates, parse_file, read
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.user_path import user_path

_MANAGED = "managed_gradient_accumulation"
_COMMENT = r"#[^\n]*|//[^\n]*|/\*.*?\*/"
_HIDDEN = re.compile(rf'"(?:\\.|[^"\\])*"|{_COMMENT}|,(?=(?:\s|{_COMMENT})*[}}\]])', re.DOTALL)
"""Strings; and, outside of them, comments and a comma before the end of an object or a list."""


class Given(NamedTuple):
    """A section as a script gives it, and as it is read."""

    raw: Any
    """The section as a dict, or an `OffloadConfig`."""
    config: OffloadConfig
    """All of it but the schedule and the next."""
    scheduler: Any
    """The part ``scheduler``; None where there is none."""
    is_managed: bool
    """The part ``managed_gradient_accumulation``: whether the engine counts micro-batches; else every step acts."""


def section_of(args: Any, config: Any) -> Given:
    """Read the section of a script, and tell its arguments the rank that torchrun gave.

    Raises:
        ValueError: there is none.
        ConfigError, FileNotFoundError: it is wrong, or its file says nothing.
    """
    if "LOCAL_RANK" in os.environ and getattr(args, "local_rank", None) in (None, -1) and args is not None:
        args.local_rank = int(os.environ["LOCAL_RANK"])
    config = getattr(args, "deepspeed_config", None) if config is None else config
    if config is None:
        raise ValueError("deepspeed.initialize: no section: pass config=, or --deepspeed_config in args")
    source = "config"
    if isinstance(config, str | Path) and not user_path(config).is_dir():
        text = None if user_path(config).exists() else _decoded(str(config))
        source, config = ("config", _parsed(text)) if text is not None else (str(config), _read(user_path(config)))
    rest, scheduler, is_managed = _taken_apart(config)
    section = read(OffloadConfig, rest, source) if isinstance(rest, Mapping) else OffloadConfig.of(rest)
    return Given(config, section, scheduler, is_managed)


def _taken_apart(section: Any) -> tuple[Any, Any, bool]:
    """Return a section without what is the door's, and that: DeepSpeed has more schedules, and counts otherwise."""
    if isinstance(section, OffloadConfig):
        own = section.scheduler
        taken = None if own is None else {"type": own.type, "params": own.params.model_dump(exclude_unset=True)}
        return section.model_copy(update={"scheduler": None}), taken, True
    inner = section[WRAPPER] if is_wrapped(section) else section
    if not isinstance(inner, Mapping):
        return section, None, True
    is_managed = inner.get(_MANAGED) is not False  # any other value is the reader's
    rest = {key: value for key, value in inner.items() if key != "scheduler" and (is_managed or key != _MANAGED)}
    return {WRAPPER: rest} if is_wrapped(section) else rest, inner.get("scheduler"), is_managed


def _read(path: Path) -> Any:
    """Return what a file says, as JSON or TOML; if it is neither, as HJSON, of which comments are known here."""
    try:
        return parse_file(path)
    except ConfigError as error:
        if not path.is_file() or path.suffix == ".toml":
            raise
        found = _parsed(path.read_text(encoding="utf-8-sig"))
        if found is None:
            what = "; comments and commas too many are read in any case, other HJSON with the package hjson"
            raise ConfigError([f"{problem}{what}" for problem in error.problems], str(path)) from None
        return found


def _parsed(text: str) -> Any:
    """Return what HJSON says; None where it cannot be read."""
    try:
        plain = _HIDDEN.sub(lambda found: found[0] if found[0].startswith('"') else "", text)
        return json.loads(plain, object_pairs_hook=no_duplicates)
    except ValueError:
        pass
    try:
        return importlib.import_module("hjson").loads(text, object_pairs_hook=no_duplicates)
    except (ImportError, ValueError):
        return None


def _decoded(text: str) -> str | None:
    """Return the section that is given in base64 in the place of a path; None: it is none."""
    try:
        return base64.urlsafe_b64decode(text).decode()
    except (binascii.Error, ValueError):
        return None
