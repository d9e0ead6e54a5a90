"""The `offload` command, and the benchmarks behind it."""
