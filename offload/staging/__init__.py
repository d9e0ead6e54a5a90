"""Units that visit a fixed set of staging buffers."""
