"""`offload doctor`: whether NVMe offload works here, and how well it can."""

import json
import platform
import warnings
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Annotated

import torch
import typer
from rich.console import Console

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ConfigError, ConfigWarning
from nvme_offload.offload.host.available_memory import available_bytes, cgroup_limit
from nvme_offload.offload.host.proc import meminfo
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.offload.units import MiB, format_bytes
from ..measure.command_line import Json
from ..measure.machine import version_of
from .engines import check_engines, probe_engines
from .findings import Finding, Group, Level, Report, print_report, saw
from .paths import check_path


def check_memory(config: OffloadConfig) -> Finding:
    """Whether the host budget fits, or without one the staging buffers."""
    facts, limit, available = meminfo(), cgroup_limit(), available_bytes()
    key, what = "zero_optimization.offload_optimizer.staging_budget", "the staging buffers"
    budget = config.zero_optimization.offload_optimizer.staging_budget
    if isinstance(config.host_budget, int):  # "auto" fits by itself
        key, what, budget = "host_budget", "the host budget", config.host_budget
    total = facts.get("MemTotal", 0)
    found = f"{format_bytes(facts.get('MemAvailable', 0))} available of {format_bytes(total)}"
    if limit:
        found += (
            f"; cgroup v{limit.version} limit {format_bytes(limit.limit_bytes)}, "
            f"{format_bytes(limit.free_bytes)} of it left"
        )
    else:
        found += "; no cgroup limit"
    remedy = f"write less than {format_bytes(budget)} for {key}"
    seen = saw("memory", found)
    if budget > available:
        return seen.error(f"too little for {what} ({format_bytes(budget)})", remedy)
    if key != "host_budget" and 2 * budget > available:
        return seen.warning(f"{what} ({format_bytes(budget)}) take more than half of it", remedy)
    return seen


def check_software(config: OffloadConfig) -> Iterator[Finding]:
    """Versions of what matters, and whether the GPU takes pinned memory."""
    versions = {name: version_of(name) for name in ("nvme-offload", "torch", "pyuring", "aiofiles")}
    versions["python"] = platform.python_version()
    listed = ", ".join(f"{name} {number or 'not installed'}" for name, number in versions.items())
    yield saw("versions", listed)
    yield check_gpu(config)


def check_gpu(config: OffloadConfig) -> Finding:
    """Whether there is a CUDA device, and pinning memory of ours for it works."""
    if not torch.cuda.is_available():
        built = torch.version.cuda
        why = f"torch is built for CUDA {built}, but sees no device" if built else "torch is built without CUDA"
        return saw("GPU", f"none ({why}); the CPU trains")
    names = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    found = f"{', '.join(names)} (CUDA {torch.version.cuda})"
    region = HostRegion(MiB)
    try:
        region.pin(torch.device("cuda", torch.cuda.current_device()))
    except RuntimeError as error:
        asked = config.zero_optimization.offload_optimizer.pin_memory
        meaning = f"copies between GPU and host cannot run asynchronously: {error}"
        remedy = "write false for zero_optimization.offload_optimizer.pin_memory"
        return saw("GPU", found).at(Level.ERROR if asked else Level.NOTE, meaning, remedy)
    finally:
        region.unpin()
    return saw("GPU", f"{found}; pinning memory works")


def doctor(
    paths: Annotated[
        list[Path] | None, typer.Argument(metavar="PATH", help="Folders for swap files, beside those in --config.")
    ] = None,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config", metavar="FILE", help="File of a section (.json or .toml), whose sizes and paths are tried."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what stands in the way of NVMe offload on this machine.

    Every finding has a level (ok, note, warning, error), and where it is not ok, what it means and what to type.
    In each folder a small run trains, commits, is killed, and goes on; what it wrote is removed.

    Exit status: 0 all is fine (notes included), 1 there are warnings, 2 an error prevents NVMe offload.
    """
    report = examine(paths or [], config)
    if as_json:
        typer.echo(json.dumps(report.as_dict(), indent=2, default=str))
    else:
        print_report(report, Console(highlight=False))
    raise typer.Exit(report.exit_status)


def examine(paths: Sequence[Path], config_file: Path | None = None) -> Report:
    """Ask all questions. A configuration that cannot be read is a finding, and the defaults take its place."""
    config, about_config = _read_config(config_file)
    probe = probe_engines(config)
    engine = probe.chosen(config)
    groups = [Group(f"Configuration {config_file}", tuple(about_config))] if config_file else []
    groups += [
        Group("I/O engines", tuple(check_engines(config, probe))),
        Group("Memory", (check_memory(config),)),
        Group("Software", tuple(check_software(config))),
    ]
    examined = dict.fromkeys([*paths, *chain(*config.paths_of_tiers.values())])
    groups += _examine_paths(list(examined), config, probe.usable(config))
    return Report(tuple(groups), engine)


def _read_config(file: Path | None) -> tuple[OffloadConfig, list[Finding]]:
    if file is None:
        return OffloadConfig(), []
    try:
        with warnings.catch_warnings(record=True, action="always", category=ConfigWarning) as caught:
            config = OffloadConfig.from_file(file)
    except (ConfigError, OSError) as error:
        problems = error.problems if isinstance(error, ConfigError) else [error.strerror or str(error)]
        meaning = "a run stops when it starts; everything below is about the defaults"
        remedy = "correct it; docs/configuration.md lists every key"
        return OffloadConfig(), [saw("section", text).error(meaning, remedy) for text in problems]
    findings = [finding for warning in caught for finding in _warned(warning)]
    if not config.paths_of_tiers:
        found = f"zero_optimization.offload_optimizer.device = {config.zero_optimization.offload_optimizer.device}"
        meaning = "with this configuration nothing goes to NVMe"
        findings.append(saw("device", found).note(meaning, 'write "nvme", and an nvme_path beside it'))
    return config, findings or [saw("section", "valid")]


def _warned(warning: warnings.WarningMessage) -> Iterator[Finding]:
    """Return what a `ConfigWarning` lists: below each of its headlines, a line for each key."""
    name, meaning = "", ""
    for line in str(warning.message).splitlines() if issubclass(warning.category, ConfigWarning) else ():
        if line.startswith("  "):
            yield saw(name, line.strip()).note(meaning)
        elif "left out" in line:
            name, meaning = "left out", "in DeepSpeed, for which this section was written, its default is another"
        else:
            name, meaning = "section", "this key has no effect here; it can stay"


def _examine_paths(paths: Sequence[Path], config: OffloadConfig, engines: Sequence[str]) -> list[Group]:
    if not paths:
        meaning = "whether a drive suits was not looked at"
        remedy = "name the folder for swap files, as in offload doctor /mnt/nvme0, or a section with --config"
        return [Group("Paths", (saw("paths", "none was named").note(meaning, remedy),))]
    groups: list[Group] = []
    by_drive: dict[str, list[str]] = defaultdict(list)
    for path in paths:
        findings, drive = check_path(path, config, engines)
        groups.append(Group(f"Path {path}", tuple(findings)))
        if drive:
            by_drive[drive.name].append(str(path))
    meaning = "an extent is striped over all paths to use several drives: on one drive that brings nothing"
    shared = [
        saw("paths", f"{', '.join(names)} are on the same drive, {name}").note(meaning, "name one for each")
        for name, names in by_drive.items()
        if len(names) > 1
    ]
    return [*groups, Group("All paths", tuple(shared))] if shared else groups
