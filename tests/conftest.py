"""Test session: how JAX starts, which device a test gets, how long Hypothesis looks."""

from __future__ import annotations

import os

# Before torch starts its threads: threads that spin while they wait make tests that run beside one
# another, or beside anything else, many times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from importlib.util import find_spec

import pytest
import torch
from hypothesis import HealthCheck, settings

HAS_CUDA = torch.cuda.is_available()

# A machine that is there for its GPU need not have what the demo and its tests import.
NEEDED_BY_EXAMPLES = ("gguf", "tokenizers", "transformers")
collect_ignore = ["examples"] if HAS_CUDA and not all(map(find_spec, NEEDED_BY_EXAMPLES)) else []

# JAX reads these once, at its import, so they are set before any test module is collected.
os.environ["JAX_ENABLE_X64"] = "0"
if HAS_CUDA:
    # By default JAX takes three quarters of the GPU at start, which leaves PyTorch too little.
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
else:
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = (
        os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    ).strip()

# `ci` draws the same examples on every run, so a red build is red for everyone. To look further:
# pytest --hypothesis-profile=explore
settings.register_profile(
    "ci",
    max_examples=100,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "explore", settings.get_profile("ci"), max_examples=2000, derandomize=False
)
settings.load_profile("ci")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, with a reason, what this machine cannot run."""
    if HAS_CUDA:
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; PyTorch sees none"))


@pytest.fixture(scope="session", params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Device of the test, as PyTorch names it: each test that asks for it runs once on each."""
    name: str = request.param
    return name


@pytest.fixture(scope="session")
def jax_device(device: str) -> str:
    """Like `device`, for tests that run JAX: skipped where JAX has no such device."""
    import jax

    try:
        jax.devices(device)
    except RuntimeError as error:
        pytest.skip(f"JAX has no {device} device: {error}")
    return device
