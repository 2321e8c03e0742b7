"""How many requests may be in flight, and how fast they may start."""
