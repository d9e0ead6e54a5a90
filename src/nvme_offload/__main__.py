"""``python -m nvme_offload``: the `offload` command."""

from nvme_offload.perf.cli import main

main()
