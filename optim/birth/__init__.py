"""First values of a model on meta."""
