"""How messages, metrics and files name one of several reward agents, and the keys of its section. Pure."""

from __future__ import annotations

import re
from pathlib import PurePath

MAIN = "reward"
"""The agent that every run has a section for; its messages do not name it."""
JUDGE = "dataflow.rewards.judge.judge:Judge"
"""What scores where the configuration names no reward function."""
SERVED = "dataflow.rewards.models.served:ServedReward"
"""What scores with a reward model of the run (``reward.models``)."""

_KEY = re.compile(r"(?<![\w./'\"-])(reward|judge|custom_reward_function)\.(?=[a-z_]+)(?!py\b|sqlite\b|models\b)")
"""Keys of the sections of an agent; ``reward.models`` holds those of all agents."""


def keyed(message: str, agent: str) -> str:
    """Returns a message with the keys of the agent's own section in place of those of section reward.

    >>> keyed("lower reward.rpm, or raise judge.url.", "style")
    'lower style.rpm, or raise style.judge.url.'
    """
    if agent == MAIN:
        return message
    return _KEY.sub(lambda key: f"{agent}." if key[1] == MAIN else f"{agent}.{key[1]}.", message)


def prefixed(message: str, agent: str) -> str:
    """Returns a message that begins with the agent's name and has its keys; unchanged if it does already.

    >>> prefixed("group 3 of step 1: 'f' raised ValueError; raise reward.tries.", "style")
    "reward agent 'style': group 3 of step 1: 'f' raised ValueError; raise style.tries."
    """
    if agent == MAIN:
        return message
    begin = f"reward agent '{agent}': "
    return begin + keyed(message.removeprefix(begin).removeprefix("reward agent: "), agent)


def file_of(file: str, agent: str) -> str:
    """Returns the name of an agent's own file in the run's directory.

    >>> file_of("rewards.sqlite", "reward"), file_of("rewards.sqlite", "style")
    ('rewards.sqlite', 'rewards_style.sqlite')
    """
    path = PurePath(file)
    return file if agent == MAIN else f"{path.stem}_{agent}{path.suffix}"


def metric(agent: str, name: str) -> str:
    """Returns the name of an agent's metric.

    >>> metric("reward", "failed"), metric("style", "failed")
    ('reward/failed', 'reward/style/failed')
    """
    return f"{MAIN}/{name}" if agent == MAIN else f"{MAIN}/{agent}/{name}"
