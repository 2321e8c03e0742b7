"""Reward requests on the virtual clock: what they are, and when those of a batch are served."""
