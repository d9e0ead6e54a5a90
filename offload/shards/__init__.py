"""Shards of FSDP2 whose bytes are on tiers."""
