"""Routed experts of MoE bases: where they lie, who is asked for, and what is computed where."""
