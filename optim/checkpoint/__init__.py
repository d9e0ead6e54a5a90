"""Checkpoints: streamed, verified, replaced only by a whole one."""
