"""Which recipe a kernel's outputs fit best, stage by stage, and the knob that would bring it closer.

`samples` are inputs with what a kernel gave for them; `fits` say how a recipe compares with one, stage by stage;
`searching` ranks the recipes, `turning` tries their knobs, and `matches` is what comes of it.
"""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.golden.matching.matches import Match as Match
    from flamia_ref.golden.matching.searching import match as match
else:
    __getattr__, __dir__, __all__ = attach(__name__, {"matches": ["Match"], "searching": ["match"]})
