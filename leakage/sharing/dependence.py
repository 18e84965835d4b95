"""The tokens that each result of a recipe can depend on: sets followed through the dataflow of attention.

Of a query everything is followed by its row: S, the row maximum and the row sum, P, O, lse, delta, dP, dS, dQ. dK and
dV gather rows. A scale that tokens share gives each of them what the others depend on; masked pairs are zero before the
scale of P or dS is taken, and so do not count. The sets hold all that can happen: P is taken to depend on all that its
row sees, though its base follows only the keys so far.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass

from flamia_ref.attention.product import Use
from flamia_ref.leakage.legal import FORWARD_OUTPUTS, QUERY_SIDE
from flamia_ref.leakage.sharing.coupling import INPUT_OF, Coupling
from flamia_ref.leakage.sharing.placement import Placement, Side, Visible
from flamia_ref.leakage.sharing.runs import Sets, then, union
from flamia_ref.leakage.sharing.scales import SharedScales

Sources = Mapping[str, Sets]
"""Tokens of each input, by the name of the input."""


def together(*parts: Sources) -> Sources:
    """The union, input by input."""
    found: dict[str, list[Sets]] = {}
    for part in parts:
        for name, sets in part.items():
            found.setdefault(name, []).append(sets)
    return {name: every[0] if len(every) == 1 else union(*every) for name, every in found.items()}


def through(tokens: Sets, sources: Sources) -> Sources:
    """For each token, what the tokens of its set depend on."""
    return {name: then(tokens, sets) for name, sets in sources.items()}


_STAGES: Mapping[str, tuple[Use, ...]] = {
    "s": (Use.S_Q, Use.S_K),
    "p_codes": (Use.O_P,),
    "lse": (),
    "out": (Use.O_V,),
    "dout": (),
    "dp": (Use.DP_DO, Use.DP_V),
    "delta": (),
    "dq": (Use.DQ_DS, Use.DQ_K),
    "dk": (Use.DK_DS, Use.DK_Q, Use.DP_DO, Use.DP_V),
    "dv": (Use.DV_P, Use.DV_DO),
}
"""The uses in each step, in the order of the dataflow."""


def affected(coupling: Coupling, use: Use) -> frozenset[str]:
    """The steps of `Dependence` that change with a use."""
    before = {
        "p_codes": ("s",),
        "lse": ("p_codes",) if coupling.summed_codes else ("s",),
        "out": ("p_codes", "lse"),
        "dout": ("lse",) if coupling.lse_in_dout else (),
        "dp": ("dout",),
        "delta": ("lse", "dp") if coupling.delta == "p_dp" else ("out", "dout"),
        "dq": ("lse", "delta", "dp"),
        "dk": ("lse", "delta", "dout"),
        "dv": ("lse", "dout", "p_codes") if coupling.forward_p else ("lse", "dout"),
    }
    into = {use, coupling.uses[use].folded_into}
    found: set[str] = set()
    for stage, uses in _STAGES.items():
        direct = into & {*uses, *(coupling.uses[one].codes_of for one in uses)}
        if stage == "delta" and coupling.delta == "quantized_dout":
            direct = into & {Use.DP_DO}
        if direct - {None} or found & {*before.get(stage, ())}:
            found.add(stage)
    return frozenset(found)


@dataclass(frozen=True, kw_only=True, eq=False)
class Dependence:
    """What the results of a recipe, of which `coupling` is all that matters, depend on over a placement."""

    coupling: Coupling
    placement: Placement

    def by(self, coupling: Coupling, use: Use) -> Dependence:
        """That of a coupling which differs in one use, and in what its product guards; this one couples nothing."""
        found = Dependence(coupling=coupling, placement=self.placement)
        reached = affected(coupling, use)
        vars(found).update(
            {stage: getattr(self, stage) for stage in _STAGES if stage not in reached}
        )
        return found

    def of(self, output: str) -> Sources:
        """For each token of "out", "lse", "delta", "dq", "dk" or "dv", the tokens of the inputs; an input that is left
        out has none. Of a recipe without a backward the gradients, and delta, have none."""
        if not self.coupling.backward and output not in FORWARD_OUTPUTS:
            return {}
        found: Sources = getattr(self, output)
        return found

    # Rows.

    @functools.cached_property
    def s(self) -> Sources:
        """S of a row: all its visible pairs. Its maximum depends on them, its P and their sum no further."""
        coded = self._scales.coded("s").keys
        return {
            "q": union(
                (self._scales.live,),
                then((self._scales.rows_of(coded),), self._scales.tokens(Use.S_Q)),
            ),
            "k": union((self._scales.seen.keys,), then((coded,), self._scales.tokens(Use.S_K))),
        }

    @functools.cached_property
    def p_codes(self) -> Sources:
        """P of a row as O's product takes it."""
        pairs = self._scales.paired("o")
        if self.coupling.masked_scores is not None:  # masked pairs are no zeros then
            pairs = Visible(self._scales.reached, self._scales.seen.queries)
        return together(self.s, self._row_codes(Use.O_P, pairs, self.s))

    @functools.cached_property
    def lse(self) -> Sources:
        """lse, and the row sum."""
        return self.p_codes if self.coupling.summed_codes else self.s

    @functools.cached_property
    def out(self) -> Sources:
        """O."""
        coded = (
            self._scales.reached if self.coupling.masked_scores else self._scales.coded("o").keys
        )
        v = union((self._scales.reached,), then((coded,), self._scales.tokens(Use.O_V)))
        return together(self.p_codes, self.lse, {"v": v})

    @functools.cached_property
    def dout(self) -> Sources:
        """What takes the place of dO in the products, before it is quantized; of a row without keys too, unless that
        is 0."""
        if self.coupling.lse_in_dout:
            return together({"dout": (self._scales.live,)}, self.lse)
        return {"dout": (self.placement.alone(Side.QUERIES),)}

    @functools.cached_property
    def dp(self) -> Sources:
        """dP of a row."""
        coded = self._scales.coded("dp").keys
        dout = then((self._scales.rows_of(coded),), self._scales.tokens(Use.DP_DO))
        v = union((self._scales.seen.keys,), then((coded,), self._scales.tokens(Use.DP_V)))
        return together(self._live_dout, through(dout, self.dout), {"v": v})

    @functools.cached_property
    def delta(self) -> Sources:
        """delta of a row."""
        match self.coupling.delta:
            case "p_dp":
                return together(self.lse, self.dp)
            case "quantized_dout":
                tokens = then((self._scales.live,), self._scales.tokens(Use.DP_DO))
                return together(self.out, self._live_dout, through(tokens, self.dout))
        return together(self.out, self._live_dout)

    @functools.cached_property
    def dq(self) -> Sources:
        """dQ."""
        pairs = self._scales.paired("dq")
        beside = together(self.lse, self.delta, self._live_dout)
        k = union(
            (self._scales.seen.keys,),
            then((self._scales.coded("dq").keys,), self._scales.tokens(Use.DQ_K)),
        )
        return together(
            self.lse,
            self.delta,
            self.dp,
            {"k": k},
            self._row_codes(Use.DQ_DS, pairs, beside),
            self._dp_of_partners(pairs),
        )

    def _dp_of_partners(self, pairs: Visible) -> Sources:
        """What dP of other rows brings into dQ: codes of dO and v only where dP takes them."""
        coded, found = self._scales.coded("dp"), []
        for sharing in self.coupling.uses[Use.DQ_DS].sharings:
            if sharing.rows == 1 and not sharing.previous:
                continue
            _, keys = self._scales.row_partners(sharing, pairs, pairs)
            rows, dp_keys = self._scales.row_partners(sharing, pairs, coded)
            dout = then((rows,), self._scales.tokens(Use.DP_DO))
            v = union((keys,), then((dp_keys,), self._scales.tokens(Use.DP_V)))
            found.append(together(through(dout, self.dout), {"v": v}))
        return together(*found)

    # Keys.

    @functools.cached_property
    def dk(self) -> Sources:
        """dK."""
        coded = self._scales.coded("dk").queries
        q = union((self._scales.seen.queries,), then((coded,), self._scales.tokens(Use.DK_Q)))
        ds = together(self.lse, self.delta, self._live_dout)
        # dP takes codes of dO and v in some pairs only, and not in those of a guarded block.
        inner = self._scales.coded("dp")
        dp_rows = self._scales.column_partners(Use.DK_DS, inner)
        dp_keys = self._scales.column_keys(Use.DK_DS, dp_rows, inner)
        return together(
            through(
                (
                    self._scales.seen.queries,
                    *self._scales.column_partners(Use.DK_DS, self._scales.paired("dk")),
                ),
                ds,
            ),
            {"q": q, "v": then(dp_keys, self._scales.tokens(Use.DP_V))},
            through(then(dp_rows, self._scales.tokens(Use.DP_DO)), self.dout),
            self._folded_into_column(Use.DK_DS, self._scales.paired("dk")),
        )

    @functools.cached_property
    def dv(self) -> Sources:
        """dV."""
        coded = self._scales.coded("dv").queries
        rows = (
            self._scales.seen.queries,
            *self._scales.column_partners(Use.DV_P, self._scales.paired("dv")),
        )
        return together(
            through(rows, self.lse),
            self._forward_p() if self.coupling.forward_p else {},
            through((self._scales.seen.queries,), self.dout),
            through(then((coded,), self._scales.tokens(Use.DV_DO)), self.dout),
            self._folded_into_column(Use.DV_P, self._scales.paired("dv")),
        )

    def _forward_p(self) -> Sources:
        """What the P of O's product adds to the pairs of a key."""
        rows = (
            self._scales.seen.queries,
            *self._scales.column_partners(Use.DV_P, self._scales.paired("dv")),
        )
        if self.coupling.masked_scores is not None:
            return through(rows, self.p_codes)
        # Those of the pairs of these rows with the keys that share a scale with the own one in dV.
        pairs, keys = self._scales.paired("o"), self.placement.alone(Side.KEYS)
        for sharing in self.coupling.uses[Use.DV_P].sharings:
            keys = self._scales.span(sharing, Side.KEYS, sharing.columns)
        keys = keys.where(self._scales.seen.queries.some)
        least, most = self.placement.alone(Side.QUERIES), keys
        for sharing in self.coupling.uses[Use.O_P].sharings:
            least = self._scales.span(sharing, Side.QUERIES, sharing.rows)
            most = keys.then(self._scales.span(sharing, Side.KEYS, sharing.columns))
        of_keys = then((keys,), self._scales.column_partners(Use.O_P, pairs))
        bounds = [run.then(least) for run in rows]
        found = tuple(run.within(one.begin, one.end) for run in of_keys for one in bounds)
        folding = tuple(run.then(pairs.keys).within(most.begin, most.end) for run in found)
        return together(through(found, self.s), self._folded(Use.O_P, found, folding))

    @functools.cached_property
    def _scales(self) -> SharedScales:
        return SharedScales(coupling=self.coupling, placement=self.placement)

    @functools.cached_property
    def _live_dout(self) -> Sources:
        return through((self._scales.live,), self.dout)

    # Codes of pairs.

    def _row_codes(self, use: Use, pairs: Visible, sources: Sources) -> Sources:
        """What the codes of a row of pairs depend on beyond the row itself: the `sources` of rows that share a scale
        with it, and the scales that are folded in."""
        parts: list[Sources] = []
        for sharing in self.coupling.uses[use].sharings:
            if sharing.rows != 1 or sharing.previous:
                rows, keys = self._scales.row_partners(sharing, pairs, pairs)
                parts += (through((rows,), sources), self._folded(use, (rows,), (keys,)))
        own = self._scales.rows_of(pairs.keys)
        return together(*parts, self._folded(use, (own,), (pairs.keys,)))

    def _folded_into_column(self, use: Use, pairs: Visible) -> Sources:
        rows = self._scales.column_partners(use, pairs)
        return self._folded(use, rows, self._scales.column_keys(use, rows, pairs))

    def _folded(self, use: Use, rows: Sets, keys: Sets) -> Sources:
        """What the scales depend on that pairs of `rows` and `keys` take."""
        found: list[Sources] = []
        for folded in self.coupling.folded(use):
            name = INPUT_OF[folded]
            tokens = then(rows if name in QUERY_SIDE else keys, self._scales.tokens(folded))
            found.append(through(tokens, self.dout) if name == "dout" else {name: tokens})
        return together(*found)
