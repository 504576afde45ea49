"""Programs that people learn distributed training from, and frameworks, on virtual GPUs.

`python benchmarks/bench_programs.py FOLDER` runs programs unmodified from checkouts in a folder,
each in a scratch copy, by `vgpu run --gpus N`, and prints a table. Data sets are made on the
spot: a text, and for picotron what it would download, with the modules of flash-attn's kernels
empty, as its options leave these kernels out. Without a FOLDER it says where to get the programs.

`python benchmarks/bench_programs.py --frameworks FOLDER` runs the programs of `frameworks/`, which
are written as each framework's documentation has it, on two virtual GPUs and on the CPU. Each
framework gets an environment of its own in the folder, from PyPI, which stays there.

Exits with status 1 when a program fails, or finds other losses than on the CPU.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import importlib.util
import json
import os
import random
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

SOURCES = {
    "examples": "https://github.com/pytorch/examples",
    "nanoGPT": "https://github.com/karpathy/nanoGPT",
    "picotron": "https://github.com/huggingface/picotron",
    "tutorials": "https://github.com/pytorch/tutorials",
}
TORCHRUN = ["python", "-m", "torch.distributed.run"]
ROOT = Path(__file__).resolve().parents[1]
TORCH = "torch==2.13.0"
LIMIT = 300  # seconds for one command
SECONDS_TO_END = 20  # for a command that was asked to
CPUS = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
CPUS["RAY_USAGE_STATS_ENABLED"] = "0"


@dataclasses.dataclass
class Program:
    """A program of a checkout.

    Attributes:
        name: what the table calls it, and `--only`.
        path: its folder in the checkouts, which is copied.
        steps: function of the number of GPUs that returns a list of steps, one after the other;
            each is a list of commands, one for each host.
        loss: a regular expression, whose matches in what it prints are the losses; None where it
            prints none.
        on_cpu: the same program on the CPU, or None where it has no option for that.
        within: how far a loss may be from the one on the CPU, relative to it.
        gpus: the numbers of GPUs that it is for; None for those of the command line.
        prepare: function of the copied folder that makes the data.
        needs: the modules, besides torch, that it imports.
        model: options of `vgpu run` that model GPUs, for what is too large for CPU cores.
    """

    name: str
    path: str
    steps: callable
    loss: str | None = None
    on_cpu: list | None = None
    within: float = 1e-3
    gpus: tuple | None = None
    prepare: callable = None
    needs: tuple = ()
    model: tuple = ()


@dataclasses.dataclass
class Result:
    """What a program did: the last line of its error or None, its seconds, its losses."""

    error: str | None
    seconds: float
    losses: list


def python(*arguments):
    """Return steps of one process."""
    return lambda n: [[["python", *arguments]]]


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
        ["python", str(data / "prepare.py")], check=True, capture_output=True, env=_variables()
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


def prepare_page(folder, name, number=0):
    """Write a program on a page of the tutorials, all its blocks together, to program.py.

    Args:
        folder: where the page is, a `Path`.
        name: of its file.
        number: which of the page's programs; each ends with the block that calls it.
    """
    programs, block = [[]], None
    for line in [*(folder / name).read_text().splitlines(), "the end"]:
        if block is not None and (line.startswith(" ") or not line):
            block.append(line)
            continue
        code = textwrap.dedent("\n".join(block or ()))
        if code and _is_python(code):
            programs[-1].append(code)
            if "__main__" in code:
                programs.append([])
        block = [] if re.fullmatch(r"\.\. code(-block)?:: *python|.*::", line) else None
    (folder / "program.py").write_text("\n\n".join(programs[number]))


def prepare_torchtitan(folder):
    """Make what torchtitan's own tests have under tests/assets: texts and a tokenizer.

    The texts are all the same, so that each process reads what a single one would.
    """
    made, specials = text(1000), ("<s>", "</s>")
    data = _made(folder / "tests/assets/c4_test") / "data.json"
    data.write_text(f"{json.dumps({'text': made})}\n" * 32)
    ids = {char: number for number, char in enumerate([*specials, *sorted(set(made))])}
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {
        "added_tokens": [{"id": ids[c], "content": c, "special": True} | flags for c in specials],
        "pre_tokenizer": {
            "type": "Split",
            "pattern": {"Regex": r"[\s\S]"},
            "behavior": "Isolated",
            "invert": False,
        },
        "model": {"type": "WordLevel", "vocab": ids, "unk_token": "</s>"},
    }
    path = _made(folder / "tests/assets/tokenizer")
    (path / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = dict(zip(("bos_token", "eos_token"), specials, strict=True))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))


def _is_python(code):
    try:
        ast.parse(code)
    except SyntaxError:
        return False
    return True


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
DDP_PAGE = "intermediate_source/ddp_tutorial.rst"
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


def _tutorial(name, page, n, steps=None, number=0, **options):
    folder, _, file = page.rpartition("/")
    return Program(
        f"tutorial: {name}",
        f"tutorials/{folder}",
        steps or python("program.py"),
        gpus=(n,),
        prepare=functools.partial(prepare_page, name=file, number=number),
        **options,
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
        on_cpu=["python", "train.py", *NANOGPT.split(), "--device=cpu", "--compile=False"],
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
    _tutorial("DDP", DDP_PAGE, 2),
    _tutorial("DDP, 8 processes", DDP_PAGE, 8),
    _tutorial("DDP, torchrun", DDP_PAGE, 2, torchrun(["program.py"]), number=1),
    _tutorial(
        "pipelining",
        "intermediate_source/pipelining_tutorial.rst",
        2,
        torchrun(["program.py"]),
        model=("--model", "v100-32gb", "--no-values"),
    ),
    _tutorial("ZeRO", "recipes_source/zero_redundancy_optimizer.rst", 2),
]


# -- the frameworks


def _framework(name, command, on_cpu=None, loss=r"^losses (.*)", **options):
    """Return a program of frameworks/ for 2 GPUs, and its form for the CPU: commands as texts."""
    return Program(
        name,
        "frameworks",
        lambda n: [[shlex.split(command)]],
        loss=loss,
        on_cpu=shlex.split(on_cpu or command),
        gpus=(2,),
        **options,
    )


RUN_2 = "torchrun --standalone --nproc-per-node=2"
LAUNCH_2 = "accelerate launch --num_processes=2 --main_process_port=0"
ACCELERATE_CPU = f"env ACCELERATE_USE_CPU=true {RUN_2} accelerate_train.py"
TRAINER_CPU = f"{RUN_2} trainer.py --use_cpu True"
LIGHTNING_CPU = "python lightning_train.py ddp 32"
FABRIC_CPU = "python lightning_fabric.py ddp"
TWO_RANKS_CPU = "python two_ranks_on_cpu.py"
TITAN = """bash -c "torchrun --nproc-per-node=1 {0} --checkpoint.create_seed_checkpoint &&
    torchrun --nproc-per-node={1} --local-ranks-filter={2} --tee=3 {0} {3}" """
