"""How much of a step is hidden: iterations with each schedule, beside the ideal and the bound of `offload plan`."""
