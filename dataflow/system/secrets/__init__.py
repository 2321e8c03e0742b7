"""Keeps secrets out of the texts that a run stores or shows."""
