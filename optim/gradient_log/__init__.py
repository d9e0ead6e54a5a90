"""What a step did to a subgroup, kept so that it can be done again."""
