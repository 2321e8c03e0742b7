"""Predicts every policy from costs written by hand, and with twice as many reward requests in flight."""

from pathlib import Path

from dataflow import plan

costs = Path(__file__).resolve().parents[1] / "costs.yaml"
for in_flight in (128, 256):
    best = min(plan(costs, steps=3, reward={"concurrency": in_flight}).rows, key=lambda row: row.step_s)
    print(f"{in_flight} in flight: {best.policy}, {best.step_s:.0f} s a step")
