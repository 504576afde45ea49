"""Figures: their style, charts that the chapters share, and plots that grow while a loop runs."""
