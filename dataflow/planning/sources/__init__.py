"""The sources of a plan: a run's trace, a verl log, or costs written by hand."""
