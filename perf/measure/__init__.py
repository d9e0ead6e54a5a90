"""The commands measure workloads on a machine, and both are here."""
