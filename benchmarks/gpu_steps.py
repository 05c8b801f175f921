"""The steps that GPU benchmarks time, and the device's own limits.

A step runs attention of several layers, each layer's output being the next one's query. Its layers
read more than a card's L2 cache holds, so none is served from it.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch

import jax_frontend
import torch_backend
from interop import AttentionPlan, AttentionSpec, RaggedBatch
from torch_backend import PagedKVCache

from .recording import Run
from .timing import Timing, measure
from .workload import PAGE_SIZE, SPEC, bucket_of

__all__ = [
    "FRONT_ENDS",
    "GraphStep",
    "attend_jax",
    "attend_torch",
    "flashinfer_layers",
    "jax_step",
    "layers_for",
    "new_cache",
    "random_query",
    "read_bandwidth",
    "release",
    "time_jax",
    "time_torch",
    "to_jax_query",
    "torch_layers",
]

# Several times the L2 cache of any card there is.
ROTATED_BYTES = 1 << 30
DTYPE = torch.bfloat16

Handle = jax_frontend.CacheHandle


def new_cache(
    num_layers: int,
    num_pages: int,
    dtype: object = DTYPE,
    scales: object | None = None,
    page_size: int = PAGE_SIZE,
) -> PagedKVCache:
    """Make a cache on the current card, filled with random numbers."""
    cache = PagedKVCache(
        SPEC,
        num_layers=num_layers,
        num_pages=num_pages,
        page_size=page_size,
        dtype=dtype,
        device="cuda",
        scales=scales,
    )
    for layer in range(num_layers):
        for pool in cache.pools(layer):
            if pool.dtype == torch.uint8:
                pool.random_(0, 64)  # small numbers with small scales
            else:
                pool.copy_(torch.randn(pool.shape, dtype=DTYPE, device="cuda"))
    # JAX reads the pool from a stream of its own.
    torch.cuda.synchronize()
    return cache


def release(*handles: jax_frontend.CacheHandle) -> None:
    """Forget caches and give torch's free memory back, for the next benchmark."""
    torch.cuda.synchronize()
    for handle in handles:
        jax_frontend.release_cache(handle.name)
    torch.cuda.empty_cache()


