"""Ways to reach values of the state: one parameter, one entry, a range, as they are or as a commit has them."""
