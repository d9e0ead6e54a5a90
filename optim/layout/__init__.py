"""Elements lie in masters, runs and subgroups."""
