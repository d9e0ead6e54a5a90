"""One step: from gradients to updated subgroups, inside `step()` or behind it."""
