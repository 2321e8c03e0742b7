"""Several rollout engines behind one: requests are balanced over the replicas."""
