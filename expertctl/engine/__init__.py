"""The one package that imports torch: base model, adapters, residency, generation."""
