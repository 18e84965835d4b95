"""How public libraries launch their kernels: sizes of tiles, and which policy when."""

from __future__ import annotations

from dataclasses import dataclass

from flamia_ref._errors import Registry
from flamia_ref.schedule.work import Pass, Problem, Size

_L2_BOUND = 50 * 2**20  # bytes of keys and values, above which cuDNN gives up sections


@dataclass(frozen=True, kw_only=True, slots=True)
class Library:
    """The launches of one library.

    Attributes:
        name: as in measurements.
        forward, backward: sizes of a tile product, and stages.
        causal, full, packed: the policy of a forward with and without a mask, and of packed documents of unequal
            length. A backward takes the grid as it is.
        versions: as measurements name them, the one whose constants are taken first.
        assumed: what of this was not read in the source.
    """

    name: str
    forward: Size
    backward: Size
    causal: str
    full: str
    packed: str
    versions: tuple[str, ...]
    assumed: str

    def size(self, launch: Pass) -> Size:
        """The size of a pass's tiles."""
        return self.forward if launch is Pass.FORWARD else self.backward

    def policy(self, problem: Problem, launch: Pass) -> str:
        """The name of the policy it takes."""
        if len(set(problem.mask.queries.lengths)) > 1:
            return self.packed
        if launch is not Pass.FORWARD:
            return "natural"
        if not problem.mask.bounded:
            return self.full
        one = max(problem.mask.keys.lengths, default=0) * (problem.head_dim + problem.value_dim) * 2
        if self.causal == "cudnn-lpt-l2" and one > _L2_BOUND:
            return "cudnn-lpt"
        return self.causal


LIBRARIES = Registry[Library](
    "library",
    (
        (library.name, library)
        for library in (
            Library(
                name="cudnn",
                versions=("fe 1.21.1 backend 9.22.0", "fe 1.19.0 backend 9.19.1"),
                forward=Size(128, 128, 2),
                backward=Size(128, 128),
                causal="cudnn-lpt-l2",
                full="natural",
                packed="cudnn-thd",
                assumed="the closed kernels launch as the open ones of the front end; pairs of tiles of a cluster count"
                " alone",
            ),
            Library(
                name="cudnn_oss",
                versions=("fe 1.31.0 backend 9.27.0",),
                forward=Size(128, 128, 2),
                backward=Size(128, 128),
                causal="cudnn-lpt-l2",
                full="natural",
                packed="cudnn-thd",
                assumed="pairs of tiles of a cluster count alone",
            ),
            Library(
                name="fa4",
                versions=("",),
                forward=Size(128, 128, 2),
                backward=Size(128, 128),
                causal="fa4-lpt",
                full="static",
                packed="fa4-varlen",
                assumed="pairs of tiles of a cluster count alone; on an H200 the tiles are those of Blackwell",
            ),
            Library(
                name="torch-flash",
                versions=("torch 2.11.0+cu130",),
                forward=Size(128, 64),
                backward=Size(64, 128),
                causal="natural",
                full="natural",
                packed="natural",
                assumed="FlashAttention-2's tiles of 128 channels on sm_90, for 64 channels too; one tile a"
                " multiprocessor at a time, where two or more fit",
            ),
            Library(
                name="torch-cudnn",
                versions=("torch 2.11.0+cu130",),
                forward=Size(128, 128, 2),
                backward=Size(128, 128),
                causal="cudnn-lpt-l2",
                full="natural",
                packed="cudnn-thd",
                assumed="launches as the front end's open kernels of Blackwell",
            ),
        )
    ),
)
