"""The scheduler, on a toy model that knows its past only through the pages it wrote."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from examples.engine import Engine, top_two
from interop import CacheSpec

VOCAB = 13
STOP = 0
PAGE_SIZE = 4


class ToyStep:
    """The next token is a hash of all tokens of the request, read back from paged memory."""

    def __init__(self, num_pages):
        self.spec = CacheSpec(
            num_layers=1, num_pages=num_pages, page_size=PAGE_SIZE, num_kv_heads=1, head_dim=1
        )
        self.memory = np.full(num_pages * PAGE_SIZE, -1)
        self.batches = []

    def __call__(self, inputs):
        batch, bucket = inputs.batch, inputs.bucket
        assert inputs.token_ids.shape == inputs.positions.shape == (bucket.num_tokens,)
        assert batch.num_tokens <= bucket.num_tokens
        assert batch.num_requests <= bucket.num_requests
        assert -(-batch.kv_lens // PAGE_SIZE).sum() <= bucket.num_pages
        self.batches.append(batch)
        logits = np.zeros((bucket.num_requests, VOCAB), np.float32)
        slots = [self.slots(batch, row) for row in range(batch.num_requests)]
        # All of the step's tokens are written before any is read, as a cache does it: pages that
        # two requests owned at once would show up as a wrong answer.
        for row, own in enumerate(slots):
            begin, end = batch.qo_indptr[row : row + 2]
            first = batch.kv_lens[row] - batch.query_lens[row]
            assert (inputs.positions[begin:end] == np.arange(first, batch.kv_lens[row])).all()
            self.memory[own[first:]] = inputs.token_ids[begin:end]
        for row, own in enumerate(slots):
            if batch.query_lens[row]:
                assert inputs.logit_rows[row] == batch.qo_indptr[row + 1] - 1
                logits[row, toy_next(self.memory[own].tolist())] = 1.0
        return logits

    @staticmethod
    def slots(batch, row):
        position = np.arange(batch.kv_lens[row])
        return batch.page_table[row][position // PAGE_SIZE] * PAGE_SIZE + position % PAGE_SIZE


def toy_next(tokens):
    value = 7
    for token in tokens:
        value = (value * 31 + token + 1) % 10_007
    return value % VOCAB


def toy_answer(prompt, max_new_tokens):
    tokens = list(prompt)
    while len(tokens) < len(prompt) + max_new_tokens:
        tokens.append(toy_next(tokens))
        if tokens[-1] == STOP:
            break
    return tokens[len(prompt) :]


def make_engine(num_pages, max_requests, token_budget):
    step = ToyStep(num_pages)
    engine = Engine(
        step, step.spec, max_requests=max_requests, token_budget=token_budget, stop_token=STOP
    )
    return step, engine


prompts = st.lists(st.lists(st.integers(1, VOCAB - 1), min_size=1, max_size=20), max_size=9)


@settings(max_examples=60)
@given(
    prompts=prompts,
    max_new_tokens=st.integers(1, 12),
    num_pages=st.integers(8, 24),
    max_requests=st.integers(1, 5),
    extra_budget=st.integers(0, 12),
)
def test_any_schedule_gives_the_answers_of_one_at_a_time(
    prompts, max_new_tokens, num_pages, max_requests, extra_budget
):
    # 8 pages of 4 tokens hold the longest request; with several seats that is often too few for
    # all, so requests are put back and computed again.
    step, engine = make_engine(num_pages, max_requests, max_requests + extra_budget)
    requests = [engine.add(prompt, max_new_tokens) for prompt in prompts]
    reports = engine.run()

    assert [r.generated for r in requests] == [toy_answer(p, max_new_tokens) for p in prompts]
    assert all(request.finished for request in requests)
    assert engine.allocator.num_free == num_pages
    assert all(batch.num_tokens <= max_requests + extra_budget for batch in step.batches)
    assert all(batch.num_requests <= max_requests for batch in step.batches)
    tokens = sum(report.num_prefill_tokens + report.num_decode_tokens for report in reports)
    assert tokens >= sum(len(r.prompt) + len(r.generated) - 1 for r in requests)


def test_requests_join_and_leave_while_others_run():
    _, engine = make_engine(num_pages=32, max_requests=2, token_budget=8)
    first = engine.add([1] * 5, 6)
    engine.step()
    late = engine.add([2] * 9, 3)
    report = engine.step()
    # One decode token of the first request, and the largest chunk of the late one that fits.
    assert (report.num_decode_tokens, report.num_prefill_tokens) == (1, 7)
    assert report.num_running == 2
    engine.run()
    assert first.generated == toy_answer([1] * 5, 6)
    assert late.generated == toy_answer([2] * 9, 3)
    assert engine.allocator.num_free == 32


def test_the_newest_request_gives_its_pages_back_when_the_pool_is_dry():
    _, engine = make_engine(num_pages=4, max_requests=2, token_budget=8)
    prompts = [[8, 11, 7, 4, 2, 8, 1], [12, 4, 10, 2, 6, 1, 1]]
    requests = [engine.add(prompt, 8) for prompt in prompts]
    reports = engine.run()
    assert [r.generated for r in requests] == [toy_answer(prompt, 8) for prompt in prompts]
    assert [len(r.generated) for r in requests] == [8, 8]
    # 14 cached tokens each: 8 pages for both, 4 in the pool. Something was computed twice.
    assert sum(r.num_prefill_tokens + r.num_decode_tokens for r in reports) > 2 * 14
    assert engine.allocator.num_free == 4


def test_warm_up_runs_each_bucket_and_writes_nothing():
    step, engine = make_engine(num_pages=4, max_requests=2, token_budget=8)
    assert engine.warm_up() > 0
    assert (step.memory == -1).all()
    assert not engine.busy


def test_what_can_never_be_served_is_refused():
    _, engine = make_engine(num_pages=2, max_requests=1, token_budget=4)
    engine.add([1] * 5, 4)
    with pytest.raises(ValueError, match=r"room for 9 tokens, the whole pool holds 8"):
        engine.add([1] * 5, 5)
    with pytest.raises(ValueError, match="prompt has 0 tokens"):
        engine.add([], 5)
    with pytest.raises(ValueError, match="max_requests is 5 and token_budget 4"):
        make_engine(num_pages=2, max_requests=5, token_budget=4)


def test_top_two():
    best = top_two(np.array([0.5, 3.0, -1.0, 3.0], dtype=np.float32))
    assert best.tokens == (1, 3)
    assert best.logits == (3.0, 3.0)
