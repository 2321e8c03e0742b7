"""Stores the answers to reward requests on disk, so that none is paid for twice."""
