"""Tools with data of each sample: a shop's prices, from the row's ``extra_info["tools_kwargs"]``."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from dataflow.tools import tool


@tool("price")
async def price(item: Annotated[str, Field(description="Singular, as in: apple.")], *, prices: dict[str, float]) -> str:
    """Looks up what an item costs in the shop."""
    if item not in prices:
        raise KeyError(f"the shop has no {item}, it has {', '.join(sorted(prices))}")
    return f"{prices[item]:g}"


@tool("basket")
class Basket:
    """Puts an item in the basket and returns the total so far."""

    def __init__(self, prices: dict[str, float]) -> None:
        self.prices, self.total = prices, 0.0

    def __call__(self, item: str, count: int = 1) -> dict[str, float]:
        self.total += self.prices[item] * count
        return {"total": self.total}
