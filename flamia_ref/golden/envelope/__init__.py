"""Envelopes: what a recipe permits of each tensor over the orders of additions that it leaves open."""
