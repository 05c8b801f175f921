"""What a serving engine asks of an attention backend; `torch_backend.backend` is the way in."""

from __future__ import annotations
