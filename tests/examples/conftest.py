"""The real model, loaded once for all tests of the examples."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from gguf import GGUFReader

from examples.smollm2 import (
    ChatTokenizer,
    LlamaConfig,
    Weights,
    find_gguf,
    load_weights,
    open_gguf,
)
from interop import AttentionSpec
from torch_backend import PagedKVCache

PAGE_SIZE = 16


@dataclass(frozen=True, repr=False)
class Model:
    """What the tests need of the model."""

    path: Path
    reader: GGUFReader
    config: LlamaConfig
    weights: Weights[npt.NDArray[np.float32]]
    tokenizer: ChatTokenizer
    spec: AttentionSpec

    def new_cache(self, num_pages: int) -> PagedKVCache:
        """A float32 cache on the CPU for all layers."""
        return PagedKVCache(
            self.spec,
            num_layers=self.config.num_layers,
            num_pages=num_pages,
            page_size=PAGE_SIZE,
            dtype="float32",
            device="cpu",
        )


@pytest.fixture(scope="session")
def model() -> Model:
    path = find_gguf()
    reader = open_gguf(path)
    config = LlamaConfig.from_gguf(reader)
    return Model(
        path=path,
        reader=reader,
        config=config,
        weights=load_weights(path),
        tokenizer=ChatTokenizer(reader),
        spec=AttentionSpec(config.num_qo_heads, config.num_kv_heads, config.head_dim),
    )
