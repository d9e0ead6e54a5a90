"""Kernels for state and gradients on a device, written in Triton: an extra of the package."""
