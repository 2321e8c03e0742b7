"""Secrets are masked in every encoding and part in which a server may send them back; other text stays as it is."""

from __future__ import annotations

import base64
import html
import json
import pickle
import re
from typing import Any
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dataflow.system.secrets import redaction
from dataflow.system.secrets.redaction import (
    MASK,
    Secrets,
    keep_secret,
    keep_secrets,
    redact,
    redact_error,
    redact_known,
    redact_values,
)

KEY = 'sk-T3st/K3y+of/a~judge="9f8e7d6c5b4a"é'


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "SECRETS", Secrets())


def encoded(text: str) -> list[str]:
    raw = text.encode()
    return [
        text,
        quote(text),
        quote(text, safe=""),
        re.sub("%..", lambda found: found[0].lower(), quote(text, safe="")),
        quote_plus(text),
        json.dumps(text),
        json.dumps(text, ensure_ascii=False),
        json.dumps(text).replace("/", "\\/"),
        repr(text),
        html.escape(text),
        base64.b64encode(raw).decode(),
        base64.urlsafe_b64encode(raw).decode(),
        base64.b64encode(b"Bearer " + raw).decode(),
        base64.b64encode(b"me:" + raw).decode(),
        base64.b64encode(b"user:" + raw + b"\n").decode(),
        raw.hex(),
        raw.hex().upper(),
    ]


def left_of(text: str, key: str = KEY) -> list[str]:
    """Returns parts of a key, or of an encoding of it, that a text still holds."""
    forms = [form.strip("'\"") for form in encoded(key)]
    return [form[at : at + 12] for form in forms for at in range(len(form) - 11) if form[at : at + 12] in text]


@pytest.mark.parametrize("form", range(len(encoded(KEY))))
def test_a_known_secret_is_masked_in_every_encoding(form: int) -> None:
    keep_secret(KEY)
    text = f"what is {encoded(KEY)[form]} for?"
    for masked in (redact(text), redact_known(text), redact(text * 3)):
        assert MASK in masked
        assert masked.startswith("what is ")
        assert masked.endswith(" for?")
        assert not left_of(masked, KEY) or encoded(KEY)[form][:8] not in masked


def spread(text: str) -> list[str]:
    """Returns the forms in which a key is spelled out, wrapped, or shown by its codes."""
    raw = text.encode()
    return [
        *(between.join(text) for between in (" ", ", ", "-", "\u200b")),
        *(between.join(re.findall(".{1,4}", text)) for between in (" ", "-", "\n   ")),
        repr(list(text)),
        repr(list(raw)),
        raw.hex(" "),
        raw.hex(":").upper(),
        "\n".join(re.findall(".{1,12}", base64.b64encode(raw).decode())),
        repr(text.encode("utf-16-le")),
        "".join(f"\\x{code:02x}" for code in raw),
        text.upper(),
        text.lower(),
    ]


@pytest.mark.parametrize("key", ["aK3jd9Qm2Lx7Vb5Nw8Rt4Yp6Zs1Gh0Fc", "Tr0ub4dor&3", "some/words of a key 7"])
def test_a_known_secret_is_masked_however_it_is_spelled_or_escaped(key: str) -> None:
    keep_secret(key)
    letters = re.sub("[^A-Za-z0-9]", "", key).lower()
    for form in [*spread(key), *escaped(key), *map(json.dumps, spread(key))]:
        for masked in (redact(f"refused {form} with 401"), redact_known(f"refused {form} with 401")):
            assert MASK in masked, form
            left = re.sub("[^A-Za-z0-9]", "", masked[len("refused ") : -len(" with 401")]).lower()
            assert len(left.replace("error", "")) < 5, (form, masked)
            assert not [at for at in range(len(letters) - 3) if letters[at : at + 4] in left], form
            assert masked.startswith("refused "), form
            assert masked.endswith(" with 401"), form


