"""What the command line does, as calls: run, resume, simulate and plan; and a trace that can be saved."""

from dataflow.api.plan import plan
from dataflow.api.run import Run, resume, run
from dataflow.api.simulate import simulate
from dataflow.api.trace import Trace

__all__ = ["Run", "Trace", "plan", "resume", "run", "simulate"]
