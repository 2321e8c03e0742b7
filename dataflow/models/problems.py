"""Generated word problems in GSM8K's format: a question, and an answer that ends in ``#### N``.

Half of them take one operation and half take two. A hash of its text decides whether a question is held out, so a train
question of one seed is never a held-out question of another. Both sets share stories and arithmetic facts: the held-out
problems are new instances of known stories.
"""

from __future__ import annotations

import random
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from dataflow.errors import DataError

NAMES = ("Ana", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gus", "Hana")
ITEMS = ("apples", "books", "cards", "coins", "pens", "shells", "stones", "toys")
LARGEST = 150
"""The largest number in a question or an answer."""

HELD_OUT = 8
"""One question in this many is held out."""


@dataclass(frozen=True)
class Story:
    """A template with its one or two operations, which apply from left to right to the operands a, b and c.

    The text has ``{name}``, ``{item}``, ``{a}``, ``{b}`` and, with two operations, ``{c}``.
    """

    text: str
    ops: str


STORIES = (
    Story("{name} has {a} {item} and finds {b} more. How many {item} does {name} have now?", "+"),
    Story("{name} picks {a} {item} on Monday and {b} on Tuesday. How many {item} in all?", "+"),
    Story("A box holds {a} {item} and {name} adds {b}. How many {item} are inside?", "+"),
    Story("{name} owns {a} {item}. A friend brings {b} more. How many {item} are there?", "+"),
    Story("{name} has {a} {item} and loses {b}. How many {item} are left?", "-"),
    Story("{name} buys {a} {item} and gives {b} away. How many {item} remain?", "-"),
    Story("There are {a} {item}. {name} takes {b}. How many {item} stay?", "-"),
    Story("{name} needs {a} {item} but has only {b}. How many {item} are missing?", "-"),
    Story("{name} fills {a} bags with {b} {item} each. How many {item} is that?", "*"),
    Story("{name} gets {a} {item} a day for {b} days. How many {item} altogether?", "*"),
    Story("Each of {a} friends sends {name} {b} {item}. How many {item} arrive?", "*"),
    Story("One pack holds {a} {item}. {name} opens {b} packs. How many {item} come out?", "*"),
    Story("{name} puts {a} old and {b} new {item} in each of {c} boxes. How many {item}?", "+*"),
    Story("Every day {name} gets {a} {item} and sells {b}. How many {item} after {c} days?", "-*"),
    Story("{name} opens {a} packs of {b} {item} and finds {c} more. How many {item} now?", "*+"),
    Story("{name} fills {a} jars with {b} {item}, then sells {c}. How many {item} are left?", "*-"),
    Story("{name} has {a} {item}, wins {b} and loses {c}. How many {item} remain?", "+-"),
    Story("{name} had {a} {item}, gave away {b}, then bought {c}. How many {item} now?", "-+"),
    Story("{name} sees {a} {item}, then {b}, then another {c}. How many {item} in all?", "++"),
    Story("{name} took {a} {item}, broke {b} and lost {c}. How many {item} are whole?", "--"),
)


def apply(left: int, op: str, right: int) -> int | None:
    """Returns ``left op right``, or None if the problems exclude it.

    Left operands are 1..20 (1..10 before ``*``); no result is below 0.

    >>> apply(3, "*", 4), apply(3, "-", 4), apply(11, "*", 4)
    (12, None, None)
    """
    if not 1 <= left <= (10 if op == "*" else 20):
        return None
    result = {"+": left + right, "-": left - right, "*": left * right}[op]
    return result if 0 <= result <= LARGEST else None


def solve(ops: str, operands: Sequence[int]) -> str | None:
    """Returns the written answer for these operations, or None if :func:`apply` excludes one.

    >>> solve("+*", (3, 4, 2))
    'It is 3 + 4 = 7.\\nThen 7 * 2 = 14.\\n#### 14'
    """
    value, lines = operands[0], []
    for word, op, right in zip(("It is", "Then"), ops, operands[1:], strict=False):
        result = apply(value, op, right)
        if result is None:
            return None
        lines.append(f"{word} {value} {op} {right} = {result}.")
        value = result
    return "\n".join([*lines, f"#### {value}"])


def held_out(question: str) -> bool:
    """Whether a question is held out; the same for every seed."""
    return zlib.crc32(question.encode()) % HELD_OUT == 0


def generate(train: int, val: int, seed: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Makes so many train and held-out problems, all different, half with one operation and half with two.

    No train question of any seed is a held-out question of any other.
    """
    return _draw(train, f"train-{seed}", held=False), _draw(val, f"val-{seed}", held=True)


def _draw(count: int, seed: str, *, held: bool) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    stories = {size: [i for i, story in enumerate(STORIES) if len(story.ops) == size] for size in (1, 2)}
    seen: set[str] = set()
    problems: list[dict[str, Any]] = []
    misses = 0
    while len(problems) < count:
        index = rng.choice(stories[1 + len(problems) % 2])
        story = STORIES[index]
        operands = [rng.randint(2, 12), *(rng.randint(2, 9) for _ in story.ops)]
        words = dict(zip("abc", operands, strict=False))
        question = story.text.format(name=rng.choice(NAMES), item=rng.choice(ITEMS), **words)
        answer = solve(story.ops, operands) if held_out(question) is held and question not in seen else None
        if answer is None:
            misses += 1
            # About one draw in two (train) or sixteen (held out) is accepted, until nearly all are used up.
            if misses > 2_000:
                raise DataError(
                    f"{count} {'held-out' if held else 'train'} problems are more than the stories make "
                    f"(about {len(problems)}); ask for fewer (data.train_size, data.val_size)."
                )
            continue
        misses = 0
        seen.add(question)
        problem = {
            "question": question,
            "answer": answer,
            "story": index,
            "ops": story.ops,
            "operands": operands,
        }
        problems.append(problem)
    # Numbers of operations alternate above; shuffle, so that any range of rows is a fair sample of the stories.
    rng.shuffle(problems)
    return problems
