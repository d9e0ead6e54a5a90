"""Experiments: cases and a sentence about each. They are in a checkout alone, and in no wheel."""
