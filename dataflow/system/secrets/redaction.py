"""Masks API keys and passwords in all texts that a run stores or shows.

Two kinds of text are masked. Known secrets are registered with :func:`keep_secret`, or are the value of an environment
variable whose name ends in KEY, TOKEN, SECRET or PASSWORD; they are also found in parts, spaced, and in the encodings
that servers echo them in. Likely secrets are authorization headers, keys with a common prefix, passwords in addresses,
and values whose name is that of a secret. Both are found below escapes, too (JSON in JSON, HTML).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from dataflow.system.secrets.escapes import layers
from dataflow.system.secrets.known import Secrets

MASK = "***"

_SEARCHED = 1 << 16  # characters searched for likely secrets; longer texts are not shown

_NAME = (
    r"api[_. +-]{0,2}key|(?:access|secret|private)[_. +-]{0,2}key"
    r"|(?:auth|access|api|refresh|session|bearer|hf)[_. +-]{0,2}token"
    r"|token|(?:client[_. +-]?)?secret|password|passwd|pwd|(?:proxy-)?authorization|credentials?"
)
_NAMES_A_SECRET = re.compile(rf"(?:.*[_. +-])?(?:{_NAME})", re.IGNORECASE)


def _has_digit(secret: str) -> bool:
    return any(c.isdigit() for c in secret)


def _of_scheme(secret: str) -> bool:
    return len(secret) >= 20 or _has_digit(secret)


def _any(secret: str) -> bool:
    return True


_PREFIXES = (
    *("sk-", "pk-", "rk-", "hf_", "gsk_", "xai-", "nvapi-", "pplx-", "r8_", "glpat-", "xox", "github_pat_"),
    *("ghp_", "gho_", "ghu_", "ghs_", "ghr_"),
)
_OF_ADDRESSES = ("key", "sig", "signature", "auth")

# Each with words, one of which the text in lower case must contain for the pattern to be tried, and a check of the
# secret, which is group 1.
_PATTERNS: tuple[tuple[tuple[str, ...], re.Pattern[str], Callable[[str], bool]], ...] = (
    (("://",), re.compile(r"(?<=://)([^\s/?#'\"<>]{1,512})@"), _any),
    (
        ("bearer", "basic"),
        re.compile(r"(?<![A-Za-z])[Bb](?:earer|asic|EARER|ASIC)(?:\s{1,4}|%20|\+|:\s{0,4})([A-Za-z0-9._~+/=%-]{6,})"),
        _of_scheme,
    ),
    (
        _PREFIXES,
        re.compile(
            r"(?<![A-Za-z0-9])((?:[spr]k-|hf_|gsk_|xai-|nvapi-|pplx-|r8_|glpat-|xox[abprs]-|github_pat_|gh[pousr]_)"
            r"[\w-]{10,}+)"
        ),
        _has_digit,
    ),
    (("aiza", "akia"), re.compile(r"(?<![A-Za-z0-9])(AIza[\w-]{20,}|AKIA[0-9A-Z]{12,})"), _any),
    (("eyj",), re.compile(r"(?<![A-Za-z0-9])(eyJ[\w-]{8,}\.[\w-]{4,}(?:\.[\w-]*)?)"), _any),  # a JSON web token
)


_NAMED_WORDS = ("key", "token", "secret", "passw", "pwd", "sig", "auth", "credential")
_ASSIGNMENT = re.compile(
    r"([?&]|(?<![\w-]))"
    r"((?:(?i:api|access|secret|private|auth|refresh|session|bearer|client)[. +]{1,2})?[A-Za-z][\w-]{2,60}+)"
    r"(?:\\?[\"']?[\s+]{0,8}(?:[=:]>?|:=)[\s+]{0,8}b?\\?[\"']?|(?<=[\w-])>)",  # or <name>
)
_VALUE = re.compile(r"((?:bearer|basic|token|digest)\s{1,4})?([^\s\"'&,;<>}\\]{3,})", re.IGNORECASE)


def _named(text: str) -> Iterator[tuple[int, int]]:
    """Yields the spans of values with the name of a secret: headers, keys of JSON, parameters of an address."""
    done = 0
    for found in _ASSIGNMENT.finditer(text):
        before, name = found[1], found[2]
        if found.end() < done or not (_NAMES_A_SECRET.fullmatch(name) or (before and name.lower() in _OF_ADDRESSES)):
            continue
        value = _VALUE.match(text, found.end())
        if value is None or value[2].startswith(MASK):
            continue
        # "token: x" also occurs where x is not a secret.
        random = len(value[2]) >= 12 and any(c.isdigit() for c in value[2]) and any(c.isalpha() for c in value[2])
        if before or value[1] or random or not name.lower().endswith("token"):
            yield value.span(2)
            done = value.end()


def _likely(text: str) -> Iterator[tuple[int, int]]:
    """Yields the spans of likely secrets."""
    lower = text.lower()
    for words, pattern, is_secret in _PATTERNS:
        if any(word in lower for word in words):
            for found in pattern.finditer(text):
                if is_secret(found[1]):
                    yield found.span(1)
    if any(word in lower for word in _NAMED_WORDS):
        yield from _named(text)


def _without(text: str, spans: Iterable[tuple[int, int]]) -> str:
    """Returns a text with spans masked; those that overlap or touch are masked together."""
    parts: list[str] = []
    done = -1
    for begin, end in sorted(spans):
        if begin > done:
            parts += [text[max(done, 0) : begin], MASK]
        done = max(done, end)
    return "".join([*parts, text[done:]]) if parts else text


SECRETS = Secrets()
"""The secrets of this process."""


def keep_secret(value: str | None) -> None:
    """Registers a secret, to be masked in all texts of this process."""
    SECRETS.add(value)


def keep_secrets(values: Any) -> None:
    """Registers the values in a configuration that have the name of a secret, such as ``api_key``."""
    if isinstance(values, Mapping):
        for name, value in values.items():
            if isinstance(value, str) and _NAMES_A_SECRET.fullmatch(str(name)):
                SECRETS.add(value)
            else:
                keep_secrets(value)
    elif isinstance(values, list | tuple):
        for value in values:
            keep_secrets(value)


def redact_known(value: Any) -> Any:
    """Returns a value with known secrets masked. For data, which masking likely secrets could damage."""
    if type(value) is str:
        return _without(value, SECRETS.spans(value))
    if isinstance(value, dict):
        return {name: redact_known(part) for name, part in value.items()}
    return [redact_known(part) for part in value] if type(value) is list else value


def redact(text: str) -> str:
    """Returns a text with known and likely secrets masked.

    >>> redact("https://me:pass@host/v1 refused 'Authorization: Bearer abc123'")
    "https://***@host/v1 refused 'Authorization: Bearer ***'"
    """
    SECRETS.look()
    return redact_reply(text)


def redact_reply(text: str) -> str:
    """As :func:`redact`, without checking the environment again: for texts of every request."""
    text = _without(text, SECRETS.spans(text))
    if len(text) > _SEARCHED:
        return redact_reply(text[:_SEARCHED]) + text[_SEARCHED:]
    return _without(text, ((at[begin], at[end]) for inner, at in layers(text) for begin, end in _likely(inner)))


def redact_values(values: Any) -> Any:
    """Returns a configuration with secrets masked, in texts and by the names of keys."""
    if isinstance(values, Mapping):
        return {redact_values(name): _value(name, value) for name, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact_values(value) for value in values]
    return redact(values) if isinstance(values, str) else values


def _value(name: Any, value: Any) -> Any:
    if value and isinstance(value, str) and _NAMES_A_SECRET.fullmatch(str(name)):
        return MASK
    return redact_values(value)


def redact_error(error: BaseException) -> None:
    """Masks secrets in an exception and those chained to it, in place."""
    SECRETS.look()
    ahead: list[BaseException | None] = [error]
    seen: set[int] = set()
    while ahead:
        one = ahead.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        ahead += [one.__cause__, one.__context__]
        # A user's class may raise here; texts made from the error are masked as well.
        with suppress(BaseException):
            ahead += getattr(one, "exceptions", ())
        with suppress(BaseException):
            if (args := _masked(one.args)) is not one.args:
                one.args = args
        for name, value in list(vars(one).items()):  # includes its notes
            with suppress(BaseException):
                if (masked := _masked(value)) is not value:
                    _set(one, name, masked)


def redact_logs() -> None:
    """Replaces loguru's default handler, if it is still installed, by one that masks secrets."""
    import sys

    from loguru import logger

    try:
        logger.remove(0)
    except ValueError:
        return

    def write(line: str) -> None:
        sys.stderr.write(redact(line))

    logger.add(write, diagnose=False)  # diagnose shows values of variables


def _masked(value: Any) -> Any:
    """Returns a value with secrets masked; the same object if there are none."""
    if isinstance(value, str):
        text = redact_reply(str(value))
        return value if text == value else text
    if isinstance(value, bytes):
        text = value.decode("latin-1")
        masked = redact_reply(text)
        return value if masked == text else masked.encode("latin-1")
    if type(value) in (list, tuple):
        parts = [_masked(part) for part in value]
        return value if all(a is b for a, b in zip(parts, value, strict=True)) else type(value)(parts)
    if type(value) is dict:
        items = {name: _masked(part) for name, part in value.items()}
        return value if all(items[name] is value[name] for name in value) else items
    return value


def _set(owner: Any, name: str, value: Any) -> None:
    try:
        setattr(owner, name, value)
    except (AttributeError, TypeError):  # a property of that name
        vars(owner)[name] = value