ROUNDED = 0.02  # the difference allowed between 16 and 32 bits


def _titan(name, options):
    command = functools.partial(TITAN.format, "torchtitan_train.py")
    loss = r"step: +\d+ .*loss: +([\d.]+)"
    on_cpu, prepare = command(1, 0, ""), prepare_torchtitan
    return _framework(name, command(2, 1, options), on_cpu, loss=loss, prepare=prepare)


TITAN_PROGRAMS = [
    _titan("FSDP2", ""),
    _titan("tensor parallel", "--parallelism.tensor_parallel_degree=2"),
    _titan("pipeline parallel", "--parallelism.pipeline_parallel_degree=2"),
]

# By name: what pip installs besides torch, and the programs.
FRAMEWORKS = {
    "accelerate": (
        ["accelerate"],
        [
            _framework("DDP", f"{LAUNCH_2} --multi_gpu accelerate_train.py", ACCELERATE_CPU),
            _framework(
                "FSDP2",
                f"{LAUNCH_2} --use_fsdp --fsdp_version=2 accelerate_train.py",
                ACCELERATE_CPU,
            ),
            _framework('device_map="auto"', "python accelerate_device_map.py"),
        ],
    ),
    "transformers": (
        ["transformers", "accelerate"],
        [
            _framework("Trainer: DDP", f"{RUN_2} trainer.py", TRAINER_CPU),
            _framework("Trainer: DataParallel", "python trainer.py", TRAINER_CPU),
            _framework("Trainer: FSDP", f"{RUN_2} trainer.py --fsdp full_shard", TRAINER_CPU),
            _framework(
                "Trainer: bf16", f"{RUN_2} trainer.py --bf16 1", TRAINER_CPU, within=ROUNDED
            ),
            _framework('device_map="auto"', "python device_map.py"),
        ],
    ),
    "lightning": (
        ["lightning"],
        [
            _framework("DDP", "python lightning_train.py ddp 32"),
            _framework(
                "DDP, fp16",
                "python lightning_train.py ddp 16-mixed",
                LIGHTNING_CPU,
                within=ROUNDED,
            ),
            _framework("FSDP", "python lightning_train.py fsdp 32", LIGHTNING_CPU),
            _framework("Fabric: DDP", "python lightning_fabric.py ddp"),
            _framework("Fabric: FSDP", "python lightning_fabric.py fsdp", FABRIC_CPU),
        ],
    ),
    "deepspeed": (
        ["deepspeed"],
        [
            *(
                _framework(f"ZeRO-{stage}", f"{RUN_2} deepspeed_train.py {stage}", TWO_RANKS_CPU)
                for stage in (1, 2, 3)
            ),
            _framework(
                "ZeRO-2, fp16",
                f"{RUN_2} deepspeed_train.py 2 fp16",
                TWO_RANKS_CPU,
                within=ROUNDED,
            ),
        ],
    ),
    "torchtitan-0.2.2": (["torchtitan==0.2.2", "triton"], TITAN_PROGRAMS),
    "torchtitan": (
        ["torchtitan", "triton"],
        # Nothing on the CPU, where torch's flex_attention has no backward; no pipeline, which is
        # made for a newer torch.
        [dataclasses.replace(program, on_cpu=None) for program in TITAN_PROGRAMS[:2]],
    ),
    "ray": (["ray[train]"], [_framework("Ray Train: DDP", "python ray_train.py")]),
    "ignite": (["pytorch-ignite"], [_framework("DDP", f"{RUN_2} ignite_train.py")]),
}


