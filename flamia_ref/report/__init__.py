"""What a check or a hunt found: one type of report, and its forms as text and JSON."""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.report.model import Bits as Bits
    from flamia_ref.report.model import CaseResult as CaseResult
    from flamia_ref.report.model import Difference as Difference
    from flamia_ref.report.model import Pair as Pair
    from flamia_ref.report.model import Report as Report
    from flamia_ref.report.model import Status as Status
    from flamia_ref.report.model import TensorResult as TensorResult
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "model": [
                "Bits",
                "CaseResult",
                "Difference",
                "Pair",
                "Report",
                "Status",
                "TensorResult",
            ],
        },
    )
