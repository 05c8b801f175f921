"""The shape of the model, read from the metadata of its GGUF file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from gguf import GGUFReader


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes and constants of a Llama-style decoder (pre-norm, gated MLP, tied embedding)."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_qo_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    rms_norm_eps: float
    max_positions: int

    @classmethod
    def from_gguf(cls, reader: GGUFReader) -> LlamaConfig:
        """Read the ``llama.*`` keys. Raises `ValueError` for any other architecture."""

        def value(key: str) -> Any:
            field = reader.get_field(key)
            if field is None:
                raise ValueError(f"the GGUF file has no metadata key {key!r}")
            return field.contents()

        architecture = value("general.architecture")
        if architecture != "llama":
            raise ValueError(
                f"general.architecture is {architecture!r}; this example reads 'llama'"
            )
        hidden_size = value("llama.embedding_length")
        num_qo_heads = value("llama.attention.head_count")
        return cls(
            vocab_size=value("llama.vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=value("llama.feed_forward_length"),
            num_layers=value("llama.block_count"),
            num_qo_heads=num_qo_heads,
            num_kv_heads=value("llama.attention.head_count_kv"),
            head_dim=hidden_size // num_qo_heads,
            rope_theta=value("llama.rope.freq_base"),
            rms_norm_eps=value("llama.attention.layer_norm_rms_epsilon"),
            max_positions=value("llama.context_length"),
        )

    @property
    def qkv_rows(self) -> tuple[int, int]:
        """Where the fused query-key-value projection splits: end of the query, end of the key."""
        query_end = self.num_qo_heads * self.head_dim
        return query_end, query_end + self.num_kv_heads * self.head_dim


def rotary_tables(config: LlamaConfig) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Cosines and sines of the rotary embedding, each ``[max_positions, head_dim / 2]`` float32.

    Angle of position p and pair i: ``p * theta ** (-2 i / head_dim)`` (Su et al., RoFormer,
    section 3.4). Computed in float32 like `transformers`, so that logits can be compared.
    """
    exponents = np.arange(0, config.head_dim, 2, dtype=np.float32) / np.float32(config.head_dim)
    inverse_frequencies = np.float32(1.0) / np.float32(config.rope_theta) ** exponents
    positions = np.arange(config.max_positions, dtype=np.float32)
    angles = np.outer(positions, inverse_frequencies)
    return np.cos(angles), np.sin(angles)
