"""Ray for executors, engines and rewards: GPUs, answers of actors, their logs, and the cluster of a single run."""
