"""Model weights in safetensors files."""
