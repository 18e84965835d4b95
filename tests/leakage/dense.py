"""The dependencies of a recipe pair by pair, with dense arrays: slow, short, and independent of `leakage.structure`.

Every pair of a query and a key has its own sets, and a scale joins those of all pairs of its block. Written from the
steps of the recipes, for documents of queries and keys with explicit masks.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from flamia_ref.attention import Recipe, Use
from flamia_ref.attention.product import Scope
from flamia_ref.formats import PRESETS

INPUTS = ("q", "k", "v", "dout")
Bools = np.ndarray
Deps = Mapping[str, Bools]  # by input, [..., tokens of the input]


@dataclass(frozen=True, kw_only=True)
class Pack:
    """Documents and what is visible, written out pair by pair."""

    queries: tuple[int, ...]
    keys: tuple[int, ...]
    causal: bool = True
    window: tuple[int | None, int | None] = (None, None)
    top_left: bool = False
    packed_blocks: bool = False

    def tokens(self, side: str) -> list[tuple[int, int]]:
        """Document and place of each token."""
        lengths = self.queries if side == "q" else self.keys
        return [(d, i) for d, length in enumerate(lengths) for i in range(length)]

    def visible(self) -> Bools:
        rows, columns = self.tokens("q"), self.tokens("k")
        found = np.zeros((len(rows), len(columns)), dtype=bool)
        left, right = self.window
        for a, (document, i) in enumerate(rows):
            own = i if self.top_left else i + self.keys[document] - self.queries[document]
            for b, (other, j) in enumerate(columns):
                sees = document == other
                sees &= not self.causal or j <= own
                sees &= left is None or j >= own - left
                sees &= right is None or j <= own + right
                found[a, b] = sees
        return found

    def block(self, side: str, size: int | str, back: int = 0) -> list[tuple]:
        """The block of each token, or the one `back` before it."""
        names: list[tuple] = []
        for token, (document, place) in enumerate(self.tokens(side)):
            of, at = (0, token) if self.packed_blocks else (document, place)
            names.append((of, 0 if size == "all" else at // int(size) - back))
        return names


def dependencies(recipe: Recipe, pack: Pack) -> dict[tuple[str, str], Bools]:
    """[tokens of the output, tokens of the input] for each output and input."""
    return _Dense(recipe, pack).results()


def either(*parts: Deps) -> dict[str, Bools]:
    names = {name for part in parts for name in part}
    return {
        name: np.logical_or.reduce(
            np.broadcast_arrays(*(part[name] for part in parts if name in part))
        )
        for name in names
    }


def product(one: Bools, other: Bools) -> Bools:
    return (one.astype(np.float32) @ other.astype(np.float32)) > 0


class _Dense:
    def __init__(self, recipe: Recipe, pack: Pack) -> None:
        self.recipe, self.pack = recipe, pack
        self.seen = pack.visible()
        self.live = self.seen.any(axis=1)
        self.guarded = self._guarded()

    def results(self) -> dict[tuple[str, str], Bools]:
        gradient, softmax = self.recipe.gradient, self.recipe.softmax
        seen = self.seen

        s = either(
            {"q": self._at_query("s", Use.S_Q)},
            {"k": self._at_key("s", Use.S_K)},
        )
        s_row = self._rows(s, seen)
        p = {name: np.where(seen[:, :, None], x[:, None], False) for name, x in s_row.items()}

        reached = self._reached()
        if softmax.mask_value is not None:
            p = {
                name: np.where(reached[:, :, None], x[:, None], False) for name, x in s_row.items()
            }
        p_o = self._quantized(Use.O_P, p, reached)
        lse = s_row
        if softmax.row_sum_of == "codes":
            lse = either(s_row, self._rows(p_o, reached))
        v = {"v": self._at_key("o", Use.O_V, reached)}
        out = either(lse, s_row, self._rows(either(p_o, v), reached))

        eye = np.eye(len(seen), dtype=bool)
        dout = {"dout": eye}
        if gradient.normalisation == "fold_into_dout":
            dout = either({"dout": eye & self.live[:, None]}, lse)

        dp_codes = self._of_dout(Use.DP_DO, dout)
        raw, high = self._raw("dp"), seen & ~self._raw("dp")
        dp = either(
            {n: np.where(raw[:, :, None], x[:, None], False) for n, x in dout.items()},
            {n: np.where(high[:, :, None], x[:, None], False) for n, x in dp_codes.items()},
            {n: np.where(seen[:, :, None], x[:, None], False) for n, x in dout.items()},
            {"v": self._at_key("dp", Use.DP_V)},
        )
        match gradient.delta_source:
            case "p_dp":
                delta = either(lse, s_row, self._rows(dp, seen))
            case "quantized_dout":
                delta = either(out, dp_codes)
            case _:
                delta = either(out, dout)
        delta = {n: x & self.live[:, None] for n, x in delta.items()}
        ds = either(
            {
                n: np.where(seen[:, :, None], x[:, None], False)
                for n, x in either(delta, lse).items()
            },
            dp,
        )
        ds_dq = self._quantized(Use.DQ_DS, ds, seen)
        dq = either(self._rows(ds_dq, seen), self._rows({"k": self._at_key("dq", Use.DQ_K)}, seen))
        ds_dk = self._quantized(Use.DK_DS, ds, seen)
        dk = either(
            self._columns(ds_dk, seen), self._columns({"q": self._at_query("dk", Use.DK_Q)}, seen)
        )
        p_back = {n: np.where(seen[:, :, None], x[:, None], False) for n, x in lse.items()}
        if gradient.p_for_dv == "forward":
            only = {n: np.where(seen[:, :, None], x, False) for n, x in p_o.items()}
            p_back = either(p_back, only)
        p_dv = self._quantized(Use.DV_P, p_back, seen)
        raw, high = self._raw("dv"), seen & ~self._raw("dv")
        codes = self._of_dout(Use.DV_DO, dout)
        dv = either(
            self._columns(p_dv, seen),
            self._columns(
                {n: np.where(seen[:, :, None], x[:, None], False) for n, x in dout.items()}, seen
            ),
            self._columns(
                {n: np.where(high[:, :, None], x[:, None], False) for n, x in codes.items()}, seen
            ),
        )
        named = {"out": out, "lse": lse, "delta": delta, "dq": dq, "dk": dk, "dv": dv}
        return {
            (output, name): deps.get(name, self._none(output, name))
            for output, deps in named.items()
            for name in INPUTS
        }

    def _none(self, output: str, name: str) -> Bools:
        rows = self.seen.shape[output in ("dk", "dv")]
        return np.zeros((rows, self.seen.shape[name in ("k", "v")]), dtype=bool)

    # Sums over the pairs.

    def _rows(self, deps: Deps, pairs: Bools) -> dict[str, Bools]:
        return {n: (x & pairs[:, :, None]).any(axis=1) for n, x in deps.items()}

    def _columns(self, deps: Deps, pairs: Bools) -> dict[str, Bools]:
        return {n: (x & pairs[:, :, None]).any(axis=0) for n, x in deps.items()}

    # Operands that are inputs.

    def _tokens(self, use: Use) -> Bools:
        """[token, token]: whether the codes of one depend on the other."""
        operand = self.recipe.operand(use)
        if operand.same_codes_as is not None:
            return self._tokens(operand.same_codes_as)
        side = "k" if str(use)[-1] in "kv" else "q"
        count = self.seen.shape[side == "k"]
        found = np.eye(count, dtype=bool)
        if operand.format in PRESETS:
            rows = operand.block[0]
            if rows == "all":
                found = np.ones((count, count), dtype=bool)
            else:
                back = int(operand.scope is Scope.PREVIOUS_BLOCK)
                mine, other = self.pack.block(side, rows, back), self.pack.block(side, rows)
                found |= np.array([[a == b for b in other] for a in mine], dtype=bool).reshape(
                    count, count
                )
        if operand.promoted_from is not None:
            found = product(found, self._tokens(operand.promoted_from))
        return found

    def _raw(self, name: str) -> Bools:
        """Pairs in which a product takes its inputs as they are."""
        if getattr(self.recipe, name).guarded and self.recipe.guard_operands == "inputs":
            return self.guarded
        return np.zeros_like(self.seen)

    def _at_query(self, name: str, use: Use) -> Bools:
        """[query, key, query]."""
        eye, codes = np.eye(len(self.seen), dtype=bool), self._tokens(use)
        found = np.where(self._raw(name)[:, :, None], eye[:, None], codes[:, None])
        return found & self.seen[:, :, None]

    def _at_key(self, name: str, use: Use, pairs: Bools | None = None) -> Bools:
        """[query, key, key]."""
        eye, codes = np.eye(self.seen.shape[1], dtype=bool), self._tokens(use)
        found = np.where(self._raw(name)[:, :, None], eye[None], codes[None])
        return found & (self.seen if pairs is None else pairs)[:, :, None]

    def _of_dout(self, use: Use, dout: Deps) -> dict[str, Bools]:
        return {n: product(self._tokens(use), x) for n, x in dout.items()}

    # Operands of pairs.

    def _quantized(self, use: Use, deps: Deps, pairs: Bools) -> dict[str, Bools]:
        operand = self.recipe.operand(use)
        name = str(use).split(".")[0]
        active = pairs
        if getattr(self.recipe, name).guarded:
            active = pairs & ~self.guarded
        taken = {use, operand.same_codes_as}
        extra: dict[str, Bools] = {}
        for other, folded in self.recipe.uses():
            if folded.scale_folded_into in taken and folded.scale_folded_into is not None:
                tensor = str(other).split(".")[1]
                codes = self._tokens(other)
                if tensor in "kv":
                    extra[tensor] = np.broadcast_to(codes[None], (*pairs.shape, pairs.shape[1]))
                elif tensor == "q":
                    extra["q"] = np.broadcast_to(codes[:, None], (*pairs.shape, pairs.shape[0]))
                else:
                    eye = {"dout": np.eye(len(self.seen), dtype=bool)}
                    if self.recipe.gradient.normalisation == "fold_into_dout":
                        eye = either({"dout": eye["dout"] & self.live[:, None]}, self._lse())
                    for n, x in self._of_dout(other, eye).items():
                        part = np.broadcast_to(x[:, None], (*pairs.shape, x.shape[1]))
                        extra = either(extra, {n: part})
        with_folds = either(deps, {n: x & active[:, :, None] for n, x in extra.items()})
        if operand.same_codes_as is not None:
            operand = self.recipe.operand(operand.same_codes_as)
        if operand.format not in PRESETS:
            return with_folds
        rows, columns = operand.block
        a, b = self.pack.block("q", rows), self.pack.block("k", columns)
        found = {}
        for n, x in with_folds.items():
            own = x.copy()
            for row_block in set(a):
                mine = np.array([one == row_block for one in a], dtype=bool)
                for column_block in set(b):
                    others = np.array([one == column_block for one in b], dtype=bool)
                    here = np.ix_(mine, others)
                    joined = (x[here] & active[here][:, :, None]).any(axis=(0, 1))
                    own[here] |= active[here][:, :, None] & joined
            found[n] = own
        return found

    def _lse(self) -> dict[str, Bools]:
        q = self._rows({"q": self._at_query("s", Use.S_Q)}, self.seen)
        k = self._rows({"k": self._at_key("s", Use.S_K)}, self.seen)
        row = either(q, k)
        if self.recipe.softmax.row_sum_of == "p":
            return row
        reached = self._reached()
        p = {n: np.where(reached[:, :, None], x[:, None], False) for n, x in row.items()}
        return either(row, self._rows(self._quantized(Use.O_P, p, reached), reached))

    # Masks.

    def _reached(self) -> Bools:
        """Pairs whose P may not be zero in O."""
        if self.recipe.softmax.mask_value is None:
            return self.seen
        tiles = self.recipe.tiles
        queries, keys = self.pack.tokens("q"), self.pack.tokens("k")
        found = np.zeros_like(self.seen)
        for a, (document, i) in enumerate(queries):
            for b, (other, j) in enumerate(keys):
                if document != other or not self.live[a]:
                    continue
                if tiles.masked == "computed":
                    found[a, b] = True
                    continue
                rows = [
                    x
                    for x, (d, y) in enumerate(queries)
                    if d == document and y // tiles.query == i // tiles.query
                ]
                columns = [
                    x
                    for x, (d, y) in enumerate(keys)
                    if d == document and y // tiles.key == j // tiles.key
                ]
                found[a, b] = self.seen[np.ix_(rows, columns)].any()
        return found

    def _guarded(self) -> Bools:
        queries, keys = self.pack.block("q", 32), self.pack.block("k", 32)
        found = np.zeros_like(self.seen)
        for row_block in set(queries):
            mine = np.array([one == row_block for one in queries], dtype=bool)
            for column_block in set(keys):
                others = np.array([one == column_block for one in keys], dtype=bool)
                here = np.ix_(mine, others)
                whole = self.seen[here].all() and others.sum() == 32
                found[here] = self.seen[here].any() and not whole
        return found
