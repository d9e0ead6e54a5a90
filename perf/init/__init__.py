"""`offload init`: a section for this machine and a model."""
