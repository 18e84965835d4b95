"""The black-box search for leaks: `hunt` and what it returns."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.leakage.search.hunt_report import HuntReport as HuntReport
    from flamia_ref.leakage.search.hunt_report import HuntVerdict as HuntVerdict
    from flamia_ref.leakage.search.hunting import hunt as hunt
    from flamia_ref.leakage.search.witnesses import FoundWitness as FoundWitness
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "hunt_report": ["HuntReport", "HuntVerdict"],
            "hunting": ["hunt"],
            "witnesses": ["FoundWitness"],
        },
    )
