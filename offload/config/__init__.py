"""The configuration section."""

from nvme_offload.offload.config.section import OffloadConfig

__all__ = ["OffloadConfig"]
