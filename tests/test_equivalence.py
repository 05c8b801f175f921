"""Three ways to the same answer: the oracle, the PyTorch core and the JAX front end.

Each test body runs on every `Target`: the reference family on the CPU and on a GPU, and each
compiled module there. Problems are drawn at random from what the target computes; how, and what
makes them hard, is in strategies.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import hypothesis.strategies as st
import jax
import numpy as np
import oracle
import pytest
from families import FA2, VARIANTS, need, only
from hypothesis import given, settings
from problem import (
    NUMPY_DTYPES,
    Array,
    CacheKind,
    Call,
    Problem,
    appended_pools,
    assert_close,
    assert_identical,
    assert_same_pools,
    assert_within,
    bits,
    from_torch,
    run_jax,
    run_torch,
    to_torch,
    tolerance_of,
)
from strategies import REFERENCE, Space, paged_problems, ragged_problems, seeds

import jax_frontend
import torch_backend
from torch_backend.kernels import reference
from torch_backend.kernels.flashinfer_abi import ModuleKey

CALLS = st.sampled_from(get_args(Call))

calls = pytest.mark.parametrize("call", get_args(Call))
cache_kinds = pytest.mark.parametrize("kind", get_args(CacheKind))
dtypes = pytest.mark.parametrize("dtype", NUMPY_DTYPES)


@dataclass(frozen=True)
class Target:
    """A device, and what computes there: a compiled module, or the reference family."""

    device: str
    key: ModuleKey | None = None
    family: str = ""
    """The kernel family, where it is not the module's own or the reference."""

    def __str__(self) -> str:
        what = [self.device, str(self.key or "reference"), self.family]
        return " ".join(filter(None, what))

    @property
    def space(self) -> Space:
        """Problems that the target computes."""
        if self.family:
            # Both launches count from a request's end, so windows are refused.
            drafts = (self.family == "fa2_drafts",)
            return replace(self._space, sliding_windows=(None,), draft_masks=drafts)
        return self._space

    @property
    def _space(self) -> Space:
        if self.key is None:
            return REFERENCE
        return Space(
            head_dims=((self.key.head_dim, self.key.head_dim),),
            dtypes=(self.key.dtype,),
            sliding_windows=(1, 2, 7, 33, 1000) if self.key.window else (None,),
            soft_caps=(3.0, 30.0) if self.key.soft_cap else (None,),
            # The hardware's tanh has a relative error, so logits must not be large.
            sm_scales=(None, 0.11) if self.key.soft_cap else REFERENCE.sm_scales,
            draft_masks=REFERENCE.draft_masks if self.key.backend == "fa2" else (False,),
        )

    def paged(self) -> st.SearchStrategy[Problem]:
        """Problems over pages; a kernel is not launched where there are no rows."""
        problems = paged_problems(self.space)
        if self.family:
            problems = problems.filter(lambda it: not _reads_own_rows(it))
        return problems if self.key is None else problems.filter(lambda it: len(it.query) > 0)

    def ragged(self) -> st.SearchStrategy[Problem]:
        """Problems without a cache; FA3 needs rows of keys as well."""
        problems = ragged_problems(self.space)
        if self.key is None:
            return problems
        return problems.filter(lambda it: len(it.query) > 0 and len(it.key) > 0)

    def check(
        self, body: Callable[..., None], *drawn: st.SearchStrategy[Any], share: int = 1
    ) -> None:
        """Call `body` with a share of as many draws as the profile says, and fewer on a GPU."""
        if self.key is not None:
            need(self.key)
        count = settings().max_examples // share
        if self.device == "cuda":
            # A small problem is no faster there, and under jit each is compiled.
            count = settings().max_examples // (5 if share == 1 else 25)
        with only(self.family or ("reference" if self.key is None else self.key.backend)):
            settings(max_examples=max(1, count))(given(*drawn)(body))()


def _reads_own_rows(problem: Problem) -> bool:
    """Whether a call with keys and values attends to these and not to pages."""
    if problem.bucket is not None:
        return problem.bucket.without_context
    return problem.batch.without_context and problem.draft_masks is None


PLAIN_FA2 = [key for key in FA2 if not key.window]

# Under jit every new shape is compiled, which takes longer than all the rest.
JITTED = 4


def _on(device: str, *keys: ModuleKey | None, family: str = "") -> list[Any]:
    marks = [pytest.mark.gpu] if device == "cuda" else []
    return [pytest.param(Target(device, key, family), marks=marks) for key in keys]


on_devices = pytest.mark.parametrize("target", _on("cpu", None) + _on("cuda", None), ids=str)
ALL = _on("cpu", None) + _on("cuda", None, *VARIANTS)
on_all = pytest.mark.parametrize("target", ALL, ids=str)
# Those that read pages alone.
TWO_LEVELS = [
    target
    for family in ("cascade", "fa2_drafts")
    for target in _on("cpu", None, family=family) + _on("cuda", *PLAIN_FA2, family=family)
]
over_pages = pytest.mark.parametrize("target", ALL + TWO_LEVELS, ids=str)


@calls
@over_pages
def test_torch_over_pages(target: Target, call: Call) -> None:
    def body(problem: Problem) -> None:
        assert_close(run_torch(problem, target.device, call), problem, target.key)

    target.check(body, target.paged())


@on_all
def test_torch_without_cache(target: Target) -> None:
    def body(problem: Problem) -> None:
        assert_close(run_torch(problem, target.device), problem, target.key)

    target.check(body, target.ragged())


