"""LLM-as-a-judge: the client, and a server that stands in for a judge."""
