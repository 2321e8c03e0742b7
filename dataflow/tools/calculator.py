"""A calculator: parses arithmetic, and never evaluates it as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from dataflow.tools.registry import tool

LONGEST = 200
"""Maximum characters of an expression."""
BITS = 4096
"""Maximum bits of an integer, intermediate results included."""

Number = int | float
_TWO: dict[type, Callable[[Number, Number], Number]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.Pow: operator.pow,
}
_ONE: dict[type, Callable[[Number], Number]] = {ast.UAdd: operator.pos, ast.USub: operator.neg}


@tool("calculator")
def calculator(
    expression: Annotated[str, Field(description="Numbers, + - * / // % ** and parentheses.")],
    *,
    digits: int = 10,
) -> str:
    """Returns the value of an arithmetic expression.

    Args:
        expression: to evaluate.
        digits: significant digits of a result that is not an integer.

    Raises:
        ValueError: it is not arithmetic or too long, or has no value or one that is too large.

    >>> calculator("(3 + 4) * 2"), calculator("7 / 2"), calculator("6 / 2")
    ('14', '3.5', '3')
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    try:
        tree = ast.parse(expression.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        raise ValueError("the expression is not arithmetic: give numbers, + - * / // % ** and parentheses") from None
    try:
        value = _value(tree.body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except OverflowError:
        raise ValueError("the result is too large") from None
    if isinstance(value, int):
        return str(value)
    if not math.isfinite(value):
        raise ValueError("the result is too large")
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.{digits}g}"


def _value(node: ast.expr) -> Number:
    if isinstance(node, ast.Constant) and type(node.value) in (int, float):
        return _bounded(node.value)  # type: ignore[arg-type]
    if isinstance(node, ast.UnaryOp) and type(node.op) in _ONE:
        return _ONE[type(node.op)](_value(node.operand))
    if isinstance(node, ast.BinOp) and type(node.op) in _TWO:
        left, right = _value(node.left), _value(node.right)
        if isinstance(node.op, ast.Pow):
            _check_power(left, right)
        return _bounded(_TWO[type(node.op)](left, right))
    raise ValueError("only numbers, + - * / // % ** and parentheses can be worked out")


def _check_power(base: Number, exponent: Number) -> None:
    """Checks that a power is not too large, before it is computed."""
    if isinstance(base, int) and isinstance(exponent, int) and base.bit_length() * abs(exponent) > BITS:
        raise ValueError("the result is too large")
    if base < 0 and not float(exponent).is_integer():
        raise ValueError("a root of a negative number is not a real number")


def _bounded(value: Number) -> Number:
    if isinstance(value, int) and value.bit_length() > BITS:
        raise ValueError("the result is too large")
    return value
