"""`policy=auto`: a run that plans from its own trace and changes its policy."""
