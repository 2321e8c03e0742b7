"""The configuration of a run: one module per section, and the keys as users write them."""
