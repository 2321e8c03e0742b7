"""A process beside this one that ends it when user code freezes it."""
