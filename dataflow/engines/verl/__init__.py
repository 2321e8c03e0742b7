"""Training by verl's worker; ``cpu.py`` has all that it needs on a CPU."""
