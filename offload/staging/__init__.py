"""Units on a tier that visit staging buffers: the machine, and policies over it."""
