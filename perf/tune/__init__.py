"""`offload tune`: the best `aio` section for a drive."""
