"""Static FP8 scales of Q, K and V: their two forms, what makes them usable, and a text form that keeps every bit.

At layer granularity each of q, k and v of a layer has one scale. At head granularity it has one for each KV head;
the query heads that share a KV head share its q scale, which is the layout `[batch, kv heads]` of the descale
tensors of FP8 attention kernels (FlashAttention-3, arXiv 2407.08608).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from tasks.numerics.fp8 import E4M3_MAX

PARTS = ("q", "k", "v")
ScaleKey = tuple[int, str]
Scale = float | tuple[float, ...]
"""One number for a layer, or a tuple with one for each KV head, in their order."""
Scales = dict[ScaleKey, Scale]
"""Scale of each (global layer number, "q" | "k" | "v")."""


class CalibrationError(ValueError):
    """A layer without values, or with values or scales that cannot be used."""


def scale_from_amax(amax: float, margin: float) -> float:
    """margin * amax / 448, rounded to fp32 once, so that every holder has the same bits."""
    return float(np.float32(margin * amax / E4M3_MAX))


def scale_values(scale: Scale) -> tuple[float, ...]:
    """The numbers of a scale: one at layer granularity, one for each KV head at head granularity."""
    return scale if isinstance(scale, tuple) else (scale,)


def slot_name(key: ScaleKey, head: int | None = None) -> str:
    """How messages name a scale: "layer 3 k", or "layer 3 k head 1"."""
    return f"layer {key[0]} {key[1]}" + ("" if head is None else f" head {head}")


def named_scales(scales: Mapping[ScaleKey, Scale]) -> dict[str, float]:
    """Every number under its `slot_name`; scales of different granularity never share a name."""
    named = {}
    for key, scale in scales.items():
        for head, value in enumerate(scale_values(scale)):
            named[slot_name(key, head if isinstance(scale, tuple) else None)] = value
    return named


def scale_keys(layers: int) -> tuple[ScaleKey, ...]:
    """The keys that a model of `layers` layers needs, in the order of layers and of q, k, v."""
    return tuple((layer, part) for layer in range(layers) for part in PARTS)


def scale_faults(scales: Mapping[ScaleKey, Scale], layers: int, heads: int | None) -> tuple[str, ...]:
    """What keeps an FP8 cache from using these scales; empty when nothing does.

    `heads`: KV heads at head granularity, None at layer granularity. `layers` 0 means that no scale belongs there.
    Looked for: a key too few or too many, the other granularity, another number of heads, and a number that is
    not positive and finite.
    """
    wanted = set(scale_keys(layers))
    if wanted != scales.keys():
        missing, extra = sorted(wanted - scales.keys()), sorted(scales.keys() - wanted)
        return (f"missing {missing[:3]}, extra {extra[:3]}",)
    faults = []
    for key, scale in scales.items():
        held = len(scale) if isinstance(scale, tuple) else None
        if held != heads:
            faults.append(f"{slot_name(key)}: scales for {_form(held)}, needed for {_form(heads)}")
    faults += [
        f"{name}: scale {value} is not a positive finite number"
        for name, value in named_scales(scales).items()
        if not 0 < value < float("inf")
    ]
    return tuple(faults)


def _form(heads: int | None) -> str:
    return "the whole layer" if heads is None else f"{heads} heads"


def grouped_scales(values: Iterable[float], layers: int, heads: int | None) -> Scales:
    """`Scales` from numbers in the order of `scale_keys` and, at head granularity, of the heads."""
    flat, size = tuple(values), 1 if heads is None else heads
    return {
        key: flat[i] if heads is None else flat[i * size : (i + 1) * size] for i, key in enumerate(scale_keys(layers))
    }


def unit_scales(layers: int, heads: int | None) -> Scales:
    """Scale 1 for every key and, at head granularity, every head: codes are then the values themselves, rounded."""
    return grouped_scales([1.0] * (len(scale_keys(layers)) * (1 if heads is None else heads)), layers, heads)


def scales_to_json(scales: Mapping[ScaleKey, Scale]) -> dict[str, str | list[str]]:
    """For a JSON file, as `float.hex`: it keeps every bit and no reader of numbers can round it."""
    return {
        f"{layer}.{part}": [value.hex() for value in scale] if isinstance(scale, tuple) else scale.hex()
        for (layer, part), scale in scales.items()
    }


def scales_from_json(written: Mapping[str, str | list[str]]) -> Scales:
    """What `scales_to_json` wrote, bit by bit; raises `CalibrationError` for anything else.

    Whether the scales fit a model is for `scale_faults` to say.
    """
    scales: Scales = {}
    for name, text in written.items():
        layer, _, part = name.partition(".")
        if not layer.isdecimal() or part not in PARTS:
            raise CalibrationError(f"{name!r} is no name of a scale, such as 3.k")
        try:
            value = tuple(map(float.fromhex, text)) if isinstance(text, list) else float.fromhex(text)
        except (ValueError, TypeError, OverflowError) as error:
            raise CalibrationError(f"scale {name}: {text!r} is no hexadecimal number: {error}") from error
        scales[(int(layer), part)] = value
    return scales
