"""The demo's model with its context spread over four ranks, in JAX and in PyTorch.

Decode context parallelism: every rank holds each fourth token of the cache and a quarter of the
query heads. JAX runs on four virtual CPU devices of one process, PyTorch in four processes; both
have to choose the tokens that one device with the whole cache chooses.

Run it with ``python -m examples.dcp_decode``.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

from examples.engine import Engine, StepInputs
from examples.smollm2 import ChatTokenizer, LlamaConfig, find_gguf, load_weights, open_gguf
from interop import AttentionSpec
from torch_backend import PagedKVCache

RANKS = 4
PROMPTS = ("What is the capital of France?", "Name three fruits.")
PAGE_SIZE, PAGES = 4, 24
# JAX makes its devices once and reads this when it does; it is imported further down.
FLAG = "--xla_force_host_platform_device_count"
if FLAG not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAG}={RANKS}"

Answers = list[list[int]]


class Setup:
    """The model, and attention whose query heads four ranks can share.

    SmolLM2 has 3 query heads for each of 3 key/value heads. One head of zeros more for each makes
    12 of them; what it attends to is dropped again.
    """

    def __init__(self) -> None:
        path = find_gguf()
        reader = open_gguf(path)
        self.config = config = LlamaConfig.from_gguf(reader)
        self.weights = load_weights(path)
        self.tokenizer = ChatTokenizer(reader)
        self.spec = AttentionSpec(config.num_qo_heads, config.num_kv_heads, config.head_dim)
        self.groups = (config.num_kv_heads, config.num_qo_heads // config.num_kv_heads)
        self.padded = replace(self.spec, num_qo_heads=config.num_kv_heads * (self.groups[1] + 1))
        self.local_heads = self.padded.num_qo_heads // RANKS

    def new_cache(self, spec: AttentionSpec, page_size: int) -> PagedKVCache:
        """A cache for all layers, of one rank or of one device."""
        sizes = {"num_layers": self.config.num_layers, "num_pages": PAGES, "page_size": page_size}
        return PagedKVCache(spec, **sizes, dtype="float32")

    def serve(self, step: Callable[[StepInputs], Any], tokens: int) -> Answers:
        """Greedy tokens for each prompt; ranks that all call this all choose the same."""
        # An entry of the page table stands for a page of every rank.
        pages = self.new_cache(self.spec, PAGE_SIZE * RANKS).spec
        stop = self.tokenizer.end_of_turn
        engine = Engine(step, pages, max_requests=2, token_budget=32, stop_token=stop)
        requests = [engine.add(self.tokenizer.encode_chat(text), tokens) for text in PROMPTS]
        engine.run()
        return [request.generated for request in requests]


def one_device(setup: Setup, tokens: int) -> Answers:
    """The whole cache on one device, from PyTorch."""
    from examples.smollm2.torch_model import TorchStep

    cache = setup.new_cache(setup.spec, PAGE_SIZE * RANKS)
    return setup.serve(TorchStep(setup.config, setup.weights, setup.spec, cache), tokens)


def jax_ranks(setup: Setup, tokens: int) -> Answers:
    """Four devices of this process, one program."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    import torch
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import jax_frontend
    from examples.smollm2.jax_model import forward
    from interop.dlpack import to_jax
    from jax_frontend import dcp

    mesh = Mesh(np.array(jax.devices("cpu")[:RANKS]), ("dcp",))
    split, everywhere = PartitionSpec("dcp"), PartitionSpec()
    caches = [setup.new_cache(setup.padded, PAGE_SIZE) for _ in range(RANKS)]
    kv = jax_frontend.cache_handle(caches, sharding=NamedSharding(mesh, split))
    arrays = setup.weights.map(lambda array: to_jax(torch.from_numpy(array)))
    weights = jax.device_put(arrays, NamedSharding(mesh, everywhere))

    def attention(query: Any, key: Any, value: Any, kv: Any, plan: Any, layer: Any) -> Any:
        rows = query.shape[0]
        groups = query.reshape(rows, *setup.groups, -1)
        every = jnp.pad(groups, ((0, 0), (0, 0), (0, 1), (0, 0))).reshape(rows, -1, key.shape[2])
        first = jax.lax.axis_index("dcp") * setup.local_heads
        own = jax.lax.dynamic_slice_in_dim(every, first, setup.local_heads, axis=1)
        out, kv = dcp.paged_attention(own, key, value, kv, plan, layer, axis_name="dcp")
        out = jax.lax.all_gather(out, "dcp", axis=1, tiled=True)
        out = out.reshape(rows, setup.groups[0], -1, key.shape[2])[:, :, :-1]
        return out.reshape(query.shape), kv

    step = partial(forward, setup.config, attention=attention)
    ins, outs = (*[everywhere] * 4, split, split), (everywhere, split)
    program = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=ins, out_specs=outs, check_vma=False))

    def run(inputs: StepInputs) -> Any:
        nonlocal kv
        plan = dcp.plan(setup.padded, kv.spec, inputs.batch, mesh, "dcp", bucket=inputs.bucket)
        rows = (inputs.token_ids, inputs.positions, inputs.logit_rows)
        logits, kv = program(weights, *rows, kv, plan)
        return np.asarray(logits)

    try:
        return setup.serve(run, tokens)
    finally:
        jax_frontend.release_cache(kv.name)


