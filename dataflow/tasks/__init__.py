"""The tasks of each step, and the events and instructions about them that runner and scheduler exchange."""
