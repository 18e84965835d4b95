"""Information flow through a JAX program: which inputs each element of its results may depend on."""
