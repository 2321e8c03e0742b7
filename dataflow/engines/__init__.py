"""Engines for rollout (hf, vllm, replicas) and training (verl), behind the Protocols of ``base``."""
