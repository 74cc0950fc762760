"""Text in and out: tokenizer, chat template, prompts and answer formats."""
