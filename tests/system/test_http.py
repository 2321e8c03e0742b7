"""HTTP: the text of an error, whatever its headers say."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from dataflow.system.http import beginning_of_error


async def _pieces() -> AsyncIterator[bytes]:
    yield "r\u00e9fused".encode()


@pytest.mark.parametrize("charset", ["undefined", "idna", "no-such", "punycode", "hex", "a\0b", ""])
def test_an_odd_character_set_does_not_hide_the_error(charset: str) -> None:
    text = asyncio.run(beginning_of_error(_pieces(), {"Content-Type": f"text/plain; charset={charset}"}))
    assert "fused" in text
