"""The tokenizer and chat template that are rebuilt from the GGUF file."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

# Ids that transformers 5.24 gives for these texts when it reads the same GGUF file.
KNOWN = {
    "What is 12 + 345?": [1780, 314, 216, 33, 34, 1232, 216, 35, 36, 37, 47],
    " Don't say naïve 😀": [4250, 982, 1643, 15486, 46494, 40303, 218],
}


@pytest.mark.parametrize("text", KNOWN)
def test_known_ids(model, text):
    assert model.tokenizer.encode(text) == KNOWN[text]


def test_control_tokens_are_single_ids_and_are_left_out_of_text(model):
    tokenizer = model.tokenizer
    assert tokenizer.encode("<|endoftext|><|im_start|><|im_end|>") == [0, 1, 2]
    assert tokenizer.end_of_turn == 2
    ids = tokenizer.encode("done<|im_end|>")
    assert tokenizer.decode(ids) == "done"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "done<|im_end|>"


def test_every_id_of_the_file_keeps_its_place(model):
    tokens = model.reader.get_field("tokenizer.ggml.tokens").contents()
    assert len(tokens) == model.config.vocab_size
    for token_id in (0, 16, 17, 300, 25_000, 49_151):
        assert model.tokenizer._tokenizer.id_to_token(token_id) == tokens[token_id]


def test_digits_are_never_joined(model):
    ids = model.tokenizer.encode("2024")
    assert [model.tokenizer.decode([token]) for token in ids] == ["2", "0", "2", "4"]


# The vocabulary has no token for these, nor for the first UTF-8 byte of U+40000 to U+BFFFF, where
# Unicode has no characters.
UNKNOWN = "\x04\x06\x13\x14\x16\x1d"
characters = st.characters(
    max_codepoint=0x3FFFF, exclude_categories=("Cs",), exclude_characters=UNKNOWN
)


@settings(max_examples=50)
@given(text=st.text(characters, max_size=60))
@example(text="  two  blanks\n\n\ttab\r\n  ")
@example(text="don't 日本語 и русский 1st 2nd")
def test_round_trip(model, text):
    assert model.tokenizer.decode(model.tokenizer.encode(text)) == text


def test_what_the_vocabulary_lacks_is_left_out(model):
    ids = model.tokenizer.encode(f"a{UNKNOWN}b")
    assert ids == [*model.tokenizer.encode("a"), *model.tokenizer.encode("b")]
    assert model.tokenizer.decode(model.tokenizer.encode("\U00040000")) != "\U00040000"


def test_chat_prompt(model):
    text = model.tokenizer.chat_text([{"role": "user", "content": "Hi"}])
    assert text == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face"
        "<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = model.tokenizer.encode_chat("Hi")
    assert ids.count(1) == 3
    assert ids.count(model.tokenizer.end_of_turn) == 2
    assert model.tokenizer.decode(ids, skip_special_tokens=False) == text


def test_own_system_message_replaces_the_default(model):
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello"},
        {"role": "user", "content": "Bye"},
    ]
    assert model.tokenizer.chat_text(messages) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
        "<|im_start|>assistant\nHello<|im_end|>\n<|im_start|>user\nBye<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
