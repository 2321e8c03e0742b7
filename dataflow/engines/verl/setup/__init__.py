"""Sets verl up in a process: its platform, its process group, its configurations, and what it lacks."""
