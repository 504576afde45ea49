"""Programs that people learn distributed training from, unmodified, on virtual GPUs.

`python benchmarks/bench_programs.py FOLDER` runs them from checkouts in a folder, each in a scratch
copy, by `d2lpar run --gpus N`, and prints a table. Data sets are made on the spot: a text, and for
picotron what it would download, with the modules of flash-attn's kernels empty, as its options
leave these kernels out. Exits with status 1 when a program fails. Without a FOLDER it says where to
get the programs.
"""

import argparse
import contextlib
import functools
import importlib.util
import json
import os
import random
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

SOURCES = {
    "examples": "https://github.com/pytorch/examples",
    "nanoGPT": "https://github.com/karpathy/nanoGPT",
    "picotron": "https://github.com/huggingface/picotron",
}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]
LIMIT = 300  # seconds for one command
SECONDS_TO_END = 20  # for a command that was asked to
CPUS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@dataclass
class Program:
    """A program of a checkout.

    Attributes:
        name: what the table calls it, and `--only`.
        path: its folder in the checkouts, which is copied.
        steps: function of the number of GPUs that returns a list of steps, one after the other;
            each is a list of commands, one for each host.
        loss: a regular expression, whose last match in what it prints is the loss; None where it
            prints none.
        on_cpu: the same program on the CPU, or None where it has no option for that.
        gpus: the numbers of GPUs that it is for; None for those of the command line.
        prepare: function of the copied folder that makes the data.
        needs: the modules, besides torch, that it imports.
    """

    name: str
    path: str
    steps: callable
    loss: str | None = None
    on_cpu: list | None = None
    gpus: tuple | None = None
    prepare: callable = None
    needs: tuple = ()


@dataclass
class Result:
    """What a program did: the last line of its error or None, its seconds, its loss or None."""

    error: str | None
    seconds: float
    loss: float | None


def python(*arguments):
    """Return steps of one process."""
    return lambda n: [[[sys.executable, *arguments]]]


def torchrun(*runs):
    """Return steps of torchrun on one host: one for each list of arguments."""
    return lambda n: [[[*TORCHRUN, "--standalone", f"--nproc-per-node={n}", *run]] for run in runs]


def on_two_hosts(*arguments):
    """Return one step of torchrun on two hosts, which find each other through a port."""

    def steps(n):
        endpoint = f"--rdzv-endpoint=127.0.0.1:{_free_port()}"
        return [
            [
                [
                    *TORCHRUN,
                    *("--nnodes=2", f"--nproc-per-node={n // 2}", f"--node-rank={host}"),
                    *("--rdzv-backend=c10d", "--rdzv-id=1", endpoint, *arguments),
                ]
                for host in range(2)
            ]
        ]

    return steps


def _free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


# -- the data


def text(num_chars=60_000):
    """Return sentences of some words, the same ones each time."""
    draw = random.Random(0)
    words = "the a one little old red bird fish cat dog king house river sings runs sees and then"
    sentences = []
    while sum(map(len, sentences)) < num_chars:
        words_of_one = draw.choices(words.split(), k=draw.randint(4, 9))
        sentences.append(" ".join(words_of_one).capitalize() + draw.choice(".!?") + "\n")
    return "".join(sentences)[:num_chars]


def prepare_mingpt(folder):
    (folder / "data" / "made.txt").write_text(text(8_000))


def prepare_nanogpt(folder):
    data = folder / "data" / "shakespeare_char"
    (data / "input.txt").write_text(text())
    subprocess.run(
        [sys.executable, str(data / "prepare.py")], check=True, capture_output=True, env=_paths()
    )


