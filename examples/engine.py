"""A small continuous-batching scheduler that knows no framework.

Each step serves every running request: one token for those that decode, a chunk of the prompt for
those that do not yet, all in one ragged batch and under one token budget. Requests join as soon as
there is a seat for them, and leave (freeing their pages) as soon as they are done. When the pool
runs dry the newest request gives its pages back and waits to be computed again.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Container, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from interop import Bucket, CacheSpec, RaggedBatch
from interop.errors import OutOfPagesError
from torch_backend import PageAllocator

IntArray = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepInputs:
    """What one step of a model takes; arrays are padded to the bucket's sizes."""

    token_ids: IntArray  # [bucket.num_tokens]
    positions: IntArray  # [bucket.num_tokens]
    logit_rows: IntArray  # [bucket.num_requests], the last token of each request
    batch: RaggedBatch
    bucket: Bucket


class Step(Protocol):
    """A model together with its cache: appends the batch to the cache and returns logits."""

    def __call__(self, inputs: StepInputs) -> npt.NDArray[np.float32]:
        """Float32 logits ``[bucket.num_requests, vocab]`` at ``inputs.logit_rows``."""
        ...


class TopTwo(NamedTuple):
    """The two best next tokens and their logits, best first; equal logits: lower id first."""

    tokens: tuple[int, int]
    logits: tuple[float, float]


@dataclass(eq=False)
class Request:
    """One prompt on its way: what is known of the text and how much of it is in the cache."""

    request_id: int
    prompt: Sequence[int]
    max_new_tokens: int
    choices: list[TopTwo] = field(default_factory=list)
    num_cached: int = 0
    finished: bool = False

    @property
    def generated(self) -> list[int]:
        """The greedy tokens so far, the stop token among them once it came."""
        return [choice.tokens[0] for choice in self.choices]

    @property
    def tokens(self) -> list[int]:
        """Prompt and generated tokens."""
        return [*self.prompt, *self.generated]

    @property
    def num_pending(self) -> int:
        """Known tokens that are not in the cache yet: 1 while decoding, more in prefill."""
        return len(self.prompt) + len(self.choices) - self.num_cached

    @property
    def decodes(self) -> bool:
        """Whether the next token to compute is the one that the model chose last."""
        return bool(self.choices) and self.num_pending == 1


@dataclass(frozen=True)
class StepReport:
    """What one step did."""

    num_prefill_tokens: int
    num_decode_tokens: int
    num_running: int
    seconds: float


