"""T1 over the whole grid: sources by lengths by modes by caches by batches by chunks, equal in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from qkv.integration.decoder import SpeculativeDecoder
from tests.integration.decoder.cases import CACHES, MODES, Moody, continued, kv_cache, padded, ragged, target
from tests.integration.decoder.test_lossless import NEW, plain, source_of

SOURCES = ("none", "related", "unrelated", "lookup", "ngram", "self:nf4", "adversary")
LENGTHS: dict[str, Callable[[], Any]] = {"1": lambda: 1, "7": lambda: 7, "adaptive": lambda: "adaptive", "moody": Moody}


@pytest.mark.slow
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("mode", MODES)
def test_output_is_that_of_plain_decoding_everywhere(mode: str, cache: str, source: str) -> None:
    expected = plain("llama", cache, mode)
    ids, mask = ragged()
    for length, make in LENGTHS.items():
        for chunk in (1, 4, 512):
            decoder = SpeculativeDecoder(
                target(),
                source=source_of(source, "llama"),
                length=make(),
                cache=kv_cache(cache, target()),
                chunk=chunk,
            )
            options: dict[str, Any] = {"seed": 3, "max_new_tokens": NEW, **MODES[mode]}
            assert continued(decoder, ids[:1], **options) == expected[:1], (length, chunk)
            assert continued(decoder, ids, mask, **options) == padded(expected), (length, chunk)
