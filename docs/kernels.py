"""Write the section Adapters of docs/kernels.md: every adapter, what it fits, and whether it ran.

Run from the root of the checkout: python docs/kernels.py. It leaves the other sections of the page as they are.
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.adapters import Adapter, adapters  # noqa: E402

FILE = ROOT / "docs" / "kernels.md"
TITLE = "# Kernels\n"
FIRST = "<!-- adapters: made by python docs/kernels.py -->\n"
LAST = "<!-- end of adapters -->\n"

HEAD = """## Adapters

Kernels that people run, behind the kernel protocol. Nothing is written to use one:

```
flamia-ref golden make pack --recipe cudnn-mxfp8
flamia-ref golden check pack --kernel flamia_ref.adapters.cudnn:mxfp8
```

A case that the library, the device or the kernel cannot do is skipped, and the report says why: a library that is not
installed, a compute capability, a head_dim, a window. A kernel that fails is a failure.

What *works in stages* takes the operand bytes of the pack, payloads and tiled scales, in the order that the library
loads; nothing is quantized again, so its forward and its backward are judged on the same inputs as the recipe's. The
others start from bfloat16. *Fits*: recipes whose packs the kernel is meant to pass; where there is none, a kernel's
outputs can be compared with those of any recipe, and no envelope is its own. *Checked*: the version of the published
package whose signatures the calls were compared with, argument by argument. That says nothing about results: only what
ran does.

"""

TABLE = """| `flamia_ref.adapters.` | runs | devices | fits | gives beside out | evidence |
|---|---|---|---|---|---|
"""

NOTES = """
| `flamia_ref.adapters.` | package | checked | limits |
|---|---|---|---|
"""

LAYOUTS = """
Scales over channels (Q and K in S, V and dO in dP) lie as `NAME.scales.tiled` of the pack, a document after another in
calls of their own. Those over tokens (V in O, Q in dK, K in dQ, dO in dV) lie as `NAME.scales.tiled_transposed`, but
from 129 channels on with the planes of 128 channels outside the heads: in a dense tensor they are the tiles of the
matrix [channels, heads x blocks of tokens] ([facts of the layout](decisions/013-scale-layouts.md)). Row payloads and
column payloads both lie as [rows, heads, channels]; a column payload is not transposed, only its scales are.

The calls were tried without a GPU in three ways: every keyword against the published signatures
(`tests/adapters/test_signatures.py`; `python tests/adapters/signatures.py FOLDER` reads them from unpacked wheels);
cuDNN's graphs by the front end's own validation; and all but FlashInfer's NVFP4 behind stand-ins that compute in
float64 from the bytes that they are handed, so that a document, a head, a plane or a scale in the wrong place gives
wrong results.
"""


def section() -> str:
    """The section between its two marks, both included."""
    rows = [_row(one) for one in adapters()]
    notes = [_note(one) for one in adapters()]
    return FIRST + HEAD + TABLE + "".join(rows) + NOTES + "".join(notes) + LAYOUTS + LAST


def page(text: str) -> str:
    """A page with its section Adapters made anew: in its place, else at the end."""
    before, mark, rest = text.partition(FIRST)
    if not mark:
        return f"{text.rstrip()}\n\n{section()}"
    _, end, after = rest.partition(LAST)
    if not end:
        raise ValueError(f"{FILE.name} has {FIRST.strip()} and not {LAST.strip()}; put that back")
    return before + section() + after


def _name(one: Adapter) -> str:
    return f"`{one.kernel.removeprefix('flamia_ref.adapters.')}`"


def _row(one: Adapter) -> str:
    fits = ", ".join(f"`{name}`" for name in one.recipes) or "none"
    passes = "forward, backward" if one.backward else "forward"
    gives = ", ".join(one.gives) or "nothing"
    cells = (_name(one), f"{one.runs} ({passes})", one.devices, fits, gives, one.evidence)
    return f"| {' | '.join(cells)} |\n"


def _note(one: Adapter) -> str:
    cells = (_name(one), one.package, one.checked or "no wheel", one.limits)
    return f"| {' | '.join(cells)} |\n"


if __name__ == "__main__":
    given = FILE.read_text(encoding="utf-8") if FILE.exists() else TITLE
    FILE.write_text(page(given), encoding="utf-8")
