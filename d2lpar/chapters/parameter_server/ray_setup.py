"""Start Ray, which runs the processes of parameter servers, without output."""

import functools
import logging
import os
import secrets
import warnings

from vgpu import defer_interrupts

OBJECT_STORE = 256 << 20  # bytes


def start_ray():
    """Connect to a Ray cluster, or start Ray on this machine, silently; return the module `ray`.

    The environment variable RAY_ADDRESS names a cluster, "host:port". Ray started here has no
    dashboard, sends no statistics and forwards no output of its processes. It ends with
    `ray.shutdown()` or with this process. Does nothing if already connected. Do not import `ray`
    before: its settings are read on import.

    Raises:
        ModuleNotFoundError: Ray is not installed.
    """
    ray = ray_module()
    if ray.is_initialized():
        return ray
    here = {
        "num_cpus": 16,  # number of idle processes that Ray keeps for workers
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE,
        "_node_ip_address": "127.0.0.1",
    }
    address = os.environ.get("RAY_ADDRESS") or "local"
    if address == "local":  # otherwise Ray stores a token in the home folder, maybe not writable
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    options = here if address == "local" else {}
    ray.init(address, log_to_driver=False, logging_level=logging.ERROR, **options)
    return ray


@functools.cache
def ray_module():
    """Import and return Ray; raise ModuleNotFoundError if it is not installed."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # hides reports of dead workers
    disabled = logging.root.manager.disable
    try:
        with warnings.catch_warnings():  # in a notebook Ray warns if ipywidgets is missing
            warnings.filterwarnings("ignore", "IProgress not found")
            logging.disable(logging.INFO)
            with defer_interrupts():  # an interrupt would leave a half-imported module
                import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "parameter servers run on Ray, which is not installed: pip install ray", name=error.name
        ) from None
    finally:
        logging.disable(disabled)
    return ray
