"""The ranks that train together, and how they agree."""
