"""Loads and calls the code that users write, copies its arguments, and reports its failures."""
