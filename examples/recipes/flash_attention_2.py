"""Write flash-attention-2-bf16.json: FlashAttention-2's forward for head_dim 64, as a variation on `bf16-fa4`.

Read in Dao-AILab/flash-attention, csrc/flash_attn/src: flash_fwd_kernel.h, softmax.h, flash_fwd_launch_template.h.
Tiles are 128 by 128 for head_dim up to 64; key tiles descend; the maximum follows at every tile; every 2^x is
ex2.approx; O is multiplied by the IEEE reciprocal of the row sum, or by 1 where that is 0 or NaN.

What it does not say: lse there is m scale + log(l), by other roundings than any here, and its backward adds dQ in any
order.
"""

import dataclasses
from pathlib import Path

from flamia_ref.attention import RECIPES, Recipe

_SOURCE = "flash-attention 2.7, csrc/flash_attn/src/"


def recipe() -> Recipe:
    """The recipe."""
    base = RECIPES["bf16-fa4"]
    return dataclasses.replace(
        base,
        name="flash-attention-2-bf16",
        softmax=dataclasses.replace(
            base.softmax, emulated=None, rescale_threshold=0, reciprocal="correct"
        ),
        schedules=(),
        steps={
            **{
                path: dataclasses.replace(step, source=step.source.replace("flash_attn/cute/", ""))
                for path, step in base.steps.items()
            },
            "softmax": dataclasses.replace(
                base.steps["softmax"], source=_SOURCE + "softmax.h and flash_fwd_kernel.h"
            ),
        },
    )


if __name__ == "__main__":
    path = Path(__file__).with_name("flash-attention-2-bf16.json")
    path.write_text(recipe().to_json() + "\n", encoding="utf-8")
    print(path)
