"""The model in Flax NNX and in Equinox: the tokens of the plain JAX model, and no extra copies."""

from __future__ import annotations

import runpy
import sys

import jax
import numpy as np
import pytest

import jax_frontend
from examples import answering, equinox_llama, flax_llama
from examples.answering import ModelStep
from examples.engine import Engine
from examples.smollm2.jax_model import JaxStep
from interop import Bucket, RaggedBatch

NUM_PAGES = 8
NUM_NEW = 5
# The first is longer than a step's budget of tokens, and so comes in chunks.
TEXTS = (
    "def fibonacci(n):\n    if n < 2:\n        return",
    "The opposite of hot is",
    "1, 2, 3, 4,",
)
LIBRARIES = [flax_llama, equinox_llama]
names = pytest.mark.parametrize("library", LIBRARIES, ids=["flax", "equinox"])


@pytest.fixture(scope="module")
def cache(model):
    """One pool for all of these tests: engines give back every page, whatever is in it."""
    return model.new_cache(NUM_PAGES)


@pytest.fixture(scope="module")
def plain(model, cache):
    """What the JAX model without a library chooses for each text."""
    return serve(model, cache, JaxStep(model.config, model.weights, model.spec, cache))


@pytest.fixture(scope="module")
def loaded(model):
    """Each library's model."""
    return {library: library.load(model.config, model.weights) for library in LIBRARIES}


def serve(model, cache, step):
    stop = model.tokenizer.end_of_turn
    # As many seats as tokens: one bucket, and so one program to compile.
    engine = Engine(step, cache.spec, max_requests=8, token_budget=8, stop_token=stop)
    requests = [engine.add(model.tokenizer.encode(text), NUM_NEW) for text in TEXTS]
    engine.run()
    return requests


@names
def test_tokens_and_logits_are_those_of_the_plain_model(model, cache, plain, loaded, library):
    found = serve(model, cache, ModelStep(loaded[library], model.spec, cache))
    assert [r.generated for r in found] == [r.generated for r in plain]
    for one, other in zip(found, plain, strict=True):
        for a, b in zip(one.choices, other.choices, strict=True):
            assert a.logits == pytest.approx(b.logits, abs=1e-3)


def test_no_near_ties_among_the_compared_tokens(model, plain):
    # Equal tokens are a fair demand only where the best leads by far more than rounding.
    assert [len(request.generated) for request in plain] == [NUM_NEW] * len(TEXTS)
    assert min(c.logits[0] - c.logits[1] for request in plain for c in request.choices) > 0.05
    assert len(model.tokenizer.encode(TEXTS[0])) > 8


@names
def test_a_step_copies_no_weights(model, cache, loaded, library):
    one = Bucket(num_requests=1, num_tokens=1, num_pages=NUM_PAGES)
    batch = RaggedBatch([1], [1], np.array([[0]]))
    plan = jax_frontend.plan(model.spec, cache.spec, batch, bucket=one)
    row, kv = np.zeros(1, np.int32), jax_frontend.cache_handle(cache)
    program = jax.jit(type(loaded[library]).__call__)
    compiled = program.lower(loaded[library], row, row, row, kv, plan).compile()
    # All layers are 425 MB, and one of them 14 MB: what the scan slices out and works on.
    layers = sum(array.nbytes for array in model.weights.layers)
    assert compiled.memory_analysis().temp_size_in_bytes < layers / 10


def test_equinox_shares_the_weights_that_were_read(model, loaded):
    layers = loaded[equinox_llama].layers
    for name, array in model.weights.layers._asdict().items():
        assert getattr(layers, name).weight.unsafe_buffer_pointer() == array.ctypes.data


@names
def test_run_from_the_command_line(capsys, monkeypatch, library):
    prompt = "What is the capital of France?"
    monkeypatch.setattr(sys, "argv", ["llama", prompt, "--max-new-tokens", "8"])
    runpy.run_path(library.__file__, run_name="__main__")
    assert capsys.readouterr().out == "The capital of France is Paris.\n"


def test_bad_command_line_is_refused(capsys):
    with pytest.raises(SystemExit):
        answering.main(flax_llama.load, ["Hi", "--max-new-tokens", "0"])
    assert "--max-new-tokens is 0; want 1 or more" in capsys.readouterr().err
