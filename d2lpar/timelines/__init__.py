"""Timelines: record and draw what virtual and CUDA GPUs run, and when."""
