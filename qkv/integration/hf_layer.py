"""One layer of a transformers cache, made of one of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from qkv.cache.layer import CacheLayer
from qkv.cache.settings import LayerSettings
from qkv.errors import QkvError
from qkv.integration.compat import step_positions

MAX_RECORDED = 256
"""Open tokens kept while recording for a rollback; longer histories are committed first."""


class KVLayer(CacheLayerMixin):  # type: ignore[misc]
    """transformers' layer interface over a :class:`CacheLayer`: ``update`` returns dense tensors.

    Args:
        settings: of the layer within.
        window: size of the model's own sliding window, if this layer has one.
    """

    is_croppable = True

    def __init__(self, settings: LayerSettings, *, window: int | None = None) -> None:
        super().__init__()
        self.core = CacheLayer(settings)
        self.window = window
        self.is_sliding = window is not None
        self.record_past = False

    def __repr__(self) -> str:
        settings = self.core.settings
        return f"KVLayer(keys={settings.keys}, values={settings.values}, tokens={len(self.core)})"

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Note device and dtype; storage comes with the tokens."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def append(self, key_states: Tensor, value_states: Tensor, starts: list[int] | None) -> None:
        """Add a step's tokens, open; what an earlier step left open for long is committed first."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.core.num_open and (not self.record_past or self.core.num_open > MAX_RECORDED):
            self.core.commit()
        self.core.append(key_states, value_states, starts=starts)

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append, and return keys and values ``[batch, heads, tokens, dim]`` of all that is visible.

        Raises:
            QkvError: padded rows with eviction, which the model's own mask cannot express.
        """
        self.append(key_states, value_states, self.starts_from(key_states, step_positions(args, kwargs)))
        self._refuse_unseen_padding(step_positions(args, kwargs))
        found = self.core.dense()
        if not self.record_past:
            self.core.commit()
        return found

    def starts_from(self, key_states: Tensor, positions: Tensor | None) -> list[int] | None:
        """Column of each row's first real token: left padding is what the newest position falls short by."""
        batch, _, tokens, _ = key_states.shape
        if positions is None or positions.shape[-1] != tokens or batch == 1:
            return None
        columns = len(self.core) + tokens
        last = positions[:, -1].expand(batch).tolist()
        return [max(0, columns - 1 - position) for position in last]

    def _refuse_unseen_padding(self, positions: Tensor | None) -> None:
        if positions is None and self.core.batch > 1 and self.core.settings.retain.is_bounded:
            raise QkvError(
                "this model does not tell its cache where padding is, which eviction in a batch must know; "
                "use KVCache.attach(model), or one row at a time"
            )

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Length and first column of what the next ``update`` returns."""
        held = self.core.visible() + self.core.num_open
        return held + query_length, len(self.core) - held

    def get_seq_length(self) -> int:
        """Tokens seen."""
        return len(self.core)

    def get_max_length(self) -> int:
        """-1: no bound on the tokens seen; the window of a sliding layer."""
        return self.window if self.window is not None else -1

    def activate_past_recording(self) -> None:
        """From now on, steps stay open until ``crop``: a rollback then leaves no trace."""
        self.record_past = True

    def crop(self, tokens_to_remove: int) -> None:
        """Take back ``-tokens_to_remove`` tokens, all if there are fewer, and commit the rest.

        Raises:
            QkvError: a positive number, or tokens that were evicted.
        """
        if tokens_to_remove > 0:
            raise QkvError(f"crop takes minus the number of tokens to remove; got {tokens_to_remove}")
        self.core.crop(-tokens_to_remove)
        self.core.commit()

    def reset(self) -> None:
        """Empty the layer."""
        self.core.reset()
        self.record_past = False

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Row i becomes a copy of row ``beam_idx[i]``: table entries move, blocks do not."""
        self.core.reorder(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each row ``repeats`` times."""
        self.core.reorder([row for row in range(self.core.batch) for _ in range(repeats)] or [0])

    def batch_select_indices(self, indices: Tensor) -> None:
        """Only these rows: numbers, or a bool for each row."""
        indices = torch.as_tensor(indices)
        self.core.reorder(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    def offload(self) -> None:
        """Move sealed blocks to host memory; they can be read there, a tile at a time. The tail stays."""
        self._move(True)

    def prefetch(self) -> None:
        """Move sealed blocks back to the device they came from."""
        self._move(False)

    def _move(self, offloaded: bool) -> None:
        if self.core.store is not None:
            self.core.store.offload(offloaded)
