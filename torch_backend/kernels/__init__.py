"""Kernel families, in the order in which dispatch prefers them."""

from __future__ import annotations

from .protocol import Decision, Device, KernelFamily, Lengths, Operands, Work
from .reference import ReferenceFamily

__all__ = ["FAMILIES", "Decision", "Device", "KernelFamily", "Lengths", "Operands", "Work"]

FAMILIES: dict[str, KernelFamily] = {family.name: family for family in (ReferenceFamily(),)}
