"""Simulates GRPO with rewards of 20 s under each policy, on the virtual clock."""

from dataflow import expand, preset, simulate
from dataflow.testing import grpo_pipeline

seconds = {"rollout": 10, "old_log_prob": 4, "actor_update": 8, "reward_collect": 20}
for policy in ("baseline", "mini-batch", "off-policy", "both"):
    graph = expand(grpo_pipeline(), preset(policy, 4), steps=10, mini_batches=4, groups=16)
    trace = simulate(graph, dict.fromkeys((s.name for s in graph.pipeline.stages), 0.1) | seconds)
    print(f"{policy:<10} {trace.wall / 10:.1f} s a step")
