"""Runnable examples: two quickstarts, and SmolLM2-135M served from PyTorch and from JAX."""

from __future__ import annotations

import os

# Read once, when PyTorch is first imported, hence here. Threads that wait for the next operation
# otherwise spin, and take the cores from XLA's threads and from whatever else the machine does:
# on two busy cores that made decoding 10 to 30 times slower.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
