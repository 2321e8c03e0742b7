"""The trained model of a run, as a Hugging Face directory: of a checkpoint, or at the end of the run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dataflow.config.loading.saved import CONFIG, read_values
from dataflow.errors import ConfigError
from dataflow.running.directory import check_run
from dataflow.running.reporting.tracking import METRICS, read_metrics
from dataflow.running.saving.checkpoints import CheckpointStore

MODEL = "model"
"""Directory of a run that holds its final model."""
ADAPTER = "adapter"
"""Likewise its LoRA adapter, if it was exported alone."""


def export(run: Path, directory: Path | None, step: int | None, adapter: bool = False) -> Path:
    """Writes the model of a checkpoint, with a LoRA adapter merged into it; returns the directory.

    Args:
        run: directory of the run.
        directory: to make; by default the run's ``model``, or of an earlier step ``model-STEP``; of an adapter
            ``adapter`` or ``adapter-STEP``.
        step: of the checkpoint; the newest whole one by default.
        adapter: write the LoRA adapter alone, in peft's form.
    """
    check_run(run)
    store = CheckpointStore(run / "checkpoints")
    point = store.newest() if step is None else store.at(step)
    if point is None:
        what, steps = "no whole checkpoint" + (f" of step {step}" if step is not None else ""), store.whole()
        there = f"there are those of steps {', '.join(map(str, steps))}" if steps else "checkpoint.every saves some"
        raise ConfigError(f"run '{run}' has {what}; {there}.")
    name = ADAPTER if adapter else MODEL
    target = directory or run / (name if step is None else f"{name}-{step}")
    from dataflow.engines.verl.export import check_new, write_adapter, write_model
    from dataflow.engines.verl.state import read_weights

    if directory is None and target.is_dir():
        raise ConfigError(
            f"{target} is there already, from the end of the run or an earlier export; use it, give -o DIR for a copy, "
            "or remove it."
        )
    check_new(target)
    values = read_values(run / CONFIG)
    source = Path(str((values.get("model") or {}).get("path")))
    if not source.is_dir():
        raise ConfigError(f"the model {source} that run '{run}' started from is gone; put it back.")
    weights, config = read_weights(point.service("trainer"))
    if adapter and config is None:
        raise ConfigError(
            f"run '{run}' trained all weights (trainer.lora.rank), so it has no adapter; leave --adapter out."
        )
    text = card(run, values, point.step, adapter=adapter)
    if config is None:
        write_model(weights, source, target, text)
    else:
        write_adapter(weights, config, source, target, text, merge=not adapter)
    return target


def step_of(arguments: Sequence[str]) -> int | None:
    """Returns the step that ``step=N`` gives, the only argument that is allowed; None without one."""
    if not arguments:
        return None
    key, _, value = arguments[0].partition("=")
    if len(arguments) > 1 or key != "step" or not value.isdecimal():
        raise ConfigError(f"'{' '.join(arguments)}': export takes step=N alone, such as step=20.")
    return int(value)


def card(run: Path, values: Mapping[str, Any], step: int, *, adapter: bool = False) -> str:
    """Returns the model card of a run's weights of a step, or of its LoRA adapter alone, from its configuration."""
    origin, base = values.get("origin") or {}, (values.get("model") or {}).get("path")
    scores: dict[str, float] = {}
    for row in read_metrics(run / METRICS):
        if row["step"] in (0, step):
            scores |= {f"{name}, step {row['step']}": v for name, v in row.items() if name.startswith("val-core/")}
    options = (values.get("data") or {}).get("apply_chat_template_kwargs")
    rank = ((values.get("trainer") or {}).get("lora") or {}).get("rank")
    lora = f", as a LoRA adapter of rank {rank}{'' if adapter else ', which is merged here'}" if rank else ""
    lines = [
        "---",
        *(["library_name: peft", f"base_model: {base}"] if adapter else ["library_name: transformers"]),
        "pipeline_tag: text-generation",
        "tags: [reinforcement-learning, dataflow]",
        "---",
        "",
        f"# {run.resolve().name}, step {step}",
        "",
        f"Trained by dataflow from `{base}`{lora}, with the configuration below.",
        "",
        *([f"- Options of the chat template, to serve it with as well: `{json.dumps(options)}`."] if options else []),
        f"- Versions: {', '.join(f'{name} {of}' for name, of in (origin.get('versions') or {}).items())}.",
        *(f"- {name}: {score:.4f}" for name, score in scores.items()),
        "",
    ]
    return "\n".join([*lines, "```json", json.dumps(dict(values), indent=1, default=str), "```", ""])
