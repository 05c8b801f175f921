"""Tokenizer and chat template, rebuilt from the fields of a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

if TYPE_CHECKING:
    from gguf import GGUFReader

# Value of `tokenizer.ggml.token_type` for tokens that mark structure and are never split text.
_CONTROL_TOKEN = 3


class ChatTokenizer:
    """Byte-level BPE with single digits (`pre` = smollm), and the model's own chat template.

    Attributes
    ----------
    end_of_turn : int
        The id that ends an answer (``<|im_end|>``).
    """

    def __init__(self, reader: GGUFReader) -> None:
        def value(key: str) -> Any:
            field = reader.get_field(key)
            if field is None:
                raise ValueError(f"the GGUF file has no metadata key {key!r}")
            return field.contents()

        kind = value("tokenizer.ggml.model"), value("tokenizer.ggml.pre")
        if kind != ("gpt2", "smollm"):
            raise ValueError(f"the GGUF tokenizer is {kind}; this example reads ('gpt2', 'smollm')")
        tokens: list[str] = value("tokenizer.ggml.tokens")
        merges: list[str] = value("tokenizer.ggml.merges")
        token_types: list[int] = value("tokenizer.ggml.token_type")

        self._tokenizer = Tokenizer(
            models.BPE(
                vocab={token: index for index, token in enumerate(tokens)},
                # The byte-level alphabet has no blank, so one blank parts the halves of a merge.
                merges=[(left, right) for left, _, right in (m.partition(" ") for m in merges)],
            )
        )
        self._tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._tokenizer.decoder = decoders.ByteLevel()
        self._tokenizer.add_special_tokens(
            [
                AddedToken(token, special=True, normalized=False)
                for token, token_type in zip(tokens, token_types, strict=True)
                if token_type == _CONTROL_TOKEN
            ]
        )
        self.end_of_turn: int = value("tokenizer.ggml.eos_token_id")
        # The template is data from a file: it runs in a sandbox and can't change what it is given.
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        self._chat_template = environment.from_string(value("tokenizer.chat_template"))

    def encode(self, text: str) -> list[int]:
        """Ids of ``text``; control tokens written out in it become their own single ids.

        Bytes that the vocabulary has no token for are left out: six control characters, and
        the first byte of U+40000 to U+BFFFF, where Unicode has no characters.
        """
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; an incomplete UTF-8 sequence becomes U+FFFD."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def chat_text(self, messages: Sequence[dict[str, str]]) -> str:
        """The prompt of a conversation, up to the point where the assistant speaks."""
        return self._chat_template.render(messages=list(messages), add_generation_prompt=True)

    def encode_chat(self, user_message: str) -> list[int]:
        """Ids of the prompt for one user message and the model's default system message."""
        return self.encode(self.chat_text([{"role": "user", "content": user_message}]))
