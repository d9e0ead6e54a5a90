"""Devices beside the host's processor: the one room that knows how they queue work and copy."""
