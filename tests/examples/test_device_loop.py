"""The demo's model decoding in one program: the tokens of the engine that steps from Python."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch

from examples import device_loop
from examples.device_loop import DeviceLoop
from examples.engine import Engine
from examples.smollm2.jax_model import JaxStep
from interop.dlpack import to_jax
from jax_frontend import StopReason

NUM_PAGES = 12
TEXTS = (
    "def fibonacci(n):\n    if n < 2:\n        return",
    "The opposite of hot is",
    "1, 2, 3, 4,",
)
NUM_NEW = 7


@pytest.fixture(scope="module")
def cache(model):
    return model.new_cache(NUM_PAGES)


@pytest.fixture(scope="module")
def prompts(model):
    return [model.tokenizer.encode(text) for text in TEXTS]


@pytest.fixture(scope="module")
def stepped(model, cache, prompts):
    """What the engine chooses, one step after another."""
    engine = Engine(
        JaxStep(model.config, model.weights, model.spec, cache),
        cache.spec,
        max_requests=3,
        token_budget=32,
        stop_token=model.tokenizer.end_of_turn,
    )
    requests = [engine.add(prompt, NUM_NEW) for prompt in prompts]
    engine.run()
    return requests


def loop(model, cache, **options):
    weights = model.weights.map(lambda array: to_jax(torch.from_numpy(array)))
    options = {"max_new_tokens": NUM_NEW, "end_tokens": [model.tokenizer.end_of_turn]} | options
    return DeviceLoop(model.config, weights, model.spec, cache, **options)


def test_tokens_are_those_of_the_engine(model, cache, prompts, stepped):
    # Equal tokens are a fair demand only where the best leads by far more than rounding.
    gaps = [c.logits[0] - c.logits[1] for request in stepped for c in request.choices]
    assert min(gaps) > 1e-3
    answers, made = loop(model, cache)(prompts)
    assert answers == [request.generated for request in stepped]
    lens = [len(prompt) - 1 + len(a) for prompt, a in zip(prompts, answers, strict=True)]
    assert np.asarray(made.kv_lens).tolist() == lens


def test_an_answer_ends_where_its_end_token_comes(model, cache, prompts, stepped):
    wanted = [request.generated for request in stepped]
    end = wanted[1][1]
    assert all(end not in tokens for tokens in (wanted[0], wanted[2]))
    answers, made = loop(model, cache, end_tokens=[end])(prompts)
    assert answers == [wanted[0], wanted[1][:2], wanted[2]]
    assert made.stop_reason[1] == StopReason.END_OF_TEXT


def test_a_whole_answer_is_one_program_without_callbacks(model, cache, prompts):
    decode = loop(model, cache)
    run, programs = decode._loop, []

    def compiled(*arguments):
        programs.append(run.lower(*arguments).compile())
        return programs[0](*jax.tree.map(np.asarray, arguments[:2]), *arguments[2:])

    decode._loop = compiled
    decode(prompts)
    calls = {
        line.split('custom_call_target="')[1].split('"')[0]
        for line in programs[0].as_text().splitlines()
        if "custom_call_target=" in line
    }
    # On the CPU a reading call passes the order token on.
    assert {call for call in calls if call.startswith("isthmus")} == {
        "isthmus_append",
        "isthmus_attend_waiting",
    }
    assert not [call for call in calls if "callback" in call]


def test_run_from_the_command_line(capsys):
    device_loop.main(["What is the capital of France?", "--max-new-tokens", "9"])
    wanted = "> What is the capital of France?\nThe capital of France is Paris.\n"
    assert capsys.readouterr().out == wanted


def test_bad_command_line_is_refused(capsys):
    with pytest.raises(SystemExit):
        device_loop.main(["Hi", "--max-new-tokens", "0"])
    assert "--max-new-tokens is 0; want 1 or more" in capsys.readouterr().err
