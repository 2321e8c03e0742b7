"""Why a test that needs a GPU cannot run here."""

from __future__ import annotations

import shutil


def why_not() -> str:
    """Returns the reason, or nothing where it can run."""
    import torch

    if torch.cuda.is_available():
        return ""
    if torch.version.cuda is None and shutil.which("nvidia-smi"):
        return "torch is its build for the CPU: run 'make gpu-check EXTRA=gpu'"
    return "this machine has no GPU"
