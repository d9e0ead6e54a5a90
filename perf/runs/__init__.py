"""`offload runs`: durable runs, listed and removed."""
