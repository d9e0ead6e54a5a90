"""`offload verify`: whether training here has the bits that it should."""
