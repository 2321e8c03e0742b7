"""Runs tasks on Ray: a group of worker processes for each service, values between stages as object refs."""

from dataflow.executors.ray.executor import RayExecutor

__all__ = ["RayExecutor"]
