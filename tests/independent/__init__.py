"""A slow second implementation of `flamia-mxfp8-folded`, sharing no code with the product."""
