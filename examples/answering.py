"""One prompt, answered by a model that is a JAX pytree: what the Flax and Equinox models share."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import TypeAlias

import jax
import numpy as np
import numpy.typing as npt
from jax import Array

import jax_frontend
from examples.engine import Engine, StepInputs
from examples.smollm2 import (
    ChatTokenizer,
    LlamaConfig,
    Weights,
    find_gguf,
    load_weights,
    open_gguf,
)
from interop import AttentionPlan, AttentionSpec
from jax_frontend import CacheHandle
from torch_backend import PagedKVCache

# ``model(token_ids, positions, logit_rows, kv, plan)`` gives logits and the next handle, like
# `forward` of `examples.smollm2.jax_model`.
Model: TypeAlias = Callable[
    [Array, Array, Array, CacheHandle, AttentionPlan[Array]], tuple[Array, CacheHandle]
]
Load: TypeAlias = Callable[[LlamaConfig, Weights[npt.NDArray[np.float32]]], Model]

PAGE_SIZE = 16
# A prompt goes in by chunks of so many tokens.
TOKEN_BUDGET = 64


class ModelStep:
    """One engine step of a model that is a pytree of arrays, such as a Flax or Equinox module.

    Parameters
    ----------
    model : Model
        With its arrays on the CPU.
    cache : PagedKVCache
        On the CPU, owned by torch; JAX carries its handle from step to step.
    """

    def __init__(self, model: Model, spec: AttentionSpec, cache: PagedKVCache) -> None:
        self._model = model
        self._spec = spec
        self._cache_spec = cache.spec
        self._kv = jax_frontend.cache_handle(cache)
        # The model's arrays are on the CPU, and so must the rest be, even where JAX prefers a GPU.
        self._device = jax.devices("cpu")[0]
        # The model is an argument: arrays that the program closed over would be constants in it.
        self._run = jax.jit(type(model).__call__)

    def __call__(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Logits ``[bucket.num_requests, vocab]`` of the rows that ``inputs.logit_rows`` names."""
        plan = jax_frontend.plan(
            self._spec,
            self._cache_spec,
            inputs.batch,
            bucket=inputs.bucket,
            device=self._device,
        )
        rows = (inputs.token_ids, inputs.positions, inputs.logit_rows)
        logits, self._kv = self._run(self._model, *rows, self._kv, plan)
        return np.asarray(logits)


def main(load: Load, argv: Sequence[str] | None = None) -> None:
    """Print the greedy answer of the model that ``load`` makes to the command line's prompt."""
    parser = argparse.ArgumentParser(description="Answer one prompt with SmolLM2-135M-Instruct.")
    parser.add_argument("prompt", nargs="?", default="What is the capital of France?")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="longest answer, in tokens")
    arguments = parser.parse_args(argv)
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {arguments.max_new_tokens}; want 1 or more")

    path = find_gguf()
    reader = open_gguf(path)
    config, tokenizer = LlamaConfig.from_gguf(reader), ChatTokenizer(reader)
    prompt = tokenizer.encode_chat(arguments.prompt)
    spec = AttentionSpec(config.num_qo_heads, config.num_kv_heads, config.head_dim)
    cache = PagedKVCache(
        spec,
        num_layers=config.num_layers,
        num_pages=-(-(len(prompt) + arguments.max_new_tokens) // PAGE_SIZE),
        page_size=PAGE_SIZE,
        dtype="float32",
        device="cpu",
    )
    engine = Engine(
        ModelStep(load(config, load_weights(path)), spec, cache),
        cache.spec,
        max_requests=1,
        token_budget=TOKEN_BUDGET,
        stop_token=tokenizer.end_of_turn,
    )
    request = engine.add(prompt, arguments.max_new_tokens)
    engine.run()
    print(tokenizer.decode(request.generated).strip())
