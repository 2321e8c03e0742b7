"""Reports how a run goes: metrics, progress on the terminal, counts of rewards, pages at the end."""
