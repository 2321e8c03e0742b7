"""A run from its first moment to its last: session, progress, tracking, summary."""
