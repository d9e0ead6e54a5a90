"""`offload bench`: this engine and fio in turn."""
