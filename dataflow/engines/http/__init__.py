"""Rollout on inference servers that run elsewhere: vLLM's OpenAI server, or SGLang's."""