def prepare_picotron(folder, **sizes):
    """Make the texts, a tokenizer of characters, a small model, and the configuration."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, PreTrainedTokenizerFast

    made, width, inner, layers, vocabulary = text(), 64, 128, 4, 64
    with open(_made(folder / "texts") / "train.jsonl", "w", encoding="utf-8") as file:
        for start in range(0, len(made), 1000):
            file.write(json.dumps({"text": made[start : start + 1000]}) + "\n")
    ids = {char: number for number, char in enumerate(sorted(set(made)))}
    ids["?unknown?"] = len(ids)
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="?unknown?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    for place in "model", "hf_model/model":
        config.save_pretrained(folder / place)
    shapes = {"model.embed_tokens": (vocabulary, width), "model.norm": (width,)}
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        shapes |= {f"{prefix}{name}_layernorm": (width,) for name in ("input", "post_attention")}
        shapes |= {f"{prefix}self_attn.{name}_proj": (width, width) for name in "qkvo"}
        shapes |= {f"{prefix}mlp.{name}_proj": (inner, width) for name in ("gate", "up")}
        shapes[f"{prefix}mlp.down_proj"] = width, inner
    weights = {f"{name}.weight": torch.zeros(shape) for name, shape in shapes.items()}
    save_file(weights, _made(folder / "hf_model_safetensors") / "model.safetensors")
    settings = json.loads((folder / "template" / "base_config.json").read_text())
    heads = {"num_hidden_layers": layers, "num_attention_heads": 4, "num_key_value_heads": 4}
    settings["distributed"] |= sizes
    settings["model"] |= {"name": "model", **heads}
    settings["training"] |= {"total_train_steps": 5, "seq_length": 64, "micro_batch_size": 4}
    settings["training"] |= {"gradient_accumulation_steps": 2, "num_samples": 50}
    settings["dataset"] |= {"name": "texts"}
    settings["environment"] |= {"FLASH_ATTEN": "0", "HF_TOKEN": "none"}
    (folder / "config.json").write_text(json.dumps(settings))
    for module, name in (
        ("flash_attn_interface", "flash_attn_func"),
        ("layers/rotary", "apply_rotary_emb"),
        ("ops/triton/layer_norm", "layer_norm_fn"),
    ):
        path = folder / "flash_attn" / f"{module}.py"
        _made(path.parent)
        path.write_text(f"{name} = None\n")


def _made(folder):
    folder.mkdir(parents=True, exist_ok=True)
    return folder


# -- the programs

SERIES, TENSORS = (
    "examples/distributed/ddp-tutorial-series",
    "examples/distributed/tensor_parallelism",
)
MINGPT = """data_config.path=data/made.txt data_config.truncate=0.1 data_config.block_size=64
    trainer_config.max_epochs=1 trainer_config.batch_size=16 trainer_config.data_loader_workers=2
    trainer_config.save_every=1 gpt_config.n_layer=2 gpt_config.n_head=4 gpt_config.n_embd=64"""
NANOGPT = """config/train_shakespeare_char.py --block_size=64 --batch_size=8 --n_layer=2 --n_head=2
    --n_embd=64 --dropout=0.0 --max_iters=20 --lr_decay_iters=20 --warmup_iters=2
    --eval_interval=10 --eval_iters=2 --log_interval=1 --gradient_accumulation_steps=4"""
NANOGPT_LOSS = r"iter \d+: loss ([\d.]+)"


def _fsdp2(*options):
    return functools.partial(
        Program,
        path="examples/distributed/FSDP2",
        steps=torchrun(*(["example.py", *o] for o in options)),
    )


def _picotron(name, n, **sizes):
    return Program(
        f"picotron, {name}",
        "picotron",
        torchrun(["train.py", "--config", "config.json"]),
        loss=r"Step: \d+ *\| Loss: +([\d.]+)",
        gpus=(n,),
        prepare=functools.partial(prepare_picotron, **sizes),
        needs=("transformers", "tokenizers", "datasets", "safetensors", "wandb"),
    )


PROGRAMS = [
    Program("ddp", "examples/distributed/ddp", torchrun(["example.py"])),
    Program("single_gpu", SERIES, python("single_gpu.py", "3", "1"), gpus=(1,)),
    Program("multigpu", SERIES, python("multigpu.py", "3", "1")),
    Program(
        "multigpu_torchrun, resumed",
        SERIES,
        torchrun(["multigpu_torchrun.py", "2", "1"], ["multigpu_torchrun.py", "4", "1"]),
    ),
    Program("multinode, two hosts", SERIES, on_two_hosts("multinode.py", "3", "1")),
    Program(
        "minGPT-ddp",
        "examples/distributed/minGPT-ddp/mingpt",
        torchrun(["main.py", *MINGPT.split()]),
        loss=r"Eval Loss ([\d.]+)",
        prepare=prepare_mingpt,
        needs=("hydra", "boto3", "fsspec"),
    ),
    _fsdp2([], [])("FSDP2, resumed"),
    _fsdp2(["--mixed-precision"], ["--mixed-precision"])("FSDP2, bfloat16, resumed"),
    _fsdp2(["--dcp-api"], ["--dcp-api"])("FSDP2, dcp-api, resumed"),
    _fsdp2(["--explicit-prefetching"])("FSDP2, prefetching"),
    Program("tensor parallel", TENSORS, torchrun(["tensor_parallel_example.py"])),
    Program("sequence parallel", TENSORS, torchrun(["sequence_parallel_example.py"])),
    Program("FSDP with TP", TENSORS, torchrun(["fsdp_tp_example.py"]), gpus=(4,)),
    Program(
        "nanoGPT, float32",
        "nanoGPT",
        python("train.py", *NANOGPT.split(), "--dtype=float32"),
        loss=NANOGPT_LOSS,
        on_cpu=[sys.executable, "train.py", *NANOGPT.split(), "--device=cpu", "--compile=False"],
        gpus=(1,),
        prepare=prepare_nanogpt,
        needs=("requests",),
    ),
    Program(
        "nanoGPT, bfloat16, ddp",
        "nanoGPT",
        torchrun(["train.py", *NANOGPT.split()]),
        loss=NANOGPT_LOSS,
        prepare=prepare_nanogpt,
        needs=("requests",),
    ),
    _picotron("dp=2", 2, dp_size=2),
    _picotron("tp=2", 2, tp_size=2),
    _picotron("cp=2", 2, cp_size=2),
    _picotron("pp=2, 1f1b", 2, pp_size=2),
    _picotron("pp=2, afab", 2, pp_size=2, pp_engine="afab"),
    _picotron("dp=2 tp=2", 4, dp_size=2, tp_size=2),
    _picotron("tp=2 pp=2", 4, tp_size=2, pp_size=2),
    _picotron("dp=2 pp=2", 4, dp_size=2, pp_size=2),
]


# -- running them


def _paths():
    """Return the environment, with the working folder and this d2lpar on Python's path."""
    root = str(Path(__file__).resolve().parents[1])
    paths = os.environ.get("PYTHONPATH", ""), root, "."
    return {**os.environ, **CPUS, "PYTHONPATH": os.pathsep.join(filter(None, paths))}


