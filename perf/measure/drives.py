"""The block device behind a path: what it is, where it is, how warm it is, and what it says of its own health."""

import json
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvme_offload.aio_native.descriptor import Descriptor
from nvme_offload.offload.devices.numa import numbers_of
from nvme_offload.offload.host.proc import SYS, Mount, mount_of, read, read_int

DATA_UNIT = 512_000  # bytes of a data unit of the NVMe specification: a thousand blocks of 512
KELVIN = 273  # subtracted by the specification's own examples, and by `nvme`
COMMANDS = (("nvme", "smart-log", "--output-format=json"), ("smartctl", "--json", "--all"))
SECONDS = 10
_SMARTCTL = {
    "percent_used": "percentage_used",
    "avail_spare": "available_spare",
    "spare_thresh": "available_spare_threshold",
}
"""Figures that `smartctl` calls otherwise than `nvme`."""


@dataclass(frozen=True)
class Drive:
    """A whole disk, or what combines several (LVM, RAID, dm-crypt)."""

    name: str
    model: str | None
    members: tuple[str, ...]  # names of the disks below it, for a combination
    rotational: bool | None
    scheduler: str | None
    logical_block_bytes: int | None
    physical_block_bytes: int | None
    nr_requests: int | None
    max_sectors_kb: int | None
    max_hw_sectors_kb: int | None
    discard_bytes: int | None  # bytes of the largest discard; 0 where there is none
    numa_node: int | None = None  # NUMA node whose processors are nearest; None where there is one, or nobody says

    @property
    def near_cpus(self) -> set[int]:
        """Processors of its NUMA node; empty where there is none, or nobody says."""
        listed = SYS / f"devices/system/node/node{self.numa_node}/cpulist"
        return set() if self.numa_node is None else numbers_of(read(listed) or "")

    @property
    def disks(self) -> tuple[str, ...]:
        """Names of the disks that hold the bytes."""
        return self.members or (self.name,)


def find_drive(device_number: int, mount: Mount | None) -> Drive | None:
    """The drive of a file whose ``st_dev`` this is; None where no block device is known."""
    directory = _directory(device_number)
    if directory is None and mount is not None and mount.source.startswith("/dev/"):
        # btrfs: files have device numbers of their own. In a container the device file may be missing.
        try:
            directory = _directory(os.stat(mount.source).st_rdev)
        except OSError:
            link = SYS / "class/block" / Path(mount.source).name
            directory = link.resolve() if link.exists() else None
    return _read_drive(directory) if directory else None


def _directory(device_number: int) -> Path | None:
    link = SYS / f"dev/block/{os.major(device_number)}:{os.minor(device_number)}"
    if not link.exists():
        return None
    directory = link.resolve()
    return directory.parent if (directory / "partition").exists() else directory


def _read_drive(directory: Path) -> Drive:
    queue = directory / "queue"
    scheduler = read(queue / "scheduler")
    active = re.search(r"\[(\S+)\]", scheduler) if scheduler else None
    rotational = read_int(queue / "rotational")
    return Drive(
        name=directory.name,
        model=read(directory / "device/model"),
        members=tuple(sorted(_members(directory))),
        rotational=None if rotational is None else bool(rotational),
        scheduler=active[1] if active else scheduler,
        logical_block_bytes=read_int(queue / "logical_block_size"),
        physical_block_bytes=read_int(queue / "physical_block_size"),
        nr_requests=read_int(queue / "nr_requests"),
        max_sectors_kb=read_int(queue / "max_sectors_kb"),
        max_hw_sectors_kb=read_int(queue / "max_hw_sectors_kb"),
        discard_bytes=read_int(queue / "discard_max_bytes"),
        numa_node=_numa_node(directory),
    )


def _members(directory: Path) -> Iterator[str]:
    slaves = directory / "slaves"
    for slave in sorted(slaves.iterdir()) if slaves.is_dir() else ():
        below = list(_members(slave.resolve()))
        yield from below or [slave.name]


