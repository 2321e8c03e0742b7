"""What the GPUs waited for. Pure."""
