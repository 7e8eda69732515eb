"""Each central law must fail for a mutant that breaks it: a law that cannot fail checks nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import qkv.memory.footprint as memory
from qkv.checkpoint.layouts import bnb, compressed_tensors
from qkv.integration.patch import quantize_
from qkv.memory.items import Item
from qkv.quantizers import budget, calibration, double_quant, grouping, integer, nf4, packing, quantize, tensor
from qkv.quantizers.budget import Option, Unit
from qkv.quantizers.format import Format
from qkv.quantizers.kernels import choose, native, native_cpu, reference
from qkv.quantizers.linear import QuantizedLinear
from qkv.quantizers.quantize import quantize_tensor
from tests.helpers import fails, prompt, tiny
from tests.laws import (
    check_blocks,
    check_counted_once,
    check_error_bound,
    check_fixed_point,
    check_forward_is_pure,
    check_gradient,
    check_groups_apart,
    check_hull,
    check_ladder,
    check_like_bitsandbytes,
    check_nearest_codes,
    check_packed,
    check_product,
    check_searched_scales,
    check_stored_as_said,
    check_within,
    sample,
)

Patch = pytest.MonkeyPatch
X = sample("normal", (4, 256), 0)
RAGGED = sample("normal", (4, 100), 0)


def bounds() -> None:
    for text in ("int8", "int8:asym", "int4", "int4:asym", "nf4", "int8:double", "nf4:double"):
        for x in (X, RAGGED, sample("one sign", (4, 256), 1), sample("huge", (4, 256), 2)):
            check_error_bound(x, Format.parse(text))


def fixed() -> None:
    for text in ("int8", "int8:asym", "int4:asym", "nf4"):
        for seed in range(20):
            for kind in ("normal", "small grid", "one sign"):
                check_fixed_point(sample(kind, (4, 256), seed), Format.parse(text))
    check_fixed_point(torch.tensor([[-0.5, 3.0, 254.5]]), Format.parse("int8:asym"))


def stored() -> None:
    for text in ("int8", "int8:asym:double", "nf4", "int4:g33"):
        for shape in ((4, 100), (3, 7), (5, 600)):
            check_stored_as_said(torch.ones(shape), Format.parse(text))


def apart() -> None:
    for text in ("int8", "int8:asym", "nf4:g32"):
        check_groups_apart(X, Format.parse(text), 1, 70)
        check_groups_apart(RAGGED, Format.parse(text), 1, 99)


def like_bitsandbytes() -> None:
    check_like_bitsandbytes(X.bfloat16(), 64)


IMPORTANCE = sample("normal", (256,), 4).mul(3).exp()


def searched() -> None:
    for text in ("nf4", "int4", "int8:asym", "int4:row", "nf4:double"):
        check_searched_scales(X, Format.parse(text), IMPORTANCE)
        check_searched_scales(sample("spike", (4, 256), 7), Format.parse(text), IMPORTANCE)


def nearest() -> None:
    for text in ("nf4", "int4", "int8:asym", "nf4:double"):
        check_nearest_codes(X, Format.parse(text), IMPORTANCE)


def products() -> None:
    for text in ("int8", "int8:asym", "nf4", "int4"):
        for rows in (1, 20):
            check_product(sample("normal", (rows, 256), 3), X, torch.ones(4), Format.parse(text))


def gradients() -> None:
    torch.manual_seed(0)
    layer = torch.nn.Sequential(torch.nn.Linear(64, 32))
    quantize_(layer, "int8")
    check_gradient(layer[0], torch.float32)  # type: ignore[arg-type]


def pure() -> None:
    model = tiny("llama")
    quantize_(model, "int8")
    check_forward_is_pure(model, prompt())


UNITS = [
    Unit(("a",), (Option("nf4", 4, 1.0), Option("int8", 6, 0.9), Option("keep", 8, 0.0))),
    Unit(("b",), (Option("nf4", 4, 3.0), Option("int8", 8, 0.2), Option("keep", 16, 0.0))),
    Unit(("c",), (Option("nf4", 4, 0.2), Option("int8", 8, 0.1))),
]


def hulls() -> None:
    check_hull(UNITS)


def ladders() -> None:
    check_ladder(UNITS)


def budgets() -> None:
    for nbytes in range(10, 34):
        check_within(UNITS, nbytes)


def floor_instead_of_round(patch: Patch) -> None:
    encode = integer.encode

    def mutant(groups: Tensor, scale: Tensor, zero: Tensor | None, bits: int) -> Tensor:
        return encode(torch.floor(groups / scale[..., None]) * scale[..., None], scale, zero, bits)

    patch.setattr(integer, "encode", mutant)


def tutorial_levels(patch: Patch) -> None:
    """The code book of the tutorials, rounded to two decimals."""
    patch.setattr(nf4, "levels", lambda device: torch.tensor(nf4.LEVELS).mul(100).round().div(100))


def swapped_nibbles(patch: Patch) -> None:
    pack = packing.pack_nibbles
    patch.setattr(quantize, "pack_nibbles", lambda codes: pack(codes.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)))
    patch.setattr(tensor, "unpack_nibbles", lambda packed: torch.stack((packed & 15, packed >> 4), -1).flatten(-2))


def scales_in_bfloat16(patch: Patch) -> None:
    scale = integer.symmetric_scale
    patch.setattr(integer, "symmetric_scale", lambda absmax, bits: scale(absmax, bits).bfloat16().float() * 0.999)


def groups_over_the_ends_of_rows(patch: Patch) -> None:
    """As bitsandbytes' blocks run over the flattened tensor."""

    def mutant(rows: Tensor, length: int) -> Tensor:
        groups = -(-rows.shape[1] // length)
        flat = torch.nn.functional.pad(rows.flatten(), (0, rows.shape[0] * groups * length - rows.numel()))
        return flat.reshape(rows.shape[0], groups, length)

    for module in (grouping, quantize):
        patch.setattr(module, "to_groups", mutant)


def clamped_zero_points(patch: Patch) -> None:
    """nncf PR#4074: a range that does not hold 0."""
    scale = integer.asymmetric_scale

    def mutant(low: Tensor, high: Tensor, bits: int) -> tuple[Tensor, Tensor]:
        return scale(low * 0.5, high, bits)

    patch.setattr(integer, "asymmetric_scale", mutant)


def no_shrunk_step(patch: Patch) -> None:
    patch.setattr(integer, "SHRINK", 1.0)


def scales_rounded_down(patch: Patch) -> None:
    patch.setattr(double_quant, "_code_above", lambda scaled: double_quant.nearest_code(scaled).clamp(min=3) - 3)


def scales_left_out(patch: Patch) -> None:
    patch.setattr(tensor.QuantizedTensor, "nbytes", property(lambda self: self.codes.untyped_storage().nbytes()))


def a_view_of_a_padded_storage(patch: Patch) -> None:
    assemble = quantize._assemble

    def mutant(x: Tensor, format: Format, codes: Tensor, *others: Any) -> Any:
        return assemble(x, format, torch.cat((codes, codes))[: len(codes)], *others)

    patch.setattr(quantize, "_assemble", mutant)


def no_bias(patch: Patch) -> None:
    forward = choose._forward
    patch.setattr(choose, "_forward", lambda x, weight, bias: forward(x, weight, None))


def a_kernel_that_drops_the_last_group(patch: Patch) -> None:
    for backend in (native_cpu, reference):
        linear = backend.linear

        def mutant(x: Tensor, weight: Any, bias: Tensor | None, linear: Any = linear) -> Tensor:
            x = x.clone()
            x[:, -64:] = 0
            result: Tensor = linear(x, weight, bias)
            return result

        if backend is not reference:
            patch.setattr(backend, "linear", mutant)
    patch.setattr(choose, "choose", lambda case: native_cpu if native_cpu.unavailable() is None else _dropping)


class _dropping:
    """The reference without its last group, where the native kernels are not live."""

    @staticmethod
    def linear(x: Tensor, weight: Any, bias: Tensor | None) -> Tensor:
        x = x.clone()
        x[:, -64:] = 0
        return reference.linear(x, weight, bias)


def a_gradient_through_the_transposed_weight(patch: Patch) -> None:
    patch.setattr(
        choose._Linear, "backward", staticmethod(lambda ctx, grad: (grad.sum(-1, True).expand(-1, 64), None, None))
    )


def a_forward_that_repacks(patch: Patch) -> None:
    """bitsandbytes 0.50.2 on AVX512: what is saved after a forward is transposed."""
    forward = QuantizedLinear.forward

    def mutant(self: QuantizedLinear, input: Tensor) -> Tensor:
        output = forward(self, input)
        self._buffers["weight_scale"] = self.quantized().scale.bfloat16().float()
        return output

    patch.setattr(QuantizedLinear, "forward", mutant)


def a_forward_that_casts_in_place(patch: Patch) -> None:
    forward = QuantizedLinear.forward

    def mutant(self: QuantizedLinear, input: Tensor) -> Tensor:
        self.weight_scale.mul_(1 + 2**-20)  # type: ignore[operator]
        return forward(self, input)

    patch.setattr(QuantizedLinear, "forward", mutant)


def tied_weights_twice(patch: Patch) -> None:
    patch.setattr(memory, "_claim", lambda tensor, seen: True)


def codes_without_scales(patch: Patch) -> None:
    live = memory._live_item

    def mutant(full_name: str, name: str, module: Any, tensors: list[Tensor]) -> Item:
        return live(full_name, name, module, tensors[:1])

    patch.setattr(memory, "_live_item", mutant)


def a_search_by_the_weights_alone(patch: Patch) -> None:
    """Least error of the weights, which makes models worse."""
    search = calibration._search
    patch.setattr(calibration, "_search", lambda x, r, f, weights: search(x, r, f, torch.ones_like(weights)))


def the_last_ratio_tried(patch: Patch) -> None:
    patch.setattr(calibration, "_better", lambda first, error, second, other: (second, other))
    patch.setattr(calibration, "RATIOS", (0.4,))


def nested_scales_unchecked(patch: Patch) -> None:
    errors = iter(range(10**9, 0, -1))
    patch.setattr(calibration, "RATIOS", (0.4,))
    patch.setattr(calibration, "_better", lambda first, error, second, other: (second, other))
    patch.setattr(quantize, "output_error", lambda *_: torch.tensor(float(next(errors))))


def codes_for_the_spanning_scales(patch: Patch) -> None:
    codes = quantize._codes

    def mutant(rows: Tensor, format: Format, scales: Any) -> Tensor:
        spanning, _ = quantize._spanning(quantize._ranges(rows, format, ""), format, torch.float32)
        return codes(rows, format, spanning)

    patch.setattr(quantize, "_codes", mutant)


def every_option_a_step(patch: Patch) -> None:
    patch.setattr(Unit, "hull", lambda self: sorted(self.options, key=lambda option: option.nbytes))


def steps_by_size(patch: Patch) -> None:
    """The smallest gain a byte first."""
    gain = budget._gain
    patch.setattr(budget, "_gain", lambda first, second: -gain(first, second))


def scales_of_nothing(patch: Patch) -> None:
    """A plan that forgets what one of its units takes."""
    plan_of = budget.plan_of
    patch.setattr(budget, "plan_of", lambda units, chosen, fixed, n: plan_of(units, chosen, fixed - 4, n))


def nibbles_as_ours(patch: Patch) -> None:
    """The first code in the high half, as bitsandbytes has it, where compressed-tensors has it low."""
    patch.setattr(compressed_tensors, "_pack", lambda codes, bits: codes.contiguous().view(torch.int32))


def scales_rounded_after_the_codes(patch: Patch) -> None:
    def mutant(*args: Any, scale_dtype: torch.dtype, **others: Any) -> Any:
        return quantize_tensor(*args, **others)

    patch.setattr(compressed_tensors, "quantize_tensor", mutant)


def blocks_that_end_with_the_row(patch: Patch) -> None:
    patch.setattr(bnb, "quantize_tensor", lambda x, *args, **others: quantize_tensor(x.reshape(4, -1), *args, **others))


MUTANTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (floor_instead_of_round, bounds),
    (tutorial_levels, bounds),
    (scales_in_bfloat16, bounds),
    (clamped_zero_points, bounds),
    (scales_rounded_down, bounds),
    (groups_over_the_ends_of_rows, apart),
    (swapped_nibbles, like_bitsandbytes),
    (no_shrunk_step, fixed),
    (scales_left_out, stored),
    (a_view_of_a_padded_storage, stored),
    (a_search_by_the_weights_alone, searched),
    (the_last_ratio_tried, searched),
    (nested_scales_unchecked, searched),
    (codes_for_the_spanning_scales, nearest),
    (every_option_a_step, hulls),
    (steps_by_size, ladders),
    (scales_of_nothing, budgets),
    (no_bias, products),
    (a_kernel_that_drops_the_last_group, products),
    (a_gradient_through_the_transposed_weight, gradients),
    (a_forward_that_repacks, pure),
    (a_forward_that_casts_in_place, pure),
    (nibbles_as_ours, check_packed),
    (scales_rounded_after_the_codes, check_packed),
    (blocks_that_end_with_the_row, check_blocks),
    (tied_weights_twice, check_counted_once),
    (codes_without_scales, check_counted_once),
]


@pytest.mark.parametrize("law", dict.fromkeys(law for _, law in MUTANTS), ids=lambda law: law.__name__)
def test_the_law_holds(law: Callable[[], None]) -> None:
    law()


@pytest.mark.parametrize(("mutate", "law"), MUTANTS, ids=lambda each: each.__name__)
def test_the_law_finds_the_mutant(mutate: Callable[[Patch], None], law: Callable[[], None], monkeypatch: Patch) -> None:
    for backend in (native_cpu, native):
        if law not in (products,):  # so that a mutant of the plain code is not hidden by a faster path
            monkeypatch.setattr(backend, "unavailable", lambda: "switched off by the test")
    choose.choose.cache_clear()
    try:
        mutate(monkeypatch)
        assert fails(law)
    finally:
        monkeypatch.undo()
        choose.choose.cache_clear()
