"""What of a training job is in memory, beside the optimizer's state: at its peak, in bytes of one rank."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from nvme_offload.offload.config.section import OffloadConfig
from nvme_offload.offload.storage.tier_plan import Tier, Unit
from nvme_offload.optim.precision.plan import precision_of
from nvme_offload.perf.plan.shape import ModelShape

LOGITS_BYTES = 16
"""Bytes of a logit when forward ends: itself in 16 bits and fp32, its log-softmax, the gradients of two of these."""
LAYER_BYTES = 34
"""Bytes that a layer without recomputation keeps for backward per element of its hidden state, in 16 bits, with an
attention that does not keep its scores: Korthikanti et al., arXiv:2205.05198, section 4.1."""


@dataclass(frozen=True)
class Residents:
    """Parameters, gradients, what is gathered of them, and activations.

    Args:
        shape: of the model.
        config: the section; it says on which tier parameters and gradients are.
        ranks: that share the model.
        tokens: of one micro-batch on one rank.
        checkpointing: whether a layer's activations are computed again in backward.
        on_device: forward and backward compute on an accelerator with memory of its own.
    """

    shape: ModelShape
    config: OffloadConfig
    ranks: int
    tokens: int
    checkpointing: bool
    on_device: bool

    def units(self) -> Iterator[Unit]:
        """The units of memory of one rank; what comes and goes is at its peak."""
        precision = precision_of(self.config)
        params, grads = self.config.zero_optimization.offload_param, self.config.offload_gradients
        device: Tier = "device" if self.on_device else "host"
        stored, accumulated = precision.storage.itemsize, precision.accumulate.itemsize
        # What may be on NVMe is placed with the state: see `prediction`.
        numel = sum(-(-sum(group) // self.ranks) for group in self.shape.groups)
        if params.device != "nvme":
            stays: Tier = "host" if params.device == "cpu" else device
            yield Unit("parameters", "parameters", numel * stored, tiers=(stays,))
        if grads.device != "nvme":
            kept: Tier = "host" if grads.device == "cpu" else device
            yield Unit("gradients", "gradients", numel * accumulated, tiers=(kept,))
        yield Unit("gathered groups", "gathered groups", self._gathered_bytes(), tiers=(device,))
        yield Unit("activations", "activations", self._activation_bytes(), tiers=(device,))

    def _gathered_bytes(self) -> int:
        """At the worst moment of backward: two layers gathered, one with its gradients before and after the reduction.

        The root's gradients wait unreduced until the end of backward. Below stage 3 all layers stay gathered.
        """
        precision = precision_of(self.config, safe=True)  # most are of classes that autocast gathers in 16 bits
        computed, reduced = precision.gather.itemsize, precision.reduce.itemsize
        layer, root = max(self.shape.unit_numels), self.shape.rest_numel
        is_freed = self.config.zero_optimization.stage == 3
        if self.ranks == 1:  # computes on its shards; where they are cast or lent, on one layer's copies at a time
            layers = layer if is_freed else sum(self.shape.unit_numels)
            leave = ("nvme", "cpu") if self.on_device else ("nvme",)
            is_lent = self.config.zero_optimization.offload_param.device in leave
            copied = (root + layers) * computed if is_lent or precision.gather != precision.storage else 0
            moves = self.config.offload_gradients.device in leave or precision.accumulate != precision.gather
            return copied + ((root + layer) * computed if moves else 0)
        layers = 2 * layer if is_freed else sum(self.shape.unit_numels)
        reducing = max(layer, root) * reduced * (1 + 1 / self.ranks)
        return round((root + layers) * computed + (root + layer) * computed + reducing)

    def _activation_bytes(self) -> int:
        hidden = self.tokens * self.shape.hidden_size
        inside = hidden * LAYER_BYTES * max(1.0, self.shape.intermediate_size / (4 * self.shape.hidden_size))
        num_layers = self.shape.num_layers
        layers = num_layers * hidden * 2 + inside if self.checkpointing else num_layers * inside
        return round(layers + self.tokens * self.shape.vocab_size * LOGITS_BYTES)
