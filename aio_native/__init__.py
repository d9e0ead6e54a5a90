"""Bytes between memory and files: engines, operations, completions. Knows no tensors; never imports torch."""
