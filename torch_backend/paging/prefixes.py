"""Which page holds the keys and values of which token prefix."""

from __future__ import annotations

from collections.abc import Hashable
from itertools import repeat

import numpy as np
import numpy.typing as npt

from interop.errors import ArgumentError
from interop.host import IntArray

__all__ = ["NO_PAGES", "Ints", "PrefixIndex"]

HashArray = npt.NDArray[np.uint64]

# The odd number nearest to 2**64 over the golden ratio: multiples of it are spread evenly.
GOLDEN = np.uint64(0x9E3779B97F4A7C15)
# NumPy gathers several times as fast with 64-bit indices as with others, which it has to convert.
Ints = npt.NDArray[np.int64]
NO_PAGES: Ints = np.zeros(0, np.int64)


def _mixed(values: HashArray) -> HashArray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood 2014, Stafford's variant 13), in place."""
    values ^= values >> np.uint64(30)
    values *= np.uint64(0xBF58476D1CE4E5B9)
    values ^= values >> np.uint64(27)
    values *= np.uint64(0x94D049BB133111EB)
    values ^= values >> np.uint64(31)
    return values


class PrefixIndex:
    """Full pages by the tokens in them and before them.

    Pages with equal prefixes are one *node* of a forest: a node has a parent (the node of the page
    before, 0 for a first page), the tokens of one page, and one or more pages that hold them.
    More than one where requests with the same prompt were computed side by side. Whoever owns a
    page of a node then owns one of its parent, too, and that lets children leave before parents.

    A node is looked up by a 64-bit hash of its prefix, under multipliers that each index draws for
    itself, and counts as found only where its tokens equal those asked for and its parent is the
    node found before. So a collision of hashes costs a miss and nothing else.

    Parameters
    ----------
    num_pages
        That of the cache.
    page_size
        Tokens in a page.

    Attributes
    ----------
    node
        Number of each page's node, ``[num_pages]`` int64; 0 where a page is not published. Numbers
        are never used twice.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self.page_size = page_size
        random = np.random.default_rng()
        self._weights = random.integers(1 << 63, size=page_size, dtype=np.uint64) * 2 + 1
        self._salt = random.integers(1 << 63, size=1, dtype=np.uint64)
        self.node = np.zeros(num_pages, np.int64)
        self._parent = np.zeros(num_pages, np.int64)
        self._prefix = np.zeros(num_pages, np.uint64)
        self._tokens = np.zeros((num_pages, page_size), np.int32)
        self._num_nodes = 0
        # A first page's key has the namespace in it, so equality of namespaces is exact as well.
        self._key: list[Hashable] = [None] * num_pages
        self._page: dict[Hashable, int] = {}
        # All pages of the nodes that have several, the one in `_page` first.
        self._same: dict[int, list[int]] = {}

    def find(self, tokens: IntArray, namespace: Hashable) -> Ints:
        """Pages ``[n]`` with the longest published prefix of `tokens`, ``[pages, page_size]``."""
        if not self._page or not len(tokens):
            return NO_PAGES
        hashes = self._hashes(tokens, 0, self._seed(namespace))
        return self._matching(tokens, self._keys(hashes, 0, namespace), 0)

    def publish(self, pages: Ints, tokens: IntArray, known: int, namespace: Hashable) -> int:
        """Let others find the full pages of a request.

        Parameters
        ----------
        pages, tokens
            From the request's first page on: ids ``[n]`` and what is in them ``[n, page_size]``.
        known
            How many of them this request has published already.
        namespace
            That of the request.

        Returns
        -------
        int
            How many are published now: `n`, or fewer where hashes collide.

        Raises
        ------
        ArgumentError
            If a page is published with other tokens; nothing is published then.
        """
        published = self.node[pages] != 0
        new, new_tokens = pages[known:], tokens[known:]
        before = self._prefix[pages[known - 1 : known]] if known else self._seed(namespace)
        hashes = self._hashes(new_tokens, known, before)
        wrong = (self._tokens[pages] != tokens).any(axis=1)
        wrong[known:] |= self._prefix[new] != hashes
        wrong &= published
        if wrong.any():
            at, size = int(wrong.argmax()), self.page_size
            raise ArgumentError(
                "tokens",
                given=f"tokens {at * size} to {(at + 1) * size - 1} or before them that differ "
                "from those published",
                wanted="the request's token ids from its first one on",
                remedy="Call make_writable before tokens are written over.",
            )
        keys = self._keys(hashes, known, namespace)
        parent = int(self.node[pages[known - 1]]) if known else 0
        found = self._matching(new_tokens, keys, parent)
        joined = found.size
        self._join(new[:joined], found)
        added = 0
        for page, key in zip(new[joined:].tolist(), keys[joined:], strict=True):
            if key in self._page:  # a collision, since a node of this prefix would have been found
                break
            self._page[key], self._key[page] = page, key
            added += 1
        fresh = new[joined : joined + added]
        nodes = np.arange(self._num_nodes, self._num_nodes + added + 1)
        nodes[0] = self.node[new[joined - 1]] if joined else parent
        self.node[fresh], self._parent[fresh] = nodes[1:], nodes[:-1]
        self._prefix[fresh] = hashes[joined : joined + added]
        self._tokens[fresh] = new_tokens[joined : joined + added]
        self._num_nodes += added
        return known + joined + added

    def forget(self, pages: Ints) -> None:
        """Take published pages out of the index."""
        for page, node in zip(pages.tolist(), self.node[pages].tolist(), strict=True):
            key, self._key[page] = self._key[page], None
            same = self._same.get(node)
            if same is None:
                del self._page[key]
                continue
            same.remove(page)
            self._page[key] = same[0]
            if len(same) == 1:
                del self._same[node]
        self.node[pages] = 0

    def _join(self, pages: Ints, found: Ints) -> None:
        """Add `pages` that are not published to the nodes of pages with the same prefix."""
        private = self.node[pages] == 0
        if not private.any():
            return
        pages, found = pages[private], found[private]
        for values in (self.node, self._parent, self._prefix, self._tokens):
            values[pages] = values[found]
        nodes = self.node[pages].tolist()
        for page, first, node in zip(pages.tolist(), found.tolist(), nodes, strict=True):
            self._key[page] = self._key[first]
            self._same.setdefault(node, [first]).append(page)

    def _seed(self, namespace: Hashable) -> HashArray:
        """What the hash of a first page starts from, ``[1]``."""
        value = np.array([hash(namespace) & (2**64 - 1)], np.uint64)
        return _mixed(value ^ self._salt)

    def _hashes(self, tokens: IntArray, start: int, before: HashArray) -> HashArray:
        """Hash of the prefix that ends with each page, ``[pages]``.

        A page's token ids ``[pages, page_size]`` are weighed, its place is added and the sum is
        mixed; a prefix has the sum over its pages, and all of it modulo 2**64. `before` is
        the hash ``[1]`` of what comes before the first of these pages, which is page `start`.
        """
        weighed: HashArray = tokens.astype(np.uint64) @ self._weights
        weighed += np.arange(start, start + len(tokens), dtype=np.uint64) * GOLDEN
        mixed = _mixed(weighed)
        mixed[:1] += before
        return np.add.accumulate(mixed)

    def _keys(self, hashes: HashArray, start: int, namespace: Hashable) -> list[Hashable]:
        keys: list[Hashable] = hashes.tolist()
        if keys and start == 0:
            keys[0] = namespace, keys[0]
        return keys

    def _matching(self, tokens: IntArray, keys: list[Hashable], parent: int) -> Ints:
        """Pages ``[n]`` under the first keys that hold these tokens behind node `parent`."""
        pages = np.fromiter(map(self._page.get, keys, repeat(-1)), np.int64, len(keys))
        missed = pages < 0
        if missed.any():
            pages = pages[: missed.argmax()]
        before = np.empty(pages.size + 1, np.int64)
        before[0], before[1:] = parent, self.node[pages]
        chained = self._parent[pages] == before[:-1]
        equal = self._tokens[pages] == tokens[: pages.size]
        if chained.all() and equal.all():
            return pages
        return pages[: (chained & equal.all(axis=1)).argmin()]
