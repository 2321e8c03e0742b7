"""Reward functions and managers that users write."""
