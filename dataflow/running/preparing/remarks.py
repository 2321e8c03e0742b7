"""What a run does otherwise than its settings say: keys whose effect other keys, the data or the model take away."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from dataflow.algorithms.estimators import ESTIMATORS
from dataflow.config.keys.effects import without_effect
from dataflow.config.reward import Source, sources_of
from dataflow.config.run import DataConfig, RunConfig
from dataflow.config.training.critic import CriticConfig
from dataflow.data.rows import GSM8K, IMAGES
from dataflow.errors import counted
from dataflow.models.directory import chat_template
from dataflow.planning.auto.controller import LEAST_LEFT, MEASURED
from dataflow.rewards.functions import CONTEXT, load_reward, takes
from dataflow.rewards.gsm8k import VERLS, VERLS_STRICT
from dataflow.rewards.naming import MAIN, keyed
from dataflow.running.preparing.toy import toy_settings

if TYPE_CHECKING:
    from dataflow.data.prompts import Problems
    from dataflow.running.preparing.prompts import Prompts


def remarks(config: RunConfig, prompts: Prompts, right: Collection[str]) -> list[str]:
    """Returns a sentence for each setting that has no effect, or another one than it seems.

    Args:
        config: of the run.
        prompts: of the run, after their checks.
        right: names of the reward agents that were found right.
    """
    agents = {s.name: partial(keyed, agent=s.name) for s in sources_of(config) if s.name != MAIN}
    found = [*toy_settings(config), *without_effect(config, config.given_keys, agents), *_of_steps(config)]
    found += [sentence for s in sources_of(config) if s.name in right for sentence in _of_function(s)]
    if prompts.settled:
        found += _of_template(config)
    if prompts.toolbox is not None and prompts.toolbox.guessed:
        found.append(
            "tools.format=auto: the chat template describes the tools, but does not show how the model writes its "
            "calls; they are read as those of hermes, and calls in another form count as answers: give tools.format."
        )
    if (problems := prompts.problems) is None:
        return found
    sources = {row.get("data_source") for part in problems for row in part.rows}
    found += [f"{VERLS_STRICT}." for s in sources_of(config) if s.custom.path == VERLS and GSM8K in sources]
    return found + list(_of_data(config, *problems))


def _of_steps(config: RunConfig) -> Iterator[str]:
    draw, steps = config.engine, counted(config.steps, "step")
    compares = ESTIMATORS[config.algorithm.adv_estimator].against == "group" and draw.n > 1
    greedy = "engine.top_k=1" if draw.top_k == 1 else "engine.min_p=1" if draw.min_p == 1 else None
    if greedy and compares and "algorithm.adv_estimator" not in config.unread:
        yield (
            f"{greedy} takes the likeliest token each time, so that the engine.n={draw.n} responses to a prompt are "
            f"the same, which algorithm.adv_estimator={config.algorithm.adv_estimator} compares; raise top_k or lower "
            "min_p."
        )
    if config.policy.auto and config.steps < MEASURED + LEAST_LEFT:
        yield (
            f"policy=auto stays at the baseline in a run of {steps}: it plans after step {MEASURED}, and no more in "
            f"the last {LEAST_LEFT}; give more steps, or the policy."
        )
    for name, section in config.trained.items():
        if isinstance(section, CriticConfig) and section.warmup >= config.steps:
            yield f"{name}.warmup={section.warmup}: in none of the run's {steps} the actor is trained; lower it."


def _of_function(source: Source) -> Iterator[str]:
    """Yields what is said of options for a reward function that has no parameter for them."""
    custom = source.custom
    if custom.path is None:
        return
    given = {name: key for name, key in CONTEXT.items() if getattr(source.options, key.removeprefix("reward."), None)}
    if not given:
        return
    function = load_reward(custom.path, custom.name, custom.reward_kwargs)
    for name, key in given.items():
        if not takes(function, name):
            yield keyed(
                f"{key} has no effect: {custom.name} of custom_reward_function.path={custom.path} has no parameter "
                f"{name}; add it, or leave the key out.",
                source.name,
            )


def _of_template(config: RunConfig) -> Iterator[str]:
    """Yields what is said of options that the chat template does not read: Jinja takes any name."""
    options, model = config.data.apply_chat_template_kwargs, config.model.path or ""
    template = chat_template(Path(model)) if options else ""
    for name in options if template else ():
        if not re.search(rf"\b{re.escape(name)}\b", template):
            yield (
                f"data.apply_chat_template_kwargs.{name} has no effect: the chat template of model.path={model} does "
                "not read it; leave it out, or take a model whose template does."
            )


def _of_data(config: RunConfig, train: Problems, val: Problems) -> Iterator[str]:
    data, there, most = config.data, len(val.rows), config.data.val_size
    if config.val.every and data.val is None and data.train is not None:
        yield (
            f"data.val: no file is given, so that evaluations (val.every={config.val.every}) use "
            f"{counted(there, 'generated word problem')}, not problems like those of data.train; give data.val=FILE, "
            "or val.every=0."
        )
    if config.val.every and data.val is not None:
        chosen = most != DataConfig.model_fields["val_size"].default
        if most < there and not chosen:
            yield (
                f"data.val_size={most}: of the {there:,} problems of {val.name}, evaluations use the first {most:,}; "
                f"give data.val_size={there} to use all."
            )
        if most > there and chosen:
            yield f"data.val_size={most} has no effect: {val.name} has {counted(there, 'problem')}; leave it out."
    named = data.image_key != DataConfig.model_fields["image_key"].default
    if named and not any(row.get(IMAGES) for row in (*train.rows, *val.rows)):
        yield f"data.image_key={data.image_key} has no effect: no row has images in a column of that name; correct it."
