"""How many bits get through: bounds by a recipe's data, entropy over draws, a probe, and real suffixes replaced."""
