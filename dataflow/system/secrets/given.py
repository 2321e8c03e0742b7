"""Secrets in the values that a user gives: logins in addresses, and a key in place of its variable's name."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from dataflow.system.secrets.redaction import keep_secret

_OF_ADDRESSES = ("url", "urls")
_SCHEME = re.compile(r"https?:/*", re.IGNORECASE)


def keep_given(values: Any, name: str = "") -> None:
    """Registers the secrets in settings, also in those that no check has accepted yet.

    Args:
        values: nested values, or the text of one.
        name: the setting's, without those of its sections.
    """
    if isinstance(values, Mapping):
        for inner, value in values.items():
            keep_given(value, name if name in _OF_ADDRESSES else str(inner))
    elif isinstance(values, list | tuple):
        for value in values:
            keep_given(value, name)
    elif isinstance(values, str) and name in _OF_ADDRESSES:
        keep_logins(values)
    elif isinstance(values, str) and name == "api_key_env" and not values.isidentifier():
        keep_secret(values)


def keep_logins(text: str) -> None:
    """Registers what stands before the last ``@`` of an address, or of each in a list, whether it is valid or not."""
    text = text.strip()
    for entry in re.split(r"[\[\]{},\s\"']+", text) if text[:1] in ("[", "{") else [text]:
        login = _SCHEME.sub("", entry.rpartition("@")[0], count=1)
        for secret in (login, login.partition(":")[2]):
            keep_secret(secret)
