"""The errors that the package raises on purpose. A message says what is wrong, where, and how to fix it."""

from __future__ import annotations

from collections.abc import Iterable


class DataflowError(Exception):
    """Base of every error that dataflow raises on purpose."""


class UserError(DataflowError):
    """The input is wrong; the command line prints one sentence and exits with code 2."""


class ConfigError(UserError):
    """A configuration key or value is wrong."""


class PipelineError(UserError):
    """The stages do not form a pipeline."""


class PolicyError(UserError):
    """The scheduling policy does not fit the pipeline or the batch."""


class DataError(UserError):
    """A data file is missing, unreadable or holds a bad row."""


class ModelError(UserError):
    """A model directory is missing or incomplete."""


class NotChecked(UserError):
    """Something cannot be checked before a start, which makes or downloads it; the message says what."""


class RunError(DataflowError):
    """The run failed: exit code 1, with the trace and metrics so far on disk."""


class StageFailed(RunError):
    """A task raised, or the process that ran it died; the cause is chained."""


class RewardFailed(RunError):
    """A reward request could not be scored."""


class ServiceLost(RunError):
    """A service cannot continue because a process that it consists of died; it has to be rebuilt."""


class NotOffered(RunError):
    """A service has no method of the name that was asked for."""


class Aborted(RunError):
    """A sample in flight was abandoned."""


class Interrupted(DataflowError):
    """The user stopped the run (Ctrl-C or SIGTERM)."""


def counted(number: float, noun: str) -> str:
    """Returns a number with its noun, in the plural unless it is 1.

    >>> counted(1, "step"), counted(5120, "sample"), counted(2, "mini-batch"), counted(1.0, "GPU")
    ('1 step', '5,120 samples', '2 mini-batches', '1 GPU')
    """
    written = f"{number:g}" if isinstance(number, float) else f"{number:,}"
    ending = "" if number == 1 else "es" if noun.endswith(("s", "ch")) else "s"
    return f"{written} {noun}{ending}"


def an(noun: str) -> str:
    """Returns a noun, such as the name of a type, with its indefinite article.

    >>> an("int"), an("list")
    ('an int', 'a list')
    """
    return f"{'an' if noun[:1].lower() in tuple('aeiou') else 'a'} {noun}"


def nearest(word: str, words: object) -> str:
    """Returns ``"; did you mean 'x'?"`` with the word closest to a misspelt one, or an empty text.

    >>> nearest("polcy", ["policy", "steps"])
    "; did you mean 'policy'?"
    >>> nearest("zzz", ["policy", "steps"])
    ''
    """
    from difflib import get_close_matches

    found = get_close_matches(word, list(words), n=1, cutoff=0.6)  # type: ignore[call-overload]
    return f"; did you mean '{found[0]}'?" if found else ""


def alike(word: str, words: Iterable[str]) -> str | None:
    """Returns the word that a name misspells, or None; stricter than :func:`nearest`.

    A name of several parts (``save_freq``) matches only if each part does, or if parts are joined or swapped.

    >>> alike("worldsize", ["world_size", "weight_decay"])
    'world_size'
    >>> alike("stpes", ["steps"])
    'steps'
    >>> alike("train_batch_size", ["train_size", "micro_batch_size"])
    >>> alike("max_token", ["max_tokens", "max_turns"])
    'max_tokens'
    """
    from difflib import SequenceMatcher, get_close_matches

    def ratio(a: str, b: str) -> float:
        return SequenceMatcher(None, a, b).ratio()

    def parts_alike(a: str, b: str) -> bool:
        mine, other = sorted(a.split("_")), sorted(b.split("_"))
        if len(mine) != len(other):
            return ratio(a.replace("_", ""), b.replace("_", "")) >= 0.85
        return all(ratio(x, y) >= 0.65 for x, y in zip(mine, other, strict=True))

    known = list(words)
    if len(word) == 1:
        return word if word in known else None
    if len(word) == 2:
        short = (other for other in known if len(other) == len(word))
        return next((other for other in short if sum(a != b for a, b in zip(word, other, strict=True)) <= 1), None)
    close = get_close_matches(word, known, n=5, cutoff=0.7)
    return next((found for found in close if parts_alike(word, found)), None)
