"""Attention of every mask and shape, with every stage, and documents cut out of it. Expected values are elsewhere."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
from hypothesis import strategies as st

from flamia_ref import attention
from flamia_ref.attention import RECIPES, Forward, Recipe, backward_stages, forward_stages
from flamia_ref.attention.copies import copy_names
from flamia_ref.attention.product import Scope
from flamia_ref.attention.stages import document_stages, input_of
from flamia_ref.packing.tiles import tile_rows
from tests.attention.masks import MASKS, offsets
from tests.attention.samples import BF16

BLOCK = 32
TILES = ((32, 32), (64, 32), (32, 96), (256, 256))

Results = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Shape:
    """One call of attention: documents of (queries, keys), heads, channels, tiles and options."""

    lengths: tuple[tuple[int, int], ...]
    heads: int = 2
    kv_heads: int = 1
    head_dim: int = 33
    value_dim: int = 20
    tiles: tuple[int, int] = (32, 32)
    mask: str = "causal"
    softcap: float | None = None
    sink: tuple[float, ...] | None = None
    seed: int = 0
    spread: float = 1.0

    @property
    def options(self) -> dict[str, Any]:
        """The keywords but for the documents."""
        sink = None if self.sink is None else np.array(self.sink, np.float32)
        return {**MASKS[self.mask], "softcap": self.softcap, "sink": sink}

    @property
    def cu_seqlens(self) -> tuple[Any, Any]:
        """Offsets of the queries and of the keys."""
        queries, keys = zip(*self.lengths, strict=True) if self.lengths else ((), ())
        return offsets(queries), offsets(keys)

    def arrays(self) -> list[np.ndarray]:
        """q, k, v, dout: normal values whose tokens differ by a few powers of two."""
        rng = np.random.default_rng(self.seed)
        queries, keys = (int(x[-1]) for x in self.cu_seqlens)
        found = []
        for tokens, heads, channels in (
            (queries, self.heads, self.head_dim),
            (keys, self.kv_heads, self.head_dim),
            (keys, self.kv_heads, self.value_dim),
            (queries, self.heads, self.value_dim),
        ):
            x = rng.standard_normal((tokens, heads, channels)) * self.spread
            powers = np.exp2(rng.integers(-3, 2, (tokens, heads, 1)))
            found.append((x * powers).astype(np.float32).astype(BF16))
        return found

    def recipe(self, name: str) -> Recipe:
        """The recipe in tiles of this size."""
        return tiled(RECIPES[name], *self.tiles)


def tiled(recipe: Recipe, query: int, key: int) -> Recipe:
    """The recipe in tiles of another size, or of the nearest that it is computed in."""
    if recipe.softmax.row_sum == "bfloat16_butterfly":
        key = 32
    if recipe.s.left.smoothing == "tile_mean":
        query = max(size for size in (32, 64, 128) if size <= query)
    return dataclasses.replace(
        recipe, tiles=dataclasses.replace(recipe.tiles, query=query, key=key)
    )


def run(
    arrays, recipe: Recipe | str, *, stages: bool = True, given: Forward | None = None, **options
) -> Results:
    """Every result of a recipe's passes by name, dsink and what is saved included, with every stage."""
    chosen = RECIPES[recipe] if isinstance(recipe, str) else recipe
    q, k, v, dout = arrays
    one = attention.forward(
        q, k, v, chosen, trace=forward_stages(chosen) if stages else (), **options
    )
    found = {
        **one.trace,
        "out": one.out,
        "lse": one.lse,
        **{f"saved.{name}": value for name, value in one.saved.items()},
    }
    if not chosen.has_backward:
        return found
    other = attention.backward(
        q, k, v, dout, given or one, trace=backward_stages(chosen) if stages else ()
    )
    sink = {} if other.dsink is None else {"dsink": other.dsink}
    return {
        **found,
        **other.trace,
        "dq": other.dq,
        "dk": other.dk,
        "dv": other.dv,
        **sink,
    }


def of_shape(shape: Shape, name: str, **options) -> Results:
    """`run` of a shape."""
    queries, keys = shape.cu_seqlens
    return run(
        shape.arrays(),
        shape.recipe(name),
        cu_seqlens=queries,
        cu_seqlens_k=keys,
        **shape.options,
        **options,
    )


def document(results: Mapping[str, Any], index: int, shape: Shape, recipe: Recipe) -> Results:
    """What `run` of one document alone should give, cut out of packed results; dsink, a sum over them, left out."""
    cut: Results = {}
    lists, uses = document_stages(recipe), {name: use for use, name in copy_names(recipe).items()}
    for name, value in results.items():
        if name == "dsink":
            continue
        side = 0
        operand = None
        if name.rpartition(".")[0] in uses:
            use = uses[name.rpartition(".")[0]]
            operand, side = recipe.operand(use), int(input_of(use) in "kv")
        elif name in ("dk", "dv"):
            side = 1
        lengths = [pair[side] for pair in shape.lengths]
        if operand is not None and name.endswith(".scales"):
            if operand.scope is Scope.HEAD:
                lengths = [1] * len(lengths)
            elif operand.block[0] != 1:
                lengths = [-(-length // operand.block[0]) for length in lengths]
        start, stop = sum(lengths[:index]), sum(lengths[: index + 1])
        if name in lists:
            cut[name] = value[index : index + 1]
        elif name in ("lse", "row_max", "row_sum", "delta"):
            cut[name] = value[..., start:stop]
        elif name == "saved.row_base":
            tiles = tile_rows(shape.lengths[index][1], recipe.tiles.key)
            cut[name] = value[:, start:stop, : -(-shape.lengths[index][1] // tiles)]
        else:
            cut[name] = value[start:stop]
    return cut


def alone(shape: Shape, index: int, recipe: Recipe, **options) -> Results:
    """`run` of one document alone."""
    queries, keys = shape.cu_seqlens
    mine, own = slice(*queries[index : index + 2]), slice(*keys[index : index + 2])
    q, k, v, dout = shape.arrays()
    return run(
        (q[mine], k[own], v[own], dout[mine]),
        recipe,
        cu_seqlens=[0, mine.stop - mine.start],
        cu_seqlens_k=[0, own.stop - own.start],
        **shape.options,
        **options,
    )


LENGTHS = st.one_of(st.integers(0, 40), st.sampled_from((0, 1, 31, 32, 33)))


@st.composite
def shapes(draw, *, most: int = 2, masks=tuple(MASKS), tiles=TILES) -> Shape:
    """Shapes of up to `most` documents of up to 40 queries and 40 keys."""
    kv_heads = draw(st.integers(1, 2))
    heads = kv_heads * draw(st.integers(1, 2))
    count = draw(st.integers(1, most))
    sinks = st.sampled_from((-np.inf, -3.0, 0.0, 0.7, 5.25))
    return Shape(
        lengths=tuple((draw(LENGTHS), draw(LENGTHS)) for _ in range(count)),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from((1, 8, 31, 32, 33, 40))),
        value_dim=draw(st.sampled_from((1, 16, 32, 40))),
        tiles=draw(st.sampled_from(tiles)),
        mask=draw(st.sampled_from(masks)),
        softcap=draw(st.sampled_from((None, None, 0.5, 3.0))),
        sink=draw(st.one_of(st.none(), st.tuples(*[sinks] * heads))),
        seed=draw(st.integers(0, 1000)),
        spread=draw(st.sampled_from((1.0, 4.0))),
    )
