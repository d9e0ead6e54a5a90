"""The machine that a plan is for: ranks, memory and drives."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import Any, Self

from nvme_offload.offload.foreign import parse_json, read_text
from nvme_offload.offload.storage.tier_plan import Tier
from nvme_offload.offload.units import TB

UPDATE_RATE = 1e9
"""Parameters per second of the update kernel, less than `perf/benchmarks/bench_kernel.py` measured on two cores."""

COPY_RATE = 3e9
"""Bytes per second that a thread copies to staging buffers or back, measured beside computing on two cores (in
`perf/results/2026-11-26T022603Z-activations-iterations.md`)."""


class PlanError(ValueError):
    """Something that is said of a machine or a model cannot be used; says what to give instead."""


@dataclass(frozen=True, kw_only=True)
class Drives:
    """All drives of one node together: extents are striped over them."""

    read: float  # bytes per second of reading alone
    write: float  # bytes per second of writing alone
    mixed: float  # bytes per second of reading and writing at once, 1:1, both counted: what an optimizer step does
    endurance: float | None = None  # bytes that may be written over the drives' life (TBW); None is not known

    @classmethod
    def of_rates(
        cls, read: float, write: float, mixed: float | None = None, terabytes_written: float | None = None
    ) -> Self:
        """Drives as a data sheet has them. Without a mixed rate: that of drives that share time between directions."""
        _check_above_zero({"--read-bw": read, "--write-bw": write, "--mixed-bw": mixed, "--tbw": terabytes_written})
        shared = 2 / (1 / read + 1 / write) if mixed is None else mixed
        endurance = None if terabytes_written is None else terabytes_written * TB
        return cls(read=read, write=write, mixed=shared, endurance=endurance)

    @classmethod
    def of_bench(cls, file: Path, terabytes_written: float | None = None) -> Self:
        """Drives as ``offload bench`` measured them, printed with ``--json`` or saved, in all three directions."""
        try:
            document = parse_json(read_text(file))
            verified, direct, results = document["verified"], document["engine"]["direct"], document["results"]
            rates = {rw: _rate(results[rw]) for rw in ("read", "write", "mixed")}
        except OSError as error:
            raise PlanError(f"{file}: {error.strerror}") from None
        except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
            how = "make it with: offload bench --rw all --json > bench.json"
            what = "is no result of offload bench with read, write and mixed"
            raise PlanError(f"{file} {what} ({error!r}); {how}") from None
        if verified is not True:
            why = "the null engine moves no bytes; choose another --ioengine"
            raise PlanError(f"{file}: nothing was verified: {why}")
        if direct is not True:
            why = "without direct I/O, so that much of it was done by the page cache"
            raise PlanError(f"{file} was measured {why}; measure with --direct required")
        return cls.of_rates(**rates, terabytes_written=terabytes_written)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """A training runs on nodes that are all alike."""

    ranks: int = 1  # number of data-parallel ranks over which the model is sharded
    ranks_per_node: int = 1
    host_memory: int  # bytes of host memory of one node
    device_memory: int | None = None
    """Bytes of one rank's accelerator; None: ranks compute on the CPU, and the device's share is host memory."""
    drives: Drives | None = None  # all drives of one node; None: their rates are not known
    capacity: int | None = None  # free bytes of one node's drives; None is not known
    flops: float | None = None
    """Floating-point operations per second that forward and backward reach on one rank; None is not known."""
    update_rate: float = UPDATE_RATE
    """Parameters per second that one rank's update kernel reaches when nothing has to be waited for."""
    copy_rate: float = COPY_RATE
    """Bytes per second that a thread copies between tensors and staging buffers. Where ranks compute on the CPU, all
    threads that compute wait for the one whose processor copies."""
    pcie: float | None = None
    """Bytes per second between a rank's accelerator and its host, each way while both are in use; None: copies take no
    time, or nobody knows."""
    network: float | None = None
    """Bytes per second between a node and the others, each way; None: gathers and reductions take no time there."""

    @property
    def budgets(self) -> dict[Tier, int]:
        """Bytes that one rank has of each tier; of one that is not here no limit is known."""
        sizes: dict[Tier, int | None] = {"host": self.host_memory // self.ranks_per_node, "device": self.device_memory}
        sizes["nvme"] = self.capacity and self.capacity // self.ranks_per_node
        return {tier: size for tier, size in sizes.items() if size is not None}

    @property
    def num_nodes(self) -> int:
        """Return the number of nodes."""
        return self.ranks // self.ranks_per_node

    def __post_init__(self) -> None:
        """Check the numbers against each other."""
        if not 1 <= self.ranks_per_node <= self.ranks:
            raise PlanError(f"--ranks-per-node {self.ranks_per_node}: between 1 and --ranks {self.ranks}")
        _check_above_zero(
            {
                "--host-memory": self.host_memory,
                "--gpu-memory": self.device_memory,
                "--capacity": self.capacity,
                "--flops": self.flops,
                "--update-rate": self.update_rate,
                "--pcie": self.pcie,
                "--network": self.network,
            }
        )
        if self.ranks % self.ranks_per_node:
            raise PlanError(f"--ranks {self.ranks} is no multiple of --ranks-per-node {self.ranks_per_node}")


def _rate(result: Mapping[str, Any]) -> float:
    """Bytes per second of all passes together; of a drive that became slow those of its end, past caches and heat."""
    summary = result["summary"]
    slow = summary.get("became_slow")
    rate = float(slow["last_bw_bytes"] if slow else summary["total_bytes"] / summary["total_seconds"])
    if not 0 < rate < inf:
        raise ValueError(f"{rate} bytes per second")
    return rate


def _check_above_zero(options: dict[str, float | None]) -> None:
    """Raise PlanError for an option that is given and not above zero and finite; nan is neither."""
    for name, value in options.items():
        if value is not None and not 0 < value < inf:
            raise PlanError(f"{name} {value}: must be more than 0, and finite")
