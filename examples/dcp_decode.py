"""The demo's model with its context spread over four ranks, in JAX and in PyTorch.

Decode context parallelism: every rank holds each fourth token of the cache and a quarter of the
query heads. JAX runs on four virtual CPU devices of one process, PyTorch in four processes; both
have to choose the tokens that one device with the whole cache chooses.

Run it with ``python -m examples.dcp_decode``.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

from examples.engine import Engine, Request, StepInputs
from examples.smollm2 import (
    ChatTokenizer,
    LlamaConfig,
    find_gguf,
    load_weights,
    open_gguf,
)
from interop import AttentionSpec
from torch_backend import PagedKVCache

RANKS = 4
PROMPTS = ("What is the capital of France?", "Name three fruits.")
PAGE_SIZE, PAGES = 4, 24


class Setup:
    """The model, and attention whose query heads four ranks can share.

    SmolLM2 has 3 query heads for each of 3 key/value heads. One head of zeros more for each makes
    12 of them; what it attends to is dropped again.
    """

    def __init__(self) -> None:
        path = find_gguf()
        reader = open_gguf(path)
        self.config = LlamaConfig.from_gguf(reader)
        self.weights = load_weights(path)
        self.tokenizer = ChatTokenizer(reader)
        config = self.config
        self.spec = AttentionSpec(config.num_qo_heads, config.num_kv_heads, config.head_dim)
        self.groups = (config.num_kv_heads, config.num_qo_heads // config.num_kv_heads)
        self.padded = replace(self.spec, num_qo_heads=config.num_kv_heads * (self.groups[1] + 1))
        self.local_heads = self.padded.num_qo_heads // RANKS

    def new_cache(self, spec: AttentionSpec, pages: int, page_size: int) -> PagedKVCache:
        """A cache for all layers."""
        layers = self.config.num_layers
        return PagedKVCache(
            spec, num_layers=layers, num_pages=pages, page_size=page_size, dtype="float32"
        )

    def serve(self, step: Callable[[StepInputs], Any], page_size: int, tokens: int) -> list[Any]:
        """Greedy tokens for each prompt; ranks that all call this all do the same."""
        shape = self.new_cache(self.spec, PAGES, 1).spec
        engine = Engine(
            step,
            replace(shape, page_size=page_size),
            max_requests=2,
            token_budget=32,
            stop_token=self.tokenizer.end_of_turn,
        )
        requests: list[Request] = [
            engine.add(self.tokenizer.encode_chat(text), tokens) for text in PROMPTS
        ]
        engine.run()
        return [request.generated for request in requests]


def one_device(setup: Setup, tokens: int) -> list[Any]:
    """The whole cache on one device, from PyTorch."""
    from examples.smollm2.torch_model import TorchStep

    cache = setup.new_cache(setup.spec, PAGES, PAGE_SIZE * RANKS)
    step = TorchStep(setup.config, setup.weights, setup.spec, cache)
    return setup.serve(step, PAGE_SIZE * RANKS, tokens)


def jax_ranks(setup: Setup, tokens: int) -> list[Any]:
    """Four devices of this process, one program."""
    # JAX makes its devices once, and reads this when it does.
    count = "--xla_force_host_platform_device_count"
    flags = os.environ.get("XLA_FLAGS", "")
    if count not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} {count}={RANKS}"
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
    caches = [setup.new_cache(setup.padded, PAGES, PAGE_SIZE) for _ in range(RANKS)]
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

    def step(weights: Any, ids: Any, positions: Any, logit_rows: Any, kv: Any, plan: Any) -> Any:
        return forward(setup.config, weights, ids, positions, logit_rows, kv, plan, attention)

    specs = (everywhere, everywhere, everywhere, everywhere, split, split)
    program = jax.jit(
        jax.shard_map(
            step, mesh=mesh, in_specs=specs, out_specs=(everywhere, split), check_vma=False
        )
    )

    def run(inputs: StepInputs) -> Any:
        nonlocal kv
        plan = dcp.plan(setup.padded, kv.spec, inputs.batch, mesh, "dcp", bucket=inputs.bucket)
        rows = (inputs.token_ids, inputs.positions, inputs.logit_rows)
        logits, kv = program(weights, *rows, kv, plan)
        return np.asarray(logits)

    try:
        return setup.serve(run, PAGE_SIZE * RANKS, tokens)
    finally:
        jax_frontend.release_cache(kv.name)


def torch_rank(rank: int, store: str, tokens: int) -> None:
    """One of four processes; the first one prints the tokens."""
    import torch
    import torch.distributed as dist

    from examples.smollm2.torch_model import forward
    from torch_backend import collectives, dcp

    torch.set_num_threads(1)
    setup = Setup()
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, RANKS),
        rank=rank,
        world_size=RANKS,
        timeout=timedelta(seconds=60),
    )
    group = dist.group.WORLD
    cache = setup.new_cache(setup.padded, PAGES, PAGE_SIZE)
    weights = setup.weights.map(torch.from_numpy)

    def attention(query: Any, key: Any, value: Any, cache: Any, plan: Any, layer: int) -> Any:
        groups = query.unflatten(1, setup.groups)
        every = torch.nn.functional.pad(groups, (0, 0, 0, 1)).flatten(1, 2)
        first = rank * setup.local_heads
        own = every[:, first : first + setup.local_heads].contiguous()
        out = dcp.paged_attention(own, key.contiguous(), value, cache, plan, layer, group)
        whole = collectives.all_gather(out, group).transpose(0, 1).flatten(1, 2)
        return whole.unflatten(1, (setup.groups[0], -1))[:, :, :-1].flatten(1, 2)

    @torch.inference_mode()
    def run(inputs: StepInputs) -> Any:
        plan = dcp.plan(setup.padded, cache.spec, inputs.batch, group, bucket=inputs.bucket)
        rows = (inputs.token_ids, inputs.positions, inputs.logit_rows)
        tensors = map(torch.from_numpy, rows)
        return forward(setup.config, weights, *tensors, cache, plan, attention).numpy()

    found = setup.serve(run, PAGE_SIZE * RANKS, tokens)
    if rank == 0:
        print(json.dumps(found))
    dist.destroy_process_group()


def torch_ranks(tokens: int) -> list[Any]:
    """Four processes of this example."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "examples.dcp_decode", "--max-new-tokens", str(tokens)]
        command += ["--store", str(Path(folder, "store")), "--rank"]
        ranks = [
            subprocess.Popen([*command, str(rank)], stdout=subprocess.PIPE, text=True)
            for rank in range(RANKS)
        ]
        try:
            said = [rank.communicate(timeout=300)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank failed; its message is above")
    return list(json.loads(said[0]))


def main(argv: Sequence[str] | None = None) -> int:
    """Run all three ways and compare; returns how many differ from one device."""
    parser = argparse.ArgumentParser(prog="python -m examples.dcp_decode", description=__doc__)
    parser.add_argument("--max-new-tokens", type=int, default=12)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--store", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    tokens: int = arguments.max_new_tokens
    if arguments.rank is not None:
        torch_rank(arguments.rank, arguments.store, tokens)
        return 0
    setup = Setup()
    want = one_device(setup, tokens)
    for text, answer in zip(PROMPTS, want, strict=True):
        print(f"{text} {setup.tokenizer.decode(answer)!r}")
    found = {
        f"JAX, {RANKS} devices": jax_ranks(setup, tokens),
        f"PyTorch, {RANKS} processes": torch_ranks(tokens),
    }
    for name, answers in found.items():
        print(f"{name}: {'the same tokens' if answers == want else f'other tokens: {answers}'}")
    return sum(answers != want for answers in found.values())


if __name__ == "__main__":
    raise SystemExit(main())