# -- running them


def make_environment(path, requirements):
    """Make an environment with torch, this d2lpar and a framework, unless it is there.

    Args:
        path: its folder, a `Path`.
        requirements: what pip installs, besides torch, which it must not replace.

    Returns:
        The names and versions of the requirements, a text.
    """
    ready, pip = path / "ready", [path / "bin/python", "-m", "pip", "install", "--quiet"]
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", path], check=True)
        subprocess.run([*pip, TORCH], check=True)
        (path / "torch.txt").write_text(TORCH)
        constrained = [*pip, "--constraint", path / "torch.txt"]
        subprocess.run([*constrained, "--editable", ROOT, *requirements], check=True)
        ready.touch()
    names = [requirement.partition("==")[0].partition("[")[0] for requirement in requirements]
    code = "import sys; from importlib.metadata import version as v; "
    code += "print(', '.join(f'{name} {v(name)}' for name in sys.argv[1:]))"
    command = [path / "bin/python", "-c", code, *names]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


def _variables(environment=Path(sys.prefix)):
    """Return variables for a process: this d2lpar, its own folder, an environment's commands."""
    pythonpath = filter(None, (os.environ.get("PYTHONPATH", ""), str(ROOT), "."))
    path = os.pathsep.join([str(environment / "bin"), os.environ["PATH"]])
    return {**os.environ, **CPUS, "PATH": path, "PYTHONPATH": os.pathsep.join(pythonpath)}


