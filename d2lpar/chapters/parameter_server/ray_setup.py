"""Ray, which runs the processes of parameter servers: started quietly, imported once."""

import functools
import logging
import os
import secrets
import warnings
from pathlib import Path

from vgpu import held_back

OBJECT_STORE = 256 << 20  # bytes

RAY_PATH = str(Path(__file__).parent / "ray_path")  # see the module there


def start_ray(address=None):
    """Connect to a Ray cluster, or start Ray on this machine, silently; return the module `ray`.

    Ray started here shows no dashboard, sends no statistics and passes on no output of its
    processes. `ray.shutdown()` or the end of this process ends it. If this process is already
    connected, nothing happens. Do not import `ray` before: on import it reads which messages to
    suppress.

    Args:
        address: the address of a cluster, "host:port"; by default RAY_ADDRESS in the environment.
            Without either, Ray starts on this machine.

    Raises:
        ModuleNotFoundError: Ray is not installed; says what to install.
    """
    ray = ray_module()
    if ray.is_initialized():
        return ray
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    address = address or os.environ.get("RAY_ADDRESS") or "local"
    if address != "local":
        ray.init(address, **quiet)
        return ray
    # for its processes; otherwise Ray keeps a token in the home, which may not be writable
    os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    path = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [RAY_PATH, path]))  # for its processes
    try:
        ray.init(
            "local",
            num_cpus=16,  # how many processes Ray keeps for further workers
            include_dashboard=False,
            object_store_memory=OBJECT_STORE,
            _node_ip_address="127.0.0.1",
            **quiet,
        )
    finally:
        os.environ.pop("PYTHONPATH")
        if path is not None:
            os.environ["PYTHONPATH"] = path
    return ray


@functools.cache
def ray_module():
    """Import Ray, or raise an error that says what to install."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", ".")  # raylet's reports of workers' ends
    disabled = logging.root.manager.disable
    try:
        with warnings.catch_warnings():  # in a notebook, importing Ray asks for ipywidgets
            warnings.filterwarnings("ignore", "IProgress not found")
            logging.disable(logging.INFO)
            with held_back():  # a half-imported module stays broken
                import ray
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            "parameter servers run on Ray, which is not installed: pip install ray", name=error.name
        ) from None
    finally:
        logging.disable(disabled)
    return ray
