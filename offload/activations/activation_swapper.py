"""Moves out of memory what a forward saves for backward: for any module, with or without an engine."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Self

import torch
from torch import nn

from nvme_offload.aio_native import FaultSpec
from nvme_offload.offload._torch_private import (
    is_compiled,
    keeping_selected,
    not_compiled,
    replace_calls,
    top_saved_tensor_hooks,
)
from nvme_offload.offload.activations.attention import AttentionResults
from nvme_offload.offload.activations.blocks import checkpoint_calls, find_blocks
from nvme_offload.offload.activations.choice import SavedFacts, is_moved, is_plain
from nvme_offload.offload.activations.kept import Handle, InPlace, KeptTensor
from nvme_offload.offload.activations.store import ActivationStats, ActivationStore
from nvme_offload.offload.activations.weights import ModelMemory
from nvme_offload.offload.config.section import (
    OffloadConfig,
    OffloadOptimizerConfig,
    SectionLike,
    ZeroOptimizationConfig,
)
from nvme_offload.offload.config.tiers import ActivationsConfig
from nvme_offload.offload.devices.device import HOST
from nvme_offload.offload.errors import ConfigError
from nvme_offload.offload.host.available_memory import auto_host_budget
from nvme_offload.offload.host.page_locks import PageLocks
from nvme_offload.offload.storage.nvme_tier import NvmeTier
from nvme_offload.offload.swapper.tensor_swapper import TensorSwapper
from nvme_offload.offload.units import KiB, MiB
from nvme_offload.offload.warn import door

logger = logging.getLogger(__name__)

_BUFFER_COUNT, _MAX_BUFFER_BYTES, _MIN_BUFFER_BYTES = 8, 8 * MiB, 128 * KiB


class ActivationSwapper(AbstractContextManager["ActivationSwapper"]):
    """Moves what autograd saves in a forward to NVMe, and back before backward wants it. The bits are the same.

    Run forwards in `saving`, and backward outside of it::

        with ActivationSwapper(section, model=model) as activations:
            for batch in batches:
                with activations.saving():
                    loss = model(batch).square().mean()
                loss.backward()

    Several forwards before a backward, graphs that are retained or never used, gradients of gradients, checkpoints
    inside the model, autocast, FSDP2 and compiled blocks work as without it.

    Args:
        config: an `OffloadConfig`, a dict or a file; its sections `activations` and `aio` are used.
        model: its parameters and buffers stay where they are, and its blocks are checkpointed unless
            ``activations.keep`` is ``all``. Compile and shard it before you make the swapper.
        blocks: blocks of the model to checkpoint; by default its repeated layers.
        faults: failures to inject, for tests.

    Raises:
        ConfigError: the configuration is wrong, or ``activations.device`` is ``none``.
        ValueError: blocks are wanted, and the model has none, or is compiled as a whole.
        SwapIOError, EngineUnavailable: see `TensorSwapper`.
    """

    @door
    def __init__(
        self,
        config: SectionLike,
        *,
        model: nn.Module,
        blocks: Iterable[nn.Module] | None = None,
        faults: FaultSpec | None = None,
    ) -> None:
        config = OffloadConfig.of(config)
        self.config = config.activations
        if self.config.device == "none":
            raise ConfigError(['activations.device = "none": an ActivationSwapper needs "cpu" or "nvme"'])
        self._model = model
        self._memory = ModelMemory(model)
        self._pack = self.keep  # one object, by which they are known again
        _take_back(InPlace(torch.empty(0, device=HOST)))  # imports the compiler, which keeps frames that are running
        found = list(find_blocks(model) if blocks is None else blocks)
        check_blocks(model, found, self.config)
        if self.config.keep == "all":
            found = []
        self._store = _store_of(config, faults)
        keeps: dict[str, Callable[[], Any]] = {}
        if self.config.keep == "attention":
            keeps["contexts"] = lambda: AttentionResults(self.keep).contexts()
        self._undo: Callable[[], object] = checkpoint_calls(found, self._is_outermost, **keeps)

    @property
    def tier(self) -> NvmeTier | None:
        """The swap space and its engine; None where tensors stay in host memory."""
        return self._store.tier

    def saving(self) -> AbstractContextManager[object]:
        """Move what is saved by forwards inside. It belongs to the thread, and may be entered again within itself."""
        self._memory.look()
        self._store.begin()
        return self._saving()

    @contextmanager
    def _saving(self) -> Iterator[None]:
        with keeping_selected(self._keep_selected), torch.autograd.graph.saved_tensors_hooks(self._pack, _take_back):
            yield

    def _keep_selected(self, tensor: torch.Tensor) -> KeptTensor | None:
        handle = self.keep(tensor)
        return handle if isinstance(handle, KeptTensor) else None

    def attach(self) -> Self:
        """Run every forward of the model in `saving` from now on, until `close`: for loops that are not yours.

        Tensors that a loss outside of the model saves stay in memory: backward uses them first.
        """
        undo = [self._undo, replace_calls([self._model], self._call_saving)]
        self._undo = lambda: [each() for each in undo]
        return self

    def _call_saving(self, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        with self.saving():
            return inner(*args, **kwargs)

    @not_compiled  # code that is compiled calls hooks, which would be compiled, too
    def keep(self, tensor: torch.Tensor) -> Handle:
        """Keep a tensor until its handle dies. The caller lets go of it; ``handle.take()`` gives it back.

        Raises:
            SwapIOError, OutOfSpaceError: there is no room for it in memory or on the drive. Nothing is lost.
        """
        if not is_plain(tensor) or not self._store.moves_from(tensor.device):
            return InPlace(tensor)
        storage_bytes = tensor.untyped_storage().nbytes()
        size = SavedFacts(is_plain=True, is_weight=False, size_bytes=tensor.nbytes, storage_bytes=storage_bytes)
        if is_moved(size, self.config.min_bytes):
            size = size._replace(is_weight=self._memory.has(tensor))
        return (self._store.keep(tensor) if is_moved(size, self.config.min_bytes) else None) or InPlace(tensor)

    def announce(self, handles: Iterable[Handle]) -> None:
        """Say in which order handles are taken next, if it is not the reverse of the order of `keep`."""
        self._store.announce(handles)

    def stats(self) -> ActivationStats:
        """Return what was kept and moved since the beginning."""
        return self._store.stats()

    def close(self) -> None:
        """Leave the model as it was, delete the files and free the memory. Idempotent.

        A graph that has tensors on the drive cannot be used any more.
        """
        self._undo()
        self._store.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_outermost(self) -> bool:
        """Whether a block that is called now saves here, and not in somebody's checkpoint around it."""
        hooks = top_saved_tensor_hooks()
        return hooks is not None and hooks[0] is self._pack


