"""Wait until the machine is idle, before a chapter is executed."""

import time

from vgpu.other_programs import measure_cpu_shares

SHARE = 0.05  # maximum share of CPU time of other programs or the hypervisor
PATIENCE = 600.0  # maximum wait, in seconds
LOOK = 3.0  # duration of a measurement, in seconds


def wait(say, stopped=lambda: False):
    """Wait until the machine is idle; return "", or the reasons why it is not.

    `say`: a function that receives a progress message, every 30 s; `stopped`: a function that
    returns whether to wait no longer.
    """
    start, said = time.monotonic(), float("-inf")
    while found := measure_cpu_shares(LOOK).sentences(SHARE):
        now = time.monotonic()
        if stopped() or now - start > PATIENCE:
            return f"after {(now - start) / 60:.0f} minutes: {'; '.join(found)}"
        if now - said > 30:
            say(f"waiting for an idle machine: {'; '.join(found)}")
            said = now
    return ""
