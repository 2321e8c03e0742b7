"""Reads replies of a chat server: at most a given number of bytes is held, whatever the server sends."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dataflow.rewards.judge.errors import JudgeError, overlong, refused_within
from dataflow.system.http import PACKED, encoding_of, short, unpacked

_LET_THROUGH = ("", "identity")
BROKEN_OFF = ("error", "abort")
"""Reasons to finish by which a reply is not complete through no property of its own."""
_CUT = ("length", "max_tokens", "content_filter", *BROKEN_OFF)
"""Reasons to finish by which a reply is not complete."""
_TAGS = "|".join(
    (
        r"</?(?:seed:)?(?:think|thinking|thought|reasoning)>",
        r"\[/?THINK\]",
        r"\u25c1/?think\u25b7",
        r"<\|channel\|>final<\|message\|>",
    )
)
_TAG = re.compile(_TAGS, re.IGNORECASE)
"""Begins or ends thinking in the text of a reply, for a server that does not separate it."""
_SPOKEN = re.compile(
    rf"(?<=[`'\"(*\u2018\u201c])(?:{_TAGS})(?=[`'\")*\u2019\u201d])|(?<!\S)(?:{_TAGS})(?=[.,;:!?)]|[ \t]+(?-i:[a-z]))",
    re.IGNORECASE,
)
"""Such a tag in quotation marks, or within a sentence: one that the text may only speak of."""
LINE_END = re.compile(r"\r\n?|[\x0b\x0c\x85\u2028\u2029]")
"""Line ends, other than a newline, that models and servers use."""


async def whole(
    url: str, pieces: AsyncIterator[bytes], max_bytes: int, headers: Mapping[str, Any] | None = None
) -> bytes:
    """Returns a reply of status 200, decompressed.

    Args:
        url: of the request, for messages.
        pieces: the body.
        max_bytes: of the decompressed reply.
        headers: of the reply.

    Raises:
        JudgeError: the reply is longer than ``max_bytes``, has an unsupported encoding, or is an error.
    """
    got = bytearray()
    async for piece in pieces:
        got += piece
        if len(got) > max_bytes:
            raise overlong(url, max_bytes)
    encoding = encoding_of(headers)
    if encoding not in (*_LET_THROUGH, *PACKED):
        fix = "configure the server, or the proxy before it, to send replies without encoding, as they are requested"
        sent = short(str((headers or {}).get("Content-Encoding", "")))  # masking needs the original case
        raise JudgeError(f"{url} sent its reply in the encoding '{sent}', which was not requested", fix=fix)
    text = unpacked(bytes(got), encoding, max_bytes + 1)
    if len(text) > max_bytes:
        raise overlong(url, max_bytes)
    if b'"error"' in text and (error := refused_within(url, _parsed(url, text), headers or {})) is not None:
        raise error
    return text


@dataclass(frozen=True)
class Reply:
    """What a chat server answered.

    Attributes:
        text: the answer, without the thinking before it; None if there is none.
        instead: what came in its place, for messages; "" for nothing.
        cut: the reason to finish, if it is one by which the reply is not complete.
        characters: of all that the model wrote, its thinking included.
        usage: as the server states it, unchecked.
    """

    text: str | None
    instead: str
    cut: str
    characters: int
    usage: Any


def read(url: str, raw: bytes, verdict: re.Pattern[str]) -> Reply:
    """Reads the body of a reply.

    Args:
        url: of the request, for messages.
        raw: the body.
        verdict: what the answer is to hold.

    Raises:
        JudgeError: it is broken, or holds no message.
    """
    answer = _parsed(url, raw)
    with suppress(LookupError, TypeError, ValueError, AttributeError):
        choices, usage = answer["choices"], answer.get("usage")
        if not choices:
            return Reply(None, f"'choices': {json.dumps(choices)}", "", 0, usage)
        choice = choices[0]
        return _said(dict(choice["message"]), choice.get("finish_reason"), usage, verdict)
    fix = "see that judge.url is an OpenAI-style chat server"
    raise JudgeError(f"{url} answered without choices[0].message: {_beginning(raw)}", fix=fix)


def _said(message: dict[str, Any], why: Any, usage: Any, verdict: re.Pattern[str]) -> Reply:
    content = message.pop("content", None)
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") if isinstance(part, Mapping) and not _thinks(part) else part for part in parts]
    said = [text for text in texts if isinstance(text, str)]
    # Servers that separate thinking and answer have a field for each.
    others = {name: value for name, value in message.items() if value and name != "role"}
    characters = sum(map(len, said)) + sum(len(value) for value in others.values() if isinstance(value, str))
    text, instead = behind_thinking("\n".join(said), verdict), "thinking that does not end"
    if text is not None and not text.strip() and (others or not said):
        text, instead = None, _named({"content": content, **others} if content else others)
    return Reply(text, instead, str(why) if why in _CUT else "", characters, usage)


def behind_thinking(text: str, verdict: re.Pattern[str]) -> str | None:
    """Returns a reply without its thinking, in linear time; None if that does not end.

    The tag that begins it may be missing: many chat templates write it into the prompt. A tag that ends it is only
    spoken of if it stands within a sentence and no verdict follows.

    >>> score = re.compile("Score: 1")
    >>> behind_thinking("<think>Score: 0?</think>Score: 1", score), behind_thinking("Score: 0?</think>Score: 1", score)
    ('Score: 1', 'Score: 1')
    >>> behind_thinking("Score: 1, but it lacks its </think> tag.", score)
    'Score: 1, but it lacks its </think> tag.'
    """
    text = LINE_END.sub("\n", text)
    tags = list(_TAG.finditer(text))
    ends = [*(tag.start() for tag in tags[1:]), len(text)]
    behind = (tag.end() for tag, end in zip(tags, ends, strict=False) if verdict.search(text[tag.end() : end]))
    last = max(behind, default=0)
    kept: list[str] = []
    done, begin = 0, -1
    for tag in tags:
        if "/" in tag[0] or "|" in tag[0]:
            within = begin < 0 or (text[begin - 1 : begin] not in ("", "\n") and _SPOKEN.match(text, begin))
            if within and tag.end() > last and _SPOKEN.match(text, tag.start()):
                begin = -1
                continue
            if begin >= 0:
                kept.append(text[done:begin])
            else:
                kept.clear()
            done, begin = tag.end(), -1
        elif begin < 0:
            begin = tag.start()
    # Within a line a tag that is not closed is one that the reply speaks of.
    if begin >= 0 and not text[text.rfind("\n", 0, begin) + 1 : begin].strip():
        return None
    return "\n".join([*kept, text[done:]]).strip()


def _thinks(part: Mapping[str, Any]) -> bool:
    return str(part.get("type", "text")) not in ("text", "output_text")


def _named(found: Mapping[str, Any]) -> str:
    """Returns what a message has in place of an answer: the names of its fields, and the first of them."""
    if not found:
        return ""
    first = next(iter(found.values()))
    return f"{' and '.join(found)}: '{short(first if isinstance(first, str) else json.dumps(first))}'"


def _parsed(url: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError) as error:
        text = short(f"{type(error).__name__}: {error}")
    raise JudgeError(f"{url} sent broken JSON, {text}: '{_beginning(raw)}'")


def _beginning(raw: bytes) -> str:
    return short(raw[:1000].decode(errors="replace"))
