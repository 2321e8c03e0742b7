"""Reads pipeline files and saved configurations."""
