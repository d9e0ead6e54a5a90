"""Update rules: what an optimizer keeps for each element of a parameter, and what it does with a gradient."""
