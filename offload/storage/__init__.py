"""Bytes are kept in tiers behind one interface."""
