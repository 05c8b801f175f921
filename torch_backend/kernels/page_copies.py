"""Which tokens to copy, for kernels that read pages as copies of them."""

from __future__ import annotations

from .protocol import IntArray, Lengths

__all__ = ["write_valid_tokens"]


def write_valid_tokens(valid: IntArray, lengths: Lengths, page_size: int) -> None:
    """Write the tokens of each entry of the page indices; -1 where there is nothing to copy.

    Parameters
    ----------
    valid
        ``[entries]`` int32, written in full.
    lengths, page_size
        The batch, and tokens in a page.
    """
    used = int(lengths.kv_indptr[-1])
    valid[:used] = page_size
    valid[used:] = -1
    some = lengths.kv_units > 0
    last = lengths.kv_indptr[1:][some] - 1
    valid[last] = lengths.kv_lens[some] - (lengths.kv_units[some] - 1) * page_size
