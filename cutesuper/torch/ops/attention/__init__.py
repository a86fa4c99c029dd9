"""Attention with searched kernels, in memory layouts that caches have."""
