"""Programs that Ray runs in place of its own; each file is run by itself and imports nothing of this package."""
