"""How fast the library is, beside peers measured in the same run: ``python -m benchmarks``."""
