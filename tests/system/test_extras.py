"""If a module of an extra is missing, the error names the extra, however deep it was raised."""

from __future__ import annotations

from dataflow.errors import ConfigError
from dataflow.system import extras
from dataflow.system.extras import missing_extra


def raised(name: str) -> Exception:
    try:
        try:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        except ModuleNotFoundError as error:
            raise ConfigError("pipeline file 'x.py' cannot be loaded") from error
    except ConfigError as error:
        return error


def test_only_what_is_missing_and_of_an_extra_counts(monkeypatch) -> None:  # type: ignore[no-untyped-def]
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: None)
    assert missing_extra(raised("torch.nn")) == (
        "this needs torch, which is not installed; pip install 'dataflow-rl[cpu]', or with GPUs 'dataflow-rl[gpu]'."
    )
    assert "pip install 'dataflow-rl[openai]'." in (missing_extra(raised("openai")) or "")
    assert missing_extra(raised("my_helpers")) is None
    assert missing_extra(ConfigError("something else")) is None
    monkeypatch.setattr(extras.importlib.util, "find_spec", lambda name: object())
    assert missing_extra(raised("torch")) is None
