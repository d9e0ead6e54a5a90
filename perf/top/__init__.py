"""`offload top`: a run while it goes on, and what is left of it."""
