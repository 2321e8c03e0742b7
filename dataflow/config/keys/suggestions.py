"""Sentences about keys that a configuration does not have: what the key is called, or the nearest one that it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from dataflow.errors import alike


def unknown(
    key: str,
    keys: Sequence[str],
    sections: Sequence[str],
    elsewhere: Callable[..., str | None],
) -> str:
    """Returns a sentence about an unknown key that suggests another.

    Args:
        key: as it was given.
        keys: all that there are, dotted.
        sections: the first parts of the keys.
        elsewhere: returns the name of another program's key, as part of a message; with ``exactly``, of no similar one.
    """
    section, _, leaf = key.rpartition(".")
    same_leaf = [k for k in keys if k.rpartition(".")[2] == leaf]
    same_section = [k for k in keys if section and k.startswith(f"{section}.")]
    # Check verl's names first, so that they are not taken for misspelt names of another meaning.
    if (message := elsewhere(key, exactly=True)) is not None:
        return f"unknown key '{key}'; {message}"
    guess = _in_other_letters(key, keys)
    if not guess and section in keys and not same_section:
        guess = f"; did you mean '{section}'?"
    guess = guess or _nearest_leaf(leaf, same_section) or _continued(leaf, same_section)
    if not guess and (message := elsewhere(key)) is not None:
        return f"unknown key '{key}'; {message}"
    if not guess and same_leaf:
        names = f"'{same_leaf[0]}'" if len(same_leaf) == 1 else f"one of {', '.join(same_leaf)}"
        guess = f"; did you mean {names}?"
    # A short name is like some key of any configuration; those beside it say more.
    if len(leaf) > (3 if same_section else 2):
        guess = guess or _nearest_leaf(leaf, keys)
    if not guess and same_section:
        guess = f"; keys of '{section}': {', '.join(k.removeprefix(f'{section}.') for k in same_section)}."
    return f"unknown key '{key}'" + (guess or f"; keys and sections: {', '.join(sections)}.")


def _forms(key: str) -> tuple[str, ...]:
    """Returns a key in other letters: without the marks of Hydra and of options, in lower case, separators replaced."""
    plain = key.lstrip("+~-").lower()
    return plain, plain.replace("-", "_"), plain.replace("/", "."), plain.replace("-", ".", 1).replace("-", "_")


def _in_other_letters(key: str, keys: Sequence[str]) -> str:
    """Suggests the key that is the same but for case, separators and the marks of Hydra and of options."""
    found = next((form for form in _forms(key) if form in keys), None)
    return f"; did you mean '{found}'?" if found else ""


def _continued(leaf: str, keys: Sequence[str]) -> str:
    """Suggests the only key that continues the one given, as ``api_key_env`` continues ``api_key``."""
    longer = [key for key in keys if key.rpartition(".")[2].startswith(f"{leaf}_")]
    return f"; did you mean '{longer[0]}'?" if len(longer) == 1 else ""


def _nearest_leaf(leaf: str, keys: Sequence[str]) -> str:
    """Suggests the key with the nearest last part; a common section would make any two keys look alike."""
    by_leaf: dict[str, str] = {}
    for key in keys:
        by_leaf.setdefault(key.rpartition(".")[2], key)
    found = alike(leaf, by_leaf)
    return f"; did you mean '{by_leaf[found]}'?" if found else ""
