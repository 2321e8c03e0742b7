"""Tools: how they are described, loaded and refused; the calculator; formats; the configuration."""

from __future__ import annotations

import asyncio
import pickle
from pathlib import Path
from typing import Any

import pytest

from dataflow.errors import ConfigError
from dataflow.tools import Tool, Toolbox, ToolCall
from dataflow.tools.calculator import calculator
from dataflow.tools.reader import find_format
from tests.engines.drawing import run

pytestmark = pytest.mark.timeout(60)

FILE = '''
from dataflow.tools import tool


@tool("lookup")
async def look_up(key: str, limit: int = 3, *, table: dict[str, str]) -> str:
    """Looks a word up.

    More that the model is not told.
    """
    return table[key][:limit]


@tool(description="Rolls a die.")
class Die:
    def __init__(self, sides: int = 6):
        self.sides = sides

    def __call__(self) -> int:
        return self.sides


def plain(x: float):
    """Doubles."""
    return 2 * x


NUMBER = 7


class Shout:
    def parse(self, text):
        from dataflow.tools import ToolCall

        return [ToolCall("plain", {"x": 1})] if text.isupper() else []
'''


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "my_tools.py"
    path.write_text(FILE)
    return str(path)


# --- registration --------------------------------------------------------------------------------------------------


