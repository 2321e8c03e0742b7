"""Servers of reward models on other nodes of a Ray cluster, each behind an address of the command's machine."""
