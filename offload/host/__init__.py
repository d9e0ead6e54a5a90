"""Host memory: regions, buffer pools, how much there is."""
