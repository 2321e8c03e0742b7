"""Several rollout engines as one: requests are balanced over the replicas."""
