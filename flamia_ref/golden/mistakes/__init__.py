"""Known mistakes: what the tensors of a case would be if one were made, and which of them explains a kernel's results.

A mistake is data (`mistake.Mistake`): its name, the stages at which it can show, and a function that gives what a
tensor would be. `diagnose` tries those that can show where a kernel first departs.
"""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.golden.mistakes.catalogue import MISTAKES as MISTAKES
    from flamia_ref.golden.mistakes.mistake import Mistake as Mistake
    from flamia_ref.golden.mistakes.mistake import Name as Name
    from flamia_ref.golden.mistakes.search import diagnose as diagnose
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {"catalogue": ["MISTAKES"], "mistake": ["Mistake", "Name"], "search": ["diagnose"]},
    )