def run_program(program, checkouts, gpus=None):
    """Run a program in a scratch copy.

    Args:
        program: a `Program`.
        checkouts: the folder of the checkouts, a `Path`.
        gpus: how many virtual GPUs; None for the CPU.

    Returns:
        A `Result`; its seconds are those of the last step.
    """
    with tempfile.TemporaryDirectory(prefix="d2lpar-programs-") as scratch:
        folder = Path(scratch, "copy")
        shutil.copytree(checkouts / program.path, folder)
        if program.prepare is not None:
            program.prepare(folder)
        steps = [[program.on_cpu]] if gpus is None else program.steps(gpus)
        for number, commands in enumerate(steps):
            if gpus is not None:
                run = [sys.executable, "-m", "d2lpar", "run", "--gpus", str(gpus // len(commands))]
                commands = [[*run, *command] for command in commands]
            start = time.perf_counter()
            code, printed = _run_together(commands, folder, Path(scratch, f"printed{number}"))
            seconds = time.perf_counter() - start
            if code:
                return Result(_last_error(printed, code), seconds, None)
    losses = re.findall(program.loss, printed) if program.loss else []
    return Result(None, seconds, float(losses[-1]) if losses else None)


def _run_together(commands, folder, path):
    """Run commands at the same time; return the first exit code but 0, and what they printed."""
    with open(path, "w+", encoding="utf-8", errors="replace") as file:
        options = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        processes = [
            subprocess.Popen(command, cwd=folder, env=_paths(), **options) for command in commands
        ]
        deadline = time.monotonic() + LIMIT
        codes = []
        for process in processes:
            try:
                codes.append(process.wait(max(0, deadline - time.monotonic())))
            except subprocess.TimeoutExpired:
                _end(process)
                codes.append(f"not ended after {LIMIT} s")
        file.seek(0)
        return next((code for code in codes if code), 0), file.read()


def _end(process):
    process.terminate()
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(SECONDS_TO_END)
        return
    process.kill()
    process.wait()


def _last_error(printed, code):
    """Return the last line of what a program printed that names an error of its own."""
    lines = [line.strip() for line in printed.split("\n")]
    errors = [
        line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): ", line)
    ]
    own = [line for line in errors if "ChildFailedError" not in line]
    return (own or [f"exit code {code}"])[-1] if isinstance(code, int) else code


def report(name, gpus, result, on_cpu):
    """Print a row of the table."""
    loss = "" if result.loss is None else f"{result.loss:.4f}"
    difference = ""
    if on_cpu is not None and on_cpu.loss is not None and result.loss is not None:
        difference = f"{abs(result.loss - on_cpu.loss):.1e}"
    row = f"{name:28} {gpus:4}  {result.error or 'ran':6} {result.seconds:7.1f}  {loss:>8}"
    print(f"{row}  {difference}".rstrip(), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="of the checkouts")
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--only", default="", metavar="NAME", help="those with this in their name")
    options = parser.parse_args()
    if options.folder is None:
        print("no FOLDER with checkouts; these are the programs:")
        for name, source in SOURCES.items():
            print(f"    git clone --depth 1 {source} FOLDER/{name}")
        return 0
    print("seconds: wall clock of the last command, start of its processes included")
    print("loss: the last that the program prints; difference: to the same program on the CPU")
    print(f"{'program':28} GPUs  {'result':6} seconds      loss  difference")
    failed = False
    for program in PROGRAMS:
        if options.only not in program.name:
            continue
        missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
        if missing or not (options.folder / program.path).is_dir():
            why = f"needs the module {missing[0]}" if missing else f"there is no {program.path}"
            print(f"{program.name:28}    -  left out: {why}", flush=True)
            continue
        on_cpu = program.on_cpu and run_program(program, options.folder)
        if on_cpu:
            failed |= on_cpu.error is not None
            report(program.name, "CPU", on_cpu, None)
        for gpus in program.gpus or options.gpus:
            result = run_program(program, options.folder, gpus)
            failed |= result.error is not None
            report(program.name, gpus, result, on_cpu)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
