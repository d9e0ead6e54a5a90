"""Moves out of memory what a forward saves for backward: for any module, with or without an engine."""

import logging
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain
from typing import Any, Self

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from nvme_offload.aio_native.faults import FaultSpec
from .._torch_private import (
    ATTENTION,
    argument_of,
    gathered_params,
    is_compiled,
    keeping_selected,
    local_tensor,
    not_compiled,
    replace_calls,
    run_operators,
    storage_identity,
    top_saved_tensor_hooks,
    tree_flatten,
    tree_unflatten,
)
from ..config.section import OffloadConfig, OffloadOptimizerConfig, SectionLike, ZeroOptimizationConfig
from ..config.tiers import ActivationsConfig
from ..devices.device import HOST, is_host
from ..errors import ConfigError
from ..host.available_memory import auto_host_budget
from ..host.page_locks import PageLocks
from ..storage.nvme_tier import NvmeTier
from ..swapper.tensor_swapper import TensorSwapper
from ..units import KiB, MiB
from ..warn import door
from .blocks import checkpoint_calls, find_blocks, what_may_change
from .choice import SavedFacts, is_moved, is_plain
from .counting import CountingStore
from .kept import ActivationStats, Handle, InPlace, KeptTensor
from .store import ActivationStore

_SAMPLE = 64


