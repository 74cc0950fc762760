"""The decoder in torch: weights, layers, CUDA graphs and LoRA slots."""
