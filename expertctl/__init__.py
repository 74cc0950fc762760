"""Package manager, registry client and engine for LLM experts."""

__version__ = "0.1.0"
