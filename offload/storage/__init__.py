"""Extents on tiers: swap files and how bytes get there."""
