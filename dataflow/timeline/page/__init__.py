"""The interactive page of a timeline."""
