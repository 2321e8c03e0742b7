"""Reward models: their servers, the choice of a server for a request, and the reward object that asks them."""
