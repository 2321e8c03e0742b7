"""One run from start to end: session, progress, tracking, summary."""