def test_the_file_s_marked_tools(file: str) -> None:
    found = Toolbox(path=file).tools
    assert list(found) == ["lookup", "Die"]
    assert found["lookup"].schema == {
        "type": "function",
        "function": {
            "name": "lookup",
            "description": "Looks a word up.",
            "parameters": {
                "type": "object",
                "properties": {"key": {"type": "string"}, "limit": {"type": "integer", "default": 3}},
                "required": ["key"],
            },
        },
    }
    about = found["Die"].schema["function"]
    assert (about["description"], about["parameters"]["properties"]) == ("Rolls a die.", {})


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["lokup"], "my_tools.py: there is no tool 'lokup'; did you mean 'lookup'"),
        (["zzz"], "my_tools.py: there is no tool 'zzz'; there is lookup, Die, calculator"),
        (["NUMBER"], "my_tools.py: '7' is no tool; a tool is a function, or a class"),
        (["Shout"], "my_tools.py: 'Shout' is no tool; .* with a method __call__"),
    ],
)
def test_names_that_are_no_tools(file: str, names: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Toolbox(path=file, names=tuple(names)).check()


@pytest.mark.parametrize(
    ("code", "message"),
    [
        ("@tool('a')\ndef b(): ...\n@tool('a')\ndef c(): ...", "two tools are called 'a'; give one another name"),
        ("@tool()\ndef b(*parts): ...", "tool 'b': a model gives arguments by name, so 'parts' must have one"),
        ("@tool\ndef b(): ...", r"importing it raised ConfigError: @tool takes the tool's name: write @tool\(\)"),
        ("def b(): ...", "nothing is marked with @tool; mark a function, or name one in tools.names"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, code: str, message: str) -> None:
    path = tmp_path / "odd.py"
    path.write_text("from dataflow.tools import tool\n" + code)
    with pytest.raises(ConfigError, match=rf"tools.path=.*odd.py: .*{message}") as raised:
        Toolbox(path=str(path)).check()
    assert "\n" not in str(raised.value)


def test_a_box_travels_as_its_settings(file: str) -> None:
    box = Toolbox(path=file, names=("lookup",), timeout=3).check()
    sent = pickle.dumps(box)
    assert b"Die" not in sent
    again = pickle.loads(sent)
    assert again == box
    assert "tools" not in vars(again)
    assert list(again.tools) == ["lookup"]


# --- calls ---------------------------------------------------------------------------------------------------------


def answers(box: Toolbox, *calls: ToolCall, kwargs: Any = None) -> list[tuple[str, bool]]:
    async def body() -> list[tuple[str, bool]]:
        async with box.open() as caller:
            own = caller.state({"tools_kwargs": kwargs})
            found = await asyncio.gather(*(own.answer(call) for call in calls))
            await own.close()
            return found

    return run(body())


def test_answers(file: str) -> None:
    kwargs = {"lookup": {"table": {"ape": "monkey"}}, "Die": {"sides": 20}}
    calls = [ToolCall("lookup", {"key": "ape"}), ToolCall("Die"), ToolCall("lookup", {"key": "bee"}), ToolCall("plain")]
    assert answers(Toolbox(path=file), *calls, kwargs=kwargs) == [
        ("mon", False),
        ("20", False),
        ("error: KeyError: 'bee'", True),
        ("error: there is no tool 'plain'; there is lookup, Die", True),
    ]


def test_what_a_tool_gets_is_its_own() -> None:
    def pops(words: list[Any], facts: Any, *, stock: list[int]) -> str:
        """Spoils all it gets."""
        sizes = [len(words), len(facts["seen"]), len(stock)]
        words.append("spoilt")
        facts["seen"].append("spoilt")
        stock.pop()
        return str(sizes)

    box = Toolbox(names=("calculator",))
    box.tools["pops"] = Tool.of(pops)
    # A format may return one object for turns that are the same.
    call = ToolCall("pops", {"words": [1], "facts": {"seen": [2]}})
    kwargs = {"pops": {"stock": [1, 2, 3]}}
    assert answers(box, call, call, kwargs=kwargs) == [("[1, 1, 3]", False)] * 2
    assert (call.arguments, kwargs) == ({"words": [1], "facts": {"seen": [2]}}, {"pops": {"stock": [1, 2, 3]}})


@pytest.mark.parametrize(
    ("side", "told"),
    [
        ("left", "[996 of 1000 characters are left out here]\n6789"),
        ("right", "0123\n[996 of 1000 characters are left out here]"),
    ],
)
def test_a_long_answer_is_cut_and_says_so(side: str, told: str) -> None:
    def long(how: str) -> Any:
        if how == "raised":
            raise ValueError("0123456789" * 100)
        return {"text": "0123456789" * 100, "parts": ["0123456789" * 100]}[how]

    box = Toolbox(names=("calculator",), longest=4, side=side)
    box.tools["long"] = Tool.of(long)
    calls = [ToolCall("long", {"how": how}) for how in ("text", "parts", "raised")]
    found = answers(box, *calls, ToolCall("calculator", {"expression": "10 ** 3"}))
    assert found[0] == (told, False)
    assert "of 1004 characters" in found[1][0], "of the JSON"
    assert found[2][1]
    assert "of 1019 characters" in found[2][0], "of the whole message"
    assert found[3] == ("1000", False)


# --- the calculator ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expression", "result"),
    [
        (" (1 + 2) * -3 ", "-9"),
        ("7 / 2", "3.5"),
        ("10 / 3", "3.333333333"),
        ("2 ** 0.5", "1.414213562"),
    ],
)
def test_calculator(expression: str, result: str) -> None:
    assert calculator(expression) == result


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("__import__('os')", "only numbers"),
        ("1 +", "not arithmetic"),
        ("(" * 100 + "1" + ")" * 100, "longer than 200"),
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "too large"),
        ("1e308 * 10", "too large"),
        ("(-8) ** 0.5", "root of a negative"),
    ],
)
def test_calculator_refuses(expression: str, message: str) -> None:
    with pytest.raises((ValueError, ArithmeticError), match=message):
        calculator(expression)


# --- formats -------------------------------------------------------------------------------------------------------


def test_a_format_of_the_users_own(file: str) -> None:
    box = Toolbox(path=file, format="Shout").check()
    assert not isinstance(box.how, str)
    assert box.how.parse("HEY") == [ToolCall("plain", {"x": 1})]
    with pytest.raises(ConfigError, match=r"tools.format=Shuot: it has no 'Shuot'; did you mean 'Shout'"):
        Toolbox(path=file, format="Shuot").check()
    with pytest.raises(ConfigError, match=r"'Die' has no method parse\(text\)"):
        Toolbox(path=file, format="Die").check()
    with pytest.raises(ConfigError, match=r"there is no format 'hermse'; did you mean 'hermes'"):
        find_format("hermse")


# --- configuration -------------------------------------------------------------------------------------------------
