"""Cases for the interpreter of recipes: changes of a recipe, shapes and arguments, one feature or a pair each.

All have tiles of 32 unless they say otherwise, so that a document of up to 40 tokens has several.
"""

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from tests.independent.samples import Array, bell, constant

FA4, CUDNN, CUDNN_BF16 = "bf16-fa4", "cudnn-mxfp8", "cudnn-mxfp8-pv-bf16"
REFERENCE = "cudnn-mxfp8-reference"
QAT = "attn-qat-nvfp4"
FLAMIA, FOLDED, UNGUARDED = "flamia-mxfp8", "flamia-mxfp8-folded", "flamia-mxfp8-unguarded"
ONE = 0x3F80
CANCELLING = (0x4E80, 0xCE80, ONE)  # bfloat16 2**30, -2**30, 1
RAGGED = (5, 0, 35), (9, 3, 20)  # lengths of queries and of keys


def wide(seed: int, *shape: int) -> Array:
    """Exponents over 40 binades, and zeros of both signs."""
    rng = np.random.default_rng(seed)
    bits = bell(seed, *shape).astype(np.int32) & 0x807F | rng.integers(107, 147, shape) << 7
    return np.where(rng.random(shape) < 0.1, bits & 0x8000, bits).astype(np.uint16)


def with_specials(seed: int, *shape: int) -> Array:
    """Bell-shaped with a NaN and infinities of both signs."""
    rng = np.random.default_rng(seed)
    result = bell(seed, *shape)
    for special in (0x7FC0, 0x7F80, 0xFF80):
        if result.size:
            result[tuple(rng.integers(0, extent) for extent in shape)] = special
    return result


