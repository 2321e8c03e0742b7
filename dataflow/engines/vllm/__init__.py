"""Rollout by vLLM, in the process of the rollout service or in processes of its own."""
