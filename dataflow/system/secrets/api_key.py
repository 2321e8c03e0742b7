"""API keys: read from environment variables, so that no setting, file or command line holds them."""

from __future__ import annotations

import os

from dataflow.errors import ConfigError
from dataflow.system.secrets.redaction import keep_secret


def key_of(variable: str | None, setting: str) -> str | None:
    """Returns the API key that an environment variable holds; None without a variable.

    Args:
        variable: its name.
        setting: the configuration key that gives the name, for messages.

    Raises:
        ConfigError: the variable is not set, or what it holds is no key.
    """
    if not variable:
        return None
    if not variable.isidentifier():
        keep_secret(variable)  # it may be the key
        raise ConfigError(f"{setting} takes the name of an environment variable that holds the key; set one.")
    # The messages have no "NAME: word" and no "NAME=word", whose word is masked as a likely secret.
    key = os.environ.get(variable, "").strip()  # a key read from a file ends with a line break
    keep_secret(key)
    if not key:
        raise ConfigError(f"{setting}: the environment variable {variable} is not set; export it where the run starts.")
    if not (key.isascii() and key.isprintable()) or " " in key:  # which no header may have
        what = "holds a space, a line break, or a character that is not ASCII"
        raise ConfigError(f"{setting}: the environment variable {variable} {what}; give the key alone.")
    return key
