"""Adapters: LoRA, DoRA, IA3 and soft prompts, loaded, fused and compiled for a base."""
