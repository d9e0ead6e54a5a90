"""Contenders of `compare`: who they are, how each trains, and what was found of them."""
