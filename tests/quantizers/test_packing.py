from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.quantizers import grouping
from qkv.quantizers.grouping import from_groups, row_chunks, to_groups
from qkv.quantizers.packing import pack_crumbs, pack_nibbles, unpack_crumbs, unpack_nibbles


def test_the_first_of_a_pair_lies_in_the_high_bits() -> None:
    """As bitsandbytes stores NF4: golden bytes."""
    assert pack_nibbles(torch.tensor([[1, 2, 15, 0, 7]], dtype=torch.uint8)).tolist() == [[0x12, 0xF0, 0x70]]
    assert pack_crumbs(torch.tensor([[0, 1, 2, 3, 3]], dtype=torch.uint8)).tolist() == [[0b00011011, 0b11000000]]


@given(st.integers(0, 9), st.integers(0, 70), st.integers(0, 2**31))
def test_packing_round_trips_at_any_length(rows: int, columns: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for top, pack, unpack, share in ((16, pack_nibbles, unpack_nibbles, 2), (4, pack_crumbs, unpack_crumbs, 4)):
        codes = torch.randint(0, top, (rows, columns), dtype=torch.uint8, generator=generator)
        packed = pack(codes)
        assert packed.shape == (rows, -(-columns // share)) and packed.dtype == torch.uint8
        assert torch.equal(unpack(packed)[:, :columns], codes)


@given(st.integers(0, 9), st.integers(1, 200), st.integers(1, 300))
def test_groups_stay_in_their_rows(rows: int, columns: int, length: int) -> None:
    x = torch.arange(1, rows * columns + 1.0).reshape(rows, columns)
    groups = to_groups(x, length)
    assert groups.shape == (rows, -(-columns // length), length)
    assert torch.equal(from_groups(groups, columns), x)
    for row in range(rows):  # the padding is zeros, all else is the row's own
        assert torch.equal(groups[row].flatten()[:columns], x[row])
        assert not groups[row].flatten()[columns:].any()


@given(st.integers(0, 5000), st.integers(0, 2**23))
def test_chunks_cover_every_row_once(rows: int, columns: int) -> None:
    covered = [row for part in row_chunks(rows, columns) for row in range(part.start, part.stop)]
    assert covered == list(range(rows))
    limit = max(columns, grouping.CHUNK_ELEMENTS)
    assert all((part.stop - part.start) * columns <= limit for part in row_chunks(rows, columns))
