"""Reports on a run: metrics, progress on the terminal, counts of rewards, pages at the end."""
