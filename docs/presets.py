"""Write docs/presets.md: every preset, and every recording of a library beside the preset that equals it.

Run from the root of the checkout, ten seconds: python docs/presets.py. Its exit status is 1 if a
block that a preset makes a claim for differs.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from flamia_ref.formats import FORMATS, PRESETS, BlockFormat, NanPolicy, ScaleRule  # noqa: E402
from flamia_ref.formats.block import NanElement, PartialBlock  # noqa: E402
from flamia_ref.formats.rounding import Rounding  # noqa: E402
from tests.formats.comparison import DTYPES, Comparison, compare  # noqa: E402
from tests.formats.stored import presets  # noqa: E402

FILE = ROOT / "docs" / "presets.md"

LIBRARIES = {
    "compressedtensors": "compressed-tensors",
    "cudnn": "cuDNN front end",
    "cutlass": "CUTLASS",
    "deepgemm": "DeepGEMM",
    "flamia": "This project's own",
    "flashinfer": "FlashInfer",
    "gfloat": "gfloat",
    "jax": "JAX",
    "microxcaling": "microxcaling",
    "modelopt": "NVIDIA ModelOpt",
    "ocp": "OCP Microscaling Formats",
    "quark": "AMD Quark",
    "qwix018": "qwix, release 0.1.8",
    "sage3": "SageAttention3",
    "te": "Transformer Engine",
    "torchao": "torchao",
    "torchao018": "torchao, release 0.18.0",
    "triton": "triton_kernels",
    "vllm": "vLLM",
}

HEAD = """# Presets

Made by `python docs/presets.py`. A preset is data, a `BlockFormat`: `flamia-ref formats show NAME` prints all of it.
It says what a library does with a block, bit for bit. Names are `<library>[<version>]-<family>[-<rule>][-<element>]`.

## Recordings

What the libraries made of the same inputs, and what the presets make of them: scale codes and element codes, or
values where a library gives no codes, and tensor scales. The inputs are 2043 blocks of 32, or 19 tensors of 32x64 for
NVFP4, in float32 and in bfloat16: random ones, every edge of every rule, subnormals, zeros, NaN and infinities ([what
they are](../tests/oracles/README.md)). *Compared*: blocks that the preset makes a claim for. *Out of contract*: the
others, by `formats.in_contract`: blocks beside a power of two in float32 where the library rounds log2 to an integer
([014](decisions/014-log2-in-libraries.md)), and where a preset says so, blocks with a NaN. *Differ*: compared blocks
that are not equal in every bit.

"""

EXPLANATION = """
Transformer Engine's recordings are of its reference in Python: the sign of a zero code is not compared there, since
the conversion of its kernels keeps it. Bit 7 of a UE4M3 code is not compared: the format has no sign.

"""

TABLES = """
## All presets