def run_program(program, folder, gpus=None, environment=Path(sys.prefix)):
    """Run a program in a scratch copy.

    Args:
        program: a `Program`.
        folder: where its `path` is, a `Path`.
        gpus: how many virtual GPUs; None for the CPU.
        environment: the virtual environment whose Python runs it, a `Path`.

    Returns:
        A `Result`; its seconds are those of the last step.
    """
    with tempfile.TemporaryDirectory(prefix="d2lpar-programs-") as scratch:
        copy = Path(scratch, "copy")
        shutil.copytree(folder / program.path, copy)
        if program.prepare is not None:
            program.prepare(copy)
        steps = [[program.on_cpu]] if gpus is None else program.steps(gpus)
        for number, commands in enumerate(steps):
            if gpus is not None:
                run = ["python", "-m", "vgpu", "run", "--gpus", str(gpus // len(commands))]
                commands = [[*run, *program.model, *command] for command in commands]
            start = time.perf_counter()
            path = Path(scratch, f"printed{number}")
            code, printed = _run_together(commands, copy, path, _variables(environment))
            seconds = time.perf_counter() - start
            error = _last_error(printed, code) if code else None
            if gpus is not None and not re.search(r"processes that used them: [1-9]", printed):
                error = error or "no process used a virtual GPU"
            if error:
                return Result(error, seconds, [])
    found = re.findall(program.loss, printed, re.MULTILINE) if program.loss else []
    return Result(None, seconds, [float(loss) for losses in found for loss in losses.split()])


def _run_together(commands, folder, path, variables):
    """Run commands at the same time; return the first exit code but 0, and what they printed."""
    with open(path, "w+", encoding="utf-8", errors="replace") as file:
        options = {"stdin": subprocess.DEVNULL, "stdout": file, "stderr": subprocess.STDOUT}
        processes = [
            subprocess.Popen(command, cwd=folder, env=variables, **options) for command in commands
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
    """Return the last line of what a program printed that names an error of its own.

    If none does, the exit code and the end of what it printed.
    """
    lines = [line.strip() for line in printed.split("\n")]
    errors = [
        line for line in lines if re.match(r"(\[rank\d+\]: )?[\w.]*(Error|Exception): ", line)
    ]
    own = [line for line in errors if "ChildFailedError" not in line]
    return (
        (own or [f"exit code {code}: {printed[-10_000:]}"])[-1] if isinstance(code, int) else code
    )


def difference(losses, on_cpu):
    """Return by how much losses differ from those on the CPU, relative to them, at the most.

    Raises:
        ValueError: there are more losses on one side, or none.
    """
    if not losses or len(losses) != len(on_cpu):
        raise ValueError(f"{len(losses)} losses, on the CPU {len(on_cpu)}")
    return max(abs(a - b) / max(abs(b), 1e-9) for a, b in zip(losses, on_cpu, strict=True))


def run_rows(program, folder, numbers, environment=Path(sys.prefix)):
    """Run a program on the CPU and on numbers of GPUs, print rows, return whether all is well."""
    on_cpu = None
    if program.on_cpu:
        key = environment, program.path, *program.on_cpu
        if key not in _on_cpu:
            _on_cpu[key] = run_program(program, folder, None, environment)
            _print_row(program.name, "CPU", _on_cpu[key], _on_cpu[key].error)
        on_cpu = _on_cpu[key]
    well = on_cpu is None or on_cpu.error is None
    for gpus in numbers:
        result, differs = run_program(program, folder, gpus, environment), None
        error = result.error
        if on_cpu and not error and not on_cpu.error:
            try:
                differs = difference(result.losses, on_cpu.losses)
                error = None if differs <= program.within else "too far from the CPU"
            except ValueError as wrong:
                error = str(wrong)
        _print_row(program.name, gpus, result, error, differs)
        well &= error is None
    return well


_on_cpu = {}  # results of commands, which several programs have in common


def _print_row(name, gpus, result, error, differs=None):
    loss = f"{result.losses[-1]:.4f}" if result.losses else ""
    row = f"{name:28} {gpus:>4}  {error or 'ran':6} {result.seconds:7.1f}  {loss:>8}"
    print(f"{row}  {'' if differs is None else f'{differs:.1e}'}".rstrip(), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, metavar="FOLDER", help="of the checkouts")
    parser.add_argument(
        "--frameworks", type=Path, metavar="FOLDER", help="run frameworks, environments made there"
    )
    parser.add_argument("--gpus", nargs="+", type=int, default=[2, 4], metavar="N")
    parser.add_argument("--only", default="", metavar="NAME", help="those with this in their name")
    options = parser.parse_args()
    if options.folder is None and options.frameworks is None:
        print("no FOLDER with checkouts; these are the programs:")
        for name, source in SOURCES.items():
            print(f"    git clone --depth 1 {source} FOLDER/{name}")
        print(f"and --frameworks FOLDER runs {', '.join(FRAMEWORKS)}")
        return 0
    print("seconds: wall clock of the last command, start of its processes included")
    print("loss: the last that the program prints")
    print("difference: from the CPU, relative, the largest of all losses that it prints")
    print(f"{'program':28} GPUs  {'result':6} seconds      loss  difference")
    well = True
    for name, (requirements, programs) in FRAMEWORKS.items() if options.frameworks else ():
        if options.only in name:
            environment = options.frameworks.resolve() / name
            print(f"{make_environment(environment, requirements)}, {TORCH}", flush=True)
            for program in programs:
                well &= run_rows(program, Path(__file__).parent, program.gpus, environment)
    for program in PROGRAMS if options.folder else ():
        if options.only not in program.name:
            continue
        missing = [name for name in program.needs if importlib.util.find_spec(name) is None]
        if missing or not (options.folder / program.path).is_dir():
            why = f"needs the module {missing[0]}" if missing else f"there is no {program.path}"
            print(f"{program.name:28}    -  left out: {why}", flush=True)
            continue
        well &= run_rows(program, options.folder, program.gpus or options.gpus)
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
