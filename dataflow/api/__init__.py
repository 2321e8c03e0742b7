"""What the command line does, as calls: run, check, resume, simulate and plan; and a trace that can be saved."""

from dataflow.api.check import Finding, check
from dataflow.api.plan import plan
from dataflow.api.run import Run, resume, run
from dataflow.api.simulate import simulate
from dataflow.api.trace import Trace

__all__ = ["Finding", "Run", "Trace", "check", "plan", "resume", "run", "simulate"]
