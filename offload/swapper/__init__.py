"""Any tensors, by name, on NVMe."""
