"""Optimizers with torch's names and arguments, one file each."""
