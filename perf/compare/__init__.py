"""Iterations of this project beside those of others, with the same model and the same data, by turns."""
