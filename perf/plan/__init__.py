"""`offload plan`: what a run will need and how long a step will take, before anything is bought or run."""
