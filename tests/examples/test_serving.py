"""The real model under continuous batching: schedules, frameworks and mixtures of them agree."""

from __future__ import annotations

import re

import pytest

from examples import demo
from examples.engine import Engine
from examples.smollm2.jax_model import JaxStep
from examples.smollm2.torch_model import TorchStep

NUM_PAGES = 16
NUM_NEW = 5
TEXTS = (
    "The capital of France is",
    "The opposite of hot is",
    "1, 2, 3, 4, 5, 6, 7, 8,",
)


@pytest.fixture(scope="module")
def cache(model):
    """One pool for all of these tests: engines give back every page, whatever is in it."""
    return model.new_cache(NUM_PAGES)


@pytest.fixture(scope="module")
def steps(model, cache):
    arguments = model.config, model.weights, model.spec, cache
    return {"torch": TorchStep(*arguments), "jax": JaxStep(*arguments)}


@pytest.fixture(scope="module")
def alone(model, cache, steps):
    """Answers of the PyTorch model to each text, served one at a time."""
    return [serve(model, cache, steps["torch"], [text])[0] for text in TEXTS]


def serve(model, cache, step, texts):
    engine = Engine(
        step,
        cache.spec,
        max_requests=2,
        token_budget=8,
        stop_token=model.tokenizer.end_of_turn,
    )
    requests = [engine.add(model.tokenizer.encode(text), NUM_NEW) for text in texts]
    engine.run()
    assert engine.allocator.num_free == NUM_PAGES
    return requests


def test_answers_make_sense_and_leave_no_near_ties(model, alone):
    # The other tests compare greedy tokens across schedules; that is fair only where the best
    # token leads by far more than rounding.
    answers = [model.tokenizer.decode(request.generated) for request in alone]
    assert answers[0].startswith(" Paris")
    assert answers[1].startswith(" cold")
    assert answers[2].startswith(" 9, 1")
    gaps = [choice.logits[0] - choice.logits[1] for r in alone for choice in r.choices]
    assert min(gaps) > 0.1


@pytest.mark.parametrize("side", ["torch", "jax"])
def test_continuous_batching_answers_as_one_at_a_time(model, cache, steps, alone, side):
    together = serve(model, cache, steps[side], TEXTS)
    for one, other in zip(together, alone, strict=True):
        assert one.generated == other.generated
        for a, b in zip(one.choices, other.choices, strict=True):
            assert a.logits == pytest.approx(b.logits, abs=1e-3)


def test_jax_traces_once_a_bucket(model, cache, steps):
    # Decode-only steps and steps of up to token_budget tokens: two buckets, whatever is in them.
    serve(model, cache, steps["jax"], TEXTS[:2])
    serve(model, cache, steps["jax"], TEXTS[1:])
    assert steps["jax"].num_traces == 2


def test_frameworks_take_turns_on_the_same_pages(model, cache, steps, alone):
    # Every other step runs in the other framework, which reads what the first one wrote.
    calls = 0

    def alternating(inputs):
        nonlocal calls
        calls += 1
        return steps["torch" if calls % 2 else "jax"](inputs)

    together = serve(model, cache, alternating, TEXTS)
    assert [r.generated for r in together] == [r.generated for r in alone]


def test_demo_prints_texts_rates_and_agreement(capsys, model):
    demo.main(["--max-new-tokens", "3", "--prompts", "What is the capital of France?", "Hi"])
    output = " ".join(capsys.readouterr().out.split())
    assert output.count("torch = jax") == 2
    assert "The capital of" in output
    assert re.search(r"torch │ +\d+\.\d \(\d+ / \d+\.\d s\)", output)
    assert re.search(r"jax │ +\d+\.\d \(\d+ / \d+\.\d s\)", output)
    assert "greedy tokens of torch and jax agree: 2 of 2 answers" in output
