"""What the command line does, as calls: run, check, resume, simulate and plan; and a trace that can be saved."""

from dataflow.api.run import Run, check, plan, resume, run
from dataflow.api.simulate import simulate
from dataflow.api.trace import Trace
from dataflow.running.preparing.check import Finding

__all__ = ["Finding", "Run", "Trace", "check", "plan", "resume", "run", "simulate"]
