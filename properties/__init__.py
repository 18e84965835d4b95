"""Hypothesis strategies and property suites that others run on their kernels.

Empty so far; the README of this folder says what will be here.
"""
