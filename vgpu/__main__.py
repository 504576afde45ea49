"""The command `vgpu`: `vgpu run` and `vgpu doctor`."""

import argparse
import sys

from vgpu.cuda.doctor import examine

# What `--model` may name: what `modelled/datasheets.py` and `hardware.py` have. They import torch,
# and `vgpu run` does not.
MODELS = (
    *("p100", "v100", "t4", "rtx4090", "a100", "h100", "v100-32gb", "a100-40gb", "h200"),
    *("dgx1", "p3.16xlarge", "bigbasin", "dgxa100", "dgxh100"),
)


def main(arguments=None):
    """Run a command line, by default this process's own, and return the exit code."""
    parser = argparse.ArgumentParser(prog="vgpu", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    run = commands.add_parser(
        "run",
        help="run a command; torch.cuda in it has virtual GPUs",
        description="Run a command. In it and in its child processes torch.cuda has N GPUs, which "
        "are virtual ones.",
        usage="vgpu run [--gpus N] [--model GPU [--clock model|wall] [--no-values]] "
        "[--trace FILE] command ...",
    )
    run.add_argument("--gpus", type=_positive, default=1, metavar="N", help="how many (default: 1)")
    run.add_argument(
        "--model",
        metavar="GPU",
        type=str.lower,
        choices=MODELS,
        help=f"model this GPU or machine: {', '.join(MODELS)}",
    )
    run.add_argument(
        "--clock",
        choices=("model", "wall"),
        help="with --model, the clock that the command reads by time.time, time.perf_counter, "
        "time.process_time, timeit and tqdm (default: model); time.monotonic and datetime always "
        "tell real time",
    )
    run.add_argument(
        "--no-values",
        action="store_true",
        help="with --model, compute shapes, memory and time only, so that networks of real size "
        "run; losses are nan, and what a program cannot go on without is an error",
    )
    run.add_argument("--trace", metavar="FILE", help="write a trace of all ranks for Perfetto")
    run.add_argument("command", nargs=argparse.REMAINDER, help="what to run, with its arguments")
    commands.add_parser("doctor", help="say what would run where here, and what is wrong")
    options = parser.parse_args(arguments)
    if options.name == "doctor":
        return examine()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        run.error("which command?")
    if options.model is None and (options.clock == "model" or options.no_values):
        option = "--no-values" if options.no_values else "--clock model"
        run.error(f"{option} is for modelled GPUs: add --model v100, for example")
    if sys.platform == "linux":
        from vgpu.cuda.run import run_command

        clock = options.clock or "model"
        values = not options.no_values
        return run_command(command, options.gpus, options.model, options.trace, clock, values)
    run.error(
        f"virtual GPUs can stand for CUDA's on Linux only, and this is {sys.platform}: on Windows "
        "use WSL, on macOS a container. Notebooks and launch run here, too"
    )


def _positive(text):
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"a positive integer, not {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