def test_a_key_of_short_words_masks_no_text_of_such_words() -> None:
    keep_secret("data flow")
    keep_secret("12345678")
    text = "dataflow moves data; flow 1,234; 567 8 of 1 2 3 4 5 6 7 8"
    assert redact(text) == text


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 30), st.integers(11, 40), st.sampled_from(["", " ", "x", '"']))
def test_a_part_of_a_known_secret_is_masked(begin: int, size: int, around: str) -> None:
    key = "aK3jd9Qm2Lx7Vb5Nw8Rt4Yp6Zs1Gh0Fc"
    keep_secret(key)
    part = key[begin : begin + size]
    masked = redact(f"of {around}{part}{around} no more")
    assert (part in masked) == (len(part) < 11 and part not in (key,)) or MASK in masked


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Authorization: Bearer abc123xyz", "Authorization: Bearer ***"),
        ("{'authorization': 'Basic Zm9vOmJhcg=='}", "{'authorization': 'Basic ***'}"),
        ('{\\"Authorization\\": \\"Bearer foo.bar\\"}', '{\\"Authorization\\": \\"Bearer ***\\"}'),
        ("[(b'Authorization', b'Bearer abc123xyz')]", "[(b'Authorization', b'Bearer ***')]"),
        ("x-api-key: foobar", "x-api-key: ***"),
        ("Incorrect API key provided: sk-proj-abcd1234efgh5678", "Incorrect API key provided: ***"),
        ("hf_abcDEF123456ghijkl is no token", "*** is no token"),
        ("gsk_a1b2c3d4e5f6g7h8 ghp_a1b2c3d4e5f6 AKIA0123456789ABCDEF", "*** *** ***"),
        ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abc-_123", "***"),
        ("GET /v1?key=abc&x=1&api_key=def", "GET /v1?key=***&x=1&api_key=***"),
        ("http://me:p@ss@host:80/v1 and https://token@host", "http://***@host:80/v1 and https://***@host"),
        ('{"api_key": "foo", "password": "bar baz"}', '{"api_key": "***", "password": "*** baz"}'),
        ("access_token=a1b2c3d4e5f6g7", "access_token=***"),
    ],
)
def test_what_looks_like_a_secret_is_masked(text: str, masked: str) -> None:
    assert redact(text) == masked
    assert redact(masked) == masked


def escaped(text: str) -> list[str]:
    """Returns the forms in which a server or a library may show JSON or the query of an address."""
    once = json.dumps(text)
    return [
        text,
        once,
        json.dumps({"error": once}),
        json.dumps(json.dumps({"error": once})),
        quote(text),
        quote_plus(text),
        quote(quote(text, safe=""), safe=""),
        quote(once),
        html.escape(text),
        repr(text.encode()),
        text.replace("_", "\\u005f"),
        json.dumps(text.replace("_", "\\u005f")),
        "".join(f"\\u{ord(c):04x}" for c in text),
        "".join(f"&#{ord(c)};" for c in text),
        "".join(f"%{ord(c):02x}" for c in text),
    ]


@pytest.mark.parametrize(
    "assignment",
    [
        '{"api_key": "hunter2x"}',
        "{'api_key': 'hunter2x'}",
        '{"x-api-key" : "hunter2x", "n": 1}',
        "api key: hunter2x",
        "API Key = hunter2x",
        "api-key = hunter2x",
        "my api.key   =   hunter2x",
        "secret key => hunter2x",
        "client secret: hunter2x",
        "<api_key>hunter2x</api_key>",
        "/v1?user=me&api_key=hunter2x&n=1",
        "Authorization: Bearer hunter2x",
        "http://me:hunter2x@host/v1",
    ],
)
def test_a_named_secret_is_masked_below_every_escape(assignment: str) -> None:
    for form in escaped(assignment):
        masked = redact(f"refused {form} with 401")
        assert "hunter2x" not in masked, form
        assert not set(escaped("hunter2x")) & set(re.split(r"[*\s\"']+", masked)), form
        assert MASK in masked, form
        assert masked.startswith("refused "), form
        assert masked.endswith(" with 401"), form
        assert redact(masked) == masked, form


