"""Stages around a rollout: conversations with tools, greedy baselines, sleep and wake of an engine."""
