"""What a plan starts from: a run's trace, a verl log, costs written by hand."""
