"""Routed experts of MoE bases: caching, prefetching, usage profiles and computation."""
