"""Fit the model of schedules, keep its constants, and write docs/schedule.md's tables."""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from flamia_ref.schedule import claim_text  # noqa: E402
from flamia_ref.schedule.claim import study  # noqa: E402
from flamia_ref.schedule.drawing import timeline_png  # noqa: E402
from flamia_ref.schedule.launches import simulate  # noqa: E402
from flamia_ref.schedule.validation import Validation, validate  # noqa: E402
from flamia_ref.schedule.work import Problem  # noqa: E402
from flamia_ref.schedule.workloads import cu_seqlens_of  # noqa: E402

CONSTANTS = ROOT / "flamia_ref" / "schedule" / "published" / "constants.json"


def constants(found: Validation) -> str:
    """The file of constants."""
    rows = [
        {
            "gpu": one.group.gpu,
            "library": one.group.library,
            "version": one.group.version,
            "pass": one.group.launch.value,
            "format": one.group.format,
            "efficiency": round(one.constants.efficiency, 4),
            "overhead": round(one.constants.overhead),
            "spread": round(one.spread, 4),
        }
        for one in found.fits
    ]
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


PAGE = """# Schedules: what the model of packed attention is good for

Written by `python docs/schedule.py`. Every time on this page is a model's; nothing ran on a Blackwell GPU.

## Good for

- Whether the order of tiles costs time: tail, idle multiprocessors and a bound that no order can beat, for given
  documents.
- Comparing policies of one kernel. All constants are the same on both sides; what their errors do to the
  ratio was not measured.
- Uniform documents on the GPUs, libraries and formats of the published tables, with the errors of the table below.
- What the traffic of quantization costs: bytes over 80% of the memory's rate, which is assumed.

## Not good for

- Differences between two kernels that are smaller than their fits' spreads.
- A kernel that nobody has published. FLAMIA's recipes take the constants of cuDNN's MXFP8 kernels: what its authors
  gained by
  better kernels is not in the model.
- Packed documents of unequal length in absolute time. All published cells have documents of one length.
- B200 and B300 by themselves. They take the cycles fitted on GB200 and GB300.
- Products in 4 bits. None was measured; they take the constants of MXFP8.

## Held against published measurements

`flamia-ref schedule validate` prints every cell too.

```text
{validation}
```

## The claim

The abstract of [arXiv:2611.03344](https://arxiv.org/abs/2611.03344) claims that its MXFP8 path is 1.10 to 1.40
times as fast on
B200, and 1.06 to 1.42 on B300, as the fastest baseline. `flamia-ref schedule claim` prints what the model predicts.

```text
{claim}
```

The model does not say that the claim is wrong. It says what the claim needs. With the kernels of cuDNN, the recipe
alone
does not reach most of the range: its products, conversions and tiles are those of cuDNN's MXFP8, and its backward
was measured
hardly faster than in bfloat16. The rest has to come from better kernels, which the model takes no part in. Scheduling
matters where few tiles meet many multiprocessors, and hardly elsewhere. Per-tensor FP8 has the
fastest backward in 58 of the 60 shapes of the cuDNN 9.22 tables; whether it was among the authors' baselines the
abstract does not say, so both answers stand above. Quantizing to it is counted without the pass that finds the
largest magnitude. Baselines never get lpt, so what it wins counts as the candidate's. The spread of a ratio takes both
sides as independent, though some share constants, and leaves out the residuals' mean.

## Two timelines

One document of 32768 tokens after 64 short ones, flamia-mxfp8 on B200, 8 heads. Rows are multiprocessors. First in
the
natural order, then longest first.

![Natural order: the long document begins late, and most multiprocessors wait for its last
tiles.](pictures/schedule-natural.png)

![Longest first: the long document's tiles run first and the short ones fill the gaps.](pictures/schedule-lpt.png)
"""


def pictures() -> None:
    """The timelines of one long document after short ones."""
    problem = Problem.of(cu_seqlens_of("one-long:tokens=65536"), heads=8)
    for policy in ("natural", "lpt"):
        drawn = timeline_png(simulate(problem, "flamia-mxfp8", gpu="B200", policy=policy))
        (ROOT / "docs" / "pictures" / f"schedule-{policy}.png").write_bytes(drawn)


if __name__ == "__main__":
    found = validate()
    CONSTANTS.write_text(constants(found), encoding="utf-8")
    pictures()
    page = PAGE.format(validation=found.to_text(cells=False), claim=claim_text.to_text(study()))
    (ROOT / "docs" / "schedule.md").write_text(page, encoding="utf-8")
    sys.stdout.write(found.to_text(cells=False) + "\n")
