"""How fast the library is, beside peers measured in the same run: ``python -m benchmarks``.

Importing this sets one thread for numpy's BLAS, unless the environment says otherwise: its idle
threads go on spinning for a while and would slow down the call that is measured next.
"""

import os

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
