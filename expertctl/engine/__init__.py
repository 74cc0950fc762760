"""Inference: base models, adapters, memory and generation. Only `torch/` imports torch."""
