"""Rollout on inference servers that run elsewhere: vLLM, SGLang."""
