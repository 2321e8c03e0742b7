"""Predicting a run: workload, costs, reward service, planner, advice, and how well past runs were predicted."""
