"""The command `d2lpar`: `d2lpar plan`."""

import argparse
import contextlib
import sys


def main(arguments=None):
    """Run a command line, by default this process's own, and return the exit code."""
    parser = argparse.ArgumentParser(prog="d2lpar", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
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
    options = parser.parse_args(arguments)
    if options.price is not None and options.tokens is None:
        plan.error("--price is for a training: add --tokens 300B, for example")
    from d2lpar.chapters.planning_a_training_run.planning import run

    return run(options, plan.error)


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
