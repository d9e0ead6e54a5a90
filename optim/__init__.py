"""Optimizers whose state lives on tiers, and the engine around them."""
