"""Timelines: what ran where and when, on virtual and on CUDA GPUs, recorded and drawn."""
