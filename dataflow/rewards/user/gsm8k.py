"""GSM8K's reward: does the final number of a response equal the ground truth?"""

from __future__ import annotations

import re
from typing import Any

from dataflow.errors import ConfigError, DataError, nearest

# A minus directly after a digit, a letter or a closing bracket is an operator ("10-5"), not a sign.
_SIGN = r"(?:(?<![\w)\]])[-\u2212])?"
_WHOLE = r"(?:[0-9]{1,3}(?:,[0-9]{2,3})*,[0-9]{3}(?![0-9])|[0-9]+)"
_NUMBER = rf"{_SIGN}\$?{_SIGN}(?:{_WHOLE}(?:\.[0-9]+)?|\.[0-9]+)"
# The same pattern in parts, for a search in linear time: a number up to its first comma or point, the groups of digits
# that may follow, and the fraction.
_BEGIN = re.compile(rf"{_SIGN}\$?{_SIGN}(?:([0-9]+)|\.[0-9]+)")
_GROUPS = re.compile(r"(?:,[0-9]{2,3}(?![0-9]))+")
_FRACTION = re.compile(r"\.[0-9]+")
_DIGITS = "0123456789"
_CHARACTERS = f"{_DIGITS},.$-\u2212"
# "#### 12,34" is not a number: the match must not be followed by more digits.
_MARKED = re.compile(rf"####[ \t]*({_NUMBER})(?![0-9]|[,.][0-9])")
METHODS = ("strict", "flexible")
VERLS = "pkg://verl.utils.reward_score"
VERLS_STRICT = (
    "verl's default_compute_score gives 0 to a right answer to GSM8K behind which 300 characters follow, and to "
    "'#### 42.' and '#### $42' (verl#7274); custom_reward_function.path=pkg://dataflow.rewards.user.gsm8k "
    "custom_reward_function.name=compute_score counts them"
)
"""What verl's own function does with the data source openai/gsm8k; its verl is 0.9.1."""


def extract(text: str, method: str = "strict") -> str | None:
    """Returns the final answer in a text as a plain number, or None if there is none.

    Args:
        text: a response, or an answer of the data set.
        method: ``strict`` takes the last number that follows ``####``, ``flexible`` the last number anywhere.

    Returns:
        Digits, with ``-`` and ``.`` if needed: no thousands separators, dollar signs or redundant zeros.

    Raises:
        ConfigError: the method is unknown.

    >>> extract("It is $1,200.50.\\n#### $1,200.50."), extract("#### 5.0"), extract("so 5 apples")
    ('1200.5', '5', None)
    >>> extract("so -5 apples", "flexible")
    '-5'
    """
    if method not in METHODS:
        hint = nearest(str(method), METHODS) or "; use strict or flexible."
        raise ConfigError(f"gsm8k: unknown extraction method {method!r}{hint}")
    if method == "flexible":
        number = _last(text)
        return None if number is None else _plain(number)
    found = _MARKED.findall(text)
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


def _last(text: str) -> str | None:
    """Returns the last number that ``_NUMBER`` matches in a text.

    The pattern itself takes quadratic time for ``1,23,23,23...``: 23 s for 100,000 characters.
    """
    end = max(map(text.rfind, _DIGITS)) + 1
    if not end:
        return None
    # Only the last run of characters that occur in numbers needs to be searched.
    at = len(text[:end].rstrip(_CHARACTERS))
    barren = last = -1  # no number with groups ends before the first; the last number begins at the second
    while at < end and (found := _BEGIN.search(text, at, end)):
        last, at = found.start(), found.end()
        if found[1] and len(found[1]) <= 3 and at >= barren and (groups := _GROUPS.match(text, at, end)):
            whole = _whole_groups(groups[0])
            if not whole:
                barren = groups.end()
            at += whole
        if found[1] and (fraction := _FRACTION.match(text, at, end)):
            at = fraction.end()
    return text[last:at]


def _whole_groups(groups: str) -> int:
    """Returns how many characters of ``,23,456,78`` belong to a number: those up to the last group of three digits."""
    end = len(groups)
    while end and groups[end - 4] != ",":
        end -= 3
    return end


def _plain(number: str) -> str:
    sign = "-" if "-" in number or "\u2212" in number else ""
    whole, _, fraction = re.sub(r"[^0-9.]", "", number).partition(".")
    plain = whole.lstrip("0") or "0"
    if fraction.rstrip("0"):
        plain += "." + fraction.rstrip("0")
    return plain if plain == "0" else sign + plain
