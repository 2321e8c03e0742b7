"""Runs a pipeline made in Python, in this process, and saves its timeline."""

from dataflow import Latest, Pipeline, run, stage


@stage(writes="mean", on="gpu", role="trains")
def train(numbers, mean: Latest, *, rate=0.5):
    return (mean or 0.0) + rate * (sum(numbers) / len(numbers) - (mean or 0.0))


pipeline = Pipeline([train], inputs=["numbers"])
done = run(pipeline, inputs={"numbers": lambda step: [step, step + 2]}, steps=5, policy="baseline")
print(done.summary["steps"], "steps,", done.trace.save("toy.txt"))
