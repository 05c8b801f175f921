"""The core's Triton kernels on pools that JAX owns, launched by XLA itself and in place.

`jax_frontend.append` launches the same kernels from a custom call, which XLA records together with
the attention around it. It does not record jax-triton's calls: each cuts a recorded step in two,
and attention between two writes is then launched from Python at every step (measured on one H200,
32 layers at 32 x 1024 with writes: 125 us a layer instead of 50). So `append_arrays` is for
programs that write and do not attend, and for those that have to run where this library's handlers
are not registered.

Importing this module needs no GPU and no jax-triton; calling it does.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any

import jax
import torch

from interop.errors import VersionError
from interop.spec import NVFP4_DTYPES, CacheSpec

__all__ = ["append_arrays"]

# Operands of the kernels that are pools, and the results that lie in the same memory.
POOLS_IN_PLACE = {5: 0, 6: 1}


def append_arrays(
    key: jax.Array,
    value: jax.Array,
    key_pool: jax.Array,
    value_pool: jax.Array,
    slots: jax.Array,
    cache_spec: CacheSpec,
    scale_table: jax.Array | None = None,
    scale_layer: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Write row ``t`` of key and value to slot ``slots[t]``; a slot of -1 writes nothing.

    The same kernels, compiled for the same constants, as `torch_backend.writing.write_rows`
    launches on a GPU, so the bytes are the same.

    Parameters
    ----------
    key, value
        ``[rows, num_kv_heads, head_dim]`` and ``[rows, num_kv_heads, head_dim_v]``, at least as
        many rows as slots.
    key_pool, value_pool
        The whole flat pools, as `cache_spec` says. XLA writes into them where they are donated or
        made by the program, and otherwise into a copy.
    slots
        ``[slots]`` int32, counted from the start of the pools: a layer ``l`` adds
        ``l * num_pages * page_size`` to those that are not -1.
    scale_table, scale_layer
        Of a quantised cache: ``[num_layers, 2, num_kv_heads]`` float32, and ``[1]`` int32.

    Returns
    -------
    (jax.Array, jax.Array)
        The pools after the write.

    Raises
    ------
    VersionError
        Without jax-triton, which the ``cuda`` extra brings.
    """
    triton_call = _triton_call()
    # The slots of a step without rows are one of -1, and its rows are at no address.
    count = min(slots.shape[0], key.shape[0])
    if not count:
        return key_pool, value_pool
    kernel, grid, constants = _kernel(cache_spec, count)
    # A kernel that reads no scales gets any pointer in their place.
    table = slots if scale_table is None else scale_table
    layer = slots if scale_layer is None else scale_layer
    written = triton_call(
        key, value, slots, table, layer, key_pool, value_pool, count,
        kernel=kernel,
        out_shape=[jax.ShapeDtypeStruct(p.shape, p.dtype) for p in (key_pool, value_pool)],
        grid=grid,
        input_output_aliases=POOLS_IN_PLACE,
        **constants,
    )  # fmt: skip
    return written[0], written[1]


def _kernel(spec: CacheSpec, count: int) -> tuple[Any, tuple[int], dict[str, Any]]:
    """Return kernel, grid and constants that write `count` rows into the pools of `spec`."""
    # Here, because a CPU needs no Triton.
    from torch_backend import triton_ops, triton_quantised

    widths = spec.head_dim, spec.head_dim_v
    pages = math.prod(spec.key_shape[1:]), math.prod(spec.value_shape[1:])
    if spec.dtype in NVFP4_DTYPES:
        constants = triton_quantised.nvfp4_constants(
            spec.page_size, spec.num_kv_heads, widths, pages, spec.layout,
            spec.dtype == "nvfp4_4over6",
        )  # fmt: skip
        grid = triton_quantised.nvfp4_grid(count, constants)
        return triton_quantised.append_nvfp4_kernel, grid, constants
    strides = [
        (page, spec.num_kv_heads * width, width)
        if spec.layout == "NHD"
        else (page, width, spec.page_size * width)
        for page, width in zip(pages, widths, strict=True)
    ]
    constants = triton_ops.append_constants(
        spec.page_size, spec.num_kv_heads, widths, *strides, getattr(torch, spec.dtype)
    )
    return triton_ops.append_kernel, triton_ops.append_grid(count, constants), constants


@cache
def _triton_call() -> Callable[..., Any]:
    kept = os.environ.get("TRITON_CACHE_DIR")
    try:
        from jax_triton import triton_call
    except ImportError as error:
        raise VersionError(
            "writing into pools that JAX owns needs jax-triton on a GPU, and it cannot be imported "
            f"here: {error}\nInstall the cuda extra, pip install 'isthmus-attention[cuda]', or use "
            "a torch-owned cache, jax_frontend.cache_handle(cache)."
        ) from error
    finally:
        # jax-triton sets it to nothing, which leaves torch's launches without a place for kernels.
        os.environ.pop("TRITON_CACHE_DIR", None)
        if kept:
            os.environ["TRITON_CACHE_DIR"] = kept
    return triton_call
