"""Graphs as mermaid and SVG, the style of all pictures, and durations in words."""
