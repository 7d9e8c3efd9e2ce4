"""Flint: a 40B mixture-of-experts decoder with NoPE full attention and RoPE sliding windows."""

from modeling.flint.config import FlintConfig as FlintConfig
