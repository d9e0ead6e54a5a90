"""Tensors that a forward saves for backward, kept where there is room."""
