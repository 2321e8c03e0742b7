"""Ray: actors, worker groups, hosts of services, GPUs, and the cluster that a run starts for itself."""
