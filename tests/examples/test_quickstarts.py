"""The quickstarts run and find their own answers right."""

from __future__ import annotations

import re

import pytest

from examples import jax_quickstart, torch_quickstart


@pytest.mark.parametrize("quickstart", [torch_quickstart, jax_quickstart])
def test_quickstart(capsys, quickstart):
    quickstart.main()
    output = capsys.readouterr().out
    assert re.fullmatch(r"output \(6, 4, 64\), largest error [\d.]+e-\d\d\n", output)
