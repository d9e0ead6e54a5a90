"""`offload doctor`: what works here and what does not."""
