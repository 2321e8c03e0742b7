"""Draws that simulations have in common are drawn once, and the first ones are kept."""

from __future__ import annotations

from dataflow.planning.requests.draws import Draws


def test_a_key_is_drawn_once_and_the_first_ones_are_kept() -> None:
    drawn: list[int] = []

    def numbers(of: int) -> list[float]:
        drawn.append(of)
        return [of + 0.5] * 4

    draws = Draws(most=10)
    for _ in range(2):
        for step in range(4):
            assert list(draws.get(step, "d", lambda: numbers(step))) == [step + 0.5] * 4  # noqa: B023
    assert drawn == [0, 1, 2, 3, 2, 3], "two steps of four numbers are kept, the others drawn again"
