"""SmolLM2-135M-Instruct from a GGUF file: weights, tokenizer, and the model in both frameworks."""

from __future__ import annotations

from examples.smollm2.config import LlamaConfig
from examples.smollm2.gguf_weights import Weights, find_gguf, load_weights, open_gguf
from examples.smollm2.tokenizer import ChatTokenizer

__all__ = [
    "ChatTokenizer",
    "LlamaConfig",
    "Weights",
    "find_gguf",
    "load_weights",
    "open_gguf",
]
