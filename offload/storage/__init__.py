"""Where bytes are kept: tiers behind one interface."""