@pytest.mark.parametrize(
    "text",
    [
        "Score: 1",
        "100% of the tokens\\n are \\u0041 &amp; B in C:\\new\\key",
        "the key is: 5; api keys are kept in files",
        "The key step: 3 + 4 = 7.",
        "Unexpected token: 'x' at 12",
        "max_tokens=128, judge.api_key_env=JUDGE_KEY",
        "Bearer of bad news; a basic understanding",
        "sk-learn-pipelines-are-good",
        "see https://host/path?x=1 or mail me@host.org",
        "answered 401: misbehaves on command",
        "http://127.0.0.1:80/v1/chat/completions answered 429: slow down",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    keep_secret(KEY)
    assert redact(text) == text


def test_a_very_long_text() -> None:
    keep_secret(KEY)
    masked = redact(f"sk-abcdefgh12345678 {'x ' * 200_000}{KEY}")
    assert masked.startswith(f"{MASK} x ")
    assert masked.endswith(f" x {MASK}")


def test_short_values() -> None:
    for short in ("", "1", "abc"):
        keep_secret(short)
    keep_secret("sesame")
    assert redact("1 abc; open sesame! sesames 'sesame'") == "1 abc; open ***! sesames '***'"


def test_words_of_a_secret_are_no_secret() -> None:
    keep_secret("the-judge-server-of-my-lab")
    assert redact("the judge-server is down") == "the judge-server is down"
    assert redact("key the-judge-server-of-my-lab!") == "key ***!"


def test_secrets_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_OWN_API_KEY", "plain-words-but-a-key")
    monkeypatch.setenv("SOME_KEY", "/etc/ssl/key.pem")
    monkeypatch.setenv("MAX_TOKEN", "12345678")
    assert redact("plain-words-but-a-key /etc/ssl/key.pem 12345678") == "*** /etc/ssl/key.pem 12345678"
    monkeypatch.setenv("MY_OWN_API_KEY", "another-one-of-words")
    assert redact("another-one-of-words") == MASK


def test_configurations() -> None:
    values = {
        "judge": {"url": "http://me:secret1@host", "api_key_env": "JUDGE_KEY", "options": {"api_key": "abc", "n": 1}},
        "reward_kwargs": {"password": "hunter2", "token": "t0ken", "max_tokens": 5, "key": "column", "list": [KEY]},
    }
    keep_secrets(values)
    assert redact_values({"endpoints": {"http://me:secret1@host": {"rpm": 1}}}) == {
        "endpoints": {"http://***@host": {"rpm": 1}}
    }
    shown = redact_values(values)
    assert shown["judge"] == {
        "url": "http://***@host", "api_key_env": "JUDGE_KEY", "options": {"api_key": MASK, "n": 1}
    }  # fmt: skip
    assert shown["reward_kwargs"] | {"list": 0} == {
        "password": MASK, "token": MASK, "max_tokens": 5, "key": "column", "list": 0
    }  # fmt: skip
    assert redact("hunter2 and t0ken") == "*** and ***"


class Told(Exception):
    def __init__(self, message: str, headers: dict[str, Any]) -> None:
        super().__init__(message, headers, [message.encode()])
        self.headers = headers
        self.message = message

    def __str__(self) -> str:
        return f"{self.message} {self.headers}"


def test_errors_and_what_is_chained_to_them() -> None:
    keep_secret(KEY)
    try:
        try:
            raise Told(f"key {KEY}", {"Authorization": f"Bearer {KEY}", "n": 1})
        except Told as error:
            error.add_note(f"with {KEY}")
            raise ExceptionGroup("several", [ValueError(KEY), error]) from KeyError(KEY)
    except ExceptionGroup as error:
        group = error
    redact_error(group)
    seen = [group, group.__cause__, group.__context__, *group.exceptions]
    text = "".join(f"{one!r} {one} {vars(one)}" for one in seen)
    assert not left_of(text)
    assert MASK in text
    assert "'n': 1" in text


def test_an_error_that_resists_is_left() -> None:
    class Fixed(Exception):
        @property
        def message(self) -> str:
            return "x"

        def __str__(self) -> str:
            raise RuntimeError("no")

    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    error: Any = Fixed(KEY)
    error.__cause__ = error
    error.exceptions, error.deep, error.said = 5, deep, KEY
    keep_secret(KEY)
    redact_error(error)
    assert (error.args, error.said) == ((MASK,), MASK)
    assert pickle.loads(pickle.dumps(ValueError(1))).args == (1,)
