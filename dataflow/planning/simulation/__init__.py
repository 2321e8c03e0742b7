"""Runs workloads under policies on the virtual clock: each simulation of a plan once, several in parallel."""
