"""What a drive says of its own health: SMART, as `nvme` or `smartctl` print it as JSON."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

DATA_UNIT = 512_000
"""Bytes of a data unit of the NVMe specification: a thousand blocks of 512."""
KELVIN = 273
"""Subtracted by the specification's own examples, and by `nvme`."""
COMMANDS = (("nvme", "smart-log", "--output-format=json"), ("smartctl", "--json", "--all"))
SECONDS = 10


class HealthError(RuntimeError):
    """A drive's health could not be read; the message says why and what to type."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The SMART / health information of an NVMe drive, log page 02h."""

    temperature: float | None
    """Degrees Celsius of the whole drive."""
    percent_used: int
    """Share of its endurance that is used up, in the maker's estimate; may be more than 100."""
    spare: int
    """Percent of the spare blocks that are left."""
    spare_threshold: int
    """Percent of them below which the drive warns."""
    bytes_written: int
    """Bytes that hosts have written in its life."""
    media_errors: int
    """Times that the drive could not give back what was written."""
    critical_warning: int
    """Bits: 1 spare is low, 2 too hot or cold, 4 unreliable, 8 read only, 16 no power protection."""
    power_on_hours: int
    warm_minutes: int
    """Minutes in its life above the temperature that its maker warns of."""
    throttled_seconds: int | None = None
    """Seconds in its life that it went slower because it was hot; None where that is not told."""


def health_of(document: Mapping[str, Any]) -> Health:
    """The health in a JSON document of ``nvme smart-log`` or ``smartctl --all``.

    Raises:
        HealthError: it is neither, or says why there is none.
    """
    try:
        if (log := document.get("nvme_smart_health_information_log")) is not None:
            return _of_smartctl(log)
        if "percent_used" in document:
            return _of_nvme(document)
    except (KeyError, TypeError, ValueError) as error:
        raise HealthError(f"the SMART log lacks what NVMe 1.0 has in it: {error!r}") from None
    said = [found.get("string", "") for found in (document.get("smartctl") or {}).get("messages", [])]
    raise HealthError("; ".join(filter(None, said)) or "no SMART log of an NVMe drive")


def _of_smartctl(log: Mapping[str, Any]) -> Health:
    return Health(
        temperature=float(log["temperature"]) if "temperature" in log else None,
        percent_used=int(log["percentage_used"]),
        spare=int(log["available_spare"]),
        spare_threshold=int(log["available_spare_threshold"]),
        bytes_written=int(log["data_units_written"]) * DATA_UNIT,
        media_errors=int(log["media_errors"]),
        critical_warning=int(log["critical_warning"]),
        power_on_hours=int(log["power_on_hours"]),
        warm_minutes=int(log.get("warning_temp_time", 0)),
    )


def _of_nvme(log: Mapping[str, Any]) -> Health:
    warning = log["critical_warning"]  # with --verbose an object, of which "value" is the number
    throttled = [log[name] for name in ("thm_temp1_total_time", "thm_temp2_total_time") if name in log]
    return Health(
        temperature=float(log["temperature"]) - KELVIN if "temperature" in log else None,
        percent_used=int(log["percent_used"]),
        spare=int(log["avail_spare"]),
        spare_threshold=int(log["spare_thresh"]),
        bytes_written=int(log["data_units_written"]) * DATA_UNIT,
        media_errors=int(log["media_errors"]),
        critical_warning=int(warning["value"] if isinstance(warning, Mapping) else warning),
        power_on_hours=int(log["power_on_hours"]),
        warm_minutes=int(log.get("warning_temp_time", 0)),
        throttled_seconds=sum(map(int, throttled)) if throttled else None,
    )


def read_health(disk: str) -> Health:
    """Ask ``nvme``, or else ``smartctl``, about a disk of this machine; root may, others mostly may not.

    Args:
        disk: its name, as ``nvme0n1``.

    Raises:
        HealthError: neither is installed, or what they answered.
    """
    if not disk.startswith("nvme"):
        raise HealthError(f"{disk} is no NVMe drive, or a hypervisor keeps its health to itself")
    said = []
    for program, *options in COMMANDS:
        if (found := shutil.which(program)) is not None:
            try:
                return _asked([found, *options, f"/dev/{disk}"])
            except HealthError as error:
                said.append(f"{program}: {error}")
    if not said:
        raise HealthError("neither nvme (package nvme-cli) nor smartctl (package smartmontools) is installed")
    raise HealthError("; ".join(said))


def _asked(command: list[str]) -> Health:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise HealthError(str(error)) from None
    try:
        return health_of(json.loads(done.stdout))
    except (json.JSONDecodeError, AttributeError):  # nvme refuses in words, and on standard error
        raise HealthError((done.stderr or done.stdout).strip() or "no answer") from None


def throttled_seconds(disks: Sequence[str]) -> float | None:
    """Seconds in their lives that any of these disks went slower because it was hot; None where none of them says."""
    found = []
    for disk in disks:
        with suppress(HealthError):
            found.append(read_health(disk).throttled_seconds)
    told = [seconds for seconds in found if seconds is not None]
    return float(max(told)) if told else None
