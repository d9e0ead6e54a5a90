"""Updates that run behind `step()`: who does them, in which order, and how others wait."""
