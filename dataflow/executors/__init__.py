"""Executors: where tasks run. The runner and the scheduler are the same over all of them."""
