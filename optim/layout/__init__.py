"""Where elements lie: masters, runs, subgroups."""
