"""What the demo says where two runs part, and what it refuses."""

from __future__ import annotations

import pytest

from examples import demo
from examples.engine import Request, TopTwo


class Letters:
    """Decodes token n as the n-th letter."""

    def decode(self, ids, *, skip_special_tokens):
        assert not skip_special_tokens
        return "".join(chr(ord("a") + token) for token in ids)


def run(name, *answers):
    requests = [
        Request(index, [1], 4, choices=list(choices)) for index, choices in enumerate(answers)
    ]
    return demo.Run(name, requests, reports=[], warm_up_seconds=0.0)


SAME = TopTwo((0, 1), (5.0, 1.0))


def test_equal_answers_agree():
    one, other = run("torch", [SAME], [SAME]), run("jax", [SAME], [SAME])
    assert demo.compare(Letters(), one, other) == [
        "greedy tokens of torch and jax [bold]agree[/]: 2 of 2 answers are the same, token by token"
    ]


def test_where_answers_part_both_sides_best_logits_are_shown():
    one = run("torch", [SAME], [SAME, TopTwo((2, 3), (4.0, 3.75)), SAME])
    other = run("jax", [SAME], [SAME, TopTwo((3, 2), (4.0, 3.5)), TopTwo((7, 8), (1.0, 0.0))])
    assert demo.compare(Letters(), one, other) == [
        "greedy tokens of torch and jax [bold]differ[/]: "
        "1 of 2 answers are the same, token by token",
        "prompt 1: the answers part at generated token 1:",
        "  torch 'c' 4.00000, then 'd' 3.75000 (gap 2.50e-01)",
        "  jax   'd' 4.00000, then 'c' 3.50000 (gap 5.00e-01)",
    ]


def test_bad_command_line_is_refused(capsys):
    with pytest.raises(SystemExit):
        demo.main(["--max-new-tokens", "0"])
    assert "--max-new-tokens is 0; want 1 or more" in capsys.readouterr().err
