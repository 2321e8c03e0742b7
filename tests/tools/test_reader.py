"""Readers of calls: what a model wrote, by special tokens where its family has them, and the frames of answers."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import pytest

from dataflow.errors import ModelError
from dataflow.tools.reader import FamilyReader, Reader, ToolCall, find_reader

pytestmark = [pytest.mark.timeout(120), pytest.mark.heavy]

TAGS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
SPECIAL = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
SCHEMA = {
    "type": "function",
    "function": {
        "name": "run",
        "description": "Runs code.",
        "parameters": {
            "type": "object",
            "properties": {"code": {"type": "string"}, "times": {"type": "integer"}},
            "required": ["code"],
        },
    },
}
PROMPT = "<|im_start|>assistant\n"
PLAIN = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" + PROMPT


def tokenizer_of(tags: list[str], template: str = PLAIN) -> Any:
    """Returns a byte-level tokenizer in which each tag is a token, as those of a family have it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["<|endoftext|>", *SPECIAL]
    vocab = {token: i for i, token in enumerate([*special, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    bytewise = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytewise, eos_token="<|im_end|>", pad_token="<|endoftext|>")
    made.add_special_tokens({"additional_special_tokens": SPECIAL})
    made.add_tokens([AddedToken(tag, normalized=False, special=False) for tag in tags])
    made.chat_template = template
    return made


def written_as(family: str, tokenizer: Any) -> str:
    """Returns a chat template that renders a chat with tools as a family does."""
    from renderers import config_from_name, create_renderer

    renderer = create_renderer(tokenizer, config_from_name(family))
    chat = [{"role": "system", "content": "SYSTEM"}, {"role": "user", "content": "USER"}]
    text = tokenizer.decode(renderer.render_ids(chat, tools=[SCHEMA], add_generation_prompt=True))
    for said, shown in (
        (json.dumps(SCHEMA), "{{ tools[0] | tojson }}"),
        ("SYSTEM", "{{ messages[0].content }}"),
        ("USER", "{{ messages[1].content }}"),
    ):
        assert said in text
        text = text.replace(said, shown)
    return text + "{{ '' }}"  # Jinja drops a newline at the end


QWEN3 = tokenizer_of(TAGS)
BARE = tokenizer_of([])


def json_call(code: str, **more: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': 'run', 'arguments': {'code': code, **more}})}\n</tool_call>"


def xml_call(code: str, **more: Any) -> str:
    parts = {"code": code, **more}
    body = "".join(f"<parameter={name}>\n{value}\n</parameter>\n" for name, value in parts.items())
    return f"<tool_call>\n<function=run>\n{body}</function>\n</tool_call>"


def calls(how: str, tokenizer: Any, text: str, prompt: str = PROMPT) -> list[ToolCall]:
    reader = find_reader(how, tokenizer, [SCHEMA], {})
    ids = [tokenizer.encode(each, add_special_tokens=False) for each in (prompt, text + "<|im_end|>")]
    return reader.calls(*ids)


WAYS = {
    "qwen3": (lambda text, *prompt: calls("qwen3", QWEN3, text, *prompt), json_call),
    "qwen3.5": (lambda text, *prompt: calls("qwen3.5", QWEN3, text, *prompt), xml_call),
    "text": (lambda text, *prompt: calls("hermes", BARE, text, *prompt), json_call),
}
Read = Callable[..., list[ToolCall]]


@pytest.fixture(params=WAYS)
def way(request: pytest.FixtureRequest) -> tuple[Read, Callable[..., str]]:
    return WAYS[request.param]


@pytest.mark.parametrize("code", ["x = '</think>'", "{} [] \\ größer </b>"])
def test_calls(way: tuple[Read, Callable[..., str]], code: str) -> None:
    read, write = way
    wanted = [ToolCall("run", {"code": code})]
    assert read(write(code)) == wanted
    assert read(write(code, times=3)) == [ToolCall("run", {"code": code, "times": 3})]
    assert read(f"<think>\nHm.\n</think>\n\nSo: {write(code)}") == wanted
    assert read(f"{write('first')}\n{write(code)}\n{write('last')}") == [
        ToolCall("run", {"code": each}) for each in ("first", code, "last")
    ]
    assert read(f"Hm.\n</think>\n{write(code)}", f"{PROMPT}<think>\n") == wanted


def test_no_call(way: tuple[Read, Callable[..., str]]) -> None:
    read, write = way
    assert read("So it is 42.") == []
    assert read("") == []
    assert read(f"<think>{write('draft')}</think>done") == []
    assert read(f"{write('draft')}</think>done", f"{PROMPT}<think>\n") == []


@pytest.mark.parametrize("how", ["qwen3", "hermes"])
def test_arguments_as_the_text_of_an_object(how: str) -> None:
    text = '<tool_call>{"name": "run", "arguments": "{\\"code\\": \\"</think>\\"}"}</tool_call>'
    assert calls(how, QWEN3, text) == [ToolCall("run", {"code": "</think>"})]
    for none in ("null", "{}"):
        text = f'<tool_call>{{"name": "run", "arguments": {none}}}</tool_call>'
        assert calls(how, QWEN3, text) == [ToolCall("run")]
    (broken,) = calls(how, QWEN3, '<tool_call>{"name": "run", "arguments": "{code}"}</tool_call>')
    assert broken.error is not None
    assert broken.error.startswith('"arguments" of the tool call is not valid JSON')
    assert broken.name == "run"


@pytest.mark.parametrize("how", ["qwen3", "hermes"])
@pytest.mark.parametrize(
    ("body", "error"),
    [
        ("{'name': 1}", "the tool call is not valid JSON"),
        ('{"name": 1}', "a tool call is an object"),
        ('{"name": "run", "arguments": [1]}', '"arguments" of a tool call is an object'),
    ],
)
def test_the_model_is_told_what_is_wrong(how: str, body: str, error: str) -> None:
    (call,) = calls(how, QWEN3, f"<tool_call>{body}</tool_call>")
    assert call.error is not None
    assert call.error.startswith((error, "the tool call is not complete"))


def built(family: str) -> tuple[Any, Any]:
    """Returns a tokenizer with the tags that a family's renderer asks for, and the renderer."""
    from renderers import config_from_name, create_renderer

    tags = list(TAGS)
    while True:
        tokenizer = tokenizer_of(tags)
        try:
            return tokenizer, create_renderer(tokenizer, config_from_name(family))
        except (AssertionError, ValueError) as error:
            (tag,) = re.findall(r"token (?:for )?'([^']+)'", str(error))
            assert tag not in tags
            tags.append(tag)


def test_every_family_reads_what_it_writes_and_goes_on_from_what_was_sampled() -> None:
    from renderers.base import MODEL_RENDERER_MAP

    code = "x = 1"
    call = {"type": "function", "id": "functions.run:0", "function": {"name": "run", "arguments": {"code": code}}}
    user = {"role": "user", "content": "?"}
    said = {"role": "assistant", "content": "So:", "reasoning_content": "Hm.", "tool_calls": [call]}
    families = dict.fromkeys(MODEL_RENDERER_MAP.values())
    # They load a vocabulary by the network, have no chat template, or leave out what was thought.
    for family in families.keys() - {"gpt-oss", "deepseek-v4", "deepseek-r1"}:
        tokenizer, renderer = built(family)
        before = renderer.render_ids([user], tools=[SCHEMA], add_generation_prompt=True)
        whole = renderer.render_ids([user, said], tools=[SCHEMA])
        same = next(at for at, (one, other) in enumerate(zip([*before, -1], whole, strict=False)) if one != other)
        reader = FamilyReader(tokenizer, renderer, [SCHEMA])
        (found,) = reader.calls(before, whole[same:])
        assert found == ToolCall("run", {"code": code}), family
        assert "42" in tokenizer.decode(reader.framed(before, whole[same:], [(found, "42")])), family


# --- which reader ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen3", "qwen3.5"])
def test_a_family_is_recognised_by_what_its_template_renders(family: str) -> None:
    tokenizer = tokenizer_of(TAGS)
    tokenizer.chat_template = written_as(family, tokenizer)
    reader = find_reader("auto", tokenizer, [SCHEMA], {})
    assert isinstance(reader, FamilyReader)
    assert reader.renderer.config.name == family


@pytest.mark.parametrize("thinking", [True, False])
def test_options_of_the_template_are_the_renderer_s(thinking: bool) -> None:
    from dataflow.models.tokenizer import with_options

    tokenizer = tokenizer_of(TAGS)
    template = written_as("qwen3", tokenizer)
    off = "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
    tokenizer.chat_template = template + off
    options = {"enable_thinking": thinking}
    reader = find_reader("auto", with_options(tokenizer, options), [SCHEMA], options)
    before, turn = (
        tokenizer.encode(text, add_special_tokens=False) for text in ("<|im_start|>assistant\n", "x<|im_end|>")
    )
    framed = reader.framed(before, turn, [(ToolCall("run"), "42")])
    wanted = "\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(framed) == wanted + ("" if thinking else "<think>\n\n</think>\n\n")


def test_a_template_of_no_family_is_read_as_hermes(warned: list[str]) -> None:
    assert type(find_reader("auto", tokenizer_of([], PLAIN + "{{ tools }}"), [SCHEMA], {})) is Reader
    assert warned == [], "a tokenizer that is not of a family is no fault"
    refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
    find_reader("auto", tokenizer_of([], refusing + PLAIN), [SCHEMA], {})
    (said,) = warned
    assert "does not render a chat with a system message (no system role)" in said


def test_a_family_that_the_tokenizer_is_not_of() -> None:
    with pytest.raises(ModelError, match=r"^tools.format=qwen3: the model's tokenizer does not fit \(.*<tool_call>"):
        find_reader("qwen3", BARE, [SCHEMA], {})
    with pytest.raises(
        ModelError, match=r"^tools.format=gpt-oss: the model's tokenizer does not fit \(it has no token"
    ):
        find_reader("gpt-oss", BARE, [SCHEMA], {})
