"""Graphs as mermaid and SVG."""
