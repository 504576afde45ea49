"""The command `vgpu`: `vgpu run` and `vgpu doctor`."""

import argparse
import sys

from vgpu.cuda.doctor import examine

# Choices of `--model`, from `modelled/datasheets.py` and `hardware.py`, which import torch.
MODELS = (
    *("p100", "v100", "t4", "rtx4090", "a100", "h100", "v100-32gb", "a100-40gb", "h200"),
    *("dgx1", "p3.16xlarge", "bigbasin", "dgxa100", "dgxh100"),
)


def main(arguments=None):
    """Run a command line, by default this process's; return the exit code."""
    parser = argparse.ArgumentParser(prog="vgpu", description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="command", required=True)
    run = commands.add_parser(
        "run",
        help="run a command with virtual GPUs in torch.cuda",
        description="Run a command. In it and in its child processes torch.cuda has N virtual "
        "GPUs.",
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
        help="with --model, the clock of time.time, time.perf_counter, time.process_time, timeit "
        "and tqdm in the command (default: model); time.monotonic and datetime are always real",
    )
    run.add_argument(
        "--no-values",
        action="store_true",
        help="with --model, compute shapes, memory and time only, so that networks of real size "
        "run; losses are nan, and operations that need values are errors",
    )
    run.add_argument("--trace", metavar="FILE", help="write a trace of all ranks for Perfetto")
    run.add_argument("command", nargs=argparse.REMAINDER, help="the command and its arguments")
    commands.add_parser("doctor", help="check this machine and installation")
    options = parser.parse_args(arguments)
    if options.name == "doctor":
        return examine()
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        run.error("a command is required")
    if options.model is None and (options.clock == "model" or options.no_values):
        option = "--no-values" if options.no_values else "--clock model"
        run.error(f"{option} requires modelled GPUs: add --model v100, for example")
    if sys.platform == "linux":
        from vgpu.cuda.run import run_command

        clock = options.clock or "model"
        values = not options.no_values
        return run_command(command, options.gpus, options.model, options.trace, clock, values)
    run.error(
        f"vgpu run requires Linux, and this is {sys.platform}: use WSL on Windows, a container on "
        "macOS. Notebooks and launch do not need it"
    )


def _positive(text):
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a positive integer: got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
