"""Secrets in the values that a user gives are masked in every message about them."""

from __future__ import annotations

import pytest

from dataflow.config.keys.overrides import parse_overrides
from dataflow.config.run import RunConfig
from dataflow.engines.servers.connect import check_urls
from dataflow.errors import ConfigError
from dataflow.system.secrets import redaction
from dataflow.system.secrets.given import keep_given, keep_logins
from dataflow.system.secrets.known import Secrets

PASSWORD = "hunter2secretZ"


@pytest.fixture(autouse=True)
def _nothing_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redaction, "SECRETS", Secrets())


@pytest.mark.parametrize(
    "address",
    [
        "http://me:{}@h:80",
        "me:{}@h:80",
        "http:me:{}@h",
        "http://me:pa/{}@h",
        "http://me:pa@{}@h",
        "http://{}@h",
        "[http://a:1, 'me:{}@h', http://b:1]",
    ],
)
def test_what_stands_before_the_last_at_is_masked(address: str) -> None:
    text = address.format(PASSWORD)
    keep_logins(text)
    assert PASSWORD not in redaction.redact(f"cannot read {text}")
    assert PASSWORD not in redaction.redact(PASSWORD)


def test_addresses_without_a_login_stay_readable() -> None:
    keep_given({"engine": {"urls": ["http://first:80", "http://second:80"], "api_key_env": "MY_KEY"}})
    text = "http://first:80 http://second:80 MY_KEY"
    assert redaction.redact(text) == text


def test_a_key_in_place_of_a_name_is_masked() -> None:
    keep_given({"engine": {"api_key_env": f"x-{PASSWORD}"}})
    assert PASSWORD not in redaction.redact(f"engine.api_key_env=x-{PASSWORD}")


@pytest.mark.parametrize(
    "arguments",
    [
        ["engine.urls={a: 'me:%s@h'}"],
        ["engine={urls: {a: 'me:%s@h'}}"],
        ["engine.urls http://me:%s@h"],
        ["engine.urls=[me:%s@h", "engine.rollout=server"],
        ["engine.urls=[me:%s@h]", "engine.urls=[me:%s@h]"],
        ["engine.urls=[me:%s@h]", "engine.rollout=servr"],
    ],
)
def test_no_error_of_the_configuration_shows_a_password(arguments: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_overrides(RunConfig, [each.replace("%s", PASSWORD) for each in arguments])
    assert PASSWORD not in str(caught.value)


@pytest.mark.parametrize("address", [f"me:{PASSWORD}@h:80", f"http:me:{PASSWORD}@h", f"http://me:p/{PASSWORD}@h"])
def test_no_error_about_an_address_shows_a_password(address: str) -> None:
    with pytest.raises(ConfigError, match="is not an address") as caught:
        check_urls(["http://a:1", address])
    assert PASSWORD not in str(caught.value)
