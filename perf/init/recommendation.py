"""Which section suits a model and a machine: the first that fits, of those that move the least."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.units import format_bytes
from nvme_offload.perf.plan.command import plannable
from nvme_offload.perf.plan.machine import Machine
from nvme_offload.perf.plan.prediction import Job, Prediction, predict
from nvme_offload.perf.plan.shape import ModelShape


class NothingFitsError(RuntimeError):
    """No section lets this model be trained here; the message says what is missing."""


@dataclass(frozen=True)
class Recommendation:
    """A section, and why it is this one."""

    section: dict[str, Any]
    why: str
    prediction: Prediction


def recommend(shape: ModelShape, machine: Machine, paths: Sequence[Path], tokens: int) -> Recommendation:
    """The first section of `candidates` that fits.

    Args:
        shape: of the model.
        machine: whose memory and capacity count.
        paths: folders on its drives.
        tokens: of a micro-batch.

    Raises:
        NothingFitsError: none does.
    """
    missing = ""
    for found, why in candidates(paths):
        try:
            config = plannable(OffloadConfig.from_dict(found), machine)
            job = Job(shape=shape, config=config, tokens=tokens, checkpointing=True)
            prediction = predict(job, machine)
        except ConfigError as error:  # a budget of "auto" that comes to less than the staging buffers
            missing = str(error)
            continue
        if not prediction.excess:
            return Recommendation(found, why, prediction)
        missing = ", ".join(f"{tier} is {format_bytes(size)} too small" for tier, size in prediction.excess.items())
    everything = "with everything on NVMe that can go there"
    raise NothingFitsError(f"{shape.name} does not fit on {machine.ranks} rank(s) here, {everything}: {missing}")


def uses_nvme(section: Mapping[str, Any]) -> bool:
    """Whether anything of a section is on NVMe."""
    return bool(section["zero_optimization"]["offload_optimizer"]["device"] == "nvme")


def candidates(paths: Sequence[Path]) -> Iterator[tuple[dict[str, Any], str]]:
    """Sections from what moves least to what needs least memory, each with the reason to take it."""
    drive = {"device": "nvme", "nvme_path": [str(path.absolute()) for path in paths]}
    common = {"bf16": {"enabled": True}, "gradient_clipping": 1.0}
    memory = {"stage": 3, "offload_optimizer": {"device": "cpu"}}
    yield common | {"zero_optimization": memory}, "everything fits into memory: no byte has to move to a drive"
    state = {"stage": 3, "offload_optimizer": drive}
    yield (
        common | {"zero_optimization": state, "host_budget": "auto"},
        "the optimizer state does not fit into memory: as much of it as fits stays there, the rest goes to NVMe",
    )
    yield (
        common | {"zero_optimization": state},
        "beside parameters and gradients no memory is left for the optimizer state",
    )
    blocks = {"zero_optimization": state | {"offload_param": drive}, "offload_gradients": drive}
    yield (
        common | blocks | {"host_budget": "auto"},
        "parameters and gradients do not fit beside it: they share what memory there is with the state",
    )
    yield common | blocks, "memory is scarce: everything is on NVMe that can go there"
