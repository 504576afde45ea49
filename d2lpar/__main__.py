"""The command `d2lpar`: `d2lpar run`, `d2lpar plan` and `d2lpar doctor`."""

import argparse
import contextlib
import sys

# What `--model` may name: what `virtual/datasheets.py` and `hardware.py` have. They import torch,
# and `d2lpar run` does not.
MODELS = (
    *("p100", "v100", "t4", "rtx4090", "a100", "h100", "v100-32gb", "a100-40gb", "h200"),
    *("dgx1", "p3.16xlarge", "bigbasin", "dgxa100", "dgxh100"),
)


def main(arguments=None):
    """Run a command line, by default this process's own, and return the exit code."""
    parser = argparse.ArgumentParser(prog="d2lpar", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    run = commands.add_parser(
        "run",
        help="run a command; torch.cuda in it has virtual GPUs",
        description="Run a command. In it and in its child processes torch.cuda has N GPUs, which "
        "are virtual ones.",
        usage="d2lpar run [--gpus N] [--model GPU [--clock model|wall] [--no-values]] "
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
    plan = commands.add_parser(
        "plan",
        help="choose how many GPUs share layers, stages and data to train a GPT",
        description="Model a step of training a GPT for each way in which GPUs can share it: by "
        "tensor (t), pipeline (p) and data parallelism (d). Nothing is measured.",
    )
    plan.add_argument(
        "--parameters", type=_amount, metavar="N", help="of the GPT, 3.6B for example"
    )
    for name in ("layers", "width", "heads"):
        plan.add_argument(f"--{name}", type=_positive, metavar="N", help="in place of --parameters")
    plan.add_argument(
        "--length", type=_positive, default=2048, metavar="N", help="tokens of a sequence"
    )
    plan.add_argument("--vocabulary", type=_positive, default=51_200, metavar="N", help="tokens")
    plan.add_argument("--gpus", type=_positive, required=True, metavar="N", help="how many")
    plan.add_argument("--model", default="dgxa100", metavar="MACHINE", help="default: dgxa100")
    plan.add_argument("--batch", type=_positive, default=512, metavar="N", help="sequences a step")
    plan.add_argument(
        "--tokens", type=_amount, metavar="N", help="of the training, 300B for example"
    )
    plan.add_argument("--price", type=_amount, metavar="X", help="of an hour of one GPU")
    plan.add_argument(
        "--zero",
        type=int,
        choices=(0, 1),
        default=0,
        help="1: replicas divide the optimizer's state; default: 0",
    )
    commands.add_parser("doctor", help="say what would run where here, and what is wrong")
    options = parser.parse_args(arguments)
    if options.name == "doctor":
        from .programs.doctor import examine

        return examine()
    if options.name == "plan":
        if options.price is not None and options.tokens is None:
            plan.error("--price is for a training: add --tokens 300B, for example")
        from .parallel.planning import run as run_plan

        return run_plan(options, plan.error)
    command = options.command[1:] if options.command[:1] == ["--"] else options.command
    if not command:
        run.error("which command?")
    if options.model is None and (options.clock == "model" or options.no_values):
        option = "--no-values" if options.no_values else "--clock model"
        run.error(f"{option} is for modelled GPUs: add --model v100, for example")
    if sys.platform == "linux":
        from .programs.run import run_command

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


def _amount(text):
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    with contextlib.suppress(ValueError):
        number = float(text) if factor is None else float(text[:-1]) * factor
        if 0 < number < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"a positive number such as 3.6B, not {text!r}")


if __name__ == "__main__":
    sys.exit(main())
