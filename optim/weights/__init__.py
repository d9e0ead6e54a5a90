"""Weights that leave: whole ones, and patches of what has changed since a version."""
