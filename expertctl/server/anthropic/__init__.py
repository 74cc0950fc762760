"""The Anthropic API: messages and token counts."""
