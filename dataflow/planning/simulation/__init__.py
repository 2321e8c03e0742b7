"""Runs a workload under a policy on the virtual clock; those of a plan each once, and beside each other."""
