"""Sandboxes: run the programs that a model wrote, on test cases, here or at a service."""
