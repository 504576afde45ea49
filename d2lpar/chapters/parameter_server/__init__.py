"""Chapter 10: parameter servers on Ray, and an advertisement model to train with them.

store      tensors on server processes; actors: the servers; clients: who pulls and pushes
ray_setup  Ray, started quietly
ad_clicks  sparse examples to train on
plots      figures of what the workers did
"""

from d2lpar.chapters.parameter_server.ad_clicks import AdClicks
from d2lpar.chapters.parameter_server.plots import plot_pushes, plot_seconds
from d2lpar.chapters.parameter_server.ray_setup import start_ray
from d2lpar.chapters.parameter_server.store import parameter_servers

__all__ = ["AdClicks", "parameter_servers", "plot_pushes", "plot_seconds", "start_ray"]
