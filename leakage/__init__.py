"""Whether an output can depend on a token it must not see: structure, proof, search, capacity.

Empty so far; the README of this folder says what will be here.
"""
