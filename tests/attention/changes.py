"""Every change of one field of a recipe, to a sample of the values that its type allows."""

import dataclasses
import json
import typing
from collections.abc import Iterator, Mapping
from enum import StrEnum
from typing import Any

from flamia_ref.arithmetic import INSTRUCTIONS
from flamia_ref.arithmetic.special import SPECIAL_MODELS
from flamia_ref.attention import RECIPES, Recipe, Use
from flamia_ref.attention.knobs import EmulatedColumns

_FORMATS = (
    "bf16",
    "fp16",
    "e4m3",
    "e5m2",
    "te-mx-e4m3",
    "te-mx-e5m2",
    "cudnn-mx-e4m3",
    "ocp-mx-floor-e4m3",
    "ocp-mx-floor-e2m1",
    "flashinfer-nvfp4",
    "cudnn-qat-nvfp4",
)
_EMULATED = EmulatedColumns(exp2="polynomial3", period=16, count=4, first=0, stop=64)
_SAMPLES: dict[str, tuple[Any, ...]] = {
    "format": _FORMATS,
    "block": (None, (1, "all"), (1, 16), (1, 32), (32, 1), (32, 32), ("all", 1)),
    "static_scale": (None, 0, 118, 119, 126, 127, 255),
    **dict.fromkeys(("same_codes_as", "scale_folded_into", "promoted_from"), (None, *Use)),
    "instruction": tuple(INSTRUCTIONS),
    **dict.fromkeys(("guard_instruction", "correction_instruction"), (None, *INSTRUCTIONS)),
    **dict.fromkeys(("exp2", "log2", "reciprocal", "tanh"), tuple(SPECIAL_MODELS)),
    "emulated": (None, _EMULATED),
    "period": (0, 8, 16),
    "count": (0, 2, 4, 17),
    "first": (-1, 0, 16, 32),
    "stop": (0, 48, 64, 96, 128),
    "rescale_threshold": (-1, 0, 1, 4, 5, 8, 64, 65),
    "p_scale": (0, 1, 2, 2688, 1 << 21),
    "p_offset": (-1, 0, 1, 4, 5, 8, 9, 64, 65),
    "mask_value": (None, 0.0, -8.0, -(2.0**100)),
    **dict.fromkeys(("query", "key"), (0, 32, 64, 96, 100, 128, 256, 288)),
    "splits": (0, 1, 2, 3, 257),
    **dict.fromkeys(("input", "output"), ("bf16", "fp16", "fp32", "e4m3")),
}


def changes(part: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted paths with another value each, of everything in a recipe that decides bits."""
    hints = typing.get_type_hints(type(part))
    for field in dataclasses.fields(part):
        if path == "" and field.name in ("name", "steps", "schedules"):
            continue
        here, value = f"{path}.{field.name}".lstrip("."), getattr(part, field.name)
        for other in _others(field.name, hints[field.name]):
            if other != value:
                yield here, other
        if dataclasses.is_dataclass(value):
            yield from changes(value, here)


def _others(name: str, kind: Any) -> tuple[Any, ...]:
    if name in _SAMPLES:
        return _SAMPLES[name]
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return tuple(kind)
    if typing.get_origin(kind) is typing.Literal:
        return typing.get_args(kind)
    if kind is bool:
        return (False, True)
    if any(dataclasses.is_dataclass(one) for one in (kind, *typing.get_args(kind))):
        return ()  # its own fields change instead; a backward is there or not as a whole
    raise NotImplementedError(f"no sample of {name}, {kind}")


def changed(part: Any, path: str, value: Any) -> Any:
    """`part`, a recipe or a part of one, with another value at a dotted path."""
    name, _, rest = path.partition(".")
    if rest:
        value = changed(getattr(part, name), rest, value)
    return dataclasses.replace(part, **{name: value})


def with_tiles(recipe: Recipe, rows: int) -> Recipe:
    """The recipe with tiles of another size."""
    return dataclasses.replace(
        recipe, tiles=dataclasses.replace(recipe.tiles, query=rows, key=rows)
    )


def with_changes(recipe: str, changes: Mapping[str, Any]) -> Recipe:
    """The recipe in tiles of 32 with other values at dotted paths, all at once."""
    data = json.loads(RECIPES[recipe].to_json())
    for path, value in {"tiles.query": 32, "tiles.key": 32, **changes}.items():
        *parents, name = path.split(".")
        part = data
        for parent in parents:
            part = part[parent]
        assert name in part, path
        part[name] = value
    return Recipe.from_json(data)
