"""Keys as users write them: overrides, the equivalents of verl's keys, and YAML values."""
