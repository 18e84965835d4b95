"""A slow second implementation of the attention recipes, sharing no code with the product."""
