"""Decoding: the text equals the tokenizer's own, for every kind of tokenizer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dataflow.rewards.decode import decoder

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(120)]

TEXTS = [
    "The answer is 42. It's 3 + 4 = 7 , isn't it ?\n#### 7",
    "naïve café — “quotes” … 東京タワー 안녕하세요 здравствуй",
    "family 👨‍👩‍👧‍👦 flags 🇯🇵🇺🇳 math ∑∫√ tab\tand\r\nlines  ",
    "",
]


def byte_level(merges: Sequence[tuple[str, str]] = (), **options: Any) -> Any:
    """A byte-level BPE of all bytes, with a few merges."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = ["<|end|>", "<|pad|>", *sorted(pre_tokenizers.ByteLevel.alphabet()), *(a + b for a, b in merges)]
    holes = options.pop("holes", 0)
    vocab = {letter: i + (holes if i > 200 else 0) for i, letter in enumerate(letters)}
    model = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = options.pop("decoder", None) or decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=model, eos_token="<|end|>", pad_token="<|pad|>", **options)


def with_added_tokens() -> Any:
    """As chat models have them: special ones, and ones that are text."""
    from tokenizers import AddedToken

    tokenizer = byte_level([("Ġ", "t"), ("h", "e"), ("Ġt", "he"), ("ð", "Ł"), ("ðŁ", "ĳ")])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    tokenizer.add_tokens(["<think>", "</think>", "東京", " answer", "Ġraw"])
    tokenizer.add_tokens([AddedToken(f"<|reserved_{i}|>", special=True) for i in range(3)])
    return tokenizer


def word_piece() -> Any:
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    words = ["[UNK]", "the", "answer", "##s", "is", ".", ",", "4", "##2", "'", "n't", "it"]
    model = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    model.decoder = decoders.WordPiece()
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="[UNK]", clean_up_tokenization_spaces=True)


