"""Golden packs: make them from the simulator, read them, check kernels against them.

A pack is a folder with ``manifest.json`` and one ``CASE.safetensors`` a case, CASE being the name of
the data, a dot, and the name of the recipe. A case file holds the inputs, the stages of forward and
backward, and the outputs by name (`flamia_ref.golden.dataflow` makes the list from the recipe), as U8,
U16, I32 and F32: bfloat16, codes and scales are their bits, and the manifest says what they mean. A
stage that is a list with an array a document is one tensor a document: ``s.0``, ``s.1``, ...

The scales of q, k, v and do are there twice: in order, and for each document in the 128x4 tiles that
kernels load:

- ``q.scales.tiled.0`` [heads, token tiles, channel block tiles, 512], where the contraction runs over
  channels (S, dP): rows are the document's tokens, columns blocks of 32 channels.
- ``k.scales.tiled_transposed.0`` [heads, channel tiles, token block tiles, 512], where it runs over
  tokens (O, dV, dQ, dK): rows are channels, columns the document's blocks of 32 tokens. Tiles of
  channels are outermost.

A scale that is shared by rows, or by columns, is repeated for each. In a tile the scale of row r and
column c is byte (r % 32) * 16 + r // 32 * 4 + c. Rows and columns past the end are 0.
"""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.golden import arrays as arrays
    from flamia_ref.golden.cases import CaseSpec as CaseSpec
    from flamia_ref.golden.comparison import check as check
    from flamia_ref.golden.explanation import explain as explain
    from flamia_ref.golden.flashinfer import export_flashinfer as export_flashinfer
    from flamia_ref.golden.headers import include_dir as include_dir
    from flamia_ref.golden.making import DEFAULT_RECIPES as DEFAULT_RECIPES
    from flamia_ref.golden.making import make as make
    from flamia_ref.golden.manifest import Manifest as Manifest
    from flamia_ref.golden.matching import Match as Match
    from flamia_ref.golden.matching import match as match
    from flamia_ref.golden.merging import merge as merge
    from flamia_ref.golden.migration import migrate as migrate
    from flamia_ref.golden.pack import Case as Case
    from flamia_ref.golden.pack import Pack as Pack
    from flamia_ref.golden.pack import load as load
    from flamia_ref.golden.raw import write_raw as write_raw
    from flamia_ref.golden.recipes import NUMERICS_VERSION as NUMERICS_VERSION
    from flamia_ref.golden.suites import SUITES as SUITES
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "arrays": [],
            "cases": ["CaseSpec"],
            "comparison": ["check"],
            "explanation": ["explain"],
            "flashinfer": ["export_flashinfer"],
            "headers": ["include_dir"],
            "making": ["DEFAULT_RECIPES", "make"],
            "manifest": ["Manifest"],
            "matching": ["Match", "match"],
            "merging": ["merge"],
            "migration": ["migrate"],
            "pack": ["Case", "Pack", "load"],
            "raw": ["write_raw"],
            "recipes": ["NUMERICS_VERSION"],
            "suites": ["SUITES"],
        },
    )
