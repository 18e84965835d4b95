"""The suites: which cases a pack is made of, and why each exists.

``smoke`` is small and quick, ``standard`` holds it and a case for each fault that kernels have had in
public, ``exhaustive`` crosses lengths, masks, heads and distributions. Every `why` is held to the data
by tests/golden/test_suites.py and the tests beside it.
"""

from flamia_ref._errors import Registry
from flamia_ref.golden.suites.documents import DOCUMENTS
from flamia_ref.golden.suites.exact import EXACT
from flamia_ref.golden.suites.exhaustive import EXHAUSTIVE
from flamia_ref.golden.suites.layouts import LAYOUTS
from flamia_ref.golden.suites.leaks import LEAKS
from flamia_ref.golden.suites.masks import MASKS
from flamia_ref.golden.suites.options import OPTIONS
from flamia_ref.golden.suites.poison import POISON
from flamia_ref.golden.suites.quantizers import QUANTIZERS
from flamia_ref.golden.suites.smoke import SMOKE

STANDARD = (
    *SMOKE,
    *QUANTIZERS,
    *LAYOUTS,
    *DOCUMENTS,
    *MASKS,
    *OPTIONS,
    *POISON,
    *EXACT,
    *LEAKS,
)

SUITES = Registry("suite", [("smoke", SMOKE), ("standard", STANDARD), ("exhaustive", EXHAUSTIVE)])
