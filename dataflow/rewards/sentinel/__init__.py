"""A process beside the agent's that ends it when user code freezes it."""
