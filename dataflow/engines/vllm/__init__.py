"""Rollout by vLLM: its ``AsyncLLM`` in the process of the service, which starts those that compute."""
