"""Which checkpoints are kept: by rules read from the disk alone, and never none."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from dataflow.running.saving import checkpoints
from dataflow.running.saving.checkpoints import CheckpointStore
from tests.rigs.checkpoints import names, save
from tests.rigs.logs import logged


def test_samples_go_with_the_checkpoint_of_their_step(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for step in (2, 3, 4):
        store.keep(step, step)
    (tmp_path / "drawn" / ".step_000002.pkl.77").touch()
    (tmp_path / "drawn" / "notes.txt").touch()
    save(store, 3)
    assert names(tmp_path / "drawn") == ["notes.txt", "step_000004.pkl"]
    found = store.newest()
    assert found is not None
    assert found.samples() == {4: 4}


def rate(directory: Path, step: int, **scores: float | None) -> None:
    """Appends a row of metrics, as a run does."""
    row = {"step": step, "actor/loss": 9.0, **{f"val-core/{name}/reward/mean@1": s for name, s in scores.items()}}
    with (directory / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")


def test_the_best_are_those_of_the_highest_mean_score(tmp_path: Path) -> None:
    rate(tmp_path, 1, a=0.9, b=0.1)
    rate(tmp_path, 2, a=0.5)
    rate(tmp_path, 2, b=0.7)  # the mean of both rows' scores is 0.6
    rate(tmp_path, 3, a=0.6, b=None)
    rate(tmp_path, 4, a=None)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "val-core/a/rew')
    for best, kept in ((1, [3, 6]), (2, [2, 3, 6]), (9, [1, 2, 3, 6])):
        directory = tmp_path / "checkpoints"
        for step in range(1, 6):
            save(CheckpointStore(directory, keep_last=9), step)
        save(CheckpointStore(directory, keep_last=1, keep_best=best), 6)
        assert CheckpointStore(directory).whole() == kept
        shutil.rmtree(directory)


def test_nothing_is_removed_for_a_checkpoint_that_is_found_torn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)

    def tear(directory: Path) -> None:
        path = tmp_path / "step_000002" / "states.pkl"
        path.write_bytes(bytes(path.stat().st_size))
        monkeypatch.undo()

    monkeypatch.setattr(checkpoints, "sync", tear)
    save(store, 2)
    assert store.whole() == [1]
    found = store.newest()
    assert found is not None
    assert found.step == 1


def test_a_run_that_resumes_from_an_earlier_checkpoint_drops_the_later_ones(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2)
    save(store, 2)
    save(store, 5)
    save(store, 3)
    assert store.whole() == [2, 3]


def test_a_step_that_is_saved_again_is_replaced_unless_it_is_all_there_is(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)

    def text() -> str:
        found = store.newest()
        assert found is not None
        return str(found.states()["pair"][1])

    save(store, 2, "first")
    save(store, 2, "second")
    assert (text(), names(tmp_path)) == ("first", ["step_000002"])
    save(store, 3, "third")
    save(store, 3, "fourth")
    assert (text(), store.whole()) == ("fourth", [2, 3])
    (tmp_path / "step_000003" / "states.pkl").unlink()
    shutil.rmtree(tmp_path / "step_000002")
    save(store, 3, "fifth")
    assert (text(), names(tmp_path)) == ("fifth", ["step_000003"])


def test_what_cannot_be_removed_is_removed_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = CheckpointStore(tmp_path, keep_last=1)
    save(store, 1)

    def refuse(path: Path) -> None:
        raise OSError(5, "Input/output error", str(path))

    with monkeypatch.context() as patch, logged() as warnings:
        patch.setattr(shutil, "rmtree", refuse)
        save(store, 2)
    assert warnings == [
        f"{tmp_path / '.step_000001.old'} cannot be removed (Input/output error); remove it to make room."
    ]
    assert store.whole() == [2]
    store.begin(3)
    store.discard(3)
    assert names(tmp_path) == ["step_000002"]
    with monkeypatch.context() as patch, logged() as warnings:
        patch.setattr(
            Path, "rename", lambda path, target: refuse(path) if "000002" in path.name else os.rename(path, target)
        )
        save(store, 3)
    assert "older checkpoints" in warnings[0]
    assert store.whole() == [2, 3]


class Retention(RuleBasedStateMachine):
    """A run that saves, is scored, is damaged, and continues with other rules, against a list of expected files."""

    def __init__(self) -> None:
        super().__init__()
        self.temporary = tempfile.TemporaryDirectory()
        self.run = Path(self.temporary.name)
        self.store = CheckpointStore(self.run / "checkpoints")
        self.there: dict[int, str] = {}
        """State of each checkpoint on disk: whole, flipped (its size is right), or cut."""
        self.scores: dict[int, float] = {}
        self.step = 0

    def teardown(self) -> None:
        self.temporary.cleanup()

    @rule(ahead=st.integers(1, 4), score=st.none() | st.sampled_from([0.1, 0.2, 0.3]))
    def save(self, ahead: int, score: float | None) -> None:
        self.step += ahead
        if score is not None:
            rate(self.run, self.step, a=score)
            self.scores[self.step] = score
        save(self.store, self.step)
        self.there[self.step] = "whole"
        sound = sorted(step for step, state in self.there.items() if state != "cut" and step <= self.step)
        kept = set(sound[-self.store.keep_last :])
        rated = sorted((step for step in sound if step in self.scores), key=lambda step: (-self.scores[step], -step))
        kept |= set(rated[: self.store.keep_best])
        if self.store.keep_every:
            kept |= {step for step in sound if step % self.store.keep_every == 0}
        self.there = {step: self.there[step] for step in sorted(kept)}

    @precondition(lambda self: self.there)
    @rule(which=st.integers(0, 9), state=st.sampled_from(["flipped", "cut"]))
    def damage(self, which: int, state: str) -> None:
        step = sorted(self.there)[which % len(self.there)]
        path = self.run / "checkpoints" / f"step_{step:06}" / "trainer" / ".metadata"
        path.write_bytes(b"shapeS" if state == "flipped" else b"sha")
        self.there[step] = state

    @rule(last=st.integers(1, 3), best=st.integers(0, 2), every=st.sampled_from([0, 2, 5]))
    def resume(self, last: int, best: int, every: int) -> None:
        self.store = CheckpointStore(self.run / "checkpoints", last, best, every)
        with logged():
            found = self.store.newest()
        self.step = found.step if found else 0

    @invariant()
    def the_newest_whole_one_is_found(self) -> None:
        with logged() as warnings:
            found = self.store.newest()
        whole = [step for step, state in self.there.items() if state == "whole"]
        assert (found.step if found else None) == max(whole, default=None)
        assert len(warnings) == sum(step > max(whole, default=0) for step in self.there)

    @invariant()
    def nothing_else_is_there(self) -> None:
        assert self.store.whole() == sorted(step for step, state in self.there.items() if state != "cut")
        if self.there:
            assert names(self.run / "checkpoints") == [f"step_{step:06}" for step in sorted(self.there)]


TestRetention = pytest.mark.slow(pytest.mark.usefixtures("quick_disk")(Retention.TestCase))
TestRetention.settings = settings(deadline=None, max_examples=12, stateful_step_count=15)
