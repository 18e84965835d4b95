"""The picture of a safeguards study: error against the share of work that leaves low precision."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any

from flamia_ref.leakage.safeguarding.points import Merits, Standing, StudyPoint, front_of

if TYPE_CHECKING:
    from flamia_ref.leakage.safeguarding.study_report import SafeguardsStudy

_LEAKING, _LEGAL, _PROVEN = "#c8102e", "#9db8d9", "#1f4e8c"
_DPI = 120
_LINE = 13  # pixels
_KINDS: tuple[tuple[Standing, str, dict[str, Any]], ...] = (
    (Standing.LEAKS, "leaks", {"marker": "x", "color": _LEAKING}),
    (Standing.DISPUTED, "disputed", {"marker": "s", "color": "#000000"}),
    (
        Standing.LEGAL,
        "legal by structure",
        {"marker": "o", "facecolors": "none", "edgecolors": _LEGAL},
    ),
    (Standing.PROVEN, "proven, on the front", {"marker": "o", "color": _PROVEN}),
)


def figure(study: SafeguardsStudy) -> Any:
    """Draw the points: across, the work at the first length; up, the error; the bytes kept as the size of a mark.

    Points above all that is legal are not shown. The line joins the points that are best in error and work alone; the
    others of the front are better in bytes. Letters are those of the text. Names are of registered
    recipes with the same six products.
    """
    from matplotlib.figure import Figure

    picture = Figure(figsize=(9, 6), dpi=_DPI, layout="constrained")
    ax = picture.subplots()
    least = min(point.kept for point in study.points)
    most = max(point.kept for point in study.points)
    for standing, text, style in _KINDS:
        points = [point for point in study.points if point.standing is standing]
        if points:
            ax.scatter(
                [_work(point) for point in points],
                [point.error for point in points],
                s=[30 + 90 * (point.kept - least) / ((most - least) or 1) for point in points],
                label=text,
                zorder=3,
                **style,
            )
    _line(ax, study)
    ax.set(
        xlabel=f"share of multiply-accumulates in 16 bits, at {study.at[0]} tokens [%]",
        ylabel="relative L2 error, root mean square of the results",
        title=f"{study.recipe.name}: safeguards of the uses that leak",
    )
    legal = [point for point in study.points if not point.illegal] + [study.base]
    high = max(point.error for point in legal)
    low = min(point.error for point in legal)
    room = 0.12 * (high - low) or high
    ax.set_xlim(-4, max(_work(point) for point in study.points) + 12)
    ax.set_ylim(max(low - room, 0), high + room)
    ax.grid(color="#dddddd", linewidth=0.6)
    ax.legend(loc="upper right", title="size: bytes kept", fontsize=8, title_fontsize=8)
    picture.draw_without_rendering()  # the layout, which labels are placed in
    picture.set_layout_engine("none")
    _labels(ax, study)
    return picture


def png(study: SafeguardsStudy) -> bytes:
    """The figure as a PNG file."""
    target = io.BytesIO()
    figure(study).savefig(target, format="png", dpi=_DPI, metadata={"Software": None})
    return target.getvalue()


def _work(point: StudyPoint) -> float:
    return 100 * float(point.work[0])


def _line(ax: Any, study: SafeguardsStudy) -> None:
    front = study.front
    found = front_of([Merits(one.error, one.work[0], 0) for one in front])
    best = [front[place] for place in found]
    ax.plot([_work(one) for one in best], [one.error for one in best], color=_PROVEN, linewidth=1)


def _labels(ax: Any, study: SafeguardsStudy) -> None:
    """Letters of the front and names of registered recipes, each beside its point where none is yet."""
    taken: list[tuple[float, float, float]] = []
    points = sorted((x for x in study.points if x.label or x.names), key=lambda one: -one.error)
    for point in points:
        text = f"{point.label}  {', '.join(point.names)}".strip()
        x, y = ax.transData.transform((_work(point), point.error))
        width = 9 * len(text)
        right = x + width + 16 < ax.bbox.x1
        begin = x + 12 if right else x - width - 12
        shift = _free(begin, y, width, taken)
        taken.append((begin, begin + width, y + shift))
        ax.annotate(
            text,
            (x, y),
            xytext=(begin, y + shift),
            xycoords="figure pixels",
            textcoords="figure pixels",
            fontsize=8,
            va="center",
            fontweight="bold" if point.names else "normal",
            arrowprops={"arrowstyle": "-", "color": "#888888", "linewidth": 0.5},
            zorder=4,
        )


def _free(begin: float, y: float, width: float, taken: list[tuple[float, float, float]]) -> float:
    """How far up or down, in pixels, a text is clear of those there are."""
    for step in range(60):
        shift = (-1) ** step * ((step + 1) // 2) * _LINE
        if not any(
            begin < stop and start < begin + width and abs(y + shift - other) < _LINE
            for start, stop, other in taken
        ):
            return float(shift)
    return 0.0
