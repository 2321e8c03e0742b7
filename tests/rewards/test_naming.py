"""Messages name the keys of the agent that they are about, once, and nothing else in them changes."""

from __future__ import annotations

import pytest

from dataflow.rewards.naming import keyed, prefixed


@pytest.mark.parametrize(
    ("said", "named"),
    [
        ("raise reward.timeout, or lower reward.rpm.", "raise style.timeout, or lower style.rpm."),
        ("the judge. It took judge.url=3", "the judge. It took style.judge.url=3"),
        ("(reward.on_failure=drop_sample)", "(style.on_failure=drop_sample)"),
        ("custom_reward_function.path=x.py", "style.custom_reward_function.path=x.py"),
        ("in reward.py:3 and my/reward.py and runs/a/rewards.sqlite", None),
        ("'reward.tries' of style.judge.url", None),
    ],
)
def test_keys_are_those_of_the_agent(said: str, named: str | None) -> None:
    assert keyed(said, "style") == (named or said)
    assert keyed(said, "reward") == said
    assert keyed(keyed(said, "style"), "style") == keyed(said, "style")


def test_a_message_says_once_which_agent_it_is_of() -> None:
    once = prefixed("reward agent: step 3 was submitted after close().", "style")
    assert once == "reward agent 'style': step 3 was submitted after close()."
    assert prefixed(once, "style") == once
    assert prefixed("reward agent: as it was; reward.tries.", "reward") == "reward agent: as it was; reward.tries."
