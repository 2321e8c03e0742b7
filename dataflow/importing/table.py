"""The table of verl's keys as text, for the command and for docs/from_verl.md."""

from __future__ import annotations

from collections.abc import Iterator

from dataflow.config.keys import verl_keys
from dataflow.config.keys.verl_keys import Meaning

_GROUPS = {
    "Data": ("data.",),
    "The model": ("actor_rollout_ref.hybrid", "actor_rollout_ref.nccl", "actor_rollout_ref.model."),
    "Training and the loss": ("actor_rollout_ref.actor.", "actor_rollout_ref.ref."),
    "Rollout": ("actor_rollout_ref.rollout.",),
    "Algorithm": ("algorithm.",),
    "Rewards": ("reward.", "custom_reward_function.", "reward_model.", "sandbox_fusion."),
    "The critic": ("critic.",),
    "The run": ("",),
}


def table() -> str:
    """Returns the table in Markdown, a heading and a table for each part of verl's configuration."""
    rows = dict(verl_keys.keys())
    parts = []
    for title, prefixes in _GROUPS.items():
        own = [key for key in rows if key.startswith(prefixes)]
        lines = [_line(key, rows.pop(key)) for key in own]
        parts.append("\n".join([f"### {title}", "", "| verl | here | |", "|---|---|---|", *lines]))
    return "\n\n".join(parts)


def _line(key: str, meaning: Meaning) -> str:
    if meaning.moved is not None:
        return f"| `{key}` | | moved to `{meaning.moved}` |"
    ours = f"`{meaning.ours}`" if meaning.ours else ""
    return f"| `{key}` | {ours} | {'; '.join(_said(meaning)).replace('|', '/')} |"


def _said(meaning: Meaning) -> Iterator[str]:
    if meaning.note:
        yield meaning.note
    if meaning.ours is None and meaning.fine is None:
        yield "listed unless it is verl's default"
    elif isinstance(meaning.fine, list):
        yield "listed unless it is " + " or ".join(f"`{'null' if each is None else each}`" for each in meaning.fine)
