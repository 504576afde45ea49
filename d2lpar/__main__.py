"""The command `d2lpar`: `d2lpar plan`."""

import argparse
import contextlib
import functools
import os
import sys


def main(arguments=None):
    """Run a command line, by default `sys.argv`, and return the exit code."""
    parser = argparse.ArgumentParser(prog="d2lpar", description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="command", required=True)
    plan = commands.add_parser(
        "plan",
        help="choose how many GPUs share layers, stages and data to train a GPT",
        description="Model a step of training a GPT for each way in which GPUs can share it: by "
        "tensor (t), pipeline (p) and data parallelism (d). Nothing is measured.",
    )
    add = functools.partial(plan.add_argument, metavar="N")
    add("--parameters", type=_amount, help="of the GPT, for example 3.6B")
    for name in ("layers", "width", "heads"):
        add(f"--{name}", type=_positive, help="in place of --parameters")
    add("--length", type=_positive, default=2048, help="tokens of a sequence")
    add("--vocabulary", type=_positive, default=51_200, help="tokens")
    add("--gpus", type=_positive, required=True, help="how many")
    add("--model", default="dgxa100", metavar="MACHINE", help="default: dgxa100")
    add("--batch", type=_positive, default=512, help="sequences a step")
    add("--tokens", type=_amount, help="of the training, for example 300B")
    add("--price", type=_amount, metavar="X", help="of an hour of one GPU")
    zero = "1: replicas divide the optimizer's state; default: 0"
    plan.add_argument("--zero", type=int, choices=(0, 1), default=0, help=zero)
    options = parser.parse_args(arguments)
    if options.price is not None and options.tokens is None:
        plan.error("--price requires --tokens, for example --tokens 300B")
    from d2lpar.chapters.planning_a_training_run.plan_command import run

    try:
        code = run(options, plan.error)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has enough lines, as in `d2lpar plan | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # for the flush at exit
        return 1
    return code


def _positive(text):
    if not (text.isdecimal() and int(text)):
        raise argparse.ArgumentTypeError(f"must be a positive integer: got {text!r}")
    return int(text)


def _amount(text):
    factor = {"K": 1e3, "M": 1e6, "B": 1e9, "T": 1e12}.get(text[-1:].upper())
    with contextlib.suppress(ValueError):
        number = float(text) if factor is None else float(text[:-1]) * factor
        if 0 < number < float("inf"):
            return number
    raise argparse.ArgumentTypeError(f"must be a positive number such as 3.6B: got {text!r}")


if __name__ == "__main__":
    sys.exit(main())
