"""GSM8K's reward: does the final number of a response equal the ground truth?"""

from __future__ import annotations

import re
from typing import Any

from dataflow.errors import ConfigError, DataError, nearest

# A minus directly after a digit, a letter or a closing bracket is an operator ("10-5"), not a sign.
_SIGN = r"(?:(?<![\w)\]])[-\u2212])?"
# Few groups, so that a search takes linear time also in "1,23,23,23...".
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{2,3}){0,9},[0-9]{3}(?![0-9])|[0-9]+)"
_NUMBER = rf"{_SIGN}\$?{_SIGN}(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)"
_ANYWHERE = re.compile(_NUMBER)
# "#### 12,34" is not a number: the match must not be followed by more digits.
_MARKED = re.compile(rf"####[ \t]*({_NUMBER})(?![0-9]|[,.][0-9])")
METHODS = ("strict", "flexible")
VERLS = "pkg://verl.utils.reward_score"
VERLS_STRICT = (
    "verl's default_compute_score gives 0 to a right answer to GSM8K behind which 300 characters follow, and to "
    "'#### 42.' and '#### $42' (verl#7274); custom_reward_function.path=pkg://dataflow.rewards.gsm8k "
    "custom_reward_function.name=compute_score counts them"
)
"""What verl's own function does with the data source openai/gsm8k; its verl is 0.9.1."""


def extract(text: str, method: str = "strict") -> str | None:
    """Returns the final answer in a text as a plain number, or None if there is none.

    Method ``strict`` takes the last number that follows ``####``, ``flexible`` the last number anywhere. The answer has
    no thousands separators, dollar signs or redundant zeros.

    >>> extract("It is $1,200.50.\\n#### $1,200.50."), extract("#### 5.0"), extract("so 5 apples")
    ('1200.5', '5', None)
    >>> extract("so -5 apples", "flexible")
    '-5'
    """
    if method not in METHODS:
        hint = nearest(str(method), METHODS) or "; use strict or flexible."
        raise ConfigError(f"gsm8k: unknown extraction method {method!r}{hint}")
    found = (_MARKED if method == "strict" else _ANYWHERE).findall(text)
    return _plain(found[-1]) if found else None


def compute_score(
    data_source: str,
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    method: str = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
    **kwargs: Any,
) -> float:
    """Scores one response, with the signature of verl's reward functions.

    Args:
        data_source: unused.
        solution_str: the response.
        ground_truth: the correct number, or a text that ends with it.
        extra_info: unused.
        method: see :func:`extract`.
        format_score: for a wrong number in the right format.
        score: for the correct number.
        kwargs: ignored; reward managers may pass further keywords.

    Returns:
        ``score``, ``format_score``, or 0.0 if the response contains no answer.

    Raises:
        DataError: the ground truth contains no number.
        ConfigError: the method is unknown.
    """
    truth = extract(str(ground_truth), "flexible")
    if truth is None:
        raise DataError(f"gsm8k: the ground truth {str(ground_truth)[:80]!r} holds no number.")
    answer = extract(solution_str, method)
    if answer is None:
        return 0.0
    return float(score if answer == truth else format_score)


def _plain(number: str) -> str:
    sign = "-" if "-" in number or "\u2212" in number else ""
    whole, _, fraction = re.sub(r"[^0-9.]", "", number).partition(".")
    plain = whole.lstrip("0") or "0"
    if fraction.rstrip("0"):
        plain += "." + fraction.rstrip("0")
    return plain if plain == "0" else sign + plain
