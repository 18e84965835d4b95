"""Tests of `flamia_ref.formats` against recorded conversions, exact rationals and worked examples."""
