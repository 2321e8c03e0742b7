"""Known secrets are masked in texts; nothing else is changed."""

from __future__ import annotations

import pytest

from dataflow.errors import ConfigError
from dataflow.system.secrets import KNOWN, MASK, keep_secret, keep_secrets, key_of, redact, redact_known, redact_values

KEY = "Zq7/Wm3+Lk9pTx2vNb8RcYd5Hs4"


def test_known_values_are_masked_in_texts_and_in_nested_data() -> None:
    keep_secret("Zq7/Wm3")
    keep_secret(KEY)  # which contains the other
    assert redact(f"of {KEY}, xZq7/Wm3x") == "of ***, x***x"
    keep_secret("abcde")  # too short
    assert redact("abcde 1") == "abcde 1"
    assert redact_known({"a": [f"x{KEY}", 5], "b": {"c": KEY}}) == {"a": ["x***", 5], "b": {"c": MASK}}


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Authorization: Bearer abc123", "Authorization: Bearer ***"),
        ("{'authorization': 'Basic Zm9vOmJhcg=='}", "{'authorization': 'Basic ***'}"),
        ("http://me:p@ss@host:80/v1, https://token@host", "http://***@host:80/v1, https://***@host"),
        ("[http://a:1,http://me:pass@b:2]", "[http://a:1,http://***@b:2]"),
    ],
)
def test_logins_and_headers_are_masked(text: str, masked: str) -> None:
    assert redact(text) == masked
    assert redact(masked) == masked


@pytest.mark.parametrize(
    "text",
    [
        "the key is: 5; max_tokens=128, judge.api_key_env=JUDGE_KEY",
        "Bearer of bad news",
        "see https://host:80/path?x=1 or mail me@host.org",
    ],
)
def test_other_text_stays_as_it_is(text: str) -> None:
    keep_secret(KEY)
    assert redact(text) == text


def test_variables_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"MY_API_KEY": "a-key-of-words", "hf_token": "12345678", "A_KEY": "default"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("KEY_FILE", "/etc/ssl/key.pem")
    assert redact("a-key-of-words 12345678 default /etc/ssl/key.pem") == "*** *** default /etc/ssl/key.pem"
    assert redact_known("a-key-of-words") == MASK


def test_configurations() -> None:
    values = {
        "judge": {"url": ["http://me:password-1@host"], "api_key_env": "JUDGE_KEY", "options": {"api_key": "abc"}},
        "endpoints": {"http://me:password-1@host": {"rpm": 1}},
        "reward_kwargs": {"db_password": "hunter2", "token": "none-1", "end_token": "</answer>", "key": "column"},
    }
    keep_secrets(values)
    assert list(KNOWN) == ["password-1", "hunter2", "none-1"]
    assert redact_values(values) == {
        "judge": {"url": ["http://***@host"], "api_key_env": "JUDGE_KEY", "options": {"api_key": MASK}},
        "endpoints": {"http://***@host": {"rpm": 1}},
        "reward_kwargs": {"db_password": MASK, "token": MASK, "end_token": "</answer>", "key": "column"},
    }


def test_a_variable_that_holds_no_key() -> None:
    with pytest.raises(ConfigError, match="the environment variable JUDGE_API_KEY is not set"):
        key_of("JUDGE_API_KEY", "judge.api_key_env")


def test_a_key_is_masked_whatever_its_variable_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SESAME", f"{KEY}\n")
    assert key_of("SESAME", "judge.api_key_env") == KEY
    assert key_of(None, "judge.api_key_env") is None
    with pytest.raises(ConfigError, match="takes the name of an environment variable"):
        key_of("sk-the-key-itself", "judge.api_key_env")
    assert redact(f"{KEY} sk-the-key-itself") == "*** ***"
