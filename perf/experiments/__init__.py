"""Experiments: cases and a sentence about each. What measures them is in `nvme_offload.perf.measure`."""
