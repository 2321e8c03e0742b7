"""Contents of chat messages as text, for judges and files of samples."""

from __future__ import annotations

from dataflow.models.chat import text_of
from dataflow.rewards.judge.rubric import question_of, transcript

PARTS = [{"type": "image", "image": object()}, {"type": "text", "text": "Is it red?"}]


def test_an_image_is_its_placeholder() -> None:
    assert text_of(PARTS) == "<image>Is it red?"
    assert question_of({"raw_prompt": [{"role": "user", "content": PARTS}]}) == "<image>Is it red?"
    assert transcript([{"role": "user", "content": PARTS}]) == "user: <image>Is it red?"


def test_other_contents_are_written_as_json() -> None:
    assert text_of("plain") == "plain"
    assert text_of({"a": 1}) == '{"a": 1}'
    assert text_of(None) == "null"
