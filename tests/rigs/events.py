"""Event files of TensorBoard, as verl writes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path


def write_events(directory: Path, row: Mapping[str, float], steps: int) -> None:
    """Writes a file with the same scalars at each step."""
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(directory)) as writer:
        for step in range(1, steps + 1):
            for name, value in row.items():
                writer.add_scalar(name, value, step)
