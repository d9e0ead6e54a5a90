"""Read what others have written: wait for nobody, check it before it is used, show it without its escapes."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from nvme_offload.aio_native.descriptor import Descriptor

EACH = "*"
"""In a shape: each value whose name is not in it has this shape."""
COUNT = range(1 << 63)
RANK = range(1 << 20)
_MOST_BYTES = 1 << 28
_END = 1e18
_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket"}


def read_text(path: Path, errors: str = "strict") -> str:
    """Return what a file says, as UTF-8. OSError: it is no file, or longer than 256 MiB; nothing waits for a writer."""
    with Descriptor(os.open, path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC) as fd:
        found = os.fstat(fd)
        if what := _KINDS.get(stat.S_IFMT(found.st_mode)):
            raise OSError(errno.EINVAL, f"this is {what}; name a file", str(path))
        if found.st_size > _MOST_BYTES:
            raise OSError(errno.EFBIG, "this is longer than 256 MiB", str(path))
        with os.fdopen(fd, "rb", closefd=False) as file:
            return file.read().decode("utf-8-sig", errors)


def parse_json(text: str) -> Any:
    """Return what a text says, its strings `printable`. ValueError: it is no JSON, or nested too deeply."""
    try:
        return _all_printable(json.loads(text))
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def printable(text: str) -> str:
    """Return a text without what a terminal would obey or cannot show: that is written as Python writes it."""
    return "".join(each if each.isprintable() or each == "\n" else ascii(each)[1:-1] for each in text)


def fits(value: object, shape: Any) -> bool:
    """Whether a value of JSON has a shape.

    A shape is a dict of shapes by name (what is not there is None; `EACH` is of all others), a list of one shape, a
    tuple of shapes of which one is enough, a range, or a type. A ``float`` is any number of at most 64 bits.
    """
    match shape:
        case tuple():
            return any(fits(value, one) for one in shape)
        case list():
            return isinstance(value, list) and all(fits(each, shape[0]) for each in value)
        case dict():
            if not isinstance(value, dict):
                return False
            others = [each for name, each in value.items() if name not in shape] if EACH in shape else []
            named = (fits(value.get(name), of) for name, of in shape.items() if name != EACH)
            return all(named) and all(fits(each, shape[EACH]) for each in others)
        case range():
            return type(value) is int and value in shape
    if shape is float:
        return isinstance(value, int | float) and type(value) is not bool and abs(value) < _END
    return isinstance(value, shape)


def _all_printable(value: Any) -> Any:
    match value:
        case str():
            return printable(value)
        case list():
            return [_all_printable(each) for each in value]
        case dict():
            return {printable(name): _all_printable(each) for name, each in value.items()}
    return value
