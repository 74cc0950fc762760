"""Inference: base models, adapters, memory and generation. Only this package imports torch."""