DISTRIBUTIONS = {"bell": bell, "wide": wide, "specials": with_specials}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What one run is given."""

    name: str
    recipe: str
    changes: Mapping[str, Any] = field(default_factory=dict)
    queries: tuple[int, ...] = (36,)
    keys: tuple[int, ...] | None = None
    heads: int = 1
    kv_heads: int = 1
    head_dim: int = 16
    width: int | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    sink: tuple[float, ...] | None = None
    seed: int = 0
    kind: str = "bell"
    nightly: bool = False

    def plain(self, recipes: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """The recipe as data, from all recipes as data by name."""
        result = copy.deepcopy(dict(recipes[self.recipe]))
        for path, value in {"tiles.query": 32, "tiles.key": 32, **self.changes}.items():
            *parents, name = path.split(".")
            part = result
            for parent in parents:
                part = part[parent]
            if name not in part:
                raise KeyError(f"{path}: no such field of a recipe")
            part[name] = value
        return result

    def inputs(self) -> list[Array]:
        """q, k, v, dout as bfloat16 bits."""
        if self.kind.startswith("cancelling"):
            return self._cancelling()
        tokens, others = sum(self.queries), sum(self.keys or self.queries)
        width = self.width or self.head_dim
        shapes = (
            (tokens, self.heads, self.head_dim),
            (others, self.kv_heads, self.head_dim),
            (others, self.kv_heads, width),
            (tokens, self.heads, width),
        )
        return [
            DISTRIBUTIONS[self.kind](self.seed + index, *shape)
            for index, shape in enumerate(shapes)
        ]

    def _cancelling(self) -> list[Array]:
        """2**30, -2**30 and 1 at every 32nd token, or in the heads: their sum is 1 in some orders, else 0.

        All scores are 0. "cancelling k": the numbers are in k, for dQ; "v" for O, "q" for dK, "do" for dV.
        """
        tokens, others = sum(self.queries), sum(self.keys or self.queries)
        width = self.width or self.head_dim
        q, do = (
            constant(0.0, tokens, self.heads, self.head_dim),
            constant(1.0, tokens, self.heads, width),
        )
        k, v = constant(0.0, others, 1, self.head_dim), constant(0.0, others, 1, width)
        v[:: 32 if self.kind == "cancelling k" else max(others, 1)] = ONE
        arrays = {"q": q, "k": k, "v": v, "do": do}
        if self.kind == "cancelling heads":
            do[:] = np.array(CANCELLING, np.uint16)[None, : self.heads, None]
            return [q, k, v, do]
        chosen = arrays[self.kind.split()[1]]
        chosen[:] = 0
        for block, start in enumerate(range(0, len(chosen), 32)):
            chosen[start] = CANCELLING[block % 3]
        return [q, k, v, do]

    def bounds(self) -> tuple[Array, Array | None]:
        """cu_seqlens of queries and, where they differ, of keys."""
        keys = None if self.keys is None else np.cumsum([0, *self.keys]).astype(np.int32)
        return np.cumsum([0, *self.queries]).astype(np.int32), keys

    def documents(self) -> Iterator[tuple[slice, slice]]:
        """The tokens of the queries and of the keys of each document."""
        queries, keys = self.bounds()
        other = queries if keys is None else keys
        for a, b in zip(pairwise(queries.tolist()), pairwise(other.tolist()), strict=True):
            yield slice(*a), slice(*b)


def masks() -> Iterator[Case]:
    """Masks and shapes."""
    for recipe in (FA4, FOLDED, FLAMIA, CUDNN):
        for options in (
            {},
            {"alignment": "top_left"},
            {"causal": False},
            {"window": (3, 0)},
            {"window": (6, 2), "causal": False},
        ):
            text = " ".join(f"{name}={value}" for name, value in options.items()) or "bottom_right"
            queries, keys = RAGGED
            yield Case(
                name=f"{recipe} ragged {text}",
                recipe=recipe,
                queries=queries,
                keys=keys,
                options=options,
            )
    for window, causal in (
        ((0, 0), True),
        ((None, 3), False),
        ((33, None), False),
        ((-1, 0), True),
    ):
        yield Case(
            name=f"{FLAMIA} window {window}",
            recipe=FLAMIA,
            options={"window": window, "causal": causal},
        )
    yield Case(
        name="window, more keys, top left",
        recipe=FA4,
        queries=(34,),
        keys=(40,),
        options={"window": (5, 4), "causal": False, "alignment": "top_left"},
    )
    yield Case(name="no keys", recipe=FA4, queries=(2, 3), keys=(0, 3))
    yield Case(name="no queries", recipe=FOLDED, queries=(0, 3), keys=(2, 3))
    yield Case(name="nothing", recipe=FLAMIA, queries=(0,))
    yield Case(name="grouped heads", recipe=FLAMIA, heads=4, kv_heads=2, queries=(9,))
    yield Case(name="one key head", recipe=CUDNN, heads=3, kv_heads=1, queries=(33,))
    for recipe, head_dim, width in (
        (FA4, 48, 20),
        (FOLDED, 16, 40),
        (FLAMIA, 72, 33),
        (CUDNN, 40, 72),
    ):
        yield Case(
            name=f"{recipe} widths {head_dim} and {width}",
            recipe=recipe,
            head_dim=head_dim,
            width=width,
            queries=(34,),
        )
    for recipe, query, key, masked in (
        (FA4, 64, 32, "skipped"),
        (CUDNN, 32, 64, "computed"),
        (FOLDED, 32, 32, "skipped"),
        (FLAMIA, 96, 32, "computed"),
        (FLAMIA, 32, 64, "skipped"),
        (UNGUARDED, 64, 32, "computed"),
        (CUDNN_BF16, 160, 96, "skipped"),
        (FOLDED, 256, 256, "computed"),
    ):
        yield Case(
            name=f"{recipe} tiles {query} x {key} {masked}",
            recipe=recipe,
            changes={
                "tiles.query": query,
                "tiles.key": key,
                "tiles.masked": masked,
                # One chain over all heads is refused with masked tiles computed.
                **({"gradient.heads": "float32_sum"} if masked == "computed" else {}),
            },
            queries=(40, 3),
        )


def softmaxes() -> Iterator[Case]:
    """Splits, soft cap, sink and the knobs of the softmax."""
    for recipe in (FA4, CUDNN, FLAMIA, FOLDED):
        for combine in ("every_split", "scales_first", "divide_last"):
            yield Case(
                name=f"{recipe} splits {combine}",
                recipe=recipe,
                changes={"tiles.splits": 2, "softmax.combine": combine},
                queries=(7, 33),
                keys=(40, 33),
            )
            yield Case(
                name=f"{recipe} splits {combine} sink",
                recipe=recipe,
                changes={"tiles.splits": 3, "softmax.combine": combine},
                queries=(2, 36),
                keys=(70, 34),
                sink=(0.5,),
                options={"window": (20, 0)},
            )
        yield Case(name=f"{recipe} softcap", recipe=recipe, options={"softcap": 1.5})
        yield Case(
            name=f"{recipe} sink",
            recipe=recipe,
            sink=(0.3, -2.0, float("-inf")),
            heads=3,
            queries=(12, 33),
            keys=(10, 6),
        )
        yield Case(
            name=f"{recipe} softcap sink scale",
            recipe=recipe,
            sink=(4.0,),
            options={"softcap": 3.0, "softmax_scale": 0.7},
        )
        yield Case(name=f"{recipe} scaled", recipe=recipe, changes={"softmax.score": "scaled"})
    yield from _softmax_knobs()


def _softmax_knobs() -> Iterator[Case]:
    knobs: list[tuple[str, dict[str, Any]]] = [
        (base, {"exp2_argument": form, "p_offset": units, "rescale_threshold": threshold})
        for base, form, units, threshold in (
            (FOLDED, "split", 3, 2),
            (FOLDED, "fused", 0, 0),
            (FLAMIA, "fused", 5, 3),
            (FLAMIA, "unfused", 8, 0),
            (FA4, "unfused", 0, 0),
            (FA4, "fused", 6, 2),
            (CUDNN, "unfused", 4, 4),
            (CUDNN, "fused", 0, 0),
            (CUDNN, "fused", 3, 1),
        )
    ]
    for order in ("eight_lanes", "two_lanes", "ascending"):
        for of in ("p", "codes"):
            knobs += [
                (name, {"row_sum": order, "row_sum_of": of})
                for name in (FA4, CUDNN, FLAMIA, FOLDED)
                if (order, of) != ("eight_lanes", "p")
            ]
    for kind in ("reciprocal", "zero_safe_reciprocal", "division", "quotient"):
        knobs += [(name, {"normalisation": kind}) for name in (FA4, CUDNN, FOLDED)]
    for form in ("log2_sum", "natural_fma"):
        knobs += [(name, {"lse": form}) for name in (CUDNN, FLAMIA)]
    columns = {"exp2": "polynomial3", "period": 8, "count": 3, "first": 8, "stop": 24}
    knobs += [(name, {"emulated": columns}) for name in (FA4, FOLDED)]
    knobs += [(CUDNN, {"emulated": None}), (FA4, {"score_factor": "exact_product"})]
    knobs += [
        (name, {"mask_value": value})
        for name in (FA4, CUDNN, FLAMIA, FOLDED)
        for value in (-1e30, -9.0)
    ]
    for name, changes in knobs:
        text = " ".join(f"{knob}={value}" for knob, value in changes.items())
        yield Case(
            name=f"{name} {text}".replace(str(columns), "8/3"),
            recipe=name,
            changes={f"softmax.{knob}": value for knob, value in changes.items()},
            # Rows without a key, tiles without one for some rows, a part of a block.
            queries=(38,),
            keys=(35,),
            seed=7,
        )


def orders() -> Iterator[Case]:
    """Orders of tiles, heads and K steps, partial sums."""
    for recipe in (FA4, CUDNN, FLAMIA, FOLDED):
        for changes in (
            {"o.tile_order": "descending"},
            {"dq.tile_order": "descending", "dq.accumulation": "chained"},
            {"dq.tile_order": "shifted", "dq.accumulation": "chained"},
            {"dq.tile_order": "shifted", "dq.accumulation": "float32_partials"},
            {"dk.tile_order": "descending", "dv.tile_order": "descending"},
            {"dk.tile_order": "shifted", "dv.tile_order": "shifted"},
            {"o.accumulation": "float32_partials"},
            {"gradient.heads": "one_chain", "gradient.heads_order": "descending"},
            {"gradient.heads": "float32_sum", "gradient.heads_order": "descending"},
        ):
            grouped = any(path.startswith("gradient") for path in changes)
            yield Case(
                name=f"{recipe} {' '.join(f'{path}={value}' for path, value in changes.items())}",
                recipe=recipe,
                changes={**changes, "tiles.masked": "skipped"},
                queries=(20, 33) if grouped else (40, 70),
                keys=None if grouped else (70, 40),
                options={"causal": grouped},
                heads=3 if grouped else 1,
                seed=3,
                nightly=not any(path.startswith("o") for path in changes),
            )
        for product in ("s", "o", "dp", "dv", "dq", "dk"):
            yield Case(
                name=f"{recipe} {product}.k_order=descending",
                recipe=recipe,
                changes={f"{product}.k_order": "descending", "tiles.query": 64, "tiles.key": 64},
                head_dim=40,
                queries=(39,),
                seed=5,
                nightly=product not in ("s", "dp"),
            )


def cancellations() -> Iterator[Case]:
    """Orders again, on numbers whose sum shows the order even in bfloat16."""
    keys: dict[str, Any] = {"queries": (70,), "keys": (96,), "kind": "cancelling k"}
    values: dict[str, Any] = {"queries": (34,), "keys": (96,), "kind": "cancelling v"}
    queries: dict[str, Any] = {"queries": (96,), "keys": (70,), "kind": "cancelling q"}
    gradients: dict[str, Any] = {**queries, "kind": "cancelling do"}
    heads: dict[str, Any] = {"queries": (3,), "heads": 3, "kind": "cancelling heads"}
    whole = {"tiles.query": 96, "tiles.key": 96}
    few: dict[str, Any] = {"queries": (2,)}
    for name in (FA4, CUDNN, FLAMIA, FOLDED):
        made: list[tuple[dict[str, Any], dict[str, Any]]] = [
            ({"o.tile_order": order}, values) for order in ("ascending", "descending")
        ]
        made += [
            ({"dq.tile_order": order, "dq.accumulation": kind}, keys)
            for order in ("ascending", "descending", "shifted")
            for kind in ("chained", "float32_partials")
        ]
        for order in ("ascending", "descending", "shifted"):
            changes = {"dk.tile_order": order, "dv.tile_order": order}
            made += [(changes, queries), (changes, gradients)]
        made += [
            ({f"{product}.k_order": order, **whole}, {**arguments, **size})
            for order in ("ascending", "descending")
            for product, arguments, size in (
                ("o", values, few),
                ("dq", keys, few),
                ("dk", queries, {"keys": (2,)}),
                ("dv", gradients, {"keys": (2,)}),
            )
        ]
        made += [
            ({"gradient.heads": kind, "gradient.heads_order": order}, heads)
            for kind in ("one_chain", "float32_sum")
            for order in ("ascending", "descending")
        ]
        for changes, arguments in made:
            text = " ".join(f"{path}={value}" for path, value in changes.items())
            yield Case(
                name=f"{name} {arguments['kind']} {text}",
                recipe=name,
                changes={"tiles.masked": "skipped", **changes},
                options={"causal": False},
                width=2,
                nightly="ascending" in changes.values(),
                **{"head_dim": 4, **arguments},
            )


def _gradient(knobs: Mapping[str, Any]) -> dict[str, Any]:
    """Changes by path; where masked tiles are computed, some are refused."""
    changes = {f"gradient.{knob}": value for knob, value in knobs.items()}
    if knobs.get("masked_ds") == "product":
        changes["tiles.masked"] = "skipped"
    if knobs.get("p_offset") == 7:
        changes["dv.left.static_scale"] = 120
    return changes


def gradients() -> Iterator[Case]:
    """The knobs of the backward."""
    base: list[tuple[str, dict[str, Any]]] = []
    for name in (FA4, CUDNN, FLAMIA, FOLDED):
        base += [
            (name, {"softmax_scale": "in_ds"}),
            (name, {"masked_ds": "product"}),
            (name, {"p_for_dv": "forward"}),
            (name, {"delta_source": "unrounded_out"}),
            (name, {"delta_source": "quantized_dout"}),
            (name, {"delta_source": "p_dp"}),
        ]
        own = "lse" if name in (FLAMIA, FOLDED) else "fold_into_dout"
        # cuDNN's P of dV is multiplied by 2**8, which a P below 2 does not bear.
        other = {"normalisation": own} | ({"p_offset": 7} if name == CUDNN else {})
        base += [
            (name, other),
            (name, {**other, "p_for_dv": "forward"}),
            (name, {**other, "delta_source": "p_dp"}),
        ]
        base += [
            (name, {"delta": kind, "delta_source": source})
            for kind in ("fma_ascending", "thread_vectors", "half_products")
            for source in ("unrounded_out", "quantized_dout")
        ]
    base += [(FOLDED, {"p_offset": 3}), (FLAMIA, {"score_factor": "float32_product"})]
    for name, changes in base:
        text = " ".join(f"{knob}={value}" for knob, value in changes.items())
        yield Case(
            name=f"{name} gradient {text}",
            recipe=name,
            changes=_gradient(changes),
            queries=(38,),
            keys=(35,),
            head_dim=20,
            seed=9,
        )
        if len(changes) == 1:
            yield Case(
                name=f"{name} gradient {text} softcap sink",
                recipe=name,
                changes=_gradient(changes),
                queries=(3, 34),
                options={"softcap": 2.0, "causal": False, "window": (12, 4)},
                sink=(0.7,),
                seed=9,
            )
    for name, knob in ((FA4, "unfused"), (FOLDED, "fused"), (FLAMIA, "unfused")):
        for normalisation in ("lse", "fold_into_dout"):
            for source in ("forward", "recomputed"):
                yield Case(
                    name=f"{name} {knob} {normalisation} p_for_dv={source} sink",
                    recipe=name,
                    changes={
                        "softmax.exp2_argument": knob,
                        "gradient.normalisation": normalisation,
                        "gradient.p_for_dv": source,
                    },
                    sink=(1.0,),
                    queries=(34,),
                    seed=11,
                )


STATIC = {"format": "e4m3", "scope": "static", "static_scale": 121, "block": None}


def scopes() -> Iterator[Case]:
    """Guards, scopes of scales, FP4."""
    for changes in (
        {},
        {"guard_operands": "codes"},
        {"guard_operands": "codes", "o.accumulation": "float32_partials"},
        {"dq.accumulation": "float32_partials"},
        {"tiles.query": 64, "tiles.key": 96},
    ):
        for options in ({"window": (20, 0)}, {"causal": False, "window": (40, 3)}):
            yield Case(
                name=f"guards {' '.join(f'{a}={b}' for a, b in changes.items())} {options['window']}",
                recipe=FLAMIA,
                changes=changes,
                queries=(70,) if not changes else (40, 5),
                keys=(75,) if not changes else (44, 3),
                options=options,
                seed=13,
            )
    static = {
        f"{use}.{name}": value for use in ("s.left", "s.right") for name, value in STATIC.items()
    }
    yield Case(name="static q and k", recipe=CUDNN, changes=static, seed=15)
    for uses, byte in ((("o.right",), 120), (("dp.left", "dp.right"), 122)):
        yield Case(
            name=f"static {' and '.join(uses)}",
            recipe=CUDNN,
            changes={
                f"{use}.{name}": value
                for use in uses
                for name, value in {**STATIC, "static_scale": byte}.items()
            },
            seed=15,
        )
    yield Case(
        name="static P, the forward's in dV",
        recipe=CUDNN,
        changes={"o.left.static_scale": 123, "gradient.p_for_dv": "forward"},
    )
    square = {"format": "te-mx-e4m3", "scope": "block", "block": [32, 32], "static_scale": None}
    yield Case(
        name="P in blocks of 32 x 32",
        recipe=UNGUARDED,
        changes={
            **{f"o.left.{name}": value for name, value in square.items()},
            "softmax.row_sum_of": "codes",
        },
    )
    yield Case(
        name="two lanes of 160 columns",
        recipe=FOLDED,
        changes={
            "gradient.delta_source": "p_dp",
            "softmax.row_sum": "two_lanes",
            "tiles.key": 160,
            "tiles.query": 96,
        },
        queries=(40,),
        keys=(170,),
    )
    previous = {"scope": "previous_block", "static_scale": 122}
    yield Case(
        name="previous block, 32 tokens",
        recipe=CUDNN,
        changes={f"o.right.{name}": value for name, value in previous.items()},
        queries=(70, 3),
        seed=15,
    )
    yield Case(
        name="previous block, 32 x 32, both orientations",
        recipe=UNGUARDED,
        changes={
            f"{use}.{name}": value
            for use in ("s.right", "dq.right", "o.right", "dp.right")
            for name, value in previous.items()
        },
        queries=(66, 33),
        head_dim=40,
        seed=15,
    )
    for recipe in ("flamia-nvfp4-fp8", "flamia-nvfp4-fp8-ue4m3"):
        yield Case(name=recipe, recipe=recipe, queries=(34, 2), heads=2, head_dim=40, seed=17)
        yield Case(
            name=f"{recipe} window softcap sink",
            recipe=recipe,
            queries=(20,),
            keys=(35,),
            head_dim=72,
            options={"softcap": 2.5, "window": (9, 0)},
            sink=(0.2,),
            seed=17,
        )


def pairs() -> Iterator[Case]:
    """Features that meet."""
    cut: dict[str, Any] = {"queries": (38,), "keys": (35,), "seed": 19}
    masked = {"softmax.mask_value": -6.0}
    partials = "float32_partials"
    made: list[tuple[str, dict[str, Any], dict[str, Any]]] = []
    for name in (FA4, CUDNN, FLAMIA, FOLDED):
        made += [
            (name, {**masked, "tiles.splits": 2}, cut),
            (name, {**masked, "softmax.row_sum_of": "codes"}, {**cut, "sink": (0.5,)}),
            (name, {**masked, "gradient.p_for_dv": "forward"}, cut),
            (name, {"softmax.row_sum": "two_lanes", "tiles.splits": 2}, {**cut, "sink": (-1.0,)}),
            (
                name,
                {
                    "gradient.softmax_scale": "in_ds",
                    "gradient.masked_ds": "product",
                    "tiles.masked": "skipped",
                },
                cut,
            ),
            (name, {"tiles.splits": 2, "gradient.p_for_dv": "forward"}, cut),
            (
                name,
                {"tiles.splits": 2, "o.tile_order": "descending", "tiles.masked": "skipped"},
                cut,
            ),
            (name, {"o.accumulation": partials, "tiles.splits": 2}, cut),
        ]
    window: dict[str, Any] = {"options": {"window": (4, 1), "causal": False}}
    made += [
        (FLAMIA, masked, {**cut, **window}),
        (
            FLAMIA,
            {"softmax.row_sum_of": "codes", "gradient.p_for_dv": "forward"},
            {**cut, **window},
        ),
        (FLAMIA, {"tiles.splits": 2, "o.accumulation": partials}, {**cut, **window}),
        (
            FLAMIA,
            {"softmax.rescale_threshold": 0, "softmax.row_sum": "two_lanes"},
            {"sink": (3.0,)},
        ),
        (FOLDED, {"softmax.rescale_threshold": 5}, {"sink": (6.0,), "seed": 23}),
        (FOLDED, {"tiles.splits": 3, "softmax.combine": "divide_last"}, {"queries": (70,)}),
        (FA4, {}, {"queries": (70,), "head_dim": 128, "width": 16, "options": {"window": (36, 0)}}),
        (FA4, {}, {"queries": (40,), "keys": (70,), "head_dim": 128, "options": {"causal": False}}),
        (
            CUDNN,
            {"dk.tile_order": "shifted", "dv.tile_order": "shifted"},
            {"queries": (70,), "heads": 2},
        ),
        (
            FA4,
            {"dq.tile_order": "shifted", "dk.tile_order": "shifted", "dv.tile_order": "shifted"},
            {"queries": (100,), "head_dim": 128, "width": 8, "options": {"window": (50, 0)}},
        ),
    ]
    for name, changes, others in made:
        text = " ".join(f"{path}={value}" for path, value in changes.items())
        more = " ".join(f"{key}={value}" for key, value in others.items() if key != "seed")
        yield Case(name=f"{name} {text} {more}", recipe=name, changes=changes, **others)


def special_values() -> Iterator[Case]:
    """NaN, infinities and wide exponents where features meet them."""
    skipped = {"tiles.masked": "skipped"}
    features: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("plain", {}, {}),
        ("sink", {}, {"sink": (0.5,)}),
        ("splits", {"tiles.splits": 2}, {}),
        (
            "divide last, sink",
            {"tiles.splits": 2, "softmax.combine": "divide_last"},
            {"sink": (1.0,)},
        ),
        ("softcap", {}, {"options": {"softcap": 3.0}}),
        ("window", {}, {"options": {"window": (9, 3), "causal": False}}),
        ("codes, two lanes", {"softmax.row_sum_of": "codes", "softmax.row_sum": "two_lanes"}, {}),
        (
            "products",
            {"gradient.masked_ds": "product", "gradient.softmax_scale": "in_ds", **skipped},
            {},
        ),
        ("forward's P", {"gradient.p_for_dv": "forward"}, {}),
        ("p_dp", {"gradient.delta_source": "p_dp"}, {}),
        ("mask value", {"softmax.mask_value": -20.0}, {}),
        ("dead rows", {}, {"keys": (31,)}),
    ]
    for kind in ("wide", "specials"):
        for name in (FA4, CUDNN, FLAMIA, FOLDED):
            for text, changes, others in features:
                yield Case(
                    name=f"{kind} {name} {text}",
                    recipe=name,
                    changes=changes,
                    queries=(34,),
                    seed=29,
                    kind=kind,
                    **others,
                )
        for recipe in ("flamia-nvfp4-fp8", "flamia-nvfp4-fp8-ue4m3"):
            yield Case(name=f"{kind} {recipe}", recipe=recipe, head_dim=40, seed=29, kind=kind)


def natural() -> Iterator[Case]:
    """The knobs of a base in natural units, and those that came with it on other recipes."""
    refused = {"softmax.p_overflow": "refused", "softmax.rescale_threshold": 2}
    named: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("as it is", {}, {}),
        ("threshold in log2", {"softmax.threshold_unit": "log2"}, {}),
        ("threshold 0", {"softmax.rescale_threshold": 0}, {}),
        ("saturated", {"softmax.p_overflow": "saturated"}, {}),
        ("refused", refused, {}),
        ("NaN kept", {"softmax.nan_p": "kept"}, {"kind": "specials", "seed": 4}),
        ("specials", {}, {"kind": "specials", "seed": 5}),
        ("wide", {}, {"kind": "wide"}),
        ("row sum of codes", {"softmax.row_sum_of": "codes"}, {}),
        ("row sum in two lanes", {"softmax.row_sum": "two_lanes"}, {}),
        ("row sum in eight lanes", {"softmax.row_sum": "eight_lanes"}, {"sink": (0.5,)}),
        ("quotient", {"softmax.normalisation": "quotient"}, {}),
        ("division", {"softmax.normalisation": "division"}, {}),
        ("chained", {"o.accumulation": "chained"}, {}),
        ("backward from lse", {"gradient.normalisation": "lse"}, {"sink": (0.5,)}),
        ("scale in dS", {"gradient.softmax_scale": "in_ds"}, {}),
        ("scale in the epilogue", {"gradient.softmax_scale": "epilogue"}, {}),
        ("delta of pairs", {"gradient.delta_source": "p_dp"}, {}),
        ("sink", {}, {"sink": (0.7, -1.0), "heads": 2}),
        ("sink of minus infinity", {}, {"sink": (float("-inf"),)}),
        ("softcap", {}, {"options": {"softcap": 1.5}, "sink": (0.7,)}),
        ("window", {}, {"options": {"window": (6, 2), "causal": False}}),
        ("descending", {"o.tile_order": "descending"}, {}),
        ("splits", {"tiles.splits": 2}, {"sink": (0.5,)}),
        ("splits, late", {"tiles.splits": 2, "softmax.combine": "divide_last"}, {"sink": (0.5,)}),
    ]
    for name, changes, fields in named:
        yield Case(
            name=f"{REFERENCE} natural: {name}",
            recipe=REFERENCE,
            changes=changes,
            **{"queries": (38,), "keys": (35,), "seed": 13, "nightly": False, **fields},
        )
    products = {f"{one}.instruction": "float32" for one in ("s", "o", "dp", "dv", "dq", "dk")}
    products["tiles.masked"] = "skipped"
    for recipe, changes in (
        (CUDNN, {"softmax.p_overflow": "saturated", "softmax.rescale_threshold": 7}),
        (CUDNN, {"softmax.p_overflow": "zero", "softmax.rescale_threshold": 7}),
        (CUDNN, {"softmax.p_scaling": "static_scale", "softmax.p_offset": 0}),
        (CUDNN, {"softmax.row_sum": "by_tiles", "softmax.normalisation": "clamped_quotient"}),
        (CUDNN, {"gradient.softmax_scale": "times_ds"}),
        (CUDNN, products),
        (FOLDED, products),
    ):
        own = {"o.left.static_scale": 123} if "softmax.p_scaling" in changes else {}
        text = " ".join(f"{path}={value}" for path, value in changes.items())
        yield Case(
            name=f"{recipe} natural: {'float32' if changes is products else text}",
            recipe=recipe,
            changes={**changes, **own},
            queries=(38,),
            keys=(35,),
            seed=13,
        )


def fake_quantization() -> Iterator[Case]:
    """Products of dequantized operands, O of P in bfloat16, row sums in bfloat16."""
    half = {
        "format": "bf16",
        "block": None,
        "scope": "unit",
        "same_codes_as": None,
        "dequantized": False,
    }
    mx = {"format": "te-mx-e4m3", "block": [1, 32]}

    def at(path: str, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {f"{path}.{name}": value for name, value in fields.items()}

    named: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
        ("as it is, specials", {}, {"kind": "specials"}),
        ("as it is, wide", {}, {"kind": "wide"}),
        (
            "as it is, ragged",
            {},
            {"queries": RAGGED[0], "keys": RAGGED[1], "heads": 2, "width": 24},
        ),
        ("full", {}, {"options": {"causal": False}, "queries": (38,), "keys": (35,)}),
        ("window", {}, {"options": {"causal": False, "window": (6, 2)}, "queries": (70,)}),
        ("sink and cap", {}, {"sink": (0.3,), "options": {"softcap": 3.0}}),
        ("splits", {"tiles.splits": 2}, {"queries": (70,)}),
        ("partials", {"o.accumulation": "float32_partials", "tiles.query": 64}, {"queries": (70,)}),
        ("selected", {"softmax.mask_value": None}, {}),
        ("near mask", {"softmax.mask_value": -3.0}, {}),
        ("row sum of codes", {"softmax.row_sum_of": "codes"}, {}),
        ("delta of pairs", {"gradient.delta_source": "p_dp"}, {}),
        ("delta of O before its rounding", {"gradient.delta_source": "unrounded_out"}, {}),
        ("forward's P", {"gradient.p_for_dv": "forward"}, {"queries": (70,)}),
        ("P of O in bfloat16", at("o.left", half), {}),
        ("P of dV in bfloat16", at("dv.left", half), {}),
        ("V of dP in bfloat16", at("dp.right", half), {}),
        (
            "dS fake",
            at(
                "dq.left",
                {
                    "format": "cudnn-qat-nvfp4",
                    "block": [1, 16],
                    "scope": "block",
                    "dequantized": True,
                },
            ),
            {},
        ),
        ("MX", {**at("s.left", mx), **at("dk.right", mx), **at("dv.left", mx)}, {"head_dim": 40}),
        ("two codes of K", {"dq.right.same_codes_as": None}, {}),
    ]
    for name, changes, fields in named:
        yield Case(
            name=f"{QAT} fake: {name}",
            recipe=QAT,
            changes=changes,
            nightly=name not in ("as it is, specials", "splits", "near mask", "MX"),
            **{"queries": (38,), "seed": 31, **fields},
        )
    yield Case(
        name=f"{FOLDED} row sum in bfloat16",
        recipe=FOLDED,
        changes={"softmax.row_sum": "bfloat16_butterfly"},
        queries=(70,),
        nightly=True,
    )
    yield Case(
        name=f"{CUDNN_BF16} O of P in bfloat16",
        recipe=CUDNN_BF16,
        changes={"gradient.delta_source": "high_precision_out"},
        nightly=True,
    )


def fp8_knobs() -> Iterator[Case]:
    """The knobs that came with the FP8 paths, on recipes that have a backward."""
    cut: dict[str, Any] = {"queries": (38,), "keys": (35,), "seed": 37}
    capped: dict[str, Any] = {"options": {"softcap": 1.5}}
    base = {"softmax.exp2_argument": "fused_base"}
    named: list[tuple[str, str, dict[str, Any], dict[str, Any]]] = [
        (FA4, "quads", {"softmax.row_sum": "quads"}, cut),
        (FA4, "quads of codes", {"softmax.row_sum": "quads", "softmax.row_sum_of": "codes"}, cut),
        (FA4, "octets", {"softmax.row_sum": "octets"}, cut),
        (FOLDED, "quads", {"softmax.row_sum": "quads"}, {"sink": (0.5,)}),
        (CUDNN, "quads", {"softmax.row_sum": "quads", "gradient.delta_source": "p_dp"}, cut),
        (FA4, "quads, specials", {"softmax.row_sum": "quads"}, {**cut, "kind": "specials"}),
        (FA4, "halved lanes", {"softmax.row_sum": "halved_lanes"}, cut),
        (CUDNN, "halved lanes", {"softmax.row_sum": "halved_lanes"}, cut),
        (FA4, "halved lanes, specials", {"softmax.row_sum": "halved_lanes"}, {**cut, "kind": "specials"}),
        (FA4, "halved lanes, p_dp", {"softmax.row_sum": "halved_lanes", "gradient.delta_source": "p_dp"}, cut),
        (FA4, "factor", {"softmax.lse": "factor_fma"}, cut),
        (FA4, "factor, lifted", {"softmax.lse": "factor_fma", "softmax.p_offset": 6}, {"sink": (0.5,)}),
        (FA4, "factor, specials", {"softmax.lse": "factor_fma"}, {**cut, "kind": "specials"}),
        (FA4, "factor, cap", {"softmax.lse": "factor_fma"}, capped),
        (FA4, "scale", {"softmax.lse": "scale_fma"}, cut),
        (FA4, "scale, lifted", {"softmax.lse": "scale_fma", "softmax.p_offset": 6}, {"sink": (0.5,)}),
        (FA4, "scale, specials", {"softmax.lse": "scale_fma"}, {**cut, "kind": "specials"}),
        (FA4, "scale, cap", {"softmax.lse": "scale_fma"}, capped),
        (FA4, "scale, splits", {"softmax.lse": "scale_fma", "tiles.splits": 2}, cut),
        (FA4, "scale, scaled", {"softmax.lse": "scale_fma", "softmax.score": "scaled"}, cut),
        (FA4, "base", base, cut),
        (FA4, "base, lifted", {**base, "softmax.p_offset": 6, "softmax.rescale_threshold": 2}, cut),
        (FA4, "base, mask value", {**base, "softmax.mask_value": -9.0}, cut),
        (FA4, "base, the forward's P", {**base, "gradient.p_for_dv": "forward"}, cut),
        (FA4, "folded cap", {"softmax.softcap": "folded"}, capped),
        (CUDNN, "folded cap", {"softmax.softcap": "folded"}, capped),
        (FOLDED, "folded cap, sink", {"softmax.softcap": "folded"}, {**capped, "sink": (0.5,)}),
        (FA4, "folded cap, factor", {"softmax.softcap": "folded", "softmax.lse": "factor_fma"},
         {**capped, "sink": (0.5,)}),
        (FA4, "c of the float32 scale", {"softmax.score_factor": "float32_scale"},
         {"options": {"softmax_scale": 0.3}}),
    ]  # fmt: skip
    for recipe, name, changes, fields in named:
        yield Case(
            name=f"{recipe} fp8: {name}",
            recipe=recipe,
            changes=changes,
            nightly=name not in ("quads", "halved lanes", "scale", "base", "folded cap, factor"),
            **{"queries": (38,), "seed": 37, **fields},
        )


MAKERS = (
    masks,
    softmaxes,
    orders,
    cancellations,
    gradients,
    scopes,
    pairs,
    special_values,
    natural,
    fake_quantization,
    fp8_knobs,
)
ALL = [case for make in MAKERS for case in make()]


def _daily() -> frozenset[str]:
    """Of the cases that differ in the recipe alone one, each time another; the rest is for the night."""
    groups: dict[str, list[str]] = {}
    for case in ALL:
        if not case.nightly:
            groups.setdefault(case.name.replace(case.recipe, "", 1), []).append(case.name)
    # Every second of them, and all that have special values or cancel: the others run by night.
    chosen = [names[index % len(names)] for index, names in enumerate(groups.values())]
    marked = [name for name in chosen if "special" in name or "cancel" in name]
    return frozenset((*chosen[::2], *marked))


DAILY = _daily()
"""The names of the cases that are always run."""
