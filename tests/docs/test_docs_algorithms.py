"""docs/algorithms.md is correct. ``python tests/docs/test_docs_algorithms.py`` updates its tables."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from dataflow.algorithms import BYPASS, ESTIMATORS, LOSSES, PRESETS

ROOT = Path(__file__).parents[2]
DOC = ROOT / "docs" / "algorithms.md"
TEXT = DOC.read_text(encoding="utf-8")
TABLE = re.compile(r"(<!-- (\w+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(name: str) -> str:
    """Returns a table of the page, from the tables in ``dataflow.algorithms``."""
    if name == "estimators":
        rows = [["name", "source (arXiv)", "compares with", "also reads", "split into parts"]]
        for key, found in ESTIMATORS.items():
            other = {"group": "its group", "batch": "the batch", "nothing": "no other sample"}[found.against]
            reads = ", ".join(f"`{field}`" for field in found.needs)
            rows.append(
                [f"`{key}`", found.source, other, reads, f"no: {found.whole_batch}" if found.whole_batch else "yes"]
            )
    elif name == "losses":
        rows = [["name", "source (arXiv)", "keys", "per micro-batch"]]
        for key, loss in LOSSES.items():
            keys = ", ".join(f"`{one}`" for one in loss.keys if not one.startswith("clip_ratio_") or one[-1] == "c")
            rows.append([f"`{key}`", loss.source, keys, loss.per_micro_batch or ""])
    else:
        rows = [["name", "sets"], *([f"`{key}`", _keys(sets)] for key, sets in PRESETS.items())]
    lines = [f"| {' | '.join(row)} |".replace("|  |", "| |") for row in rows]
    return "\n".join([lines[0], "|---" * len(rows[0]) + "|", *lines[1:], ""])


def _keys(keys: Mapping[str, Any]) -> str:
    return ", ".join(f"`{key}={str(value).lower()}`" for key, value in keys.items())


def test_the_tables_are_those_of_the_code() -> None:
    found = {name: shown for _, name, shown, _ in TABLE.findall(TEXT)}
    assert found == {name: table(name) for name in ("presets", "estimators", "losses")}


@pytest.mark.heavy
def test_verl_has_nothing_that_the_tables_do_not_know() -> None:
    from verl.trainer.ppo.core_algos import ADV_ESTIMATOR_REGISTRY, POLICY_LOSS_REGISTRY

    from dataflow.engines.verl.loss import PREFIX

    assert set(ADV_ESTIMATOR_REGISTRY) == set(ESTIMATORS)
    assert {name for name in POLICY_LOSS_REGISTRY if not name.startswith(PREFIX)} == {*LOSSES, BYPASS}


if __name__ == "__main__":
    DOC.write_text(TABLE.sub(lambda m: m[1] + table(m[2]) + m[4], TEXT), encoding="utf-8")