class ModelMemory:
    """The memory of a model's parameters and buffers, sharded or not, as it is at this moment."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._own: set[Hashable] = set()
        self._sharded: list[nn.Module] = []
        self._by_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}

    def look(self) -> None:
        """Note where parameters and buffers are. To be called before a forward, which changes that of gathered ones."""
        self._own = {identity for tensor in self._tensors() if (identity := _identity_of(tensor)) is not None}
        by_shape: defaultdict[tuple[int, ...], list[torch.Tensor]] = defaultdict(list)
        for param in self._model.parameters():
            by_shape[_shape_of(param)].append(param)
        self._by_shape = dict(by_shape)
        self._sharded = [module for module in self._model.modules() if isinstance(module, FSDPModule)]

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor's memory is the model's own, or it is what autocast makes of a parameter."""
        identity = _identity_of(tensor)
        if identity in self._own or any(_identity_of(param) == identity for param in gathered_params(self._sharded)):
            return True
        return self._is_cast(tensor)

    def _tensors(self) -> Iterator[torch.Tensor]:
        return (local_tensor(tensor) for tensor in chain(self._model.parameters(), self._model.buffers()))

    def _is_cast(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is a parameter in autocast's dtype. Those of a forward are cached until it ends.

        Inside of an operator autocast is off, so that only values tell a cast from what happens to have its shape. On a
        device the host would have to wait for them: what has the shape stays there.
        """
        shape, dtype = _shape_of(tensor), tensor.dtype
        if dtype is not torch.get_autocast_dtype(tensor.device.type) or not (candidates := self._by_shape.get(shape)):
            return False
        if not is_host(tensor.device):
            return any(param.dtype is not dtype for param in candidates)
        gathered = (param for param in gathered_params(self._sharded) if _shape_of(param) == shape)
        return any(_begin_alike(tensor, param) for param in chain(map(local_tensor, candidates), gathered))


def _shape_of(tensor: torch.Tensor) -> tuple[int, ...]:
    """The shape but for the order of dimensions: a linear layer saves its weight transposed."""
    return tuple(sorted(tensor.shape))


def _identity_of(tensor: torch.Tensor) -> Hashable | None:
    """The identity of a tensor's memory; None for a wrapper that has none of its own."""
    if hasattr(tensor, "__tensor_flatten__") or tensor.is_meta:
        return None
    return storage_identity(tensor.untyped_storage())


def _begin_alike(cast: torch.Tensor, param: torch.Tensor) -> bool:
    """Whether what comes first in memory is the same in the dtype of the cast, which keeps the strides."""
    if not is_plain(param) or param.dtype is cast.dtype or not param.dtype.is_floating_point:
        return False
    pair = cast, param.detach()
    first, own = (each.as_strided((min(each.numel(), _SAMPLE),), (1,), each.storage_offset()) for each in pair)
    return torch.equal(first, own.to(cast.dtype))


class AttentionResults:
    """The results of attention in one call of a block; the repetition takes them in the same order.

    Autograd's own node for attention is made in the repetition, too, around the results that are taken: it saves them
    as if they had just been computed. Selective checkpointing works so as well, but keeps them where hooks on saved
    tensors do not look.
    """

    def __init__(self, keep: Callable[[torch.Tensor], Handle]) -> None:
        self._keep = keep
        self._kept: list[tuple[list[Any], Any]] = []
        self._next = 0

    def contexts(self) -> tuple[Any, Any]:
        """Return what the forward of the block runs in, and what its repetition does."""
        return run_operators(self._compute, self._kept.clear), run_operators(self._take, self._begin)

    def _begin(self) -> None:
        self._next = 0  # a graph that is retained is computed again more than once

    def _compute(self, op: Any, args: Any, kwargs: Any) -> Any:
        results = op(*args, **kwargs)
        if _is_kept(op, args, kwargs):
            leaves, layout = tree_flatten(results)
            self._kept.append(([self._keep(x) if isinstance(x, torch.Tensor) else x for x in leaves], layout))
        return results

    def _take(self, op: Any, args: Any, kwargs: Any) -> Any:
        if not _is_kept(op, args, kwargs):
            return op(*args, **kwargs)
        leaves, layout = self._kept[self._next]
        self._next += 1
        return tree_unflatten([leaf.take() if hasattr(leaf, "take") else leaf for leaf in leaves], layout)


def _is_kept(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether it is attention. With dropout it draws random numbers, and what comes after it others if it did not."""
    return op in ATTENTION and not argument_of(op, "dropout_p", args, kwargs, 0.0)


logger = logging.getLogger(__name__)

Choose = Callable[[int, int, bool], OffloadConfig]
"""It gets the bytes that a block saves and those that it gives to the next, whether a block can be computed twice, and
returns the section to go on with."""

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
        choose: for a section that leaves ``activations.device`` open. All stays where it is until the first block that
            saves anything has been computed. Then this is called once: see `Choose`. A device of ``none`` ends the
            swapper.

    Raises:
        ConfigError: the configuration is wrong, or ``activations.device`` is ``none`` without `choose`.
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
        choose: Choose | None = None,
    ) -> None:
        config = OffloadConfig.of(config)
        self.config = config.activations
        if self.config.device == "none" and choose is None:
            raise ConfigError(['activations.device = "none": an ActivationSwapper needs "cpu" or "nvme"'])
        self._model = model
        self._memory = ModelMemory(model)
        self._pack = self.keep  # one object, by which they are known again
        _take_back(InPlace(torch.empty(0, device=HOST)))  # imports the compiler, which keeps frames that are running
        found = list(find_blocks(model) if blocks is None else blocks)
        check_blocks(model, found, self.config)
        if self.config.keep == "all":
            found = []
        self._store = CountingStore() if choose else _store_of(config, faults)
        keeps: dict[str, Callable[[], Any]] = {}
        if self.config.keep == "attention":
            keeps["contexts"] = lambda: AttentionResults(self.keep).contexts()
        self._undo: Callable[[], object] = checkpoint_calls(found, self._is_outermost, **keeps)
        self._end_look: Callable[[], object] = lambda: None
        if choose is not None and isinstance(self._store, CountingStore):
            self._end_look = replace_calls(found, partial(self._look, self._store, choose))

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

    def _look(self, counted: CountingStore, choose: Choose, inner: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Compute a block; when the first one saves anything, have it chosen how the forward goes on."""
        if not torch.is_grad_enabled():
            return inner(*args, **kwargs)
        before = counted.size_bytes
        with self.saving() if top_saved_tensor_hooks() is None else nullcontext():  # or in somebody's checkpoint
            output = inner(*args, **kwargs)
        saved, gives = counted.size_bytes - before, CountingStore()
        for leaf in tree_flatten(output)[0]:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                gives.keep(leaf)
        if not (saved or gives.size_bytes):  # it is frozen
            return output
        config = choose(saved, gives.size_bytes, not what_may_change((args, kwargs)))
        self._end_look()
        self.config = config.activations
        if self.config.device == "none":
            self.close()
        else:
            self._store = _store_of(config, None)
        return output

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

    def park(self) -> None:
        """Give memory back between two steps, until something is saved."""
        self._store.park()

    def stats(self) -> ActivationStats:
        """Return what was kept and moved since the beginning."""
        return self._store.stats()

    def close(self) -> None:
        """Leave the model as it was, delete the files and free the memory. Idempotent.

        A graph that has tensors on the drive cannot be used any more.
        """
        self._end_look()
        self._undo()
        self._store.close()

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _is_outermost(self) -> bool:
        """Whether a block that is called now saves here, and not in somebody's checkpoint around it."""
        hooks = top_saved_tensor_hooks()
        repeats = self.config.device != "none" and self.config.keep != "all"
        return repeats and hooks is not None and hooks[0] is self._pack


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
