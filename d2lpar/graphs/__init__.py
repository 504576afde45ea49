"""Graphs of operators: recorded while a program runs, or captured by torch's compiler."""
