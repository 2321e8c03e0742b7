"""Rollout on vLLM's OpenAI servers that run elsewhere."""
