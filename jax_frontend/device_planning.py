"""Plans made inside a compiled program, from lengths that only the device knows."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from jax import lax

from interop.attributes import Call
from interop.batch import Bucket
from interop.device_metadata import DeviceShape, metadata_of
from interop.device_status import check_arrays
from interop.errors import FrameworkError
from interop.ffi import foreign_call
from interop.plan import AttentionPlan, PlanStatic
from interop.spec import AttentionSpec, CacheSpec
from torch_backend.device_planning import check_kind, device_static, planning_launch
from torch_backend.dispatch import device_facts

__all__ = ["plan_on_device"]


class _JaxArithmetic:
    """`interop.device_arithmetic.Arithmetic` of JAX."""

    @property
    def xp(self) -> Any:
        """See `Arithmetic.xp`."""
        return jnp

    def running_sum(self, x: jax.Array) -> jax.Array:
        """See `Arithmetic.running_sum`."""
        return lax.cumsum(x)

    def running_max(self, x: jax.Array) -> jax.Array:
        """See `Arithmetic.running_max`."""
        return lax.cummax(x)

    def owners(self, ends: jax.Array, count: int) -> jax.Array:
        """See `Arithmetic.owners`."""
        return jnp.searchsorted(ends, jnp.arange(count, dtype=jnp.int32), side="right")

    def quotient(self, x: jax.Array, y: jax.Array | int) -> jax.Array:
        """See `Arithmetic.quotient`; ``//`` would look at signs."""
        x, y = jnp.broadcast_arrays(x, jnp.asarray(y, jnp.int32))
        return lax.div(x, y)

    def take(self, x: jax.Array, index: jax.Array) -> jax.Array:
        """See `Arithmetic.take`."""
        return x.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)

    def wide(self) -> AbstractContextManager[Any]:
        """See `Arithmetic.wide`."""
        return jax.enable_x64(True)

    def float64(self, x: jax.Array) -> jax.Array:
        """See `Arithmetic.float64`."""
        return lax.convert_element_type(x, np.dtype(np.float64))


_ARITHMETIC = _JaxArithmetic()


def plan_on_device(
    spec: AttentionSpec,
    cache_spec: CacheSpec,
    kv_lens: jax.Array,
    cu_q_lens: jax.Array,
    page_table: jax.Array,
    *,
    bucket: Bucket,
    kernel: str | None = None,
    split: bool | None = None,
    return_lse: bool = True,
    batch_invariant: bool = False,
) -> tuple[AttentionPlan[jax.Array], jax.Array]:
    """Plan one step's attention inside ``jax.jit``, from lengths that are arrays of the program.

    Loops (``lax.scan``, ``lax.while_loop``) and ``jax.shard_map`` may call it, too. The static part
    follows from the bucket alone. On the CPU the rest is operations of the program; on a GPU it is
    a custom call that launches four kernels, which XLA records and replays without Python. With it
    a whole decode loop can be one program.

    Parameters
    ----------
    spec, cache_spec, bucket, kernel, split, return_lse, batch_invariant
        As for `torch_backend.plan_on_device`; under ``shard_map`` those of one shard. On a GPU the
        kernel is FA2 for queries of any length.
    kv_lens
        ``[requests]`` int32: tokens of each request, those that this step appends among them. Up to
        ``bucket.num_requests`` of them.
    cu_q_lens
        ``[requests + 1]`` int32: 0, then the running sum of the query lengths.
    page_table
        ``[requests, width]`` int32: the pages of each request in order. What comes after its last
        page is ignored. Two requests must not write to the same slot, which goes unnoticed here.

    Returns
    -------
    AttentionPlan, jax.Array
        A plan, equal to the host plan of the same kernel and variant, and ``[requests]`` int32
        numbers of `PlanStatus`: 0 for requests that are served, else the reason why one is left
        out. A request that is left out is neither read nor written; the others are served.

    Raises
    ------
    FrameworkError, DTypeError, ShapeError
        At trace time, for arrays of another kind, element type or shape.
    ArgumentError, PlanError, UnsupportedError
        At trace time, as `torch_backend.plan_on_device` does.
    """
    arrays = {"kv_lens": kv_lens, "cu_q_lens": cu_q_lens, "page_table": page_table}
    for name, array in arrays.items():
        if not isinstance(array, jax.Array):
            raise FrameworkError(
                name,
                given=f"{type(array).__module__}.{type(array).__name__}",
                wanted="a jax.Array",
                remedy="For lengths on the host make a RaggedBatch and call plan.",
            )
    check_kind("bucket", bucket, Bucket)
    check_kind("cache_spec", cache_spec, CacheSpec)
    check_arrays(bucket, kv_lens, cu_q_lens, page_table)
    on_cpu = cache_spec.device == "cpu"
    static, shape = device_static(
        spec,
        cache_spec,
        bucket,
        device_facts(torch.device("cpu") if on_cpu else torch.device("cuda", 0)),
        kernel=kernel,
        split=split,
        return_lse=return_lse,
        batch_invariant=batch_invariant,
    )
    if on_cpu:
        metadata, status = metadata_of(_ARITHMETIC, shape, kv_lens, cu_q_lens, page_table)
    else:
        metadata, status = _planned_by_triton(static, shape, kv_lens, cu_q_lens, page_table)
    return AttentionPlan(static, metadata), status


def _planned_by_triton(
    static: PlanStatic, shape: DeviceShape, *arrays: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Let the core's kernels plan, in a custom call that XLA records.

    XLA's own kernels for the same lines take 17 to 64 microseconds, other ones from compilation to
    compilation; these take 10 to 24.
    """
    if torch.cuda.is_available():
        from torch_backend.triton_planning import warm

        for device in range(torch.cuda.device_count()):
            warm(shape, torch.device("cuda", device))
    results = [
        jax.ShapeDtypeStruct(size, np.dtype(np.int32))
        for size in ((static.layout.words,), arrays[0].shape, (shape.bucket.num_requests + 1,))
    ]
    call = Call(planning_launch(static, shape), "", 0, False)
    own = [_owned(array) for array in arrays]
    metadata, status, _ = foreign_call("isthmus_plan", call, own, results)
    return metadata, status


def _owned(array: jax.Array) -> jax.Array:
    """The same numbers in memory of the program's own, for a recorded call to take.

    A 0 is added that XLA, which looks at whole arrays and not at bits, does not know.
    """
    low = array.reshape(-1)[0] & 1
    return array + lax.shift_right_logical(low, jnp.int32(1))
