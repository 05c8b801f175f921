"""Whole answers from one compiled program: SmolLM2 decodes without coming back to Python.

The prompts go in as one ragged batch, planned on the host. What follows, all steps of all answers,
is one call of `jax_frontend.generate` inside ``jax.jit``.

Run it with ``python -m examples.device_loop "What is the capital of France?" "Name three fruits."``
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import Array

import jax_frontend
from examples.smollm2 import (
    ChatTokenizer,
    LlamaConfig,
    Weights,
    find_gguf,
    load_weights,
    open_gguf,
)
from examples.smollm2.jax_model import forward
from interop import AttentionPlan, AttentionSpec, RaggedBatch
from interop.dlpack import to_jax
from jax_frontend import CacheHandle, Generated, StopReason
from torch_backend import PageAllocator, PagedKVCache

PAGE_SIZE = 16
PROMPTS = ("What is the capital of France?", "Name three fruits.")


class DeviceLoop:
    """Greedy decoding of a batch in one program.

    Parameters
    ----------
    weights : Weights of JAX arrays, on the device of ``cache`` and of its element type
    cache : PagedKVCache
        Owned by torch; nothing else may be in it.
    max_new_tokens : int
        Longest answer.
    end_tokens : token ids that end an answer
    """

    def __init__(
        self,
        config: LlamaConfig,
        weights: Weights[Array],
        spec: AttentionSpec,
        cache: PagedKVCache,
        *,
        max_new_tokens: int,
        end_tokens: Sequence[int],
    ) -> None:
        self._weights, self._spec, self._cache = weights, spec, cache
        self._device = next(iter(weights.embedding.devices()))
        self._max_new_tokens = max_new_tokens

        @jax.jit
        def prefill(
            weights: Weights[Array],
            token_ids: Array,
            positions: Array,
            kv: CacheHandle,
            plan: AttentionPlan[Array],
        ) -> CacheHandle:
            no_rows = jnp.zeros(0, jnp.int32)
            return forward(config, weights, token_ids, positions, no_rows, kv, plan)[1]

        @jax.jit
        def loop(
            weights: Weights[Array],
            tokens: Array,
            kv: CacheHandle,
            kv_lens: Array,
            page_table: Array,
        ) -> Generated:
            rows = jnp.arange(tokens.size)

            def model(
                token_ids: Array, positions: Array, kv: CacheHandle, plan: AttentionPlan[Array]
            ) -> tuple[Array, CacheHandle]:
                return forward(config, weights, token_ids, positions, rows, kv, plan)

            return jax_frontend.generate(
                model,
                tokens,
                kv,
                kv_lens,
                page_table,
                spec=spec,
                max_new_tokens=max_new_tokens,
                end_tokens=end_tokens,
            )

        self._prefill, self._loop = prefill, loop

    def __call__(self, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], Generated]:
        """The new tokens of each prompt, and what the loop returned.

        Each prompt has 2 tokens or more: all but the last go in first, and the loop begins there.
        """
        spec = self._cache.spec
        allocator = PageAllocator(spec.num_pages, spec.page_size)
        for number, prompt in enumerate(prompts):
            # The last token of an answer is never written.
            allocator.allocate(number, len(prompt) + self._max_new_tokens - 1)
        page_table = allocator.page_table(range(len(prompts)))

        lens = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
        batch = RaggedBatch(lens, lens, page_table)
        plan = jax_frontend.plan(self._spec, spec, batch, device=self._device)
        inputs = (
            np.concatenate([np.array(prompt[:-1], np.int32) for prompt in prompts]),
            np.concatenate([np.arange(count, dtype=np.int32) for count in lens]),
        )
        kv = jax_frontend.cache_handle(self._cache)
        kv = self._prefill(self._weights, *inputs, kv, plan)

        last = np.array([prompt[-1] for prompt in prompts], np.int32)
        made = self._loop(self._weights, last, kv, lens, page_table)
        rows = zip(np.asarray(made.tokens), np.asarray(made.num_tokens), strict=True)
        return [row[:count].tolist() for row, count in rows], made


def main(argv: Sequence[str] | None = None) -> None:
    """Print the answers to the command line's prompts."""
    parser = argparse.ArgumentParser(prog="python -m examples.device_loop", description=__doc__)
    parser.add_argument("prompts", nargs="*", default=PROMPTS, help="user messages to answer")
    parser.add_argument("--max-new-tokens", type=int, default=48, help="longest answer, in tokens")
    arguments = parser.parse_args(argv)
    if arguments.max_new_tokens < 1:
        parser.error(f"--max-new-tokens is {arguments.max_new_tokens}; want 1 or more")

    path = find_gguf()
    reader = open_gguf(path)
    config, tokenizer = LlamaConfig.from_gguf(reader), ChatTokenizer(reader)
    prompts = [tokenizer.encode_chat(text) for text in arguments.prompts]
    spec = AttentionSpec(config.num_qo_heads, config.num_kv_heads, config.head_dim)
    cache = PagedKVCache(
        spec,
        num_layers=config.num_layers,
        num_pages=sum(-(-(len(p) + arguments.max_new_tokens) // PAGE_SIZE) for p in prompts),
        page_size=PAGE_SIZE,
        dtype="float32",
        device="cpu",
    )
    decode = DeviceLoop(
        config,
        load_weights(path).map(lambda array: to_jax(torch.from_numpy(array))),
        spec,
        cache,
        max_new_tokens=arguments.max_new_tokens,
        end_tokens=[tokenizer.end_of_turn],
    )
    answers, made = decode(prompts)
    reasons = np.asarray(made.stop_reason).tolist()
    for text, answer, reason in zip(arguments.prompts, answers, reasons, strict=True):
        print(f"> {text}")
        ended = "" if reason == StopReason.END_OF_TEXT else " ..."
        print(tokenizer.decode(answer).strip() + ended)


if __name__ == "__main__":
    main()
