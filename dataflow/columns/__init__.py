"""The columns of a batch as they travel between processes."""
