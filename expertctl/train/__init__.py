"""Training: from examples to an adapter directory that `build` packages."""