class Engine:
    """Serves requests greedily through one `Step`.

    Parameters
    ----------
    step : Step
        The model.
    cache : CacheSpec
        Shape of the cache that ``step`` writes; the engine hands out all its pages.
    max_requests : int
        Seats: how many requests run at once.
    token_budget : int
        Most tokens in one step; longer prompts are cut into chunks. At least ``max_requests``, so
        that decoding never waits.
    stop_token : int
        The token that ends a request.

    Attributes
    ----------
    allocator : PageAllocator
        Who owns which page.
    """

    def __init__(
        self,
        step: Step,
        cache: CacheSpec,
        *,
        max_requests: int,
        token_budget: int,
        stop_token: int,
    ) -> None:
        if not 1 <= max_requests <= token_budget:
            raise ValueError(
                f"max_requests is {max_requests} and token_budget {token_budget}; "
                "want 1 <= max_requests <= token_budget so that every decode fits in a step"
            )
        self._step = step
        self.allocator = PageAllocator(cache.num_pages, cache.page_size)
        self._capacity = cache.num_pages * cache.page_size
        self._max_requests = max_requests
        self._token_budget = token_budget
        self._stop_token = stop_token
        self._waiting: deque[Request] = deque()
        self._running: list[Request] = []
        self._num_added = 0
        # Two buckets, and so two compiled programs: steps that only decode, and all others.
        self._buckets = [
            Bucket(num_requests=max_requests, num_tokens=num_tokens, num_pages=cache.num_pages)
            for num_tokens in sorted({max_requests, token_budget})
        ]

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting or self._running)

    def add(self, prompt: Sequence[int], max_new_tokens: int) -> Request:
        """Queue a prompt. Raises `ValueError` when it could never be served."""
        if not prompt or max_new_tokens < 1:
            raise ValueError(
                f"prompt has {len(prompt)} tokens and max_new_tokens is {max_new_tokens}; "
                "want at least 1 of each"
            )
        # The last token is chosen but never fed back, so it needs no room.
        room = len(prompt) + max_new_tokens - 1
        if room > self._capacity:
            raise ValueError(
                f"prompt and max_new_tokens need room for {room} tokens, the whole pool holds "
                f"{self._capacity}; shorten them or make the pool larger"
            )
        request = Request(self._num_added, list(prompt), max_new_tokens)
        self._num_added += 1
        self._waiting.append(request)
        return request

    def warm_up(self) -> float:
        """Run an empty batch in each bucket, so that compiling comes first; returns seconds."""
        start = time.perf_counter()
        for bucket in self._buckets:
            self._step(_padding(bucket))
        return time.perf_counter() - start

    def run(self, on_step: Callable[[StepReport], None] = lambda report: None) -> list[StepReport]:
        """Step until nothing is left to do."""
        reports = []
        while self.busy:
            reports.append(self.step())
            on_step(reports[-1])
        return reports

    def step(self) -> StepReport:
        """Compute one batch, choose the next tokens, let finished requests leave."""
        start = time.perf_counter()
        chunks = self._schedule()
        num_tokens = sum(count for _, count in chunks)
        bucket = next(b for b in self._buckets if b.num_tokens >= num_tokens)
        logits = self._step(_inputs(chunks, self.allocator, bucket))
        num_decode_tokens = sum(count for request, count in chunks if request.decodes)
        for row, (request, count) in enumerate(chunks):
            request.num_cached += count
            if request.num_pending == 0:
                request.choices.append(top_two(logits[row]))
                self._leave_if_finished(request)
        return StepReport(
            num_prefill_tokens=num_tokens - num_decode_tokens,
            num_decode_tokens=num_decode_tokens,
            num_running=len(chunks),
            seconds=time.perf_counter() - start,
        )

    def _leave_if_finished(self, request: Request) -> None:
        stopped = request.choices[-1].tokens[0] == self._stop_token
        if stopped or len(request.choices) == request.max_new_tokens:
            request.finished = True
            self.allocator.free(request.request_id)
            self._running.remove(request)

    def _schedule(self) -> list[tuple[Request, int]]:
        """Choose this step's requests and how many tokens of each, and give them pages."""
        chunks: dict[int, tuple[Request, int]] = {}
        budget = self._token_budget
        # Decodes first: a long prompt must not hold up the answers that are under way.
        for request in sorted(self._running, key=lambda request: not request.decodes):
            count = min(request.num_pending, budget)
            # An earlier request of this loop may have needed the pages of this one.
            if request not in self._running or count == 0:
                continue
            if request.decodes and not self._extend(request, kept=chunks):
                continue
            chunks[request.request_id] = request, count
            budget -= count
        while self._waiting and len(self._running) < self._max_requests and budget:
            request = self._waiting[0]
            count = min(request.num_pending, budget)
            try:
                # All that is known of the text gets its pages now, so that a prompt that has begun
                # is never cut short; only decoding asks for more.
                self.allocator.allocate(request.request_id, request.num_pending)
            except OutOfPagesError:
                break
            self._running.append(self._waiting.popleft())
            chunks[request.request_id] = request, count
            budget -= count
        return list(chunks.values())

    def _extend(self, request: Request, kept: Container[int]) -> bool:
        """Get room for one more token, at the cost of the newest requests that are not ``kept``.

        Returns False when the request itself was the newest and had to go back to waiting.
        """
        while True:
            try:
                self.allocator.extend(request.request_id, request.num_cached + 1)
                return True
            except OutOfPagesError:
                newest = next(r for r in reversed(self._running) if r.request_id not in kept)
                self.allocator.free(newest.request_id)
                self._running.remove(newest)
                self._waiting.appendleft(newest)
                newest.num_cached = 0
                if newest is request:
                    return False


def top_two(logits: npt.NDArray[np.float32]) -> TopTwo:
    """The two largest of ``[vocab]`` logits."""
    first = int(np.argmax(logits))
    others = logits.copy()
    others[first] = -np.inf
    second = int(np.argmax(others))
    return TopTwo((first, second), (float(logits[first]), float(logits[second])))


def _padding(bucket: Bucket) -> StepInputs:
    """A step without work: one empty request, and padding around it."""
    return StepInputs(
        token_ids=np.zeros(bucket.num_tokens, dtype=np.int32),
        positions=np.zeros(bucket.num_tokens, dtype=np.int32),
        logit_rows=np.zeros(bucket.num_requests, dtype=np.int32),
        batch=RaggedBatch([0], [0], np.zeros((1, 1), dtype=np.int32)),
        bucket=bucket,
    )


def _inputs(
    chunks: Sequence[tuple[Request, int]], allocator: PageAllocator, bucket: Bucket
) -> StepInputs:
    """Gather the chosen tokens of each request into one padded ragged batch."""
    starts = np.array([request.num_cached for request, _ in chunks], dtype=np.int32)
    query_lens = np.array([count for _, count in chunks], dtype=np.int32)
    ends = np.cumsum(query_lens, dtype=np.int32)

    inputs = _padding(bucket)
    for (request, count), start, end in zip(chunks, starts, ends, strict=True):
        inputs.token_ids[end - count : end] = request.tokens[start : start + count]
    first_rows = ends - query_lens
    inputs.positions[: ends[-1]] = np.arange(ends[-1]) + np.repeat(starts - first_rows, query_lens)
    inputs.logit_rows[: len(chunks)] = ends - 1

    page_table = allocator.page_table([request.request_id for request, _ in chunks])
    return replace(inputs, batch=RaggedBatch(query_lens, starts + query_lens, page_table))
