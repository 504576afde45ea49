"""Many processes on this machine: `launch`, and one rank of a process group.

launcher   launch: calls a function in several processes and returns the results
agent      starts, monitors, restarts and ends the ranks; preload: imports before the fork
rank       one rank: sets up its group, calls the function, tears down; for torchrun, too
roll_call  where the ranks are, and which of them are missing
"""
