"""A server of reward models on transformers, for classifiers and tests."""
