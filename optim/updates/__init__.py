"""Ways to update a subgroup: each is one class, and one function says which of them a subgroup gets."""
