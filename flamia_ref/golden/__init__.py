"""Golden packs: make them from the simulator, read them, check kernels against them."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.golden.cases import SUITES as SUITES
    from flamia_ref.golden.cases import CaseSpec as CaseSpec
    from flamia_ref.golden.comparison import check as check
    from flamia_ref.golden.making import DEFAULT_RECIPES as DEFAULT_RECIPES
    from flamia_ref.golden.making import make as make
    from flamia_ref.golden.manifest import NUMERICS_VERSION as NUMERICS_VERSION
    from flamia_ref.golden.manifest import Manifest as Manifest
    from flamia_ref.golden.pack import Case as Case
    from flamia_ref.golden.pack import Pack as Pack
    from flamia_ref.golden.pack import load as load
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "cases": ["CaseSpec", "SUITES"],
            "comparison": ["check"],
            "making": ["DEFAULT_RECIPES", "make"],
            "manifest": ["Manifest", "NUMERICS_VERSION"],
            "pack": ["Case", "Pack", "load"],
        },
    )
