"""Routed experts of MoE bases: where they lie, which are asked for, and what is computed where."""
