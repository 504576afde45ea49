"""The model of a virtual GPU: a GPU in a machine, and its shared links."""

from collections import Counter
from math import ceil

from vgpu.modelled.kernels import kernel_of
from vgpu.modelled.links import PRESETS
from vgpu.modelled.simulation import ModelledEngine, Simulation
from vgpu.private.dispatch import tf32_is_allowed
from vgpu.runtime import scheduler
from vgpu.runtime.scheduler import Resource

# Bytes/s of a channel of NCCL, which occupies a multiprocessor: 20 to 24 GB/s over NVLink
CHANNEL = 20e9


def use_model_clock(devices, machines, values):
    """Switch idle `Device`s, each with its `Machine`, to a new simulation, which starts at 0."""
    gpus = Counter(machine.gpu.name for machine in machines)
    name = ", ".join(f"{count} x {gpu}" if count > 1 else gpu for gpu, count in gpus.items())
    if machines[0].name:
        name += f" in {machines[0].name}"
    host = machines[0].host
    simulation = Simulation(f"{name}, {host}", host, values)
    shared = {}
    for device, machine in zip(devices, machines, strict=True):
        over_link = device.peer_link in (device.link, PRESETS["pcie4-through-host-measured"])
        device.run_by(Model(device, machine, simulation, shared, over_link), values)
    scheduler.clock.stop()
    scheduler.clock = simulation
    simulation.start()
    simulation.set_threads(max(device.threads for device in devices))


class Model:
    """The model of one device, with the number of its machine, `machine_index`.

    `shared` is a dict of the `Resource`s that devices share, filled here; `over_link` tells whether
    copies to other devices use the link to the CPU.
    """

    def __init__(self, device, machine, simulation, shared, over_link):
        self.gpu, self.machine, self._device = machine.gpu, machine, device
        self.engines = tuple(
            ModelledEngine(name, device, simulation) for name in ("compute", "h2d", "d2h", "p2p")
        )
        self.machine_index = device.index // (machine.gpus or device.index + 1)
        self._over_link = over_link
        self._collective = 0.0, 0.0  # end of the last one, and its fraction of multiprocessors
        number = device.index - self.machine_index * (machine.gpus or 0)  # within the machine
        self._switch = self.machine_index, number // machine.gpus_per_switch
        up, down = Resource(), Resource()
        self._out = up if over_link else Resource()
        self._in = down if over_link else Resource()
        self._trunk_up, self._trunk_down = (
            shared.setdefault((direction, "switch", self._switch), Resource())
            for direction in ("up", "down")
        )
        card = number * machine.network_cards // (machine.gpus or number + 1)
        self._network_out, self._network_in = (
            shared.setdefault((direction, "card", self.machine_index, card), Resource())
            for direction in ("out", "in")
        )
        compute, h2d, d2h, p2p = self.engines
        self._resources = {
            compute: (compute,),
            h2d: (h2d, down, self._trunk_down),
            d2h: (d2h, up, self._trunk_up),
            p2p: (p2p, self._out, self._in),  # sends and receives at the same time
        }

    def seconds(self, op):
        """Return the duration of an op without `seconds`: a kernel's by `gpu`, 0 for others."""
        if op.kind != "kernel":
            return 0.0
        if op.plan is None:
            return self._kernel_seconds(op)
        allowed = tf32_is_allowed()
        if op.plan.modelled is None or op.plan.modelled[:2] != (self, allowed):
            op.plan.modelled = self, allowed, self._kernel_seconds(op)
        return op.plan.modelled[2]

    def _kernel_seconds(self, op):
        seconds = self.gpu.kernel_seconds(kernel_of(op))
        if not seconds >= 0:
            raise ValueError(
                f"kernel_seconds of {self.gpu.name} for {op.name} must not be negative: "
                f"got {seconds}"
            )
        return seconds

    def note_collective(self, op):
        """Record a `Collective` whose end is known: until then it slows kernels down."""
        if op.seconds:
            channels = ceil(op.num_bytes / op.seconds / CHANNEL)
            self._collective = op.end, min(channels / self.gpu.multiprocessors, 0.5)

    def kernel_end(self, start, seconds):
        """Return the end of a kernel that starts at `start` and takes `seconds` if alone."""
        until, part = self._collective
        beside = min(seconds / (1 - part), until - start)
        return start + seconds + max(beside, 0.0) * part

    def link_to(self, other):
        if self.machine_index != other.model.machine_index:
            return self.machine.network
        links = self._device.peer_link, other.peer_link
        known = [link for link in links if link is not None]
        return min(known, key=lambda link: link.bandwidth, default=None)

    def resources_of(self, op):
        """Return the `Resource`s that an op occupies: its engine, and directions of links."""
        if op.kind == "collective":
            return op.engine, *op.directions(self._out, self._in)
        if op.receiver is None:
            return self._resources[op.engine]
        other = op.receiver.device.model
        resources = [op.engine, self._out, other._in]
        if other.machine_index != self.machine_index:
            resources += self._network_out, other._network_in
        if self._over_link and other._switch != self._switch:
            resources += self._trunk_up, other._trunk_down
        return resources
