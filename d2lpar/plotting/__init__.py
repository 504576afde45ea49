"""Figures: their style, the charts that chapters share, and a progress bar."""
