"""The configuration of a run: one module a section, overrides, and verl's names for ours."""