@cache_kinds
@over_pages
def test_jax_over_pages(target: Target, kind: CacheKind) -> None:
    def body(problem: Problem, call: Call, traced_layer: bool) -> None:
        got = run_jax(problem, target.device, kind, call, traced_layer=traced_layer)
        assert_close(got, problem, target.key)
        assert_identical(got, run_torch(problem, target.device, call))

    target.check(body, target.paged(), CALLS, st.booleans(), share=JITTED // len(get_args(Call)))


@on_all
def test_jax_without_cache(target: Target) -> None:
    def body(problem: Problem) -> None:
        got = run_jax(problem, target.device)
        assert_close(got, problem, target.key)
        assert_identical(got, run_torch(problem, target.device))

    target.check(body, target.ragged(), share=JITTED)


@given(problem=paged_problems())
def test_reference_in_many_blocks(problem: Problem) -> None:
    """Problems of this size fit one block of the reference's, so make its blocks tiny."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "BLOCK_ELEMENTS", 256)
        patch.setattr(reference, "LOGIT_ELEMENTS", 64)
        assert_close(run_torch(problem, "cpu"), problem)


def with_any_bits(problem: Problem, seed: int) -> Problem:
    """The problem with new keys and values of random bits: NaNs, denormals, -0, all there is."""
    rng = np.random.default_rng(seed)

    def scramble(rows: Array) -> Array:
        low, high = np.iinfo(bits(rows).dtype).min, np.iinfo(bits(rows).dtype).max
        random = rng.integers(low, high, rows.shape, dtype=bits(rows).dtype, endpoint=True)
        scrambled: Array = random.view(rows.dtype)
        return scrambled

    return replace(problem, key=scramble(problem.key), value=scramble(problem.value))


@on_devices
def test_torch_appends_the_very_bytes(target: Target) -> None:
    def body(problem: Problem, seed: int) -> None:
        problem = with_any_bits(problem, seed)
        assert_same_pools(run_torch(problem, target.device), *appended_pools(problem))

    target.check(body, target.paged(), seeds)


@cache_kinds
@on_devices
def test_jax_appends_the_very_bytes(target: Target, kind: CacheKind) -> None:
    def body(problem: Problem, seed: int) -> None:
        problem = with_any_bits(problem, seed)
        assert_same_pools(run_jax(problem, target.device, kind), *appended_pools(problem))

    target.check(body, target.paged(), seeds, share=JITTED)


def merge_operands(dtype: str) -> list[Array]:
    """Outputs and LSEs of two sides: every pair of LSEs that is special, and many that are not."""
    rng = np.random.default_rng(0)
    special = np.array([-np.inf, np.inf, 0.0, 50.0, -90.0, 700.0], np.float32)
    lse_a, lse_b = (x.ravel() for x in np.meshgrid(special, special))
    lse_a = np.concatenate([lse_a, 5 * rng.standard_normal(64)]).astype(np.float32)
    lse_b = np.concatenate([lse_b, 5 * rng.standard_normal(64)]).astype(np.float32)
    operands: list[Array] = []
    for lse in (lse_a.reshape(-1, 2), lse_b.reshape(-1, 2)):
        out = rng.standard_normal((*lse.shape, 24))
        # A side without keys should have output 0, but not every kernel writes it.
        out[~np.isfinite(lse)] = np.nan
        operands += [out.astype(NUMPY_DTYPES[dtype]), lse]
    return operands


def check_merged(out: Array, lse: Array, operands: list[Array], dtype: str) -> None:
    want_out, want_lse = oracle.merge_states(*operands)
    assert out.dtype == NUMPY_DTYPES[dtype]
    assert lse.dtype == np.float32
    assert_within("out", out, want_out, tolerance_of(dtype).out)
    assert_within("lse", lse, want_lse, tolerance_of(dtype).lse)
    assert not out[np.isneginf(want_lse)].any()


@dtypes
def test_torch_merges_states(device: str, dtype: str) -> None:
    operands = merge_operands(dtype)
    out, lse = torch_backend.merge_states(*(to_torch(x, device) for x in operands))
    check_merged(from_torch(out), from_torch(lse), operands, dtype)


@dtypes
def test_jax_merges_states(jax_device: str, dtype: str) -> None:
    operands = merge_operands(dtype)
    target = jax.devices(jax_device)[0]
    merge: Any = jax.jit(jax_frontend.merge_states)
    out, lse = merge(*(jax.device_put(x, target) for x in operands))
    check_merged(np.asarray(out), np.asarray(lse), operands, dtype)


@dtypes
def test_attention_in_two_parts_merges_to_the_whole(device: str, dtype: str) -> None:
    """The LSE that attention returns is the one that `merge_states` takes."""
    rng = np.random.default_rng(1)
    query, key, value = (
        rng.standard_normal(shape).astype(NUMPY_DTYPES[dtype])
        for shape in ((3, 6, 32), (40, 2, 32), (40, 2, 16))
    )
    features = {"causal": False, "logits_soft_cap": 3.0}
    whole = Problem(dtype, features, [3], [40], query, key, value)
    states = []
    for part in (slice(0, 7), slice(7, 40)):
        some = replace(whole, key=key[part], value=value[part], kv_lens=[part.stop - part.start])
        with only("reference"):
            answer = run_torch(some, device)
        states += [to_torch(answer.out, device), to_torch(answer.lse, device)]
    out, lse = (from_torch(x) for x in torch_backend.merge_states(*states))
    want_out, want_lse = oracle.ragged_attention(query, key, value, [3], [40], **features)
    assert_within("out", out, want_out, 2 * tolerance_of(dtype).out)  # rounded twice
    assert_within("lse", lse, want_lse, tolerance_of(dtype).lse)
