"""The model of the default run, and the checks of a user's model."""
