"""Where in a tensor elements fail, and by how much: heat maps and histograms of a report."""

from collections.abc import Mapping

import numpy as np

from flamia_ref.golden.bitwise import Aligned, Bools, ordinals
from flamia_ref.golden.pack import Case
from flamia_ref.golden.stage import BLOCK, Place
from flamia_ref.report.model import HeatMap

_MOST_CELLS = 64  # rows or columns of a heat map: beyond, cells grow

# Axes that are drawn down and across, and how many of their elements belong together.
_DOWN = (
    "queries",
    "query_blocks",
    "tokens",
    "key_tokens",
    "token_blocks",
    "token_tiles",
    "channel_tiles",
)
_ACROSS = ("keys", "key_blocks", "head_dim", "channel_blocks", "one", "bytes")
_SIZES = {
    "queries": BLOCK,
    "keys": BLOCK,
    "tokens": BLOCK,
    "key_tokens": BLOCK,
    "head_dim": BLOCK,
    "bytes": 16,
}


def by_steps(one: Aligned, where: Bools) -> Mapping[str, int]:
    """Count elements by their distance in representable numbers: "0" for zeros of different sign, "1", "2", "3-4",
    "5-8", ..., and "NaN"."""
    nan = np.isnan(one.values(one.expected[where])) | np.isnan(one.values(one.actual[where]))
    distance = np.abs(
        ordinals(one.expected[where], one.view) - ordinals(one.actual[where], one.view)
    )
    found: dict[str, int] = {}
    # Bucket n holds distances above 2^(n-1) and up to 2^n.
    zeros = int(np.count_nonzero(distance[~nan] == 0))
    if zeros:
        found["0"] = zeros
    bucket = np.ceil(np.log2(distance[~nan & (distance > 0)])).astype(np.int64)
    for power, count in zip(*np.unique(bucket, return_counts=True), strict=True):
        least, most = 2 ** int(power) // 2 + 1, 2 ** int(power)
        found[str(most) if least >= most else f"{least}-{most}"] = int(count)
    if nan.any():
        found["NaN"] = int(np.count_nonzero(nan))
    return found


def heat_map(case: Case, place: Place, failing: Bools) -> HeatMap | None:
    """Count failing elements by cells of 32 rows and 32 columns, or by more where there are many. None without axes."""
    axes = place.stage.axes
    down = next((axis for axis in _DOWN if axis in axes), None)
    across = next((axis for axis in _ACROSS if axis in axes), None)
    if across is None and "heads" in axes:
        across = "heads"
    if down is None or across is None or down == across or failing.size == 0:
        return None
    order = (axes.index(down), axes.index(across))
    whole = np.moveaxis(failing, order, (0, 1)).reshape(
        *(failing.shape[axis] for axis in order), -1
    )
    sizes = [
        _cell(axis, extent) for axis, extent in zip((down, across), whole.shape[:2], strict=True)
    ]
    counts = _by_cells(whole.sum(axis=2), sizes)
    everything = _by_cells(np.full(whole.shape[:2], whole.shape[2], dtype=np.int64), sizes)
    return HeatMap(
        rows=down.replace("_", " "),
        columns=across.replace("_", " "),
        row_size=sizes[0],
        column_size=sizes[1],
        counts=tuple(tuple(int(x) for x in row) for row in counts),
        sizes=tuple(tuple(int(x) for x in row) for row in everything),
    )


def permuted(one: Aligned, failing: Bools) -> bool:
    """Whether the failing elements are the expected ones in another order, and not all alike."""
    if np.count_nonzero(failing) < 4:
        return False
    expected, actual = np.sort(one.expected[failing]), np.sort(one.actual[failing])
    return bool(np.array_equal(expected, actual) and len(np.unique(expected)) > 2)


def _cell(axis: str, extent: int) -> int:
    size = _SIZES.get(axis, 1)
    return max(size, -(-extent // (_MOST_CELLS * size)) * size)


def _by_cells(counts: np.ndarray, sizes: list[int]) -> np.ndarray:
    for axis, size in enumerate(sizes):
        starts = np.arange(0, counts.shape[axis], size)
        counts = np.add.reduceat(counts, starts, axis=axis)
    return counts