def _numa_node(directory: Path) -> int | None:
    """Return the node of a disk: of the PCI device below its controller. -1 says that there is only one."""
    found = (read_int(directory / up / "numa_node") for up in ("device", "device/device"))
    return next((node for node in found if node is not None and node >= 0), None)


def drive_of(path: Path) -> Drive | None:
    """The drive under a folder; None where no block device is known, or the folder is not there."""
    try:
        folder = Descriptor(os.open, path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None
    with folder as fd:
        return find_drive(os.fstat(fd).st_dev, mount_of(fd))


def temperature(disk: str) -> float | None:
    """Degrees Celsius of a disk now, as its driver tells everybody; None where it does not.

    The kernel's nvme driver does (``CONFIG_NVME_HWMON``), from Linux 5.5 on.
    """
    device = SYS / "class/block" / disk / "device"
    places = [*device.glob("hwmon*/temp1_input"), *device.glob("hwmon/hwmon*/temp1_input")]
    found = (read_int(place) for place in sorted(places))
    return next((thousandths / 1000 for thousandths in found if thousandths is not None), None)


class HealthError(RuntimeError):
    """A drive's health could not be read; the message says why and what to type."""


@dataclass(frozen=True, kw_only=True)
class Health:
    """The SMART / health information of an NVMe drive, log page 02h."""

    temperature: float | None  # degrees Celsius of the whole drive
    percent_used: int  # share of its endurance that is used up, in the maker's estimate; may be more than 100
    spare: int  # percent of the spare blocks that are left
    spare_threshold: int  # percent of them below which the drive warns
    bytes_written: int  # bytes that hosts have written in its life
    media_errors: int  # times that the drive could not give back what was written
    critical_warning: int  # bits: 1 spare is low, 2 too hot or cold, 4 unreliable, 8 read only, 16 no power protection
    power_on_hours: int
    warm_minutes: int  # minutes in its life above the temperature that its maker warns of
    throttled_seconds: int | None = None
    """Seconds in its life that it went slower because it was hot; None where that is not told."""


def health_of(document: Mapping[str, Any]) -> Health:
    """The health in a JSON document of ``nvme smart-log`` or ``smartctl --all``."""
    try:
        if (log := document.get("nvme_smart_health_information_log")) is not None:
            return _of_log(log, _SMARTCTL, 0)
        if "percent_used" in document:
            return _of_log(document, {}, KELVIN)
    except (KeyError, TypeError, ValueError) as error:
        raise HealthError(f"the SMART log lacks what NVMe 1.0 has in it: {error!r}") from None
    said = [found.get("string", "") for found in (document.get("smartctl") or {}).get("messages", [])]
    raise HealthError("; ".join(filter(None, said)) or "no SMART log of an NVMe drive")


def _of_log(log: Mapping[str, Any], names: Mapping[str, str], zero: int) -> Health:
    """Read a log whose program has other `names` for some figures, and degrees whose zero is `zero`."""

    def figure(name: str) -> int:
        return int(log[names.get(name, name)])

    warning = log["critical_warning"]  # nvme: with --verbose an object, of which "value" is the number
    throttled = [log[name] for name in ("thm_temp1_total_time", "thm_temp2_total_time") if name in log]
    return Health(
        temperature=float(log["temperature"]) - zero if "temperature" in log else None,
        percent_used=figure("percent_used"),
        spare=figure("avail_spare"),
        spare_threshold=figure("spare_thresh"),
        bytes_written=figure("data_units_written") * DATA_UNIT,
        media_errors=figure("media_errors"),
        critical_warning=int(warning["value"] if isinstance(warning, Mapping) else warning),
        power_on_hours=figure("power_on_hours"),
        warm_minutes=int(log.get("warning_temp_time", 0)),
        throttled_seconds=sum(map(int, throttled)) if throttled else None,
    )


def read_health(disk: str) -> Health:
    """Ask ``nvme``, or else ``smartctl``, about a disk as ``nvme0n1``; root may, others mostly may not."""
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
