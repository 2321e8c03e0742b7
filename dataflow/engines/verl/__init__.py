"""Training by verl: what it lacks, and no more."""
