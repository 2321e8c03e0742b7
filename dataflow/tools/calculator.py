"""A calculator: parses arithmetic, and never evaluates it as Python."""

from __future__ import annotations

import ast
import math
import operator
from collections.abc import Callable
from typing import Annotated

from pydantic import Field

from dataflow.tools.tool import tool

LONGEST, BITS = 200, 4096  # characters of an expression; bits of an integer, intermediate results included

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
        digits: significant digits of a result that is not an integer.

    Raises:
        ValueError: it is not arithmetic or too long.
        ArithmeticError: it has no value, or one that is too large.

    >>> calculator("(3 + 4) * 2"), calculator("7 / 2"), calculator("6 / 2")
    ('14', '3.5', '3')
    """
    if len(expression) > LONGEST:
        raise ValueError(f"the expression is longer than {LONGEST} characters")
    try:
        value = _value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError):
        raise ValueError("the expression is not arithmetic: give numbers, + - * / // % ** and parentheses") from None
    if isinstance(value, int):
        return str(value)
    return str(int(value)) if value.is_integer() and abs(value) < 2**53 else f"{value:.{digits}g}"


def _value(node: ast.expr) -> Number:
    match node:
        case ast.Constant(value=int() | float() as value) if not isinstance(value, bool):
            pass
        case ast.UnaryOp() if type(node.op) in _ONE:
            value = _ONE[type(node.op)](_value(node.operand))
        case ast.BinOp() if type(node.op) in _TWO:
            left, right = _value(node.left), _value(node.right)
            # A power is checked before it is computed.
            if isinstance(node.op, ast.Pow) and isinstance(left, int) and isinstance(right, int):
                _check_size(left.bit_length() * abs(right))
            value = _TWO[type(node.op)](left, right)
        case _:
            raise ValueError("only numbers, + - * / // % ** and parentheses can be worked out")
    if isinstance(value, complex):
        raise ValueError("a root of a negative number is not a real number")
    if isinstance(value, int):
        _check_size(value.bit_length())
    elif not math.isfinite(value):
        raise OverflowError("the result is too large")
    return value


def _check_size(bits: int) -> None:
    if bits > BITS:
        raise OverflowError("the result is too large")
