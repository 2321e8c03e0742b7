"""Training by verl's worker; what it needs on a CPU stands alone in a file of its own."""
