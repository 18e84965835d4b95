"""Who shares scales over a placement: of inputs by token, of P and dS by pair; and which pairs a product takes how."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from flamia_ref.attention.product import Use
from flamia_ref.leakage.legal import QUERY_SIDE
from flamia_ref.leakage.sharing.coupling import INPUT_OF, Coupling, Sharing, product_of
from flamia_ref.leakage.sharing.placement import DOCUMENT, Placement, Side, Visible
from flamia_ref.leakage.sharing.runs import Runs, Sets, then, union


def side_of(name: str) -> Side:
    """Whether an input or an output has a row for a query or for a key."""
    return Side.QUERIES if name in QUERY_SIDE else Side.KEYS


@dataclass(frozen=True, kw_only=True, eq=False)
class SharedScales:
    """The scales of a coupling over a placement."""

    coupling: Coupling
    placement: Placement

    # Pairs.

    @property
    def seen(self) -> Visible:
        """The visible pairs."""
        return self.placement.visible

    @functools.cached_property
    def live(self) -> Runs:
        """Each query that sees a key."""
        return self.rows_of(self.seen.keys)

    def rows_of(self, keys: Runs) -> Runs:
        """Each query that has a key."""
        return self.placement.alone(Side.QUERIES).where(keys.some)

    def paired(self, product: str) -> Visible:
        """The pairs whose P or dS is quantized for a product."""
        return self.placement.unguarded if product in self.coupling.guarded else self.seen

    def coded(self, product: str) -> Visible:
        """The pairs in which a product takes the codes of its inputs."""
        return self.seen if self.coupling.codes else self.paired(product)

    @functools.cached_property
    def reached(self) -> Runs:
        """The keys whose v counts in a row of O."""
        seen, sizes = self.seen.keys, self.coupling.masked_scores
        if sizes is None:
            return seen
        begin, end = self.placement.own(Side.QUERIES, Side.KEYS)
        rows, columns = sizes
        if rows:
            tile = self.live.then(self.placement.tile(Side.QUERIES, rows)).then(seen)
            start = begin
            begin = start + (tile.begin - start) // columns * columns
            end = np.minimum(start - (start - tile.end) // columns * columns, end)
        return Runs(begin=begin, end=end).where(seen.some)

    # Inputs.

    def tokens(self, use: Use) -> Sets:
        """For each token of an input, the tokens that its code and its scale depend on, itself among them."""
        if use not in self._tokens:
            side = side_of(INPUT_OF[use])
            found: Sets = (self.placement.alone(side),)
            for sharing in self.coupling.uses[use].sharings:
                found = then(self._shared(sharing, side), found)
            self._tokens[use] = found
        return self._tokens[use]

    @functools.cached_property
    def _tokens(self) -> dict[Use, Sets]:
        return {}

    def _shared(self, sharing: Sharing, side: Side) -> Sets:
        placement, extent = self.placement, sharing.rows
        alone = placement.alone(side)
        if extent == DOCUMENT:
            begin, end = placement.own(side, side)
            return (Runs(begin=begin, end=end),)
        if not isinstance(extent, int):  # the scale of a whole tensor, which all documents share
            return (Runs(begin=alone.begin, end=alone.end, whole=True),)
        if sharing.previous:
            return union((alone,), (placement.previous(side, extent),))
        return (placement.block(side, extent),)

    # Values of pairs.

    def row_partners(self, sharing: Sharing, own: Visible, others: Visible) -> tuple[Runs, Runs]:
        """For each query, the queries with a pair among `others` that shares a scale with a pair of its `own`, and the
        keys of these pairs."""
        touched = own.keys.then(self.span(sharing, Side.KEYS, sharing.columns))
        theirs = touched
        if others is not own:
            theirs = others.keys.then(self.span(sharing, Side.KEYS, sharing.columns))
        block = self.span(sharing, Side.QUERIES, sharing.rows)
        # Ends that never go back, so that rows without a pair do not disturb the search.
        least = np.where(theirs.some, theirs.begin, np.iinfo(np.int64).max)
        least = np.minimum.accumulate(least[::-1])[::-1]
        most = np.maximum.accumulate(np.where(theirs.some, theirs.end, -1))
        first = np.searchsorted(most, touched.begin, side="right")
        last = np.searchsorted(least, touched.end, side="left")
        rows = Runs(begin=np.maximum(first, block.begin), end=np.minimum(last, block.end))
        rows = rows.where(touched.some)
        return rows, rows.then(others.keys).within(touched.begin, touched.end)

    def column_partners(self, use: Use, others: Visible) -> Sets:
        """For each key, the queries of its pairs among `others`, and of those that share a scale of `use` with one of
        its own."""
        found = [others.queries]
        for sharing in self.coupling.uses[use].sharings:
            own = self.paired(product_of(use)).queries
            rows = own.then(self.span(sharing, Side.QUERIES, sharing.rows))
            columns = self.span(sharing, Side.KEYS, sharing.columns).then(others.queries)
            found.append(columns.within(rows.begin, rows.end).where(own.some))
        return union(tuple(found))

    def column_keys(self, use: Use, rows: Sets, others: Visible) -> Sets:
        """For each key, the keys that have a pair among `others` with some rows which shares a scale with its own."""
        own = self.placement.alone(Side.KEYS)
        for sharing in self.coupling.uses[use].sharings:
            own = self.span(sharing, Side.KEYS, sharing.columns)
        return union(tuple(run.then(others.keys).within(own.begin, own.end) for run in rows))

    def span(self, sharing: Sharing, side: Side, extent: int | str) -> Runs:
        """The queries or the keys of the block of pairs of each, with those of the block before where that counts."""
        block = self.placement.block(side, extent)
        if not sharing.previous:
            return block
        previous = self.placement.previous(side, extent)
        return Runs(begin=np.where(previous.some, previous.begin, block.begin), end=block.end)
