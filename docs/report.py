"""Draw docs/pictures/report-light.png and report-dark.png: the HTML report of a kernel with one mistake.

Run from the root of the checkout, where Chromium is, a minute: python docs/report.py
"""

import io
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from matplotlib.image import imread  # noqa: E402

from examples.kernels import scales_rounded_down  # noqa: E402
from flamia_ref import golden  # noqa: E402
from flamia_ref.report import Report, png  # noqa: E402
from tests.report.browser import find, started  # noqa: E402

PICTURES = ROOT / "docs" / "pictures"
NAME = "packs/smoke"
SHOWN = ("smollm2*", "outliers*", "poison*")
WIDTH, HEIGHT = 1280, 1900  # as far as the first heat map


def checked() -> Report:
    """What a check finds of a smoke pack, with the pack named as somebody would who has it in their repository."""
    with tempfile.TemporaryDirectory() as folder:
        golden.make(Path(folder, "pack"), ["flamia-mxfp8-folded"], suite="smoke")
        report = golden.check(Path(folder, "pack"), scales_rounded_down, cases=SHOWN)
    named = {report.pack: NAME, str(Path(folder, "pack")): NAME}
    cases = []
    for case in report.cases:
        command = case.command
        for path, name in named.items():
            command = command.replace(path, name)
        cases.append(replace(case, command=command))
    return replace(report, pack=NAME, cases=tuple(cases))


def smaller(picture: bytes) -> bytes:
    """The same picture as a file of at most 256 colours, which are rounded as far as that takes."""
    pixels = np.rint(255 * imread(io.BytesIO(picture))[..., :3]).astype(np.uint32)
    for step in (1, 2, 4, 8, 16, 32):
        packed = pixels // step * step @ np.array([1 << 16, 1 << 8, 1], dtype=np.uint32)
        colours, indices = np.unique(packed, return_inverse=True)
        if len(colours) <= 256:
            break
    palette = [(int(c) >> 16, int(c) >> 8 & 255, int(c) & 255) for c in colours]
    return png.encode(indices.reshape(packed.shape).astype(np.uint8), palette)


def main() -> None:
    """Check, and draw the page in both schemes."""
    binary = find()
    if binary is None:
        raise SystemExit("no Chromium here; install the package chromium")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder, "report.html")
        page.write_text(checked().to_html(), encoding="utf-8")
        with started(binary, Path(folder)) as browser:
            browser.size(WIDTH, HEIGHT)
            for scheme in ("light", "dark"):
                browser.media(scheme=scheme)
                browser.open(page)
                (PICTURES / f"report-{scheme}.png").write_bytes(smaller(browser.screenshot()))


if __name__ == "__main__":
    main()
