"""Keys and an answer for the tests of the ledger."""

from __future__ import annotations

from dataflow.rewards.ledger.ledger import Answer, key_of

ANSWER = Answer(0.1 + 0.2, {"explanation": "it is right", "tokens": 312}, 0.25, 2)


def key(text: str) -> bytes:
    return key_of({"solution_str": text})


A, B = key("a"), key("b")
