"""Runs whose state outlives them: extents that are never overwritten while a manifest needs them, and the manifests."""