X is the scale of a block, S that of the tensor, amax the largest magnitude of the block and tensor_amax that of the
tensor. A formula is written as it is computed: every operation rounds to float32, to nearest even, or to the type of
x where the table says *in the type of x*. An element is x / X, exactly, where no formula is given, and rounds to
nearest even and saturates. *Range*: of the codes of X. Codes are hexadecimal, those of E8M0 decimal. Codes of NaN:
for +NaN, -NaN and a NaN that the scaling makes.
"""


def row(cells: Iterable[str]) -> str:
    """A row of a table, with its newline."""
    return f"| {' | '.join(cells)} |\n"


def head(cells: Iterable[str]) -> str:
    """The first two lines of a table."""
    cells = list(cells)
    return row(cells) + "|" + "---|" * len(cells) + "\n"


def comparisons() -> Iterator[tuple[Comparison, ...]]:
    """Each recording of a quantizer in both input types."""
    for recording in presets():
        yield tuple(compare(recording, dtype) for dtype in DTYPES)


def comparison_row(results: Sequence[Comparison]) -> str:
    """The row of one recording."""
    cells = [f"`{results[0].preset}`", f"`{results[0].recording}`"]
    for result in results:
        wrong = f"**{result.wrong}**" if result.wrong else "0"
        cells += [str(result.compared), str(result.outside or "-"), wrong]
    return row(cells)


def comparison_section(results: Sequence[Sequence[Comparison]]) -> str:
    """The table of all recordings, and its last line."""
    columns = ("compared", "out of contract", "differ")
    titles = [f"{dtype}: {title}" for dtype in ("float32", "bfloat16") for title in columns]
    lines = [head(["preset", "recording", *titles]), *map(comparison_row, results)]
    total = [sum(getattr(r, n) for both in results for r in both) for n in ("compared", "wrong")]
    verdict = "all equal" if all_equal(results) else f"**{total[1]} blocks differ**"
    return f"{''.join(lines)}\n{len(results)} recordings, {total[0]} blocks compared: {verdict}.\n"


def all_equal(results: Iterable[Iterable[Comparison]]) -> bool:
    """Whether no compared block differs."""
    return not any(result.wrong for both in results for result in both)


def code_in(preset: BlockFormat, code: int) -> str:
    """A scale code as the field writes it."""
    return str(code) if preset.scales_are_powers else f"{code:#04x}"


def scale_cell(preset: BlockFormat) -> str:
    """How a scale follows from its amax."""
    if preset.rule is ScaleRule.QUOTIENT:
        rounding = str(preset.scale_rounding).replace("_", " ")
        words = [f"`{preset.quotient}`, {rounding}"]
    else:
        words = [preset.rule.in_words]
    if preset.exponent is not None:
        words.append(f"emax {preset.exponent}")
    if preset.even_bits is not None:
        words.append(f"even_bits {preset.even_bits}")
    if preset.smallest_amax:
        words.append(f"amax at least {preset.smallest_amax:g}")
    if preset.smallest_quotient:
        words.append(f"1 for a quotient below {preset.smallest_quotient:g}")
    if preset.scale_range is not None:
        words.append("range {} to {}".format(*(code_in(preset, c) for c in preset.scale_range)))
    if preset.underflow_scale is not None:
        words.append(f"code {preset.underflow_scale:#x} in place of 0")
    if preset.row_span is not None:
        words.append(f"at most 2^{preset.row_span} below that of the row")
    if preset.choice is not None:
        words.append(
            f"or of 1.5 times that, by {preset.choice.value.upper()} of `{preset.decoded}`"
        )
    if preset.zero_below:
        words.append(f"blocks with an amax below {preset.zero_below:g} are zeros")
    if preset.arithmetic == "input":
        words.append("in the type of x")
    if preset.flushes_subnormals:
        words.append("subnormals flushed")
    return "; ".join(words)


def tensor_cell(preset: BlockFormat) -> str:
    """The scale of the tensor."""
    if preset.tensor_scale is None:
        return "-"
    how = "x is code X / S" if preset.tensor_divides else "x is code X S"
    of = " of each row" if preset.tensor_extent == "row" else ""
    return f"`{preset.tensor_scale}`{of}; {how}"


def element_cell(preset: BlockFormat) -> str:
    """How an element meets its scale."""
    words = []
    if preset.signs is not None:
        words.append("x after a Hadamard transform of 16")
    if preset.prepared is not None:
        words.append(f"x is first `{preset.prepared}`")
    words.append("x / X" if preset.scaled is None else f"`{preset.scaled}`")
    words += [
        f"X of code {code_in(preset, code)} counts as {value:g}"
        for code, value in preset.scale_values
    ]
    if preset.rounding is not Rounding.NEAREST_EVEN:
        words.append(str(preset.rounding).replace("_", " "))
    if preset.half_added:
        words.append("by adding 1/2 and cutting")
    return "; ".join(words)


def nan_cell(preset: BlockFormat) -> str:
    """What a NaN does to its scale, and its code."""
    policy = (
        "ignored"
        if preset.nan is NanPolicy.IGNORE
        else f"X {code_in(preset, preset.nan_scale or 0)}"
    )
    if preset.nan is NanPolicy.MAXIMUM_NUMBER:
        policy = f"ignored beside numbers, alone {policy}"
    codes = " ".join(f"{code:02x}" for code in preset.nan_elements)
    if preset.nan_element is NanElement.AS_NUMBER:
        codes = f"as a number; {preset.nan_elements[2]:02x}"
    if preset.nan_block_code is not None:
        codes += f"; all of its block {preset.nan_block_code:02x}"
    return f"{policy}; {codes}"


def odd_cells(preset: BlockFormat) -> list[str]:
    """Infinities and zeros."""
    infinity = preset.infinity_scale
    zero = "by the rule" if preset.zero_scale is None else f"X {code_in(preset, preset.zero_scale)}"
    sign = str(preset.zero_sign).replace("_", " ")
    return [
        "by the rule" if infinity is None else f"X {code_in(preset, infinity)}",
        f"{zero}; sign {'kept' if sign == 'keep' else sign}",
    ]


def blocks_cell(preset: BlockFormat) -> str:
    """What may share a scale, its own first."""
    others = [block for block in preset.blocks if block != preset.block]
    whole = ", whole ones" if preset.partial is PartialBlock.REFUSE else ""
    return ", ".join(f"{rows}x{columns}" for rows, columns in (preset.block, *others)) + whole


def narrow_cell(preset: BlockFormat) -> str:
    """What is otherwise for x in bfloat16 and float16."""
    return ", ".join(f"{field} {value}" for field, value in preset.narrow) or "-"


def preset_row(preset: BlockFormat) -> str:
    """The row of one preset."""
    return row(
        [
            f"`{preset.name}`",
            preset.element.name,
            preset.scale.name,
            scale_cell(preset),
            tensor_cell(preset),
            element_cell(preset),
            blocks_cell(preset),
            nan_cell(preset),
            *odd_cells(preset),
            narrow_cell(preset),
            str(preset.evidence),
        ]
    )


COLUMNS = ("preset", "element", "X in", "X", "S", "element of", "blocks", "NaN", "infinity")
COLUMNS += ("zeros", "bfloat16, float16", "evidence")


def preset_sections(formats: Mapping[str, BlockFormat] = PRESETS) -> str:
    """A table for each library."""
    lines = [TABLES]
    for library, members in groupby(formats.values(), key=lambda preset: preset.library):
        kept = list(members)
        lines.append(f"\n### {LIBRARIES.get(library, library)}\n\n")
        sources = dict.fromkeys((one.source, one.version) for one in kept)
        lines += [f"- {source}; {version}\n" for source, version in sources]
        for text in dict.fromkeys(one.out_of_contract for one in kept if one.out_of_contract):
            names = ", ".join(f"`{one.name}`" for one in kept if one.out_of_contract == text)
            whose = "" if names.count("`") == 2 * len(kept) else f" of {names}"
            lines.append(f"- Out of contract{whose}: {text}\n")
        lines += ["\n", head(COLUMNS), *map(preset_row, kept)]
    return "".join(lines)


def scalar_section() -> str:
    """The formats of elements and scales."""
    rows = (
        row([f"`{name}`", str(f.bits), f"{f.max:g}", f"{f.smallest:g}"])
        for name, f in FORMATS.items()
    )
    titles = head(["format", "bits", "largest", "smallest"])
    return f"\n## Elements and scales\n\n{titles}{''.join(rows)}"


def page(results: Sequence[Sequence[Comparison]]) -> str:
    """The whole page."""
    return HEAD + comparison_section(results) + EXPLANATION + scalar_section() + preset_sections()


if __name__ == "__main__":
    found = list(comparisons())
    FILE.write_text(page(found), encoding="utf-8")
    sys.stdout.write(comparison_section(found))
    sys.exit(0 if all_equal(found) else 1)
