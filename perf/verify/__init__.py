"""`offload verify`: whether training here has the bits and the speed that it should."""
