"""Paid answers on disk, so that none is paid for twice."""
