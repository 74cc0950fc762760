"""Small real bases and experts that are trained for `benchmarks.quality`, and what they answer."""
