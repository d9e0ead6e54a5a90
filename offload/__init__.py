"""Tensors on NVMe: configuration, tiers, staging buffers and the swapper over all of it."""
