"""The model of the default run, and the check of a user's own."""
