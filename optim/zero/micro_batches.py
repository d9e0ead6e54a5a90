"""The order in which ``engine.accumulate`` goes through the micro-batches of a step: one by one, or block by block."""

import logging
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from nvme_offload.aio_native.interrupt import DeferredInterrupt
from nvme_offload.offload.activations.buffers import Buffers
from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.devices.device import current_of
from nvme_offload.offload.errors import BlockOrderError
from nvme_offload.offload.warn import warn_user
from ..ranks.collective import gather
from .accumulation import Accumulation
from .block_by_block import BlockByBlock
from .block_call import Keeper, KeptInMemory, random_states, set_random_states
from .keeping import KeepingChoice
from .passes import Passes

logger = logging.getLogger(__name__)


class WholeStep(NamedTuple):
    """All micro-batches of a step, and what their engine does around passes."""

    loss_of: Callable[[Any], torch.Tensor]
    micro_batches: Sequence[Any]
    begin_backward: Callable[[torch.Tensor | None, bool, bool], torch.Tensor | None]
    """A `BeginBackward` that is told, too, whether gradients are final where the micro-batch is the last."""
    begin_anew: Callable[[], None]
    """Drops the gradients of the step."""
    catch_up: Callable[[], None]
    """It is called where backward has come to the end of a block."""


class MicroBatches:
    """Goes through the micro-batches of a step block by block, if the section asks for that and the model allows it."""

    def __init__(
        self,
        config: OffloadConfig,
        root: nn.Module,
        units: Sequence[nn.Module],
        mesh: DeviceMesh,
        accumulation: Accumulation,
        passes: Passes,
        keeper: Keeper | None = None,
        keeping: KeepingChoice | None = None,
    ) -> None:
        # An embedding or a head by itself is code between blocks: nobody wants the logits of all micro-batches at once.
        layers = [unit for unit in units if not isinstance(unit, nn.Embedding | nn.Linear)] or list(units)
        self._is_asked = config.micro_batch_order == "vertical"
        self.is_vertical = config.goes_by_blocks and (self._is_asked or bool(layers))
        """Whether the next step goes block by block."""
        self._root = root
        self._layers = layers
        self._mesh = mesh
        self._accumulation = accumulation
        self._passes = passes
        self._keeper = keeper or KeptInMemory()
        self._keeping = keeping
        self._begins_for_good = config.overlap.forbids_clipping
        self._blocks: BlockByBlock | None = None

    def go_through(self, step: WholeStep) -> list[torch.Tensor] | None:
        """Run forward and backward of all micro-batches block by block; return their losses.

        Return None, with nothing done, if the model cannot be computed so; BlockOrderError if the section asks for it.
        """
        if not self.is_vertical:
            return None
        device = current_of(self._mesh.device_type)
        states = random_states(device)
        inside = {module for layer in self._layers for module in layer.modules()}
        buffers = Buffers(pair for pair in self._root.named_modules() if pair[1] not in inside)
        try:
            return self._block_by_block(step, device)
        except BlockOrderError as error:
            buffers.put_back()
            if self._is_asked or not self._passes.can_go_on:
                error.add_note('micro_batch_order = "horizontal" computes the model as it is')
                raise
            reason = str(error)
        self.is_vertical, self._blocks = False, None
        set_random_states(device, states)
        if self._keeping is not None and self._keeping.goes_one_by_one:
            return None
        warn_user(
            f"micro-batches go one after the other, and every block is gathered for each of them: {reason}. Write "
            'micro_batch_order = "horizontal" if that is meant'
        )
        return None

    def _block_by_block(self, step: WholeStep, device: torch.device) -> list[torch.Tensor]:
        with self._passes.run("accumulate", step.begin_anew, self._accumulation.is_complete):
            if self._blocks is None:
                self._blocks = BlockByBlock(self._root, self._layers, device, self._keeper)
                logger.info("micro-batches go block by block, through %d blocks", len(self._layers))
            if self._keeping is not None:
                self._keeping.begin(len(step.micro_batches))
            blocks = self._blocks
            has_looked = blocks.has_looked  # no update begins before it is known that nothing is to be done again
            try:
                blocks.forward(
                    step.loss_of, step.micro_batches, lambda loss, last: step.begin_backward(loss, last, has_looked)
                )
                is_final = has_looked and self._begins_for_good
                with DeferredInterrupt() if is_final else nullcontext():
                    losses = blocks.backward(step.catch_up)
                    self._accumulation.end_whole()
            except BaseException as error:
                blocks.stop(error)
                raise
        return losses


def check_alike(num_micro_batches: int, mesh: DeviceMesh) -> None:
    """Raise ValueError on every rank if they have different numbers of micro-batches. Collective."""
    found = gather(num_micro_batches, *mesh.get_all_groups())
    if len({*found.values()}) > 1:
        what = f"ranks have different numbers of micro-batches in a step, by rank: {found}"
        raise ValueError(f"engine.accumulate: {what}")
