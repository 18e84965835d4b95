"""Hypothesis strategies and property suites that others run on their kernels.

The command is ``pytest --pyargs flamia_ref.properties --flamia-kernel module:function``. In a test of one's own,
`check` holds a kernel to one `Example`, `search` looks for an example that fails, and `strategies` has what examples
are drawn from. `strategies` and `search` need Hypothesis (``pip install 'flamia-ref[properties]'``), nothing here
needs JAX.
"""

from typing import TYPE_CHECKING

from flamia_ref._lazy import attach

if TYPE_CHECKING:
    from flamia_ref.properties import strategies as strategies
    from flamia_ref.properties.catalogue import PROPERTIES as PROPERTIES
    from flamia_ref.properties.catalogue import Property as Property
    from flamia_ref.properties.catalogue import check as check
    from flamia_ref.properties.drawn import Edit as Edit
    from flamia_ref.properties.drawn import Example as Example
    from flamia_ref.properties.drawn import Space as Space
    from flamia_ref.properties.searching import Profile as Profile
    from flamia_ref.properties.searching import search as search
    from flamia_ref.properties.subject import PropertyFailure as PropertyFailure
    from flamia_ref.properties.subject import Subject as Subject
else:
    __getattr__, __dir__, __all__ = attach(
        __name__,
        {
            "strategies": [],
            "catalogue": ["PROPERTIES", "Property", "check"],
            "drawn": ["Edit", "Example", "Space"],
            "searching": ["Profile", "search"],
            "subject": ["PropertyFailure", "Subject"],
        },
    )
