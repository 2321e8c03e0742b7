"""A statement of Python that tests a program: it must be able to fail."""

from __future__ import annotations

import ast
import warnings
from typing import Any

from dataflow.errors import an
from dataflow.rewards.sandbox.outcome import BadCases, short

_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
_ENDS = ("exit", "_exit", "quit")
"""Names of functions that end a process with an exit code."""


def check_statement(statement: Any, what: str) -> None:
    """Checks that a statement can be run, and can end.

    Args:
        statement: Python, as text; it may be several.
        what: says in the error which one it is.

    Raises:
        BadCases: it is empty, or no Python, or ends the process whatever it finds.
    """
    if not isinstance(statement, str):
        raise BadCases(f"{what} is {an(type(statement).__name__)}, not a statement of Python as text")
    try:
        tree = _parsed(statement)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:  # the last two: nested too deeply
        raise BadCases(f"{what}, {short(repr(statement))}, is no statement of Python ({error})") from error
    if not tree.body:
        raise BadCases(f"{what} is empty, so that it would test nothing")
    if _ends(tree):
        raise BadCases(
            f"{what}, {short(repr(statement))}, ends the process, so that no program would pass; give an assert, "
            "for unittest as in: assert unittest.main(exit=False).result.wasSuccessful()"
        )


def check_tests(statement: str, what: str) -> None:
    """Checks that a statement can fail, as far as its text shows.

    It can if it reaches an ``assert`` or ``raise``, in a function of its own also, or a function that by its name does
    such a thing: one whose name begins with ``assert``, or that ends the process.

    Raises:
        BadCases: it would pass with every program.
    """
    tree = _parsed(statement)
    if _can_fail(tree):
        return
    unused = [each.name for each in tree.body if isinstance(each, _FUNCTIONS)]
    hint = f"; call what it defines, as in {unused[-1]}(NAME)" if unused else ""
    raise BadCases(f"{what}, {short(repr(statement))}, passes with every program: it reaches no assert or raise{hint}")


def _parsed(statement: str) -> ast.Module:
    with warnings.catch_warnings(action="ignore"):
        return ast.parse(statement)


def _ends(tree: ast.Module) -> bool:
    """Returns whether a statement ends the process, also after tests that have passed."""
    for each in tree.body:
        if isinstance(each, ast.Expr) and isinstance(each.value, ast.Call) and _name(each.value.func) in _ENDS:
            return True
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "unittest.main":
            return all(given.arg != "exit" for given in node.keywords)
    return False


def _name(node: ast.AST) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _can_fail(tree: ast.Module) -> bool:
    bodies: dict[str, list[ast.AST]] = {}
    used: set[str] = set()
    ahead: list[ast.AST] = [*tree.body]
    while ahead:
        node = ahead.pop()
        if isinstance(node, (*_FUNCTIONS, ast.ClassDef)):
            body: list[ast.AST] = [*node.body]
            if isinstance(node, ast.ClassDef):  # its methods are reached if its name is used
                body = [
                    inner for each in node.body for inner in (each.body if isinstance(each, _FUNCTIONS) else [each])
                ]
            bodies.setdefault(node.name, []).extend(body)
            ahead += [*node.decorator_list, *(body if node.name in used else [])]
            continue
        if isinstance(node, ast.Raise) or (isinstance(node, ast.Assert) and not _always(node.test)):
            return True
        name = _name(node)
        if name.startswith("assert") or name in _ENDS:
            return True
        if name and name not in used:
            used.add(name)
            ahead += bodies.get(name, [])
        ahead += ast.iter_child_nodes(node)
    return False


def _always(test: ast.expr) -> bool:
    """Returns whether a condition holds whatever the program is, as a tuple does that was meant as a message."""
    if isinstance(test, ast.Constant):
        return bool(test.value)
    return isinstance(test, ast.Tuple | ast.List | ast.Set) and bool(test.elts)
