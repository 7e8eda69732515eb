"""PrefixCache: prompts that begin alike share the blocks of what they have in common.

A tree of blocks by their tokens: each node holds one block of tokens and, for every layer, the block of keys
and values that these tokens have after all that lies above. A node is found by its tokens themselves (a dict
compares them, whatever their hash), so a match costs its own length, however many entries there are.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Literal

import torch

from qkv.cache.blocks import Block
from qkv.cache.layer import CacheLayer
from qkv.cache.retention.sizes import parse_bytes
from qkv.errors import QkvError

Tokens = tuple[int, ...]


@dataclass(eq=False)
class Node:
    """One block of tokens after those of its parents.

    Args:
        tokens: the block's tokens. ``parent``: the block before; None at a root.
        blocks: for every layer the block of keys and values, and at the first block its sinks.
        hits: lookups that passed here. ``used``: when the last one did, in lookups.
    """

    tokens: Tokens
    parent: Node | None
    blocks: list[Block] = field(default_factory=list)
    sinks: list[Block] = field(default_factory=list)
    children: dict[Tokens, Node] = field(default_factory=dict)
    hits: int = 0
    used: int = 0

    def __iter__(self) -> Iterator[Block]:
        yield from self.blocks
        yield from self.sinks

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self)

    @property
    def is_evictable(self) -> bool:
        """A leaf that no live cache refers to."""
        return not self.children and all(block.references == 1 for block in self)


class PrefixCache:
    """Blocks of prompts already seen, found again by their tokens.

    A hit reads sealed blocks where the first run read its own exact values, so with a lossy codec the logits
    of the two may differ by the codec's error; with ``"exact"`` they do not.

    Args:
        max_bytes: what the tree may hold, such as ``"2GB"``; blocks that a live cache refers to are kept
            beyond being wanted, never evicted.
        policy: ``"lru"`` or ``"lfu"``: which leaf goes first.
        min_match: shortest match worth taking, in tokens.
        make: makes an empty cache, for a lookup before anything was stored.

    Raises:
        QkvError: a size or policy that does not exist.

    Example:
        >>> shared = PrefixCache(max_bytes="2GB", make=lambda: KVCache(model.config))   # doctest: +SKIP
        >>> cache, matched = shared.lookup(ids)   # doctest: +SKIP
        >>> model.generate(ids, cache=cache); shared.store(ids, cache)   # doctest: +SKIP
    """

    def __init__(
        self,
        max_bytes: str | int,
        *,
        policy: Literal["lru", "lfu"] = "lru",
        min_match: int = 1,
        make: Callable[[], Any] | None = None,
    ) -> None:
        if policy not in ("lru", "lfu"):
            raise QkvError(f"prefix policy {policy!r} is neither lru nor lfu")
        if min_match < 1:
            raise QkvError(f"min_match {min_match!r} is not a number of tokens, at least 1")
        self.max_bytes, self.policy, self.min_match, self.make = (
            parse_bytes(max_bytes),
            policy,
            min_match,
            make,
        )
        self._roots: dict[tuple[Any, ...], Node] = {}
        self._template: Any = None
        self._clock = 0
        self._ticket = count()
        self._leaves: list[tuple[int, int, int, Node]] = []
        self._nbytes = 0
        self.lookups = self.hits = self.tokens_matched = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks the tree refers to."""
        return self._nbytes

    @property
    def num_blocks(self) -> int:
        """Nodes of the tree."""
        return sum(1 for _ in self._nodes())

    def lookup(self, ids: Any, cache: Any = None, *, salt: str = "") -> tuple[Any, int]:
        """A cache that holds the longest stored prefix of ``ids``, and how many tokens that is.

        At least one token is left to run. The cache is independent: using it changes nothing here.

        Args:
            ids: tokens of one prompt: a list, or a tensor ``[tokens]`` or ``[1, tokens]``.
            cache: an empty cache to fill; made like the last stored one, or by ``make``, if not given.
            salt: only entries stored with the same one are found.

        Returns:
            ``(cache, matched)``; ``(None, 0)`` where nothing says how to make a cache.
        """
        tokens = _tokens(ids)
        cache = cache if cache is not None else self._empty()
        self.lookups += 1
        if cache is None:
            return None, 0
        if len(cache.block_layers[0]):
            raise QkvError("lookup fills an empty cache; this one holds tokens: reset it first")
        path = self._match(tokens, self._roots.get(_key(cache, salt)), cache.block_layers[0].block_size)
        matched = sum(len(node.tokens) for node in path)
        if not path or matched < self.min_match:
            return cache, 0
        self._touch(path)
        self.hits, self.tokens_matched = self.hits + 1, self.tokens_matched + matched
        for index, layer in enumerate(cache.block_layers):
            sinks = path[0].sinks[index] if path[0].sinks else None
            layer.adopt([node.blocks[index] for node in path], sinks)
        return cache, matched

    def store(self, ids: Any, cache: Any, *, salt: str = "", row: int = 0) -> int:
        """Keep the blocks of a prompt's tokens; returns how many tokens of ``ids`` the tree now holds.

        Whole blocks only, and only those computed before anything was evicted. Blocks that are there already
        stay; the oldest leaves make room for new ones, and where they cannot, the rest is not kept.

        Raises:
            QkvError: a cache with layers of transformers' own (make it with ``shareable=True``).
        """
        tokens = _tokens(ids)
        layers: list[CacheLayer] = cache.block_layers
        _check_shareable(cache)
        size = layers[0].block_size
        whole = min(min(layer.shareable_tokens(row) for layer in layers), len(tokens)) // size
        if layers[0].settings.retain.sinks > size:
            raise QkvError("prefixes are shared only with sinks no longer than a block; raise block_size")
        self._template = self._template or cache.empty()
        node = self._roots.setdefault(_key(cache, salt), Node((), None))
        path: list[Node] = []
        for index in range(whole):
            part = tokens[index * size : (index + 1) * size]
            child = node.children.get(part) or self._insert(node, part, layers, row, index, path)
            if child is None:
                break
            node = child
            path.append(node)
        self._touch(path)
        return len(path) * size

    def clear(self) -> None:
        """Give everything back."""
        for node in list(self._nodes()):
            _release(node)
        self._roots, self._leaves, self._nbytes = {}, [], 0

    def _empty(self) -> Any:
        if self._template is not None:
            return self._template.empty()
        return self.make() if self.make is not None else None

    def _match(self, tokens: Tokens, node: Node | None, size: int) -> list[Node]:
        path: list[Node] = []
        while node is not None and (len(path) + 1) * size < len(tokens):
            node = node.children.get(tokens[len(path) * size : (len(path) + 1) * size])
            if node is not None:
                path.append(node)
        return path

    def _insert(
        self, parent: Node, tokens: Tokens, layers: list[CacheLayer], row: int, index: int, path: list[Node]
    ) -> Node | None:
        blocks = [layer.shareable_block(row, index) for layer in layers]
        sinks = [block for layer in layers if index == 0 for block in layer.shareable_sinks(row)]
        node = Node(tokens, parent, blocks, sinks)
        if not self._make_room(node.nbytes, path):
            _release(node)
            return None
        parent.children[tokens] = node
        self._nbytes += node.nbytes
        return node

    def _touch(self, path: list[Node]) -> None:
        self._clock += 1
        for node in path:
            node.hits += 1
            node.used = self._clock
        if path and not path[-1].children:
            self._note_leaf(path[-1])

    def _note_leaf(self, node: Node) -> None:
        rank = node.hits if self.policy == "lfu" else 0
        heapq.heappush(self._leaves, (rank, node.used, next(self._ticket), node))
        if len(self._leaves) > 64 + 4 * max(1, len(self._roots)) and len(self._leaves) > 8 * self.num_blocks:
            leaves = [n for n in self._nodes() if not n.children]
            self._leaves = []
            for leaf in leaves:
                self._note_leaf(leaf)

    def _make_room(self, nbytes: int, path: list[Node]) -> bool:
        """Evict leaves until ``nbytes`` fit; those in use, and the path being stored, stay."""
        aside = []
        while self._nbytes + nbytes > self.max_bytes and self._leaves:
            entry = heapq.heappop(self._leaves)
            node = entry[3]
            current = (node.hits if self.policy == "lfu" else 0, node.used) == entry[:2]
            if node.children or not node.blocks or not current:
                continue
            if not node.is_evictable or node in path:
                aside.append(entry)
                continue
            self._evict(node)
        for entry in aside:
            heapq.heappush(self._leaves, entry)
        return self._nbytes + nbytes <= self.max_bytes

    def _evict(self, node: Node) -> None:
        self._nbytes -= node.nbytes
        parent = node.parent
        if parent is not None:
            del parent.children[node.tokens]
            if not parent.children and parent.parent is not None:
                self._note_leaf(parent)
        _release(node)

    def _nodes(self) -> Iterator[Node]:
        pending = [child for root in self._roots.values() for child in root.children.values()]
        while pending:
            node = pending.pop()
            pending += node.children.values()
            yield node


def _release(node: Node) -> None:
    for block in node:
        block.store.drop(block)
    node.blocks, node.sinks = [], []


def _tokens(ids: Any) -> Tokens:
    """Tokens as whole numbers of full width; one prompt only."""
    if isinstance(ids, torch.Tensor):
        if ids.dim() > 2 or (ids.dim() == 2 and ids.shape[0] != 1):
            raise QkvError(f"prefixes are looked up one prompt at a time; got ids of shape {tuple(ids.shape)}")
        ids = ids.flatten().tolist()
    if not isinstance(ids, Sequence):
        raise QkvError(f"ids are a list or tensor of tokens; got {type(ids).__name__}")
    return tuple(int(token) for token in ids)


def _key(cache: Any, salt: str) -> tuple[Any, ...]:
    return (*cache.signature, ("salt", salt))


def _check_shareable(cache: Any) -> None:
    if len(cache.block_layers) != len(cache.layers):
        stock = {type(v).__name__ for v in cache.layers} - {"KVLayer"}
        raise QkvError(
            f"layers of kind {', '.join(sorted(stock))} cannot be shared between prompts; make the cache "
            "with shareable=True (linear-attention layers have no prefix to share)"
        )
