"""API keys from environment variables."""

from __future__ import annotations

import pytest

from dataflow.errors import ConfigError
from dataflow.system.secrets.api_key import key_of
from dataflow.system.secrets.redaction import redact


@pytest.mark.parametrize("variable", ["JUDGE_API_KEY", "HF_TOKEN", "PASSWORD", "MY_SECRET_1"])
@pytest.mark.parametrize("setting", ["judge.api_key_env", "engine.api_key_env"])
@pytest.mark.parametrize(
    ("held", "what"),
    [(None, "is not set"), ("  ", "is not set"), ("two words-of-9", "holds a space"), ("clé-1234-9", "holds a space")],
)
def test_a_message_names_the_variable_and_the_reason_where_secrets_are_masked(
    monkeypatch: pytest.MonkeyPatch, variable: str, setting: str, held: str | None, what: str
) -> None:
    if held is None:
        monkeypatch.delenv(variable, raising=False)
    else:
        monkeypatch.setenv(variable, held)
    with pytest.raises(ConfigError) as error:
        key_of(variable, setting)
    message = str(error.value)
    assert redact(message) == message
    assert message.startswith(f"{setting}: the environment variable {variable} {what}")
    assert not held or held.isspace() or held not in message
