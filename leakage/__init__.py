"""Whether an output can depend on a token it must not see.

So far the demonstration of the leak; the README of this folder says what else will be here.
"""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.leakage import demo as demo
    from flamia_ref.leakage.witness import WITNESSES as WITNESSES
    from flamia_ref.leakage.witness import Witness as Witness
else:
    __getattr__, __dir__, __all__ = attach(
        __name__, {"demo": [], "witness": ["WITNESSES", "Witness"]}
    )
