"""The stages of the dataflow by name: what can be traced, and what golden packs hold, in order."""

FORWARD_STAGES = (
    "q.codes",
    "q.scales",
    "k.codes",
    "k.scales",
    "v.codes",
    "v.scales",
    "s",
    "p",
    "p.o.codes",
    "p.o.scales",
    "row_max",
    "row_sum",
    "o",
)
"""Traced stages of a forward. `out` and `lse` follow them.

- `*.codes` [tokens, heads, head_dim] and `*.scales` [tokens, heads, 1]: uint8.
- `s`, `p` (float32) and `p.o.codes` (uint8): lists with one [heads, queries, keys] array a document; `p.o.scales`
  likewise, [heads, queries, ceil(keys / 32)]. `s` holds every pair, masked ones too; `p` and its codes are relative to
  the row maximum of their key tile.
- `row_max`, `row_sum`: float32 [heads, tokens].
- `o`: float32 [tokens, heads, head_dim], normalised, before output rounding.
"""

DOCUMENT_STAGES = ("s", "p", "p.o.codes", "p.o.scales")
"""Stages that are lists, one array a document."""
