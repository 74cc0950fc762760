"""Adapters on the device: LoRA, DoRA, IA3 and soft prompts, loaded, fused and compiled."""
