"""The configuration of a run: one module per section, overrides, and the equivalents of verl's keys."""
