"""The servers of reward models: how their latency depends on their load, and what a run's trace tells about it."""
