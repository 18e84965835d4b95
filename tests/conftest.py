"""Settings of the whole test run. They must be in place before anything imports JAX."""

import importlib.util
import os
import signal
import sys
import threading
from pathlib import Path

import hypothesis

ROOT = Path(__file__).resolve().parent.parent

if "jax" in sys.modules:
    raise RuntimeError("JAX was imported before tests/conftest.py could set its environment")

# JAX: no silent promotion, and one compilation cache for all workers and all runs. Its files are
# written in place, so JAX locks them, which it does only where the cache has a size limit.
os.environ["JAX_NUMPY_DTYPE_PROMOTION"] = "strict"
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".cache" / "jax"))
os.environ.setdefault("JAX_COMPILATION_CACHE_MAX_SIZE", str(1 << 30))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.2")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

# Hundreds of processes of the tests import the package: the first of them keeps what it compiled.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

if (
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    and threading.current_thread() is threading.main_thread()
):
    # Of a run in the background: the processes of the tests would ignore their Ctrl-C, too.
    signal.signal(signal.SIGINT, signal.default_int_handler)

if "PYTEST_XDIST_WORKER" in os.environ:
    # One thread a worker. XLA on CPU sizes its pools by NPROC (measured with jaxlib 0.10.2, where
    # neither --xla_cpu_multi_thread_eigen nor intra_op_parallelism_threads has any effect).
    os.environ["NPROC"] = "1"
    os.environ["OPENBLAS_NUM_THREADS"] = "1"

hypothesis.settings.register_profile("local", deadline=None)
hypothesis.settings.register_profile("ci", deadline=None, derandomize=True, print_blob=True)
hypothesis.settings.load_profile("ci" if os.environ.get("CI") else "local")


def _require_this_checkout() -> None:
    """Refuse to test a mixture of two checkouts: an editable install may point at another one."""
    spec = importlib.util.find_spec("flamia_ref.formats")
    found = [Path(place).resolve() for place in (spec and spec.submodule_search_locations) or ()]
    if found != [ROOT / "formats"]:
        raise RuntimeError(
            f"flamia_ref.formats comes from {found}, not from {ROOT / 'formats'}; "
            "run `python -m pytest` from the root of the checkout"
        )


_require_this_checkout()
