"""Writing pages, and decoding from pages of 8 bits, on a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import torch

import jax_frontend
import torch_backend
from interop import AttentionPlan, RaggedBatch
from torch_backend import PagedKVCache

from .gpu_steps import (
    DTYPE,
    FRONT_ENDS,
    GraphStep,
    layers_for,
    new_cache,
    random_query,
    release,
    time_jax,
    time_torch,
    to_jax_query,
)
from .recording import Run
from .timing import Timing
from .workload import PAGE_SIZE, SPEC, decode_shape, kv_bytes, make_batch, pages_for

__all__ = ["append", "quantised"]

# An 8-bit or 4-bit cache does not say what the model computes in.
MODEL = replace(SPEC, dtype="bfloat16")
WIDTHS = SPEC.num_kv_heads * (SPEC.head_dim + SPEC.head_dim_v)
FORMATS = ("bfloat16", "float8_e4m3fn", "nvfp4")
SCALES = (0.02, 0.03)
# What one token and layer takes in each format, in bytes.
STORED = {"bfloat16": 2.0, "float8_e4m3fn": 1.0, "nvfp4": 0.5 + 1 / 16}
JAX_LAYERS = 32


def append(run: Run) -> None:
    """Time of writing a step's rows, against copying as many bytes from one tensor to another."""
    for tokens in (32, 8192):
        requests = min(tokens, 32)
        batch = make_batch([tokens // requests] * requests, [tokens // requests] * requests)
        layers = 32 if tokens == 32 else layers_for(4 * tokens * WIDTHS)
        shape = {"tokens": tokens, "layers": layers}
        with run.attempt("copy", shape):
            _add_rate(run, "copy", shape, _copy(run, tokens, layers), 4.0)
        for dtype in FORMATS:
            case = f"append, {dtype}, PyTorch graph"
            with run.attempt(case, shape):
                cache = _cache_for(batch, layers, dtype)
                timing = _append_torch(run, cache, batch, layers)
                _add_rate(run, case, shape, timing, 2.0 + STORED[dtype])
        if tokens == 32:
            for dtype in FORMATS[:2]:
                _append_jax(run, batch, dtype, shape)


def _cache_for(batch: RaggedBatch, layers: int, dtype: str) -> PagedKVCache:
    scales = SCALES if dtype != "bfloat16" else None
    return new_cache(layers, pages_for(batch.kv_lens.tolist()), dtype, scales)


def _add_rate(
    run: Run, case: str, shape: dict[str, Any], timing: Timing, bytes_an_element: float
) -> None:
    layers, size = shape["layers"], shape["tokens"] * WIDTHS * bytes_an_element
    rate = size * layers / timing.median
    run.add(case, shape, timing.scaled(1e6 / layers), "us/layer", gb_per_s=rate * 1e-9)


def _rows(tokens: int, layers: int) -> list[torch.Tensor]:
    shape = (tokens, SPEC.num_kv_heads, SPEC.head_dim)
    return [torch.randn(shape, dtype=DTYPE, device="cuda") for _ in range(layers)]


def _copy(run: Run, tokens: int, layers: int) -> Timing:
    """Copy keys and values of all layers, each to memory of its own."""
    rows = _rows(tokens, 2 * layers)
    copies = [torch.empty_like(each) for each in rows]

    def body() -> None:
        for source, target in zip(rows, copies, strict=True):
            target.copy_(source)

    return time_torch(run, GraphStep(body))


def _append_torch(run: Run, cache: PagedKVCache, batch: RaggedBatch, layers: int) -> Timing:
    plan = torch_backend.plan(MODEL, cache.spec, batch, device=cache.device)
    keys, values = _rows(batch.num_tokens, layers), _rows(batch.num_tokens, layers)

    def body() -> None:
        for layer in range(layers):
            torch_backend.append(keys[layer], values[layer], cache, plan, layer)

    return time_torch(run, GraphStep(body))


def _append_jax(run: Run, batch: RaggedBatch, dtype: str, shape: dict[str, Any]) -> None:
    """Writes of all layers in a jitted step; rows are the program's own, as a model's are."""
    layers = shape["layers"]
    rows = to_jax_query(random_query(batch.num_tokens))

    def step(x: jax.Array, kv: Any, plan: AttentionPlan[jax.Array]) -> Any:
        key = x[:, : SPEC.num_kv_heads] * 2
        for layer in range(layers):
            kv = jax_frontend.append(key, key, kv, plan, layer)
        return kv

    program = jax.jit(step, donate_argnums=1)
    cache = _cache_for(batch, layers, dtype)
    scales = SCALES if dtype != "bfloat16" else None
    for kind in ("torch owns", "JAX owns"):
        case = f"append, {dtype}, JAX unrolled, {kind} the cache"
        with run.attempt(case, shape):
            kv: Any = jax_frontend.cache_handle(cache)
            if kind == "JAX owns":
                release(kv)
                kv = jax_frontend.init_cache(
                    SPEC,
                    num_layers=layers,
                    num_pages=cache.spec.num_pages,
                    page_size=PAGE_SIZE,
                    dtype=dtype,
                    scales=scales,
                )
            plan = jax_frontend.plan(MODEL, kv.spec, batch)
            state = [kv]

            def one(state: list[Any] = state, plan: Any = plan) -> Any:
                state[0] = program(rows, state[0], plan)
                return state[0]

            _add_rate(run, case, shape, time_jax(run, one), 2.0 + STORED[dtype])
            if kind == "torch owns":
                jax.block_until_ready(state[0])


def quantised(run: Run) -> None:
    """Decode from a cache of 8 bits against one of 16, by every kernel that can read it."""
    for requests, context in ((32, 1024), (128, 2048)):
        lengths = [context] * requests
        layers = layers_for(kv_bytes(lengths) // 2)
        shape = decode_shape(requests, context, layers=layers)
        batch = make_batch([1] * requests, lengths)
        query = random_query(requests)
        per_head = torch.full((layers, 2, SPEC.num_kv_heads), 0.02)
        per_head[:, :, 0] = 0.03
        settings: tuple[tuple[str, str, object, dict[str, Any]], ...] = (
            ("bf16", "bfloat16", None, {}),
            ("fp8", "float8_e4m3fn", SCALES, {"return_lse": False}),
            ("fp8, scales per head", "float8_e4m3fn", per_head, {"return_lse": False}),
            ("fp8, with LSE", "float8_e4m3fn", SCALES, {}),
        )
        for name, dtype, scales, options in settings:
            cache = new_cache(layers, pages_for(lengths), dtype, scales)
            for front_end, measure in FRONT_ENDS.items():
                case = f"{name}, {front_end}"
                with run.attempt(case, shape):
                    timing, family = measure(run, MODEL, cache, batch, query, layers, **options)
                    per_layer = timing.scaled(1e6 / layers)
                    run.add(case, shape, per_layer, "us/layer", family=family)
            del cache
            torch.cuda.empty_cache()