@not_compiled
def _take_back(packed: Handle) -> torch.Tensor:
    return packed.take()


def check_blocks(model: nn.Module, blocks: Sequence[nn.Module], section: ActivationsConfig) -> None:
    """Raise ValueError where blocks are to be checkpointed, and there are none, or the model is compiled whole."""
    if section.device == "none" or section.keep == "all":
        return
    if is_compiled(model):
        raise ValueError(
            f'activations.keep = "{section.keep}": the model is compiled as a whole, and its blocks are not called one '
            'by one: compile the blocks instead, or write "all"'
        )
    if not blocks:
        raise ValueError(
            f'activations.keep = "{section.keep}": no repeated layers were found in the model: name them with blocks=, '
            'or write "all"'
        )


def _store_of(config: OffloadConfig, faults: FaultSpec | None) -> ActivationStore:
    """Make the store that a section asks for."""
    section = config.activations
    budget = auto_host_budget() if section.host_budget == "auto" else section.host_budget
    locks = PageLocks(config.zero_optimization.offload_optimizer.pin_memory, logger.warning)
    if section.device == "cpu":
        return ActivationStore(None, budget, locks)
    buffer_bytes = max(_MIN_BUFFER_BYTES, min(_MAX_BUFFER_BYTES, budget // (4 * _BUFFER_COUNT)))
    place = OffloadOptimizerConfig(
        device="nvme",
        nvme_path=section.nvme_path,
        buffer_count=_BUFFER_COUNT,
        staging_budget=_BUFFER_COUNT * buffer_bytes,
    )
    zero = ZeroOptimizationConfig(offload_optimizer=place)
    swapper = TensorSwapper(OffloadConfig(zero_optimization=zero, aio=config.aio), faults=faults)
    return ActivationStore(swapper, budget, locks)
