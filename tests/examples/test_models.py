"""Logits of both models against transformers' Llama on the same weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from numpy.testing import assert_allclose
from transformers import LlamaConfig as ReferenceConfig
from transformers import LlamaForCausalLM

from examples.engine import StepInputs
from examples.smollm2.jax_model import JaxStep
from examples.smollm2.torch_model import TorchStep
from interop import Bucket, RaggedBatch

TEXTS = (
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
)


@pytest.fixture(scope="module")
def expected(model):
    """Token ids of the texts and the reference's logits ``[tokens, vocab]`` for each."""
    config = model.config
    with torch.device("meta"):
        reference = LlamaForCausalLM(
            ReferenceConfig(
                vocab_size=config.vocab_size,
                hidden_size=config.hidden_size,
                intermediate_size=config.intermediate_size,
                num_hidden_layers=config.num_layers,
                num_attention_heads=config.num_qo_heads,
                num_key_value_heads=config.num_kv_heads,
                head_dim=config.head_dim,
                rms_norm_eps=config.rms_norm_eps,
                max_position_embeddings=config.max_positions,
                rope_parameters={"rope_type": "default", "rope_theta": config.rope_theta},
                tie_word_embeddings=True,
            )
        )
    reference.load_state_dict(_state_dict(model), assign=True)
    # Buffers are no part of the state; made on the meta device above, they need making again.
    reference.model.rotary_emb = type(reference.model.rotary_emb)(reference.config)
    ids = [model.tokenizer.encode(text) for text in TEXTS]
    with torch.inference_mode():
        logits = [reference(torch.tensor([row])).logits[0].numpy() for row in ids]
    return ids, logits


def _state_dict(model):
    """The weights under transformers' names, as views."""
    weights = model.weights.map(torch.from_numpy)
    state = {
        "model.embed_tokens.weight": weights.embedding,
        "lm_head.weight": weights.embedding,
        "model.norm.weight": weights.final_norm,
    }
    query_end, key_end = model.config.qkv_rows
    for layer in range(model.config.num_layers):
        own = {name: stacked[layer] for name, stacked in weights.layers._asdict().items()}
        gate, up = own["gate_up"].chunk(2)
        names = {
            "self_attn.q_proj": own["qkv"][:query_end],
            "self_attn.k_proj": own["qkv"][query_end:key_end],
            "self_attn.v_proj": own["qkv"][key_end:],
            "self_attn.o_proj": own["attention_output"],
            "mlp.gate_proj": gate,
            "mlp.up_proj": up,
            "mlp.down_proj": own["down"],
            "input_layernorm": own["attention_norm"],
            "post_attention_layernorm": own["mlp_norm"],
        }
        state |= {f"model.layers.{layer}.{name}.weight": part for name, part in names.items()}
    return state


@pytest.mark.parametrize("side", [TorchStep, JaxStep])
def test_logits_of_a_chunked_ragged_batch(model, expected, side):
    ids, logits = expected
    step = side(model.config, model.weights, model.spec, model.new_cache(num_pages=8))
    page_table = np.array([[5, 2], [7, 0]])
    # Two steps: the first brings all tokens but the last 3 of each text, the second the rest.
    cuts = [len(row) - 3 for row in ids]
    for starts, ends in (([0, 0], cuts), (cuts, [len(row) for row in ids])):
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        num_tokens = sum(lens)
        inputs = StepInputs(
            token_ids=_padded([row[s:e] for row, s, e in zip(ids, starts, ends, strict=True)]),
            positions=_padded([range(s, e) for s, e in zip(starts, ends, strict=True)]),
            logit_rows=np.arange(32, dtype=np.int32),
            batch=RaggedBatch(lens, ends, page_table),
            bucket=Bucket(num_requests=32, num_tokens=32, num_pages=8),
        )
        found = step(inputs)[:num_tokens]
        wanted = [part[s:e] for part, s, e in zip(logits, starts, ends, strict=True)]
        assert_allclose(found, np.concatenate(wanted), rtol=0, atol=1e-3)


def _padded(rows):
    joined = np.concatenate([np.asarray(row, dtype=np.int32) for row in rows])
    return np.pad(joined, (0, 32 - joined.size))
