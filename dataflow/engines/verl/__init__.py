"""Training by verl's worker; ``setup/cpu.py`` has all that it needs on a CPU."""
