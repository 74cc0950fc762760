"""What the tutorial trains: one small LoRA, in less than a minute."""