def sentence_piece() -> Any:
    """As Llama 2 has it: a mark for spaces, and bytes by name."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁answer", "s", "4", "2"]
    model = Tokenizer(models.Unigram([(piece, -1.0) for piece in pieces], unk_id=0, byte_fallback=True))
    model.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=model, unk_token="<unk>", eos_token="</s>")


def stripping() -> Any:
    """Byte-level, but the first space is left out."""
    from tokenizers import decoders

    return byte_level(decoder=decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]))


def cleaning_up() -> Any:
    """Byte-level, but the library takes out spaces before punctuation."""
    return byte_level(
        clean_up_tokenization_spaces=True, clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output=True
    )


def with_holes() -> Any:
    """Not every id has a token, so there are ids above the number of tokens."""
    tokenizer = byte_level([("Ġ", "t"), ("h", "e")], holes=100)
    assert max(tokenizer.get_vocab().values()) >= len(tokenizer)
    return tokenizer


def with_long_tokens() -> Any:
    """Tokens that just fit into a cell of the table, and ones that just do not."""
    tokenizer = byte_level()
    tokenizer.add_tokens([letter * size for letter, size in LONG.items()])
    return tokenizer


LONG = {"p": 7, "q": 8, "r": 9, "s": 15, "t": 16, "u": 17, "v": 80}
BYTE_LEVEL = [byte_level, with_added_tokens, with_holes, with_long_tokens]
OTHERS = [word_piece, sentence_piece, stripping, cleaning_up]


@cache
def made(kind: Callable[[], Any]) -> tuple[Any, Any]:
    tokenizer = kind()
    return tokenizer, decoder(tokenizer)


def same(kind: Callable[[], Any], rows: Sequence[Sequence[int]]) -> None:
    tokenizer, decode = made(kind)
    expected = tokenizer.batch_decode([list(row) for row in rows], skip_special_tokens=True)
    assert decode([np.asarray(row, dtype=np.int64) for row in rows]) == expected


def size(kind: Callable[[], Any]) -> int:
    return 1 + int(max(made(kind)[0].get_vocab().values()))


kinds = pytest.mark.parametrize("kind", BYTE_LEVEL + OTHERS)


@kinds
def test_encoded_text_comes_back_as_the_library_has_it(kind: Callable[[], Any]) -> None:
    tokenizer, _decode = made(kind)
    same(kind, [tokenizer(text)["input_ids"] for text in TEXTS])


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_text_comes_back_as_it_was(kind: Callable[[], Any]) -> None:
    tokenizer, decode = made(kind)
    assert decode([np.asarray(tokenizer(text)["input_ids"], dtype=np.int64) for text in TEXTS]) == TEXTS


@kinds
def test_each_token_alone_and_all_together(kind: Callable[[], Any]) -> None:
    ids = list(range(size(kind)))
    same(kind, [[i] for i in ids] + [ids, ids[::-1]])


@kinds
def test_rows_of_any_length_and_no_rows(kind: Callable[[], Any]) -> None:
    assert made(kind)[1]([]) == []
    same(kind, [[], [5], [], [5] * 3000])


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_letters_that_are_torn_apart_or_cut_off(kind: Callable[[], Any]) -> None:
    tokenizer, _decode = made(kind)
    ids = tokenizer("a👨‍👩‍👧b東é")["input_ids"]
    assert len(ids) > 15, "several tokens a letter"
    same(kind, [ids[i:j] for i in range(len(ids)) for j in range(i, len(ids) + 1)])
    same(kind, [ids[::2], ids[1::2], ids[::-1]])


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_ids_beyond_the_vocabulary_are_nothing(kind: Callable[[], Any]) -> None:
    """A model may have more outputs than its tokenizer has tokens."""
    last = size(kind)
    same(kind, [[last, 70, last + 1, 71, last + 100_000], [last]])


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_special_tokens_are_left_out_wherever_they_stand(kind: Callable[[], Any]) -> None:
    tokenizer, decode = made(kind)
    ids = tokenizer("ab")["input_ids"]
    end, pad = tokenizer.eos_token_id, tokenizer.pad_token_id
    rows = [[pad, pad, *ids, end, *ids, end, end], [end], [pad] * 5]
    same(kind, rows)
    assert decode([np.asarray(row) for row in rows]) == ["abab", "", ""]


def test_added_tokens_are_text_unless_they_are_special() -> None:
    tokenizer, decode = made(with_added_tokens)
    ids = tokenizer("<|im_start|><think>東京 answer</think><|reserved_1|>x")["input_ids"]
    assert decode([np.asarray(ids)]) == ["<think>東京 answer</think>x"]


@pytest.mark.parametrize("longest", LONG)
def test_tokens_of_any_length_beside_shorter_ones_and_bytes_that_are_no_text(longest: str) -> None:
    tokenizer, _decode = made(with_long_tokens)
    of = tokenizer.get_vocab()
    upto = [of[letter * size] for letter, size in LONG.items() if letter <= longest]
    no_text = [of["Ā"], of["ÿ"]]  # the bytes 0x00 and 0xff
    same(with_long_tokens, [upto, [*upto, no_text[0]], [no_text[1], *upto], [*no_text, upto[-1]], no_text])


@pytest.mark.parametrize("kind", BYTE_LEVEL)
def test_a_byte_level_tokenizer_needs_the_library_no_more(
    kind: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = kind()
    decode = decoder(tokenizer)

    def refuse(*_args: Any, **_options: Any) -> None:
        raise AssertionError("the library is some ten times slower")

    monkeypatch.setattr(type(tokenizer), "batch_decode", refuse)
    assert decode([np.asarray(tokenizer("the 👨")["input_ids"])]) == ["the 👨"]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
def test_ids_of_any_integer_type(dtype: Any) -> None:
    _tokenizer, decode = made(byte_level)
    ids = np.asarray([70, 71, 72])
    assert decode([ids.astype(dtype)]) == decode([ids])


@given(st.data(), st.sampled_from(BYTE_LEVEL + OTHERS))
def test_any_ids_give_the_librarys_text(data: st.DataObject, kind: Callable[[], Any]) -> None:
    ids = st.integers(0, size(kind) + 3)
    same(kind, data.draw(st.lists(st.lists(ids, max_size=12), min_size=1, max_size=4)))
