"""Plain module in, sharded engine out."""
