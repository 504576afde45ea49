"""Many processes on this machine: `launch`, and one rank of a process group.

launcher   launch: from a function to the results of its ranks
agent      starts, watches, restarts and ends the ranks; preload: what they have imported
rank       one rank: sets up its group, calls the function, tears down; for torchrun, too
roll_call  where the ranks are, and which of them are missing
"""