def torch_rank(rank: int, store: str, tokens: int) -> Answers:
    """What one of four processes does."""
    import torch
    import torch.distributed as dist
    from torch.nn.functional import pad

    from examples.smollm2.torch_model import forward
    from torch_backend import collectives, dcp

    torch.set_num_threads(1)  # ranks share the cores
    setup = Setup()
    meet, wait = dist.FileStore(store, RANKS), timedelta(seconds=60)
    dist.init_process_group("gloo", store=meet, rank=rank, world_size=RANKS, timeout=wait)
    group = dist.group.WORLD
    cache = setup.new_cache(setup.padded, PAGE_SIZE)
    weights = setup.weights.map(torch.from_numpy)

    def attention(query: Any, key: Any, value: Any, cache: Any, plan: Any, layer: int) -> Any:
        every = pad(query.unflatten(1, setup.groups), (0, 0, 0, 1)).flatten(1, 2)
        own = every.chunk(RANKS, dim=1)[rank].contiguous()
        out = dcp.paged_attention(own, key, value, cache, plan, layer, group)
        whole = collectives.all_gather(out, group).transpose(0, 1).flatten(1, 2)
        return whole.unflatten(1, (setup.groups[0], -1))[:, :, :-1].flatten(1, 2)

    @torch.inference_mode()
    def run(inputs: StepInputs) -> Any:
        plan = dcp.plan(setup.padded, cache.spec, inputs.batch, group, bucket=inputs.bucket)
        rows = map(torch.from_numpy, (inputs.token_ids, inputs.positions, inputs.logit_rows))
        return forward(setup.config, weights, *rows, cache, plan, attention).numpy()

    answers = setup.serve(run, tokens)
    dist.destroy_process_group()
    return answers


def torch_ranks(tokens: int) -> Answers:
    """Four processes of this example; the answers of the first one."""
    processes = ProcessPoolExecutor(RANKS, multiprocessing.get_context("spawn"))
    with tempfile.TemporaryDirectory() as folder, processes:
        store = os.path.join(folder, "store")
        ranks = [processes.submit(torch_rank, rank, store, tokens) for rank in range(RANKS)]
        return [rank.result() for rank in ranks][0]  # noqa: RUF015 (all have to end well)


def main(argv: Sequence[str] | None = None) -> int:
    """Run all three ways and compare; returns how many differ from one device."""
    parser = argparse.ArgumentParser(prog="python -m examples.dcp_decode", description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=12)
    tokens: int = parser.parse_args(argv).max_new_tokens
    setup = Setup()
    ways: dict[str, Callable[[], Answers]] = {
        "PyTorch, 1 device": lambda: one_device(setup, tokens),
        f"JAX, {RANKS} devices": lambda: jax_ranks(setup, tokens),
        f"PyTorch, {RANKS} processes": lambda: torch_ranks(tokens),
    }
    found: list[Answers] = []
    print(f"{'':20}  seconds  tokens")
    for name, run in ways.items():
        start = time.perf_counter()
        found.append(run())
        seconds, count = time.perf_counter() - start, sum(map(len, found[-1]))
        same = "as on one device" if found[-1] == found[0] else f"others: {found[-1]}"
        print(f"{name:20} {seconds:8.1f} {count:7}  {same}", flush=True)
    for text, answer in zip(PROMPTS, found[0], strict=True):
        print(f"{text} {setup.tokenizer.decode(answer)!r}")
    return sum(answers != found[0] for answers in found)


if __name__ == "__main__":
    raise SystemExit(main())
