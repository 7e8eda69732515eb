from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qkv.errors import QkvError
from qkv.quantizers.format import BITS, FORMATS, MAX_GROUP_SIZE, NESTED_BLOCK, Format
from tests.helpers import MATRIX
from tests.laws import check_stored_as_said

SHAPES = [
    (64,), (7,), (1,), (0,), (16, 100), (5, 7), (7, 9), (1, 1), (3, 65), (0, 64), (4, 0), (3, 4, 96), (2, 3, 33),
    (2, 0, 5), (0, 2, 5), (9, 0, 0), (40, 513),
]  # fmt: skip


def formats() -> st.SearchStrategy[Format]:
    groups = st.one_of(st.integers(1, MAX_GROUP_SIZE), st.sampled_from(["row", "tensor"]))
    integers = st.builds(Format, st.sampled_from(["int8", "int4"]), groups, st.booleans(), st.booleans())
    return st.one_of(integers, st.builds(Format, st.just("nf4"), groups, st.just(True), st.booleans()))


@given(formats())
def test_text_and_value_are_the_same(format: Format) -> None:
    assert Format.parse(str(format)) == format
    assert Format.parse(format) is format


def test_usual_formats_are_their_names() -> None:
    for name, format in FORMATS.items():
        assert Format.parse(name) == format and format.bits == BITS[format.name]
    assert str(FORMATS["nf4"]) == "nf4:g64" and str(FORMATS["int8:asym"]) == "int8:g64:asym"


@pytest.mark.parametrize("text", ["int8:g32:asym:double", "int8:double:asym:g32", "int8:asym:g32:double"])
def test_options_come_in_any_order(text: str) -> None:
    assert Format.parse(text) == Format("int8", 32, symmetric=False, double_quant=True)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("int3.7", ["int3.7", "int8", "nf4"]),
        ("", ["''", "nf4"]),
        ("int8:", ["''", "int8:"]),
        ("int8:64", ["'64'", "gN"]),
        ("int8:g", ["'g'"]),
        ("int8:g-1", ["'g-1'"]),
        ("int8:g2.5", ["'g2.5'"]),
        ("int8:g0", ["0", f"{MAX_GROUP_SIZE:,}"]),
        ("int8:g1048577", ["1048577", f"{MAX_GROUP_SIZE:,}"]),
        ("int8:g18446744073709551616", ["18446744073709551616"]),  # bitsandbytes#1071: SIGFPE killed the process
        ("nf4:asym", ["asymmetric", "int4:asym"]),
        ("int8:triple", ["'triple'", "double"]),
        (None, ["None"]),
        (8, ["8"]),
        ("INT8", ["INT8"]),
        (" int8", ["' int8'"]),
    ],
)
def test_mistakes_name_the_value_and_what_to_write(value: Any, words: list[str]) -> None:
    with pytest.raises(QkvError) as caught:
        Format.parse(value)
    assert all(word in str(caught.value) for word in words), caught.value
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("size", [0, -1, -2, 2.5, "64", True, None, MAX_GROUP_SIZE + 1, "rows", 2**64])
def test_group_sizes_that_do_not_exist(size: Any) -> None:  # AutoAWQ#578, pytorch/ao#3458
    with pytest.raises(QkvError, match="group size"):
        Format("int8", size)


@pytest.mark.parametrize("text", MATRIX)
def test_layout_is_what_is_stored(text: str) -> None:
    for shape in SHAPES:
        check_stored_as_said(torch.ones(shape, dtype=torch.bfloat16), Format.parse(text))


@pytest.mark.parametrize(
    ("text", "limits"),
    [("nf4", (4.1, 4.6)), ("int8", (8.2, 8.6)), ("int8:asym", (8.2, 9.1)), ("nf4:double", (4.1, 4.15))],
)
def test_bits_a_weight_count_the_scales(text: str, limits: tuple[float, float]) -> None:
    """mistral.rs fork#53 (scales left out), VeloxQuant-MLX#162 (2 bits claimed, 16 stored); QLoRA: 4.127."""
    bits = 8 * Format.parse(text).stored_nbytes((512, 512)) / 512**2
    assert limits[0] <= bits <= limits[1]


def test_layout_by_hand() -> None:
    layout = Format.parse("int4:g64:asym:double").layout((3, 100))
    assert layout == {
        "": ((3, 2, 32), torch.uint8),
        "_scale": ((3, 2), torch.uint8),
        "_zero": ((3, 2), torch.uint8),
        "_scale_absmax": ((1,), torch.float32),
        "_scale_offset": ((), torch.float32),
        "_shape": ((2,), torch.int64),
    }
    assert Format("nf4").layout((NESTED_BLOCK + 1, 64))[""] == ((NESTED_BLOCK + 1, 1, 32), torch.uint8)
    assert "_shape" not in Format("nf4").layout((3, 128))


@given(formats(), st.integers(0, 3000))
def test_a_shape_is_stored_just_where_the_codes_do_not_tell_it(format: Format, columns: int) -> None:
    layout = format.layout((2, columns))
    groups, stored = layout[""][0][1:]
    told = groups * stored * 8 // format.bits
    assert ("_shape" in layout) == (told != columns)