def layers_for(bytes_of_a_layer: int) -> int:
    """Layers that a step needs so that the L2 cache does not serve it; at least 4."""
    return max(4, -(-ROTATED_BYTES // bytes_of_a_layer))


def random_query(tokens: int) -> torch.Tensor:
    """``[tokens, num_qo_heads, head_dim]`` on the card."""
    return torch.randn(tokens, SPEC.num_qo_heads, SPEC.head_dim, dtype=DTYPE, device="cuda")


def to_jax_query(query: torch.Tensor) -> jax.Array:
    """Copy a query to memory that JAX owns."""
    numbers = jnp.asarray(query.float().cpu().numpy(), jnp.bfloat16)
    array: jax.Array = jax.device_put(numbers, jax.devices("gpu")[0])
    return array


def torch_layers(
    query: torch.Tensor,
    cache: PagedKVCache,
    plan: AttentionPlan[torch.Tensor],
    layers: int,
    *,
    write: bool = False,
) -> torch.Tensor:
    """One step from PyTorch; with `write` each layer also writes keys and values into pages."""
    for layer in range(layers):
        if write:
            # Heads of the query stand for what a model would compute as keys and values.
            rows = query[:, : SPEC.num_kv_heads].contiguous()
            out = torch_backend.paged_attention(query, rows, rows, cache, plan, layer)
        else:
            out = torch_backend.attend(query, cache, plan, layer)
        assert isinstance(out, torch.Tensor)
        query = out
    return query


class GraphStep:
    """A step recorded in a CUDA graph.

    Parameters
    ----------
    body
        Launches the step's kernels.
    plan
        The plan that `body` uses, for `load`; its metadata belongs to this step.
    """

    def __init__(
        self, body: Callable[[], Any], plan: AttentionPlan[torch.Tensor] | None = None
    ) -> None:
        self.plan = plan
        # Keeps alive what the recorded kernels read: workspaces, metadata, caches.
        self.body = body
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                body()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        self.graph = torch.cuda.CUDAGraph()
        # JAX's threads may call CUDA meanwhile, which a capture in global mode would not survive.
        with torch.cuda.graph(self.graph, capture_error_mode="thread_local"):
            self.out = body()

    def load(self, plan: AttentionPlan[torch.Tensor]) -> None:
        """Let the next replay use another plan of the same bucket."""
        assert self.plan is not None
        if plan.static != self.plan.static:
            raise RuntimeError("the plan's static part is not that of the recorded step")
        self.plan.metadata.copy_(plan.metadata)

    def __call__(self) -> Any:
        """Replay the step."""
        self.graph.replay()
        return self.out


def jax_step(layers: int, *, scan: int = 0, write: bool = False) -> Callable[..., Any]:
    """One step from JAX, ``step(query, kv, plan)``, the same as `torch_layers`.

    Parameters
    ----------
    layers, write
        As for `torch_layers`.
    scan
        Layers in the body of a ``lax.scan``; 0 for a program without a loop.

    Returns the last layer's output and the cache after the step.
    """

    def one(x: jax.Array, kv: Handle, plan: AttentionPlan[jax.Array], layer: Any) -> Any:
        if not write:
            return jax_frontend.attend(x, kv, plan, layer), kv
        rows = x[:, : SPEC.num_kv_heads]
        return jax_frontend.paged_attention(x, rows, rows, kv, plan, layer)

    def step(query: jax.Array, kv: Handle, plan: AttentionPlan[jax.Array]) -> Any:
        # As in a model, the first query and the last output are not the program's own arguments
        # and results, whose addresses change from step to step.
        x = query * 2
        if scan:
            numbers = jnp.arange(layers, dtype=jnp.int32)
            (x, kv), _ = jax.lax.scan(
                lambda carry, layer: (one(*carry, plan, layer), None),
                (x, kv),
                numbers,
                unroll=min(scan, layers),
            )
        else:
            for layer in range(layers):
                x, kv = one(x, kv, plan, layer)
        return x * 2, kv

    return jax.jit(step)


def flashinfer_layers(
    query: torch.Tensor,
    cache: PagedKVCache,
    batch: RaggedBatch,
    layers: int,
    *,
    split_pages: int | None = None,
) -> Callable[[], torch.Tensor]:
    """One decode step through FlashInfer's own wrapper and planner (FA2 on tensor cores).

    Parameters
    ----------
    split_pages
        Pages of each chunk; FlashInfer's own search when left out.
    """
    flashinfer = importlib.import_module("flashinfer")
    workspace = torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(
        workspace, "NHD", use_tensor_cores=True, backend="fa2"
    )
    pages = batch.pages(PAGE_SIZE)
    indices = batch.page_indices(PAGE_SIZE, cache.spec.num_pages).copy()
    wrapper.plan(
        torch.from_numpy(pages.indptr),
        torch.from_numpy(indices).cuda(),
        torch.from_numpy(pages.last_lens),
        SPEC.num_qo_heads,
        SPEC.num_kv_heads,
        SPEC.head_dim,
        PAGE_SIZE,
        q_data_type=DTYPE,
        kv_data_type=DTYPE,
        sm_scale=SPEC.sm_scale,
        fixed_split_size=split_pages,
    )

    def step() -> torch.Tensor:
        x = query
        for layer in range(layers):
            x = wrapper.run(x, cache.pools(layer))
        return x

    return step


def time_torch(run: Run, step: Callable[[], Any]) -> Timing:
    """Seconds of a step on torch's current stream."""
    return measure(
        step, lambda _: torch.cuda.synchronize(), repeats=run.repeats, seconds=run.seconds
    )


def time_jax(run: Run, step: Callable[[], Any]) -> Timing:
    """Seconds of a step that returns JAX arrays."""
    return measure(step, jax.block_until_ready, repeats=run.repeats, seconds=run.seconds)


def read_bandwidth(run: Run) -> tuple[Timing, str]:
    """Bytes per second that the card reads at best, and by what: the limit of every decode."""
    numbers = torch.zeros((2 << 30) // 4, dtype=torch.float32, device="cuda")
    readers: dict[str, Callable[[], Any]] = {"torch.sum": numbers.sum}
    with run.attempt("device read by Triton"):
        module = importlib.import_module("benchmarks.triton_read")
        readers["Triton"] = module.reader(numbers)
        readers["Triton"]()
    found: dict[str, Timing] = {}
    for name, reader in readers.items():
        seconds = time_torch(run, reader)
        found[name] = Timing(
            numbers.nbytes / seconds.median,
            numbers.nbytes / seconds.high,
            numbers.nbytes / seconds.low,
            seconds.repeats,
            seconds.steps,
        )
    best = max(found, key=lambda name: found[name].median)
    return found[best], best


def attend_torch(
    run: Run,
    spec: AttentionSpec,
    cache: PagedKVCache,
    batch: RaggedBatch,
    query: torch.Tensor,
    layers: int,
    **options: Any,
) -> tuple[Timing, str]:
    """Seconds of `layers` attentions in a CUDA graph, and the family that served.

    `options` are those of `torch_backend.plan`; the bucket is the batch's own sizes.
    """
    options = {"bucket": bucket_of(batch)} | options
    plan = torch_backend.plan(spec, cache.spec, batch, device=cache.device, **options)
    graph = GraphStep(lambda: torch_layers(query, cache, plan, layers), plan)
    return time_torch(run, graph), plan.static.main[0].family


def attend_jax(
    run: Run,
    spec: AttentionSpec,
    cache: PagedKVCache,
    batch: RaggedBatch,
    query: torch.Tensor,
    layers: int,
    **options: Any,
) -> tuple[Timing, str]:
    """As `attend_torch`, in a jitted program."""
    options = {"bucket": bucket_of(batch)} | options
    kv = jax_frontend.cache_handle(cache)
    plan = jax_frontend.plan(spec, cache.spec, batch, **options)

    def step(x: jax.Array, kv: Any, plan: AttentionPlan[jax.Array]) -> jax.Array:
        x = x * 2
        for layer in range(layers):
            x = jax_frontend.attend(x, kv, plan, layer)
        return jnp.asarray(x * 2)

    program: Callable[..., jax.Array] = jax.jit(step)
    rows = to_jax_query(query)
    try:
        return time_jax(run, lambda: program(rows, kv, plan)), plan.static.main[0].family
    finally:
        release(kv)


FRONT_ENDS: dict[str, Callable[..., tuple[Timing, str]]] = {
    "PyTorch graph": attend_torch,
    "JAX unrolled": attend_jax,
}
