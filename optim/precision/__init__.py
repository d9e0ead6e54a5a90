"""Which dtype for what, and the casts that follow."""
