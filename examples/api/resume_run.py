"""Trains a pipeline file for two steps, and resumes it for a third (the default model takes a minute to make)."""

from pathlib import Path

from dataflow import resume, run

pipeline = Path(__file__).resolve().parents[2] / "pipelines" / "gsm8k_grpo.py"
keys = {"executor": "inline", "engine": {"rollout": "hf"}, "val": {"every": 0}, "checkpoint": {"every": 1}}
first = run(pipeline, "judge.time_scale=0.01", steps=2, **keys)
longer = resume(first.directory, steps=3)
print(longer.summary["steps"], "steps,", longer.trace.save("resumed.html"))
