"""Masks API keys and passwords in the texts that a run stores or shows.

Masked is each exact value that the process knows: keys that it has read for a setting, passwords of addresses, options
with the name of a secret, and environment variables whose names end in KEY, TOKEN, SECRET or PASSWORD. So are logins in
addresses and authorization headers, which errors of libraries quote. A value in another form, or a part of it, is not.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from typing import Any

from dataflow.errors import ConfigError

MASK = "***"
KNOWN: dict[str, None] = {}
"""The values that this process masks."""

_SHORTEST, _SHORTEST_VARIABLE = 6, 8  # a shorter value would mask ordinary text
_VARIABLES = ("KEY", "TOKEN", "SECRET", "PASSWORD")
_OPTION = re.compile(r"(.*_)?(api_?key|secret|password|(api|access|auth)_token)|token", re.IGNORECASE)
_LOGIN = re.compile(r"://([^\s/?#'\"<>]+)@")
_HEADER = re.compile(r"(authorization\W{1,4}(?:bearer|basic) +)[\w.~+/=-]+", re.IGNORECASE)


def keep_secret(value: str | None) -> None:
    """Registers a value, to be masked in all texts of this process; one of less than 6 characters is ignored."""
    if value and len(value) >= _SHORTEST:
        KNOWN[value] = None


def keep_secrets(values: Any, name: str = "") -> None:
    """Registers the secrets in the nested values of an option, such as ``api_key``, and passwords of addresses."""
    if isinstance(values, Mapping):
        for inner, value in values.items():
            keep_secrets(value, str(inner))
    elif isinstance(values, list | tuple):
        for value in values:
            keep_secrets(value, name)
    elif isinstance(values, str):
        logins = [login.partition(":")[2] for login in _LOGIN.findall(values)]
        for secret in [values] if _OPTION.fullmatch(name) else logins:
            keep_secret(secret)


def keep_variables() -> None:
    """Registers the secrets in the current environment."""
    for name in os.environ:
        if name.upper().endswith(_VARIABLES) and len(value := os.environ.get(name, "")) >= _SHORTEST_VARIABLE:
            keep_secret(value)


keep_variables()  # at the start of each process; redact() finds what user code has set since


def key_of(variable: str | None, setting: str) -> str | None:
    """Returns the API key in the environment variable that a setting names, and registers it; None without a name."""
    if not variable:
        return None
    if not variable.isidentifier():
        keep_secret(variable)  # it may be the key
        raise ConfigError(f"{setting} takes the name of an environment variable that holds the key; set one.")
    key = os.environ.get(variable, "").strip()  # a key read from a file ends with a line break
    keep_secret(key)
    if not key:
        raise ConfigError(f"{setting}: the environment variable {variable} is not set; export it where the run starts.")
    return key


def redact_known(value: Any) -> Any:
    """Returns a text, or nested dicts and lists of texts, with known secrets masked: for data, at each request."""
    if isinstance(value, str):
        for secret in sorted(KNOWN, key=len, reverse=True):  # one may contain another
            value = value.replace(secret, MASK)
        return value
    if isinstance(value, dict):
        return {name: redact_known(part) for name, part in value.items()}
    return [redact_known(part) for part in value] if type(value) is list else value


def redact(text: str) -> str:
    """Returns a text with known secrets, those of the current environment, logins and authorization headers masked.

    >>> redact("https://me:pass@host/v1 refused 'Authorization: Bearer abc123'")
    "https://***@host/v1 refused 'Authorization: Bearer ***'"
    """
    keep_variables()
    return _HEADER.sub(rf"\1{MASK}", _LOGIN.sub(f"://{MASK}@", redact_known(text)))


def redact_values(values: Any, name: str = "") -> Any:
    """Returns a configuration with secrets masked, in texts and by the names of options."""
    if isinstance(values, Mapping):
        return {redact_values(inner): redact_values(value, str(inner)) for inner, value in values.items()}
    if isinstance(values, list | tuple):
        return [redact_values(value, name) for value in values]
    if not isinstance(values, str):
        return values
    return MASK if values and _OPTION.fullmatch(name) else redact(values)


def redact_logs() -> None:
    """Replaces loguru's default handler, if it is still installed, by one that masks secrets."""
    from loguru import logger

    try:
        logger.remove(0)
    except ValueError:
        return

    def write(line: str) -> None:
        sys.stderr.write(redact(line))

    logger.add(write, diagnose=False)  # diagnose shows values of variables
