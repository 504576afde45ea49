"""Chapter 11: parameter servers on Ray, and sparse data to train on.

store      create servers, run workers, pull and push
actors     the processes: servers and the counter of the workers' ticks
ray_setup  start Ray without output
ad_clicks  sparse examples
"""

from d2lpar.chapters.parameter_server.ad_clicks import AdClicks
from d2lpar.chapters.parameter_server.ray_setup import start_ray
from d2lpar.chapters.parameter_server.store import parameter_servers

__all__ = ["AdClicks", "parameter_servers", "start_ray"]
