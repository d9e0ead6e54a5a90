"""Tensors on NVMe: configuration, tiers, staging buffers and the swapper over all of it."""

from offload.config import OffloadConfig
from offload.tensor_swapper import TensorSwapper
from offload.transfer import Transfer

__all__ = ["OffloadConfig", "TensorSwapper", "Transfer"]
