"""Bytes as people write them: GB is 1e9, GiB is 2**30; capacities are shown in GiB, rates in GB/s."""

import re
from decimal import Decimal

KiB, MiB, GiB, TiB = 2**10, 2**20, 2**30, 2**40
KB, MB, GB, TB = 10**3, 10**6, 10**9, 10**12

_UNITS = {"": 1, "B": 1, "KB": KB, "kB": KB, "MB": MB, "GB": GB, "TB": TB}
_UNITS |= {"KiB": KiB, "MiB": MiB, "GiB": GiB, "TiB": TiB}
_FORM = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([A-Za-z]*)", re.ASCII)
_PER_DAY = "/day"
_ACCEPTED = (
    'write a whole number of bytes, or a number and a unit in this spelling: "512MiB", "8GiB", "1.5GB" '
    "(KiB, MiB, GiB, TiB are powers of 1024; KB, MB, GB, TB are powers of 1000)"
)


def parse_bytes(value: int | float | str) -> int:
    """Return the number of bytes that ``value`` means, or raise ValueError; a part of a byte is dropped.

    A bare "8G" is refused, as it could mean either unit. A float is to be whole, as the 1e9 of DeepSpeed's files.
    """
    if isinstance(value, str):
        match = _FORM.fullmatch(value.strip())
        if match and match[2] in _UNITS:
            return int(Decimal(match[1]) * _UNITS[match[2]])
    elif isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:
        if value == float("inf") or value != int(value):
            raise ValueError(f"{value!r} is not a number of bytes; {_ACCEPTED}")
        return int(value)
    raise ValueError(f"{value!r} is not a number of bytes; {_ACCEPTED}")


def parse_bytes_per_day(value: str) -> int:
    """Return the bytes a day that words like "1TB/day" mean, or raise ValueError."""
    text = value.replace(" ", "") if isinstance(value, str) else ""
    if not text.endswith(_PER_DAY):
        raise ValueError(f'{value!r} is no limit of wear; write bytes a day: "1TB/day"')
    size_bytes = parse_bytes(text.removesuffix(_PER_DAY))
    if size_bytes == 0:
        raise ValueError(f"{value!r} is no limit of wear: a durable run has to write; leave it out for none")
    return size_bytes


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple that is no less than a value."""
    return -(-value // multiple) * multiple


def format_bytes(size_bytes: int) -> str:
    """Show a capacity: ``8 GiB``, ``1.5 MiB``, ``17 B``. `parse_bytes` reads it back, to two decimals."""
    for name, unit in (("GiB", GiB), ("MiB", MiB), ("KiB", KiB)):
        if abs(size_bytes) >= unit:
            return f"{size_bytes / unit:.2f}".rstrip("0").rstrip(".") + f" {name}"
    return f"{size_bytes} B"


def format_rate(bytes_per_second: float) -> str:
    """Show a rate: ``2.31 GB/s``; more digits where two would hide it."""
    rate = bytes_per_second / GB
    return f"{rate:.2f} GB/s" if rate == 0 or abs(rate) >= 0.1 else f"{rate:.4f} GB/s"
