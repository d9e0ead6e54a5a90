"""What the process around a training does besides: another default device, forks, a refusal to pin, a compiler."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from nvme_offload.offload.devices.device import current_of, page_lock
from nvme_offload.offload.host.region import HostRegion
from nvme_offload.perf.verify.bits import must_equal
from nvme_offload.perf.verify.outcome import Found, LeftOutError, Site, WrongError
from nvme_offload.perf.verify.training import BF16, layered_run
from nvme_offload.perf.verify.updates import Params, section, trained

_KEPT: dict[str, Any] = {"gradient_clipping": 0.1, **BF16}


def process(site: Site) -> Found:
    """Steps under a default device, and with workers forked between them; a refusal to pin that is over when told."""
    expected = trained("cpu", section(None)).bits
    with site.drive() as drive, _default_device(site.device if site.has_device else "meta"):
        must_equal(trained(site.device, section(drive)).bits, expected, "under a default device")

    def fork(params: Params, step: int) -> None:
        for _ in DataLoader(TensorDataset(torch.arange(16)), num_workers=2, multiprocessing_context="fork"):
            pass

    with site.drive() as drive:
        must_equal(trained(site.device, section(drive), before=fork).bits, expected, "with workers forked meanwhile")
    if site.has_device:
        _refuse_to_pin(current_of(site.device))
    return Found("the same bits under a default device and with forked workers", {})


@contextmanager
def _default_device(name: str) -> Iterator[None]:
    torch.set_default_device(name)
    try:
        yield
    finally:
        torch.set_default_device(None)


def _refuse_to_pin(device: torch.device) -> None:
    """Ask for what is pinned already; whoever computes next must not be told of that."""
    region = HostRegion(1 << 20)
    region.pin(device)
    try:
        if not page_lock(region.address, region.size_bytes, device):
            raise LeftOutError("memory can be pinned twice here")
        torch.ones(10, device=device).sum().item()
    except RuntimeError as error:
        raise WrongError(f"the next kernel raised what pinning was refused for: {error}") from error
    finally:
        region.unpin()


def compiled(site: Site) -> Found:
    """Compiled blocks, wherever anything is kept: the bits of the same blocks with all of it in memory."""
    backend = "inductor" if site.large else "aot_eager"
    torch.compiler.reset()
    try:
        torch.compile(torch.neg, backend=backend)(torch.ones(1, device=site.device))
    except Exception as error:  # a compiler that is missing is none of ours
        raise LeftOutError(f"torch.compile does not work here: {error}") from error
    with site.drive() as drive:
        found = layered_run(site, section(drive, **_KEPT), backend)
    must_equal(found, layered_run(site, section(None, **_KEPT), backend), "state on NVMe and in memory")
    with site.drive() as drive:
        found = layered_run(site, _away({"device": "nvme", "nvme_path": str(drive)}, drive), backend)
    must_equal(found, layered_run(site, _away({"device": "cpu"}, None), backend), "all on NVMe and in memory")
    return Found(f"{backend}: the same bits, wherever anything is kept", {})


def _away(kept: dict[str, Any], drive: Path | None) -> dict[str, Any]:
    config = section(drive, offload_gradients=kept, **_KEPT)
    config["zero_optimization"]["offload_param"] = kept
    return config
