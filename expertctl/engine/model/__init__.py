"""The torch decoder: weights, layers, CUDA graphs and LoRA slots."""
