"""Train a GPT with any residual mode, on one process or many.

    python train.py configs/tiny.toml --residual_mode=attnres_block --seed=2
    torchrun --standalone --nproc_per_node=2 train.py configs/tiny.toml --residual_mode=attnres_block --seed=2

On several machines, which see one run folder and the same data (under Slurm: srun --ntasks-per-node=1 in front):

    python -m torch.distributed.run --nnodes=2 --nproc_per_node=8 --rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:PORT \\
        train.py configs/rd_120m.toml

Settings: defaults, then TOML files or run folders from left to right, then --key=value or --key value. The keys are the
fields of GPTConfig (model.py) and TrainConfig (below); a key that is not among them is an error, and --help lists all.

The run folder holds config.toml, log.csv, last.pt, best.pt and the source files: `train.py runs/NAME --resume` goes on
exactly where the run stopped. Batch k is a function of (seed, k) alone: runs of one seed see the same data on any
number of processes.
"""
import csv
import inspect
import json
import math
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
import zipfile
import zlib
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, fields, replace
from datetime import timedelta
from difflib import get_close_matches
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import Literal, get_args

try:
    import tomllib
except ImportError:
    sys.exit(f"Python 3.11 or newer is needed, this is {platform.python_version()}")

import numpy as np
import torch
import torch.distributed as dist

import hub
import prepare_fineweb
from model import GPT, RESIDUAL_MODES, GPTConfig, at_least_fp32, require, require_choice, require_choices
from prepare_fineweb import (UserError, check_shards, cores, file_crc, first_line, lock_folder, print_anything,
                             read_header, read_meta)

# ---------------------------------------------------------------------------------------------------------------------
# Configuration


@dataclass
class TrainConfig:
    data_dir: str = "data/fineweb"  # folder with the token shards that prepare_fineweb.py writes
    prepare: str = ""  # flags for prepare_fineweb.py, used when data_dir has no finished data yet
    out_dir: str = ""  # run folder; empty = runs/<config>-<residual_mode>-seed<seed>
    seed: int = 1  # of the initial weights and of the order of the data
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"  # where to compute
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"  # compute dtype (float64 is for tests)
    compile: Literal["auto", "on", "off"] = "auto"  # torch.compile; on a CPU its runs are not bit-reproducible
    init_from: str = ""  # start from these weights: a run, a Hugging Face folder, or a Hub id (owner/name[@revision])
    parallel: Literal["ddp", "fsdp"] = "ddp"  # each process holds the whole model (ddp) or a part of it (fsdp)
    resume: bool = False  # go on from last.pt in the run folder; starts fresh in a new or empty one
    overwrite: bool = False  # start afresh in a run folder that holds a run: its log and checkpoints are deleted
    micro_batch: int = 8  # sequences per process in one forward pass; lower it when memory runs out
    tokens_per_step: int = 524_288  # tokens per optimizer step, over all processes and accumulated micro-batches
    max_steps: int = 10_000  # optimizer steps; max_steps * tokens_per_step is the budget
    stop_after: int = 0  # stop behind this step, saved, with the schedule of the whole run; 0 = at the end
    lr: float = 6e-4  # peak learning rate
    min_lr: float = 6e-5  # learning rate of the last step
    warmup_steps: int = 200  # steps of linear warm-up; the last of them has the peak rate
    optimizer: Literal["adamw", "muon"] = "adamw"  # muon: for the matrices of the sublayers; AdamW for the rest
    schedule: Literal["cosine", "wsd"] = "cosine"  # after the warm-up; wsd: constant, then linear over decay_steps
    decay_steps: int = 0  # wsd: length of the decay; 0 = a fifth of max_steps
    beta1: float = 0.9  # AdamW: decay of the first moment
    beta2: float = 0.95  # AdamW: decay of the second moment
    adam_eps: float = 1e-8  # AdamW: epsilon
    weight_decay: float = 0.1  # on matrices only
    grad_clip: float = 1.0  # largest global gradient norm; 0 = no clipping
    route_lr_mult: float = 1.0  # factor on the learning rate of the residual's parameters
    route_first: int = 0  # steps at the start in which only the residual's parameters learn
    eval_every: int = 250  # steps between evaluations on val, also at start and end; 0 = none
    eval_tokens: int = 1_000_000  # val tokens per evaluation, spread evenly over the split, the same ones each time
    eval_at_tokens: str = ""  # further evaluations once so many tokens are trained on, for instance 1_000_000,2_000_000
    save_every: int = 1000  # steps between saves of last.pt; 0 = only at start and end
    log_every: int = 10  # steps between log lines
    estimate: bool = False  # print what the run would need in every mode, and train nothing
    gpus: int = 1  # for estimate: number of GPUs
    gpu: str = "H100"  # for estimate: one of those in study/estimate.py
    mfu: float = 0.4  # for estimate: part of the GPU's peak that the run is assumed to reach
    tracker: Literal["none", "tensorboard", "wandb"] = "none"  # where log rows go as well

    def __post_init__(self):
        for name in ("micro_batch", "tokens_per_step", "max_steps", "eval_tokens", "log_every", "gpus"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("seed", "min_lr", "warmup_steps", "decay_steps", "weight_decay", "grad_clip", "route_lr_mult",
                     "route_first", "eval_every", "save_every", "stop_after"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}: must not be negative")
        for name in ("lr", "adam_eps"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)}: must be positive")
        require(self.min_lr <= self.lr, f"min_lr={self.min_lr} is above lr={self.lr}")
        require(0 < self.mfu <= 1, f"mfu={self.mfu}: must be above 0 and at most 1")
        for name in ("gpus", "gpu", "mfu"):
            require(self.estimate or getattr(self, name) == getattr(TrainConfig, name), f"{name}={getattr(self, name)} "
                    "has no effect without estimate=true; start processes with torchrun --standalone --nproc_per_node")
        for name in ("beta1", "beta2"):
            require(0 <= getattr(self, name) < 1, f"{name}={getattr(self, name)}: must be in [0, 1)")
        require(self.dtype != "float16", "dtype=float16 is not supported: use bfloat16 or float32")
        require(not re.fullmatch(r"gpu|cuda:\d+", self.device), f"device={self.device}: use cuda; which GPUs, says the "
                "environment variable CUDA_VISIBLE_DEVICES")
        require_choices(self)
        require(self.seed < 2**62, f"seed={self.seed}: must be below 2^62")
        require(self.schedule == "wsd" or not self.decay_steps, f"decay_steps={self.decay_steps} has no effect in "
                f"schedule={self.schedule}: remove it, or use schedule=wsd")
        require(self.parallel == "ddp" or torch_version() >= (2, 13), "parallel=fsdp needs PyTorch 2.13 or newer ("
                f"norms of shards were wrong), this is {torch.__version__}; update it, or use parallel=ddp")
        require(self.optimizer == "adamw" or hasattr(torch.optim, "Muon"), "optimizer=muon needs PyTorch 2.9 or newer, "
                f"this is {torch.__version__}: pip install -U torch, or use optimizer=adamw")
        require(self.stop_after <= self.max_steps, f"stop_after={self.stop_after} is behind the last step, max_steps="
                f"{self.max_steps}")
        require(not (self.resume and self.overwrite), "resume=true goes on with a run and overwrite=true deletes it: "
                "give one of them")
        spec = None if self.tracker == "none" else find_spec(self.tracker)  # a folder of wandb's files is no package
        require(self.tracker == "none" or spec and spec.origin, f"tracker={self.tracker} needs a package that is "
                f"not installed: pip install {self.tracker}")
        try:
            how = shlex.split(self.prepare)
        except ValueError as e:
            raise ValueError(f"prepare={self.prepare}: {e}") from None
        require(not any(a.startswith("--out") for a in how), "prepare: the shards go to data_dir, give no --out")
        require(all(m > 0 for m in self.milestones()), f"eval_at_tokens={self.eval_at_tokens}: must be positive")

    def milestones(self):
        try:
            return [int(n) for n in self.eval_at_tokens.split(",") if n.strip()]
        except ValueError:
            raise ValueError(f"eval_at_tokens={self.eval_at_tokens}: must be whole numbers and commas") from None

    def lr_at(self, step):
        """Learning rate of step 0 .. max_steps-1. Step warmup_steps-1 has the peak, the last step the floor."""
        if step < self.warmup_steps:
            return self.lr * (step + 1) / self.warmup_steps
        length = self.max_steps - self.warmup_steps
        if self.schedule == "wsd":
            length = min(length, self.decay_steps or math.ceil(self.max_steps / 5))
        done = max(0.0, 1 - (self.max_steps - 1 - step) / length)
        left = (1 + math.cos(math.pi * done)) / 2 if self.schedule == "cosine" else 1 - done
        return self.min_lr + (self.lr - self.min_lr) * left


SCHEMA = {f.name: f for cls in (GPTConfig, TrainConfig) for f in fields(cls)}


def load_config(argv):
    """Command line -> (GPTConfig, TrainConfig); raises UserError that names the place and the nearest known key."""
    if {"-h", "--help"} & set(argv):
        print(__doc__)
        for cls in (GPTConfig, TrainConfig):
            print(f"{cls.__name__}:")
            for name, comment in re.findall(r"^    (\w+): .*?  # (.*)$", inspect.getsource(cls), re.M):
                choices = " | ".join(get_args(SCHEMA[name].type))
                print(f"  --{name}={SCHEMA[name].default}".ljust(34), comment + f" ({choices})" * bool(choices))
        print("residual modes: what a sublayer reads, and where it is from")
        for name, mode in RESIDUAL_MODES.items():
            print(f"  {name:19} {mode.reads} ({mode.paper})")
        sys.exit(0)
    values, stem, origin, flags, paths, words = {}, "gpt", {}, {}, [], deque(argv)
    while words:
        word = words.popleft()
        if not word.startswith("-"):
            paths.append(word)
            continue
        key, equals, text = word.removeprefix("--").partition("=")
        parse_key("command line", key)
        default, kind = SCHEMA[key].default, type(SCHEMA[key].default)
        if not equals and kind is bool:
            text = words.popleft() if words and words[0].lower() in ("true", "false") else "true"
        elif not equals:
            if not words or words[0].startswith("--"):
                raise UserError(f"--{key} needs a value: --{key}={default or '...'}")
            text = words.popleft()
        if key in flags:
            raise UserError(f"command line: --{key} is given twice")
        flags[key] = parse_value("command line", key, text, kind)
    for path in paths:
        file = Path(path) / "config.toml" if os.path.isdir(path) else path  # of a run folder
        if not str(file).endswith(".toml"):
            raise UserError(f"{path!r}: expected a .toml file, a run folder or --key=value")
        try:
            content = tomllib.loads(Path(file).read_text(encoding="utf-8-sig"))
        except (OSError, ValueError, RecursionError) as e:
            raise UserError(f"cannot read {file}: {first_line(e)}") from None
        content = {key: parse_value(path, key, value) for key, value in content.items()}
        values |= content | ({"out_dir": path} if os.path.isdir(path) else {})  # it may have been moved
        origin |= dict.fromkeys(content, path)
        stem = Path(path).stem
    values |= flags
    place = {key: "command line" if key in flags else origin.get(key) for key in ("data_dir", "prepare")}
    if place["data_dir"] not in (None, place["prepare"]):  # how another folder's data are made
        values.pop("prepare", None)
    values |= {key: os.path.expanduser(values[key]) for key in ("data_dir", "out_dir", "init_from") if key in values}
    mode, seed = values.get("residual_mode", "standard"), values.get("seed", 1)
    out_dir = values.get("out_dir") or f"runs/{stem}-{mode}-seed{seed}"
    if values.get("init_from"):
        values = take_shape(values, Path(out_dir) / "last.pt")
    try:
        cfg, train = (cls(**{f.name: values[f.name] for f in fields(cls) if f.name in values})
                      for cls in (GPTConfig, TrainConfig))
    except ValueError as e:
        places = {origin[key] for key in re.findall(r"\w+(?==)", str(e)) if key in origin and key not in flags}
        raise UserError(f"{', '.join(sorted(places))}{': ' * bool(places)}{e}") from None
    train.out_dir = out_dir
    if train.route_first and cfg.residual_mode == "standard":
        raise UserError(f"route_first={train.route_first} has no effect in residual_mode=standard: nothing would learn")
    return cfg, train


def take_shape(values, last):
    """Settings completed by the shape of the model that the run starts from; one that contradicts it is an error."""
    source = str(last) if values.get("resume") and last.exists() else values["init_from"]  # which may be gone by then
    if hub.is_model(source):
        old = hub.read_config(hub.locate(source, ("config.json",)))  # its weights are not needed for a plan
    else:
        old = load_checkpoint(find_checkpoint(source), mmap=True)["cfg"]
    for key in hub.SHAPE:
        if key in values and values[key] != getattr(old, key) and (values[key] or type(SCHEMA[key].default) is not int):
            raise UserError(f"{key}={values[key]} contradicts {source}, which has {getattr(old, key)}: leave {key} out")
    if values.get("init", GPTConfig.init) != GPTConfig.init:
        raise UserError(f"init={values['init']} has no effect with init_from: leave one of them out")
    return {"seq_len": old.seq_len} | values | {key: getattr(old, key) for key in hub.SHAPE}


# What nanoGPT, Hugging Face and others call our settings: ours, then theirs.
THEIRS = {theirs: ours for ours, names in (line.split(" < ") for line in """\
micro_batch (sequences in one forward pass) and tokens_per_step (tokens per optimizer step) < batch_size
micro_batch < per_device_train_batch_size device_batch_size micro_batch_size
tokens_per_step, cut into micro-batches by itself < gradient_accumulation_steps total_batch_size global_batch_size
seq_len < block_size max_position_embeddings n_ctx n_positions context_length max_seq_len max_seq_length sequence_length
lr < learning_rate max_lr
max_steps < max_iters num_iterations num_steps total_steps steps iters lr_decay_iters train_steps
max_steps, in steps of tokens_per_step tokens < num_train_epochs epochs
warmup_steps < warmup_iters warmup num_warmup_steps
schedule < decay_lr lr_scheduler_type lr_schedule
eval_every < eval_interval eval_steps val_every val_interval
eval_tokens < eval_iters
save_every < save_steps save_interval checkpoint_interval always_save_checkpoint
log_every < log_interval logging_steps
tracker=wandb < wandb_log wandb use_wandb wandb_project wandb_run_name
tracker < report_to
grad_clip < max_grad_norm clip_grad gradient_clip_val
beta1 < adam_beta1
beta2 < adam_beta2
adam_eps < adam_epsilon
dtype < bf16 fp16 precision torch_dtype
compile < torch_compile
data_dir < dataset data dataset_path data_path
out_dir < output_dir save_dir
n_layer < num_hidden_layers n_layers num_layers depth
n_head < num_attention_heads n_heads num_heads
n_kv_head < num_key_value_heads n_kv_heads
n_embd < hidden_size d_model dim width n_embed
n_ffn < intermediate_size d_ff ffn_dim n_inner
norm_eps < rms_norm_eps layer_norm_eps layer_norm_epsilon
tie_embeddings < tie_word_embeddings tie_weights
remat < gradient_checkpointing activation_checkpointing
residual_mode < mode residual
resume < resume_from_checkpoint
overwrite < overwrite_output_dir
nothing: give the file without a flag, train.py FILE.toml < config config_file cfg
nothing: there is no dropout < dropout resid_dropout attn_dropout attention_dropout
nothing: there are no biases < bias attention_bias""".splitlines()) for theirs in names.split()}


def parse_key(place, key):
    if key not in SCHEMA:
        plain = key.replace("-", "_").lower()
        near = [plain] if plain in SCHEMA else get_close_matches(plain, SCHEMA, 1)
        hint = f", here it is {THEIRS[plain]}" if plain in THEIRS else f", did you mean {near[0]}?" if near else ""
        raise UserError(f"{place}: unknown key {key!r}{hint} (--help lists all)")


def parse_value(place, key, value, from_text=None):
    """Check a value from TOML, or convert one from the command line, to the type of its field."""
    parse_key(place, key)
    kind = type(SCHEMA[key].default)
    try:
        if key == "compile" and str(value).lower() in ("true", "false"):
            return "on" if str(value).lower() == "true" else "off"
        if from_text is bool:
            return {"true": True, "false": False}[value.lower()]
        if from_text:
            value = prepare_fineweb.whole(value) if kind is int else kind(value)
        elif kind is int and type(value) is float and value.is_integer():  # 1e3
            value = int(value)
        elif kind is float and type(value) is int:
            value = float(value)
        fits = {int: lambda v: abs(v) < 2**62, float: math.isfinite, bool: lambda v: True,
                str: lambda v: "\0" not in v and v.encode() is not None}  # encode() raises on what is no UTF-8
        if type(value) is kind and fits[kind](value):
            return value
    except (ValueError, KeyError, OverflowError):
        pass  # told below, like a value of the wrong kind
    what = {int: "a whole number", float: "a number", bool: "true or false", str: "a string of valid UTF-8"}[kind]
    try:
        shown = f"{str(value)[:100]!r}"
    except ValueError:  # Python writes out no integer of so many digits
        shown = "a number with thousands of digits"
    raise UserError(f"{place}: {key}={shown} must be {what}{' below 2^62' * (type(value) is kind is int)}")


ONCE = "resume", "overwrite", "stop_after", "estimate", "gpus", "gpu", "mfu"  # wishes for one start, no settings


def to_toml(*configs):
    """JSON's scalars are TOML's, but for what JSON may leave unescaped (DEL) and for non-ASCII pairs."""
    lines = (f"{k} = {json.dumps(v, ensure_ascii=False).replace(chr(127), chr(92) + 'u007f')}\n"
             for c in configs for k, v in asdict(c).items() if k not in ONCE)
    return "".join(lines)


# ---------------------------------------------------------------------------------------------------------------------
# Data


CHECK_BYTES = 2**28  # splits up to this size are compared with their checksums at each start, in a fraction of a second


class Tokens:
    """One split as a single stream of tokens over all its shards, read through memory maps.

    A window is seq_len + 1 tokens: inputs, and targets one further. Windows lie end to end, and an epoch is as many as
    fit. The tokens that do not fill another one would never be seen: so the stream is a ring, and the windows of each
    epoch start where those of the epoch before ended (the second one at a place that depends on the seed): every token
    is seen equally often, but for one time. The first epoch starts at the first token.
    """

    def __init__(self, data_dir, split, seq_len, vocab_size):
        self.seq_len, self.vocab_size, self.maps, self.touched = seq_len, vocab_size, {}, 0
        folder, meta = Path(data_dir), read_meta(data_dir)
        self.tokenizer_vocab = meta and meta["vocab_size"]
        if meta:
            if meta["vocab_size"] > vocab_size:
                raise UserError(f"{folder} has a vocabulary of {meta['vocab_size']}, more than vocab_size={vocab_size}")
            shards = meta["splits"][split]["shards"]
            self.paths = [folder / s["file"] for s in shards]
        else:  # shards of other origin: the last word of the three in a name decides
            self.paths = sorted(p for p in folder.glob("*.bin")
                                if re.findall("_(train|val|test)(?=_)", p.name)[-1:] == [split])
        if not self.paths:
            without = "; train without val with --eval_every=0" if split == "val" else ""
            raise UserError(f"{folder} holds no {split} shards (*_{split}_*.bin): prepare them with python "
                            f"prepare_fineweb.py --source=... --out={folder}{without}")
        counts, self.dtypes = zip(*map(read_header, self.paths))
        self.crc = zlib.crc32(json.dumps(
            shards if meta else [(p.name, file_crc(p, 2**20)) for p in self.paths]).encode())  # tells data apart
        self.checked = meta is not None and sum(p.stat().st_size for p in self.paths) <= CHECK_BYTES
        if meta:
            check_shards(folder, shards, contents=self.checked)
        self.starts = np.concatenate([[0], np.cumsum(counts, dtype=np.int64)])
        self.total = int(self.starts[-1])
        self.windows = (self.total - 1) // seq_len
        if self.windows < 1:
            raise UserError(f"{folder}: {split} has {self.total} tokens, fewer than one window of seq_len + 1 = "
                            f"{seq_len + 1}; prepare more text or lower --seq_len")

    def read(self, position, n):
        """Tokens position .. position+n-1 as int64."""
        self.touched += n + 2**15  # pages come with their neighbours, 64 KB
        if self.touched > 2**23:
            self.maps.clear()  # the pages touched so far go back to the system
            self.touched = 0
        out, shard = [], int(np.searchsorted(self.starts, position, side="right")) - 1
        while n > 0:
            offset = position - int(self.starts[shard])
            out.append(np.array(self.map(shard)[offset:offset + n], dtype=np.int64))
            if len(out[-1]) and out[-1].max() >= self.vocab_size:
                raise UserError(f"{self.paths[shard]} holds token {out[-1].max()}, but the model has vocab_size="
                                f"{self.vocab_size}")
            position, n, shard = position + len(out[-1]), n - len(out[-1]), shard + 1
        return np.concatenate(out)

    def map(self, shard):
        if shard not in self.maps:
            if len(self.maps) >= 16:
                self.maps.clear()  # maps count as resident memory and as open files
            self.maps[shard] = np.memmap(self.paths[shard], self.dtypes[shard], "r", prepare_fineweb.HEADER_BYTES)
        return self.maps[shard]

    def order(self, seed, step, size):
        """First tokens (size,) of the windows of a step: a function of its arguments alone; each epoch is a new
        permutation."""
        positions, n = np.arange(step * size, (step + 1) * size, dtype=np.uint64), np.uint64(self.windows)
        epochs, starts = positions // n, positions % n
        for epoch in np.unique(epochs):
            here, shift = epochs == epoch, int(epoch) * self.windows * self.seq_len
            shift += int(np.random.default_rng(seed).integers(self.total)) if epoch else 0
            starts[here] = (permute(starts[here], self.windows, (seed, int(epoch))) * np.uint64(self.seq_len)
                            + np.uint64(shift % self.total)) % np.uint64(self.total)
        return starts

    def rows(self, windows):
        """Tokens of the windows (n,) of the first epoch, by their number: (n, seq_len + 1) int64."""
        return self.at(np.asarray(windows) * self.seq_len)

    def at(self, starts):
        """Tokens of the windows that begin at starts (n,): (n, seq_len + 1) int64; behind the last token, the first."""
        out = np.empty((len(starts), self.seq_len + 1), np.int64)
        for row, start in zip(out, map(int, starts)):
            head = min(len(row), self.total - start)
            row[:head] = self.read(start, head)
            row[head:] = self.read(0, len(row) - head) if head < len(row) else 0
        return out


def read_ahead(data, t, steps, accumulate, rank, world, pin):
    """For each micro-step: this rank's rows (micro_batch, seq_len + 1) on the host, the checksum of the step's whole
    batch, and the seconds waited for them. A thread prepares the next rows while these are in use."""
    def prepare(step, i):
        starts = data.order(t.seed, step, accumulate * world * t.micro_batch)
        rows = torch.from_numpy(data.at(starts.reshape(accumulate, world, t.micro_batch)[i, rank]))
        return rows.pin_memory() if pin else rows, zlib.crc32(starts.astype("<u8").tobytes(), data.crc)
    with ThreadPoolExecutor(1) as pool:
        ahead = None
        for place in chain(((step, i) for step in steps for i in range(accumulate)), [None]):
            ready, ahead = ahead, place and pool.submit(prepare, *place)
            if ready:
                began = time.perf_counter()
                yield *ready.result(), time.perf_counter() - began


def permute(index, n, seed):
    """A pseudo-random permutation of 0 .. n-1 applied to a uint64 array: no table, so n may be anything below 2^62.

    A balanced Feistel network permutes the next power of four; values that land outside are sent through it again.
    """
    half = np.uint64(max(1, ((n - 1).bit_length() + 1) // 2))
    mask, keys = (np.uint64(1) << half) - np.uint64(1), np.random.default_rng(seed).integers(2**63, size=6).astype("u8")
    out, outside = index.copy(), np.ones(len(index), dtype=bool)
    while outside.any():
        left, right = out[outside] >> half, out[outside] & mask
        for key in keys:
            mixed = (right + key) * np.uint64(0x9E3779B97F4A7C15)
            mixed = (mixed ^ (mixed >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
            left, right = right, left ^ ((mixed >> np.uint64(32)) & mask)
        out[outside] = left << half | right
        outside = out >= n
    return out


# ---------------------------------------------------------------------------------------------------------------------
# Device and processes


LAUNCH = "RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"  # all that one of several processes needs
SIZES = "WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE"
PATIENCE = timedelta(days=7)  # how long processes wait for the first one, which prepares data
STEP_PATIENCE = timedelta(hours=2)  # and for one that hangs, in a step or while rank 0 saves


def launched():
    """Whether a launcher made this one of several processes; a lone one counts under torchrun only, for what a shell
    or a scheduler left behind looks the same."""
    return all(name in os.environ for name in LAUNCH) and (
        "TORCHELASTIC_RUN_ID" in os.environ or os.environ["WORLD_SIZE"] != "1")


def check_launch():
    """Processes that were started together but know nothing of each other would each train a model of their own."""
    if launched():
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_PORT", "LOCAL_WORLD_SIZE"):
            if not re.fullmatch("[0-9]{1,9}", value := os.environ.get(name, "1")):
                raise UserError(f"{name}={value}, which the launcher of this process has set, is no whole number")
        if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):  # it would wait for days
            raise UserError("RANK={RANK} is not below WORLD_SIZE={WORLD_SIZE}: ranks count from 0".format(**os.environ))
        return
    for name in SIZES:
        if os.environ.get(name, "1") not in ("", "0", "1"):
            missing = ", ".join(n for n in LAUNCH if n not in os.environ)
            program = Path(sys.argv[0]).name or "train.py"
            raise UserError(
                f"{name}={os.environ[name]} is set, as for several processes, but not {missing}: each would run alone. "
                f"One machine: torchrun --standalone --nproc_per_node=GPUS {program} ...; several: srun "
                "--ntasks-per-node=1 python -m torch.distributed.run --nnodes=NODES --nproc_per_node=GPUS "
                f"--rdzv_backend=c10d --rdzv_endpoint=FIRST_NODE:PORT {program} ...; one process only: "
                f"env -u {name} python {program} ...")


def choose_device(requested):
    """(device, reason) for this process."""
    check_launch()
    local_rank = int(os.environ["LOCAL_RANK"]) if launched() else 0
    local_world = max(local_rank + 1, int(os.environ.get("LOCAL_WORLD_SIZE", 1))) if launched() else 1
    kind, reason = requested, "as asked"
    if requested == "auto":
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
        built = torch.version.cuda or torch.version.hip
        reason = "found" if kind != "cpu" else "no GPU found" if built else "this PyTorch is built without GPUs"
    if kind == "cuda":
        if not torch.cuda.is_available():
            raise UserError("device=cuda, but PyTorch sees no CUDA device; use --device=auto")
        if local_world > torch.cuda.device_count():
            raise UserError(f"{local_world} processes on {torch.cuda.device_count()} GPUs: lower --nproc_per_node, or "
                            "let each process see all GPUs of its machine (Slurm: no --gpus-per-task)")
        torch.cuda.set_device(local_rank)
        return torch.device("cuda", local_rank), f"{reason}: {torch.cuda.get_device_name(local_rank)}"
    if kind == "mps" and not torch.backends.mps.is_available():
        raise UserError("device=mps, but PyTorch sees no Apple GPU; use --device=auto")
    if kind == "mps" and local_world > 1:
        raise UserError("device=mps works with one process only")
    return torch.device(kind), reason


def choose_dtype(requested, device):
    """(compute dtype, reason). Weights and optimizer state are float32 whatever it is (float64 for float64)."""
    if device.type == "cuda":
        fast_bf16, lacks = torch.cuda.is_bf16_supported(including_emulation=False), "this GPU has no bfloat16"
    else:
        fast_bf16, lacks = device.type == "cpu" and torch.cpu._is_amx_tile_supported(), "bfloat16 is slow here"
    if requested == "auto":
        return (torch.bfloat16, "fast here") if fast_bf16 else (torch.float32, lacks)
    if requested == "bfloat16" and device.type == "cuda" and not fast_bf16:
        raise UserError(f"dtype=bfloat16, but {lacks}; use --dtype=float32")
    if requested == "float64" and device.type == "mps":
        raise UserError("dtype=float64 does not exist on device=mps; use --dtype=float32")
    return getattr(torch, requested), "as asked"


def autocast(device, dtype):
    return torch.autocast(device.type, dtype=torch.bfloat16, enabled=dtype == torch.bfloat16)


def compile_model(model, mode, device, say):
    """Compile in place (names in the state dict stay as they are); eager with one warning where no compiler works."""
    if mode == "off" or (mode == "auto" and device.type != "cuda"):
        return "off"
    try:
        torch.compile(lambda x: x * 2 + 1)(torch.ones(8, device=device))
    except Exception as e:  # whatever a missing C compiler or Triton raises
        say(f"warning: torch.compile does not work here, going on without ({str(e).strip().splitlines()[0][:120]})")
        torch._dynamo.reset()
        return "off, no working compiler"
    model.chunk_loss = torch.compile(model.chunk_loss, dynamic=False)  # head and loss, in every mode alike
    # the bank is written in place, which no graph likes, and shards come and go between sublayers
    if is_sharded(model) or model.experts or (model.cfg.route_impl != "reference" and model.fused):
        for sublayer in model.sublayers:
            sublayer.compile(dynamic=False)
        return "on, sublayers and head"
    model.trunk = torch.compile(model.trunk, dynamic=False)
    return "on"


def sum_over_ranks(values, device):
    """Element-wise sum over all processes of a list of numbers."""
    if not dist.is_initialized():
        return values
    total = torch.tensor(values, dtype=torch.float64, device=device if device.type == "cuda" else "cpu")  # mps: no fp64
    dist.all_reduce(total)
    return total.tolist()


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation and checkpoints


@torch.no_grad()
def evaluate(model, tokens, batch, device, dtype, limit=None, rank=0, world=1, show=lambda part: None,
             stop=lambda: False):
    """Mean NLL in nats over a split, and the number of tokens that it is a mean of.

    Every token but the first is predicted once, from at most seq_len before it. With a limit below the split's size,
    `limit` of them, in windows that are spread evenly over the split: the same ones each time. Batches are dealt out to
    the ranks, to each as many, for all of them gather shards. All have one shape, with targets of -1 (not counted)
    behind the last token. As soon as `stop()` is true on one of the ranks the result is (None, 0).
    """
    T, n = tokens.seq_len, tokens.total - 1 if limit is None else min(limit, tokens.total - 1)
    windows, all_windows = -(-n // T), -(-(tokens.total - 1) // T)
    batch = min(batch, windows)
    nll, count = 0.0, 0
    for first in range(0, windows, world * batch):
        if sum_over_ranks([float(stop())], device)[0]:
            break
        first += rank * batch
        x, y = np.zeros((batch, T), np.int64), np.full((batch, T), -1)
        for row, i in enumerate(range(first, min(first + batch, windows))):
            size = min(T, n - i * T)
            stretch = tokens.read(i * all_windows // windows * T, size + 1)
            x[row, :size], y[row, :size] = stretch[:-1], stretch[1:]
        mine = int((y >= 0).sum())
        x, y = (torch.from_numpy(a).to(device) for a in (x, y))
        with autocast(device, dtype):
            loss = model(x, y)[1]
        if mine:
            nll, count = nll + loss.item() * mine, count + mine
        show(first / windows)
    nll, count, stopped = sum_over_ranks([nll, float(count), float(stop())], device)
    return (None, 0) if stopped else (nll / count, int(count))


def save_checkpoint(folder, name, content):
    """Atomic: whoever reads the file finds the old content or the new, whole."""
    path, aside = Path(folder) / name, Path(folder) / f"{name}.tmp"
    try:
        with open(aside, "wb") as f:
            torch.save(content, f)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
    except (OSError, RuntimeError) as e:  # torch hides the system's reason behind a RuntimeError
        reason = (e if isinstance(e, OSError) else e.__context__ or e)
        aside.unlink(missing_ok=True)  # before the free space is measured
        free, kept = shutil.disk_usage(folder).free / 1e6, "; the one saved before is kept" if path.exists() else ""
        raise UserError(f"cannot write {path} ({first_line(reason)}; it needs {size_of(content) / 1e6:,.1f} MB, its "
                        f"disk has {free:,.1f} MB free){kept}") from None


def size_of(content):
    """Bytes of all tensors in nested dictionaries and lists."""
    if isinstance(content, torch.Tensor):
        return content.nbytes
    parts = content.values() if isinstance(content, dict) else content if isinstance(content, list) else ()
    return sum(map(size_of, parts))


def load_source(name, mmap=False):
    """(what load_checkpoint returns, its path) of a run, a Hugging Face folder or a Hub id."""
    if hub.is_model(name):
        return hub.load(name), Path(name)
    return load_checkpoint(path := find_checkpoint(name), mmap), path


def find_checkpoint(name):
    """Path of the checkpoint of a run folder, or the path itself."""
    path = Path(name)
    if not path.exists():
        hidden = path.parts[:1] if re.fullmatch(prepare_fineweb.HUB_ID, name) and Path(path.parts[0]).is_dir() else ()
        raise UserError(f"{name} does not exist: give a run folder, a Hugging Face folder or a model of the Hub, "
                        "OWNER/NAME" + "".join(f"; the folder {owner} here hides the Hub's" for owner in hidden))
    if not path.is_dir():
        return path
    path = path / "last.pt" if (path / "last.pt").exists() else path / "best.pt"
    if not path.exists():
        raise UserError(f"{name} holds no checkpoint (last.pt or best.pt) and no config.json of Hugging Face")
    return path


def load_checkpoint(path, mmap=False):
    """Checkpoint on the host, as tensors and plain types only; raises UserError if the file cannot be used.

    A field of the configuration that the file lacks has its default: it is older than the field.
    """
    try:
        with zipfile.ZipFile(path) as z:
            if damaged := z.testzip():
                raise ValueError(f"{damaged} in it does not match its checksum")
            crc = zlib.crc32(repr([part.CRC for part in z.infolist()]).encode())
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        for key, kind in dict(config=dict, data=dict, model=dict, step=int, tokens=int, best=float,
                              rng=torch.Tensor).items():
            value = content[key]
            if not isinstance(value, kind) or isinstance(value, bool) or (kind is int and value < 0):
                raise ValueError(f"{key} is {str(value)[:50]!r}")
        config = {k: parse_value("config", k, v) for k, v in content["config"].items()}
        content["cfg"] = GPTConfig(**{f.name: config[f.name] for f in fields(GPTConfig) if f.name in config})
        # names may carry the prefixes of wrappers when the file was written by other code
        content["model"] = {k.replace("_orig_mod.", "").removeprefix("module."): v for k, v in content["model"].items()}
        if not all(v.isfinite().all() for v in content["model"].values()):
            raise ValueError("its weights are not finite")
        content["owed"] = content.get("owed") is True
        return content | {"crc": f"{crc:08x}"}
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except Exception as e:  # a damaged file can raise anything
        others = [n for n in ("last.pt", "best.pt") if n != path.name and (path.parent / n).exists()]
        advice = ["made by other code? That of the run is in its folder source/"] * ("unknown key" in str(e)) + [
            f"evaluate {n} beside it" for n in others] + ["train again with --overwrite=true or in another --out_dir"]
        raise UserError(f"{path} is not a usable checkpoint ({first_line(e)}): {', or '.join(advice)}") from None


def build(cfg, device="cpu"):
    """GPT(cfg); what only shows while it is made, like a mode without a fused form, ends in one line too."""
    try:
        with torch.device(device):
            return GPT(cfg)
    except ValueError as e:
        raise UserError(str(e)) from None


def build_from(content, path):
    """GPT(content["cfg"]) on the host around the tensors of a checkpoint: nothing is drawn and nothing copied."""
    model = build(content["cfg"], "meta")
    load_weights(model, content["model"], path, assign=True)
    return model


def build_sharded(cfg, t, device, dtype):
    """GPT(cfg) in shards over all processes, without content. With `fill` a process never holds more than its shards
    and one whole parameter.

    A unit of FSDP2 is a sublayer, whole only while it runs. All else (embedding, head, gain, residual) is the root's:
    whole and in full precision throughout a step, for the residual's parameters are read outside of any module. Shards
    lie within a machine; across machines they are replicated, so that only gradients travel there.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.distributed.tensor import Shard
    world, local = dist.get_world_size(), processes_per_machine()
    for name, n in (("n_embd", cfg.n_embd), ("n_ffn", cfg.n_ffn), ("n_head * head_dim", cfg.n_head * cfg.head_dim)):
        if t.optimizer == "muon" and n % local:
            raise UserError(f"optimizer=muon with parallel=fsdp: {name}={n} does not divide by {local} processes")
    shape, names = ((local,), ("shard",)) if world == local else ((world // local, local), ("replicate", "shard"))
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    model = build(cfg, "meta").to(torch.float64 if dtype == torch.float64 else None)
    policy = MixedPrecisionPolicy(dtype if dtype == torch.bfloat16 else None, at_least_fp32(dtype), None, False)
    # columns, so that q, k and v, and gate and up, can be told apart in a shard
    columns = (lambda p: Shard(1) if p.dim() == 2 else None) if t.optimizer == "muon" else None
    for moe in model.experts:  # experts are chosen in full precision
        fully_shard(moe.router, mesh=mesh)
    for sublayer in model.sublayers:
        fully_shard(sublayer, mesh=mesh, mp_policy=policy, shard_placement_fn=columns)
    fully_shard(model, mesh=mesh)
    return model


def processes_per_machine():
    """As the launcher says; a launch by hand need not say it, then the names of the machines are compared."""
    found = [None] * dist.get_world_size()
    dist.all_gather_object(found, (os.environ.get("LOCAL_WORLD_SIZE"), platform.node()))
    sizes = {int(size or 0) or sum(name == other for _, other in found) for size, name in found}
    if len(sizes) > 1 or len(found) % min(sizes):
        raise UserError(f"parallel=fsdp needs as many processes on every machine, not {' and '.join(map(str, sizes))} "
                        f"of {len(found)}: start equally many, or use parallel=ddp")
    return sizes.pop()


@torch.no_grad()
def fill(model, device, seed, weights=None, path=""):
    """A model without content gets its memory on `device` and, one parameter at a time, `weights` (read from path) or
    those of GPT.init_weights. They are drawn on the host, so that a seed gives the same ones on every device."""
    model.to_empty(device=device)
    torch.manual_seed(seed)
    if weights is not None:
        load_weights(model, weights, path)
        return model
    for bias in model.buffers():
        bias.zero_()
    start = {f"residual.{name}": p for name, p in hub.make_residual(model.cfg).named_parameters()}
    for name, p in model.named_parameters():
        if name not in start:
            model.init_parameter(name, value := torch.empty(p.shape))
        p.copy_(like(start.get(name, value).to(p.dtype), p))
    return model


def whole_by_sublayer(model):
    """A twin of a sharded model, for a forward pass in the precision in which weights are kept. Its sublayers have
    their parameters only while they run; all else is whole, as in training."""
    twin = build(model.cfg, "meta")

    def take(module, shards):
        whole = {k: v if k == "bias" else v.full_tensor() for k, v in shards.items()}
        module.load_state_dict(whole, strict=False, assign=True)
    take(twin, {k: v for k, v in model.state_dict().items() if not k.startswith("sublayers.")})
    for sublayer, source in zip(twin.sublayers, model.sublayers):
        sublayer.register_forward_pre_hook(lambda me, _, source=source: take(me, source.state_dict()))
        sublayer.register_forward_hook(lambda me, *_: me.to("meta") and None)
    return twin


def is_sharded(model):
    return hasattr(model, "reshard")  # FSDP2 changes the class


def like(value, p):
    """This process's shard of a whole tensor, if parameter p has shards."""
    if not hasattr(p, "to_local") or value.shape != p.shape:
        return value
    from torch.distributed.tensor import distribute_tensor
    return distribute_tensor(value.to(p.device), p.device_mesh, p.placements, src_data_rank=None)


def gathered(tree):
    """A state dict with its shards put together, one tensor at a time: whole on the host of rank 0, None elsewhere."""
    if isinstance(tree, dict):
        return {key: gathered(value) for key, value in tree.items()}
    if not hasattr(tree, "full_tensor"):
        return tree
    whole = tree.full_tensor()
    return whole.cpu() if dist.get_rank() == 0 else None


@torch.no_grad()
def load_weights(model, weights, path, assign=False):
    """Tensors {name: tensor} become the parameters (assign), or are copied into them, each read when its turn comes."""
    own = dict(model.named_parameters()) | dict(model.named_buffers())
    try:
        if own.keys() != weights.keys():
            raise RuntimeError(f"only one of them has {', '.join(sorted(own.keys() ^ weights.keys()))}")
        if assign:
            model.load_state_dict(dict(weights), assign=True)
        for name, p in own.items() if not assign else ():
            if (value := weights[name]).shape != p.shape:
                raise RuntimeError(f"size mismatch for {name}: {list(value.shape)} and {list(p.shape)}")
            p.copy_(like(value, p))
    except (RuntimeError, AttributeError) as e:
        raise UserError(f"{path} does not fit the model: {' '.join(str(e).split())[:300]}") from None


# ---------------------------------------------------------------------------------------------------------------------
# The run


def show_estimate(cfg, t):
    from study import estimate
    try:
        require_choice("gpu", t.gpu, estimate.GPUS)
        require(t.dtype in ("auto", "bfloat16"), f"dtype={t.dtype}: the estimate is for bfloat16; leave dtype out")
    except ValueError as e:
        raise UserError(str(e)) from None
    estimate.estimate(with_vocabulary(cfg, t), t, tell)


def with_vocabulary(cfg, t):
    """cfg with the vocabulary of the data, if it names none."""
    meta = None if cfg.vocab_size else read_meta(t.data_dir)
    if not (meta or cfg.vocab_size):
        raise UserError(f"{t.data_dir} has no meta.json that tells the vocabulary: give --vocab_size")
    return replace(cfg, vocab_size=cfg.vocab_size or meta["vocab_size"])


class Diverged(UserError):
    """The loss, a gradient or a weight is not finite."""


def train(cfg, t):
    """Train a run, or say what it would need; the run folder is this process' own until then."""
    global folder_lock
    try:
        show_estimate(cfg, t) if t.estimate else run(cfg, t)
    finally:
        folder_lock = None


def run(cfg, t):
    device, why_device = choose_device(t.device)
    if device.type == "cpu":
        torch.set_num_threads(min(torch.get_num_threads(), cores()))
    dtype, why_dtype = choose_dtype(t.dtype, device)
    rank, world = start_processes(device)
    say = tell if rank == 0 else lambda _: None
    accumulate = check_batch(cfg, t, world)
    on_first_rank(prepare_data, t)
    cfg, data, val, about_data = open_data(cfg, t)

    weights = base = None  # what the run starts from, and the residual that it has
    if t.init_from and not (t.resume and os.path.lexists(Path(t.out_dir) / "last.pt")):
        weights, base = convert(cfg, t, about_data)
    sharded = t.parallel == "fsdp" and world > 1
    if sharded:
        model = build_sharded(cfg, t, device, dtype)
    else:
        model = build(cfg, "meta").to(torch.float64 if dtype == torch.float64 else None)
    model = fill(model, device, t.seed, weights, t.init_from)
    optimizer = make_optimizer(model, t, device)
    on_first_rank(lock_run_folder, t)
    about_val = f"{min(t.eval_tokens, val.total)} tokens of {val.crc:08x}" if val else ""
    start, best, owed, crc = 0, math.inf, True, ""
    if t.resume:
        start, best, owed, crc = resume(cfg, t, model, optimizer, about_data, say, about_val)
    owed = val and owed and (start or t.eval_every)  # an evaluation behind step `start`; that of step 0 is the start
    check_agreement(start_facts(cfg, t, dtype, start, about_data, val, model) | {
        "the checksum of last.pt": crc, "the best val loss": best})  # all shards are saved when it falls
    if start < t.max_steps:
        on_first_rank(describe_run, cfg, t)
    notes = []
    if base and (sharded or rank == 0):
        rows = torch.from_numpy((val or data).rows([0])).to(device)
        notes = hub.describe_conversion(cfg, t, whole_by_sublayer(model) if sharded else model, base,
                                        "val" if val else "train", rows)
    compiled = compile_model(model, t.compile, device, say)
    introduce(cfg, t, model, data, world, accumulate, say)
    say(f"device: {device} ({why_device}); dtype: {str(dtype)[6:]} ({why_dtype}); compile: {compiled}")
    for note in notes:
        say(note)
    end = min(t.max_steps, t.stop_after or t.max_steps)
    if start >= end and not owed:
        limit = "stop_after" if end < t.max_steps else "max_steps"
        return say(f"{t.out_dir} is finished: {start} of {end} steps are done; raise --{limit} to go on")

    wrapped = model
    if world > 1 and not sharded:
        wrapped = torch.nn.parallel.DistributedDataParallel(
            model, device_ids=[device.index] if device.type == "cuda" else None, gradient_as_bucket_view=True,
            broadcast_buffers=False)
    stop, batches = StopSignal(), read_ahead(data, t, range(start, end), accumulate, rank, world, device.type == "cuda")

    def update(step):
        """One optimizer step: (loss, gradient norm, seconds waited for data, checksum, largest load, stop wanted)."""
        loss, waited, skew, load = 0.0, 0.0, 0.0, [0] * len(model.experts)
        for i in range(accumulate):
            rows, crc, seconds = next(batches)
            rows, waited = rows.to(device, non_blocking=device.type == "cuda"), waited + seconds
            # averaged once a step; shards at once, for whole gradients would take the memory that they save
            with nullcontext() if world == 1 or sharded or i == accumulate - 1 else wrapped.no_sync():
                with autocast(device, dtype):
                    part = wrapped(rows[:, :-1], rows[:, 1:])[1] / accumulate
                part.backward()
            loss, load = loss + part.detach(), [n + moe.load for n, moe in zip(load, model.experts)]
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), t.grad_clip or math.inf).item()
        mine = [loss.item() / world, stop.number > 0, *(n for layer in load for n in layer.tolist())]
        loss, signalled, *load = sum_over_ranks(mine, device)  # all ranks decide alike
        if not math.isfinite(loss + norm):
            raise Diverged(f"step {step + 1}: loss {loss}, gradient norm {norm}. Stopped before the update, the saved "
                           "checkpoints are good. Lower --lr, or set --grad_clip")
        for group in optimizer.param_groups:
            group["lr"] = t.lr_at(step) * group["lr_mult"] * (step >= t.route_first or group["name"] == "residual")
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        for moe, own in zip(model.experts, torch.tensor(load, dtype=torch.float64).view(-1, cfg.n_expert or 1)):
            moe.bias += (1e-3 * (step >= t.route_first) * (own.mean() - own).sign()).to(moe.bias)  # rate: 2408.15664
            skew = max(skew, (own.max() / own.mean()).item())
        return loss, norm, waited, crc, skew, signalled > 0

    def finite():
        bad = sum(not (p.to_local() if hasattr(p, "to_local") else p).isfinite().all() for p in model.parameters())
        return not (sum_over_ranks([float(bad)], device)[0] if sharded else bad)

    def keep(name, done):
        """Save the state behind step `done`."""
        content = dict(config=asdict(cfg) | asdict(t), data=about_data, val=about_val, step=done,
                       tokens=done * t.tokens_per_step, best=best, owed=bool(owed), rng=torch.get_rng_state(),
                       model=gathered(dict(model.state_dict())))
        if name == "last.pt":
            content["optimizer"] = gathered(optimizer.state_dict())
        if rank == 0:
            save_checkpoint(t.out_dir, name, content)

    with stop, Log(cfg, t, start, end, device) if rank == 0 else nullcontext() as log:
        if start == 0:
            keep("last.pt", 0)  # from here on there is always something to go on from, and the disk is known to take it
        for done in range(start, end + 1):
            began, row, val_loss, signalled = time.perf_counter(), None, None, False
            if done > start:
                loss, norm, waited, crc, skew, signalled = update(done - 1)
                row = loss, t.lr_at(done - 1), norm, time.perf_counter() - began, waited, crc, skew
                owed = val and evaluation_due(t, done)
            if owed and not signalled:  # a stop comes first: whoever sent it may not wait for long
                val_loss = evaluate(model, val, t.micro_batch, device, dtype, t.eval_tokens, rank, world,
                                    stop=lambda: stop.number > 0)[0]
                signalled = owed = val_loss is None
            due = signalled or done == end or (done > start and t.save_every and done % t.save_every == 0)
            if (due or val_loss is not None) and not finite():
                raise Diverged(f"step {done}: loss {loss}, gradient norm {norm}, but the update made weights that are "
                               "not finite. The saved checkpoints are good. Lower --lr, or set --grad_clip")
            error = ""
            if rank == 0:
                try:
                    log.step(done, row, val_loss, signalled)
                except UserError as e:
                    error = str(e)
            if sum_over_ranks([float(error > "")], device)[0] if sharded else error:  # a save takes all shards
                if finite():  # what was trained is worth more than the line about it
                    try:
                        keep("last.pt", done)
                        error += f"; the model of step {done} is saved"
                    except UserError as e:
                        error += f"; {e}"
                raise UserError(error if rank == 0 else "rank 0 cannot write its log")
            if val_loss is not None and val_loss < best and done:
                best = val_loss
                keep("best.pt", done)
            if due:
                keep("last.pt", done)
            if signalled and (done < end or owed):
                say(f"stopped by a signal after step {done}, all is saved; go on with: {again(t, world)}")
                sys.exit(128 + (stop.number or signal.SIGTERM))
    if end < t.max_steps:
        say(f"stopped after step {end} of {t.max_steps} as asked, all is saved; go on with: {again(t, world)}")
        return sys.exit(128 + stop.number) if stop.number else None  # the signal came in the last step
    found = f", best val loss {best:.4f}" if best < math.inf else ""
    say(f"done: {t.max_steps} steps{found}; evaluate with: python {script('eval.py')} {shlex.quote(t.out_dir)}")


def script(name):
    """Path of a script of this folder, for a shell in the working directory."""
    return shlex.quote(os.path.relpath(Path(__file__).resolve().parent / name))


def again(t, world):
    """The command that goes on with a run."""
    launch = "python" if world == 1 else f"torchrun --standalone --nproc_per_node={world}"
    if world > 1 and os.environ.get("LOCAL_WORLD_SIZE") != str(world):  # several machines, or a launch by hand
        launch = "(launched as before)"
    return f"{launch} {script('train.py')} {shlex.quote(t.out_dir)} --resume"


def start_processes(device):
    """(rank, number of processes)"""
    check_launch()
    if not launched():
        return 0, 1
    if not dist.is_initialized():
        rank, size, _, host, port = (os.environ.get(name, "") for name in LAUNCH)
        if "TORCHELASTIC_RUN_ID" not in os.environ:  # torchrun has brought its processes together already
            tell(f"process {rank} of {size}: waiting for the others at {host}:{port}")
        try:
            dist.init_process_group("nccl" if device.type == "cuda" else "gloo", timeout=STEP_PATIENCE)
        except (RuntimeError, ValueError) as e:
            raise UserError(f"process {rank} of {size} cannot meet the others at {host}:{port}, its MASTER_ADDR and "
                            f"MASTER_PORT ({first_line(e)})") from None
    return dist.get_rank(), dist.get_world_size()


def check_agreement(facts):
    """All processes must start from the same {what: value}; raises UserError on each of them if they do not."""
    if not dist.is_initialized():
        return
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, facts)
    for rank, theirs in enumerate(everyone):
        for what, value in everyone[0].items():
            if theirs[what] != value:
                raise UserError(f"the processes disagree: {what} is {value} on rank 0 and {theirs[what]} on rank {rank}"
                                ". Every machine needs the same code, settings and data, and a run folder that all of "
                                "them see (a shared disk, or a copy of it on each)")


def start_facts(cfg, t, dtype, start, about_data, val, model):
    """What must be equal on all processes before the first step; paths, devices and trackers may differ."""
    here, config = Path(__file__).resolve().parent, asdict(cfg) | asdict(t)
    code = b"".join(path.read_bytes() for name in ("model", "kernels", "train", "prepare_fineweb")
                    if (path := here / f"{name}.py").exists())
    facts = {"the step to go on from": start, "the dtype": str(dtype), "the version of PyTorch": torch.__version__,
             "the checksum of the code": f"{zlib.crc32(code):08x}", **{
                 f"the data's {k}": v for k, v in about_data.items()}, "the val data": val and f"{val.crc:08x}"}
    facts |= {k: v for k, v in config.items() if k not in ("data_dir", "prepare", "out_dir", "device", "tracker")}
    return facts | {"the checksum of the weights": weights_checksum(model)}


def weights_checksum(model):
    """Sum of the bit patterns: of integers, so that no order of summation matters; of shards over those of a model."""
    own = [p.to_local() if is_sharded(model) else p.detach() for p in model.parameters()]
    bits = sum(p.view(torch.int32 if p.element_size() == 4 else torch.int64).sum(dtype=torch.int64) for p in own)
    if is_sharded(model):
        dist.all_reduce(bits, group=next(model.parameters()).device_mesh.get_group("shard"))
    return f"{bits.item() % 2**64:016x}"


def on_first_rank(function, *args):
    """Run on rank 0 while the others wait, for hours if need be; its UserError is raised on all."""
    if not dist.is_initialized():
        return function(*args)
    error, group = [""], dist.new_group(backend="gloo", timeout=PATIENCE)
    if dist.get_rank() == 0:
        try:
            function(*args)
        except UserError as e:
            error = [str(e)]
    dist.broadcast_object_list(error, group=group)
    if error[0]:
        raise UserError(error[0])


def check_batch(cfg, t, world):
    """Micro-steps per optimizer step."""
    unit = t.micro_batch * cfg.seq_len * world
    if t.tokens_per_step % unit:
        below = t.tokens_per_step // unit * unit
        nearest = " or ".join(f"--tokens_per_step={n}" for n in (below, below + unit) if n) * (not t.resume)
        raise UserError(f"tokens_per_step={t.tokens_per_step} does not divide by micro_batch={t.micro_batch} x "
                        f"seq_len={cfg.seq_len} x {world} process{'es' * (world > 1)} = {unit}: use " + " or ".join(
                            filter(None, (nearest, "another --micro_batch", "another number of processes" * t.resume))))
    return t.tokens_per_step // unit


def prepare_data(t):
    """Make the data folder, or complete a half prepared one, if the configuration says how."""
    folder = Path(t.data_dir)
    half = (folder / "progress.json").exists() or not any(folder.glob("*.bin"))
    if t.prepare and half and not (folder / "meta.json").exists():
        print(f"preparing {folder}: prepare_fineweb.py {t.prepare}", flush=True)
        try:
            args = prepare_fineweb.parse_args([*shlex.split(t.prepare), f"--out={folder}"])
        except UserError as e:
            raise UserError(f"prepare={t.prepare}: {e}") from None
        try:
            prepare_fineweb.prepare(args)
        except OSError as e:
            raise UserError(f"{e.filename or folder}: {e.strerror or e}") from None


def open_data(cfg, t):
    """(cfg with the vocabulary, train split, val split or None, what identifies the data)."""
    cfg, meta = with_vocabulary(cfg, t), read_meta(t.data_dir)
    data = Tokens(t.data_dir, "train", cfg.seq_len, cfg.vocab_size)
    val = Tokens(t.data_dir, "val", cfg.seq_len, cfg.vocab_size) if t.eval_every or t.eval_at_tokens else None
    return cfg, data, val, dict(tokenizer=meta["tokenizer"] if meta else "", train_tokens=data.total,
                                train_crc32=data.crc)


class MuonAdamW(torch.optim.AdamW):
    """AdamW, but torch.optim.Muon for groups that have `rows`: the rows of each matrix that are one for Muon.

    q, k and v are stored as one matrix, gate and up too, but they are several maps: each is orthogonalised by itself.
    Updates have the size that AdamW's usually have (0.2 sqrt(max(A, B)); arXiv 2502.16982), so that both share one
    learning rate and one weight decay. Newton and Schulz's iteration runs in bf16 whatever the dtype of the model.
    """

    @torch.no_grad()
    def step(self):
        for group in (g for g in self.param_groups if "rows" in g):
            parts = []
            for p in group["params"]:
                if not self.state[p]:
                    self.state[p] = dict(step=torch.zeros(()), momentum_buffer=torch.zeros_like(p))  # all have a step
                for view, grad, momentum in zip(*(x.detach().split(group["rows"]) for x in (
                        p, p.grad, self.state[p]["momentum_buffer"]))):
                    view.grad = grad
                    parts.append((view, {"momentum_buffer": momentum}))
                p.grad = None  # nothing left for AdamW
            muon = torch.optim.Muon([view for view, _ in parts], group["lr"], group["weight_decay"],
                                    adjust_lr_fn="match_rms_adamw")
            muon.state.update(parts)  # the views write through to parameters and momenta
            muon.step()
        super().step()


def muon_groups(model, group):
    """The group of matrices -> one for each kind: qkv, out, up, down, and of experts the router."""
    rows, kinds = {"qkv": model.sublayers[0].sizes, "up": model.cfg.n_ffn, "down": model.cfg.n_embd}, {}
    names = {p: name.split(".")[-2:][0] for name, p in model.named_parameters()}
    for p in group["params"]:
        kinds.setdefault(names[p], []).append(p)
    return [group | dict(params=ps) | ({"rows": rows.get(kind, len(ps[0]))} if kind != "router" else {})
            for kind, ps in kinds.items()]  # a router's gradients nearly add up to zero: Muon would magnify their noise


def convert(cfg, t, about_data):
    """({name: tensor} of GPT(cfg) made of what init_from names, the residual that they come with)."""
    saved, _ = load_source(t.init_from, mmap=True)
    trained, here = saved["data"].get("tokenizer"), about_data["tokenizer"]
    if trained and here and trained != here:
        raise UserError(f"{t.data_dir} is of the tokenizer {here}, but {t.init_from} was trained on {trained}: prepare "
                        "the data with that one")
    return hub.convert(cfg, saved, t.init_from)


def make_optimizer(model, t, device):
    groups = model.param_groups(t.weight_decay, t.route_lr_mult)
    if sorted(id(p) for g in groups for p in g["params"]) != sorted(id(p) for p in model.parameters()):
        raise AssertionError("GPT.param_groups must hold every parameter exactly once")
    cls = torch.optim.AdamW
    if t.optimizer == "muon":
        cls, groups = MuonAdamW, muon_groups(model, groups[0]) + groups[1:]
    # fused is the faster one on both: on two CPU cores 8 ms against 18 (for loop) and 53 (foreach), 16M parameters
    return cls(groups, t.lr, (t.beta1, t.beta2), t.adam_eps, fused=device.type in ("cpu", "cuda"))


folder_lock = None  # open as long as this process trains


def lock_run_folder(t):
    """Make the run folder, and make sure that nobody else writes to it and that nothing of worth in it is lost."""
    global folder_lock
    out, found = Path(t.out_dir), []
    try:
        folder_lock = None  # of an earlier run in this process
        folder_lock = lock_folder(out, "training in")
        if t.overwrite:
            old = [path for pattern in RUN_FILES for path in out.glob(pattern)]
            if old and {os.environ.get(name, "0") for name in RESTARTS} != {"0"}:
                raise UserError(f"{out}: this job has been restarted, and overwrite=true would delete what it has "
                                "trained: start it with --resume=true")
            for path in old:
                path.unlink()
        log = (out / "log.csv").read_bytes() if os.path.lexists(out / "log.csv") else b""
        found += ["log.csv"] * (len(log.splitlines()) > 1)  # a header alone is no loss
        found += [name for name in ("best.pt", "last.pt") if os.path.lexists(out / name)]
        if found and not t.resume:
            raise UserError(f"{out} holds a run already ({', '.join(found)}): go on with it (--resume=true), delete it "
                            "and start afresh (--overwrite=true), or choose another --out_dir")
        if found and "last.pt" not in found:
            raise UserError(f"{out} has {' and '.join(found)} but no last.pt to go on from: put it back, delete what "
                            "there is and start afresh (--overwrite=true), or choose another --out_dir")
        for name in ("last.pt", "best.pt"):  # a kill in the middle of a save leaves these
            (out / f"{name}.tmp").unlink(missing_ok=True)
    except OSError as e:
        raise UserError(f"cannot write to the run folder {out} ({e.strerror or e}): choose another --out_dir") from None


RESTARTS = "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT"
RUN_FILES = "log.csv", "last.pt*", "best.pt*", "config.toml", "environment.txt", "wandb_id.txt", "events.out.tfevents*"


def commit():
    """Of the code that runs, as git names it, -dirty if it has been changed; `unknown` without git or a repository."""
    def git(*args):
        return subprocess.run(["git", "-C", Path(__file__).resolve().parent, *args], capture_output=True,
                              encoding="utf-8", errors="replace")
    name = git("describe", "--always").stdout.strip() if shutil.which("git") else ""
    if not name:
        return "unknown"
    changed = git("diff", "--quiet", "HEAD", "--", "*.py").returncode == 1  # not by the results of a study
    return name + "-dirty" * changed


def describe_run(cfg, t):
    """Configuration, source files and, for each start, command and environment: the folder explains itself."""
    out, here = Path(t.out_dir), Path(__file__).resolve().parent
    files = [path for path in (*here.glob("*.py"), here / "study/estimate.py") if path.is_file()]
    try:
        source = out / "source"
        changed = [path.name for path in files if (old := source / path.relative_to(here)).exists() and
                   old.read_bytes() != path.read_bytes()]
        if changed and t.resume:
            before = next(p for n in count(1) if not (p := out / f"source.{n}").exists())
            source.rename(before)
            tell(f"note: the code has changed since the last start ({', '.join(changed)}); as it was: {before}")
        with open(out / "config.tmp", "w", encoding="utf-8") as f:
            f.write(to_toml(cfg, t))
        os.replace(out / "config.tmp", out / "config.toml")
        for path in files if here != source.resolve() else ():
            copy = source / path.relative_to(here)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)  # without the mode: a checkout may be read-only
        with open(out / "environment.txt", "a", encoding="utf-8") as f:
            f.write(f"command: {shlex.join(sys.argv)}\ncommit: {commit()}\n"
                    f"python: {sys.version}\ntorch: {torch.__version__}\n"
                    f"machine: {platform.platform()}, {os.cpu_count()} cores\n\n")
    except OSError as e:
        raise UserError(f"cannot write to the run folder {out} ({e.strerror or e})") from None


def resume(cfg, t, model, optimizer, about_data, say, about_val=""):
    """Load last.pt into model and optimizer; returns (steps done, best val loss, whether step's evaluation is still to
    be made, checksum of the file): (0, inf, True, "") if there is none yet."""
    path = Path(t.out_dir) / "last.pt"
    if not os.path.lexists(path):
        say(f"nothing to resume in {t.out_dir}: starting fresh")
        return 0, math.inf, True, ""
    saved = load_checkpoint(path, mmap=is_sharded(model) or model.gain.is_cuda)  # or each process would hold all of it
    if "optimizer" not in saved:
        raise UserError(f"{path} has no optimizer state, so the run cannot go on exactly: start another --out_dir")
    old = {name: field.default for name, field in SCHEMA.items()} | saved["config"] | asdict(saved["cfg"])
    changed = {k: f"{k}: {old[k]} -> {v}" for k, v in (asdict(cfg) | asdict(t)).items() if old[k] != v and
               k not in ONCE}
    fixed = {f.name for f in fields(GPTConfig)} - {"route_impl", "remat"} | {"seed", "tokens_per_step", "optimizer"}
    other = ", ".join(changed[k] for k in sorted(fixed & set(changed)))
    if other:
        raise UserError(f"{path} is of another run ({other}): put the old values back, or choose another --out_dir")
    if saved["data"] != about_data:
        raise UserError(f"the data in {t.data_dir} is not what {path} was trained on: choose another --out_dir")
    load_weights(model, saved["model"], path)
    try:
        state = saved["optimizer"]["state"]
        for group, own in zip(saved["optimizer"]["param_groups"], optimizer.param_groups):
            for i, p in zip(group["params"], own["params"]):
                if i in state:
                    state[i] = {k: like(v, p) for k, v in state[i].items()}
            # the settings of this start; `fused` among them decides where the state has to lie
            group.update({k: v for k, v in own.items() if k != "params"})
        optimizer.load_state_dict(saved["optimizer"])
        for group in optimizer.param_groups if saved["step"] else ():  # before the first step there is none
            names = ["momentum_buffer"] if "rows" in group else ["exp_avg", "exp_avg_sq"]
            for p in group["params"]:
                step, *moments = (optimizer.state[p][name] for name in ("step", *names))
                if step.numel() != 1 or any(m.shape != p.shape for m in moments):
                    raise ValueError("state of another shape")
        torch.set_rng_state(saved["rng"])
    except Exception as e:  # a damaged file can raise anything
        raise UserError(f"{path}: its optimizer state does not fit the model ({first_line(e)})") from None
    news = f"; changed: {', '.join(changed.values())}" if changed else ""
    rate = f"; next learning rate {t.lr_at(saved['step']):.1e}" if saved["step"] < t.max_steps else ""
    say(f"resuming {t.out_dir} after step {saved['step']}{news}{rate}")
    best = min(saved["best"], best_of(Path(t.out_dir) / "best.pt"))
    if about_val and saved.get("val", about_val) not in ("", about_val) and best < math.inf:
        say(f"note: evaluated on {about_val}, before on {saved['val']}: the next evaluation makes a new best.pt")
        best = math.inf
    return saved["step"], best, saved["owed"], saved["crc"]


def best_of(path):
    """Val loss of best.pt, which may be newer than last.pt; without the file the next evaluation makes one."""
    if not os.path.lexists(path):
        return math.inf
    try:
        return float(torch.load(path, map_location="cpu", weights_only=True, mmap=True)["best"])
    except Exception as e:  # a damaged file can raise anything
        raise UserError(f"{path} is not a usable checkpoint ({first_line(e)}): move it away and go on without "
                        "it") from None


def introduce(cfg, t, model, data, world, accumulate, say):
    """What is trained, in which settings, and what about them may surprise."""
    settings = {k: v for c in (cfg, t) for k, v in chosen(c).items() if k not in ("out_dir", "data_dir", "prepare")}
    say(f"settings: {', '.join(f'{k}={v}' for k, v in settings.items()) or 'the defaults'}")
    n, res, budget = model.count(), model.residual, t.max_steps * t.tokens_per_step
    routing = f", {n['residual']:,} of them in the residual" if n["residual"] else ""
    routing += f", {cfg.n_expert_active} of {cfg.n_expert} experts for each token" if model.experts else ""
    say(f"model: {cfg.residual_mode}, {cfg.n_layer} layers of width {cfg.n_embd}, {n['total']:,} parameters "
        f"({n['non_embedding']:,} without embeddings{routing})")
    if hasattr(res, "depth_block"):
        say(f"depth: {2 * cfg.n_layer} sublayers in {math.ceil(2 * cfg.n_layer / res.depth_block)} depth blocks of "
            f"{res.depth_block}, {res.route_heads} depth head{'s' * (res.route_heads > 1)}")
        why = "as asked" if cfg.route_impl == "reference" else model.why_not_fused
        say(f"routing: {f'reference ({why})' if why else 'fused'}")
    say(f"data: {t.data_dir}, {data.total:,} train tokens{'' if data.checked else ', checksums not compared'}; "
        f"{t.max_steps:,} steps use {budget:,}, {budget / (data.windows * cfg.seq_len):.2f} epochs")
    say(f"step: {t.tokens_per_step:,} tokens = {t.micro_batch} sequences x {cfg.seq_len} tokens x {world} "
        f"process{'es' * (world > 1)} x {accumulate} micro-step{'s' * (accumulate > 1)}")
    behind, decay = t.max_steps - t.warmup_steps, t.decay_steps or math.ceil(t.max_steps / 5)
    load, n_cores = 0.0, cores()
    with suppress(OSError):  # not to be had everywhere
        load = os.getloadavg()[0]
    if behind <= 0:
        say(f"warning: the warm-up of {t.warmup_steps} steps takes the whole run of {t.max_steps}: lower it")
    elif t.schedule == "wsd" and decay > behind:
        say(f"warning: the decay of {decay} steps is longer than the {behind} behind the warm-up: it is cut to those")
    if data.tokenizer_vocab and cfg.vocab_size > data.tokenizer_vocab:
        say(f"note: vocab_size={cfg.vocab_size} is {cfg.vocab_size - data.tokenizer_vocab} above the tokenizer's: "
            "those ids are in the softmax too, which raises the loss a little")
    if behind_end := [m for m in t.milestones() if m > budget]:
        say(f"note: eval_at_tokens={behind_end[0]} is behind the end of the run, at {budget} tokens")
    if load > n_cores and torch.get_num_threads() > 1:
        say(f"note: the machine is busy (load {load:.1f} on {n_cores} cores): times say little, and on a CPU training "
            "may be several times faster with the environment variable OMP_NUM_THREADS=1")


def chosen(config):
    """The settings that differ from their defaults, without what is derived from others."""
    found = {}
    for f in fields(config):
        value = getattr(config, f.name)
        with suppress(ValueError):  # the default does not fit the other settings
            if value != f.default and getattr(replace(config, **{f.name: f.default}), f.name) == value:
                continue
        if value != f.default:
            found[f.name] = value
    return found


def evaluation_due(t, done):
    before, now = (done - 1) * t.tokens_per_step, done * t.tokens_per_step
    regular = t.eval_every and (done % t.eval_every == 0 or done == t.max_steps)
    return regular or any(before < m <= now for m in t.milestones())


class StopSignal:
    """Ctrl-C, SIGTERM, a closed terminal and a scheduler's warning (SIGUSR1, SIGUSR2) end the run after the step at
    hand; a second Ctrl-C at once. What was ignored at the start (nohup, a job behind &) stays ignored. torchrun passes
    on what its --signals-to-handle names, and dies of the rest."""
    names = "SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2"

    def __init__(self):
        self.number, self.before = 0, {}
        for number in (getattr(signal, name) for name in self.names):
            if signal.getsignal(number) is not signal.SIG_IGN:
                self.before[number] = signal.signal(number, self.handle)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)

    def handle(self, number, _):
        if number == self.number == signal.SIGINT:
            os._exit(128 + number)  # files are replaced at once, so none is damaged
        # torchrun passes Ctrl-C on as SIGTERM: that is not a second wish
        self.number = self.number or number
        with suppress(RuntimeError):  # the signal came in the middle of another print
            tell(f"\n{signal.Signals(number).name}: stopping after this step (Ctrl-C again stops at once)")


class Log:
    """log.csv, one line per logged step on stdout, a status line in a terminal, and the tracker."""
    columns = "step tokens loss val_loss lr grad_norm tok_per_s ms mem_mb crc wait_ms".split()
    row = r"[0-9]{1,18}(,[-+.0-9a-z]*)+"  # a whole line of the file

    def __init__(self, cfg, t, start, end, device):
        self.t, self.start, self.end, self.device = t, start, end, device
        self.columns = Log.columns + ["load"] * (cfg.n_expert > 0)
        self.steps, self.seconds, self.waited, self.begin = 0, 0.0, 0.0, time.monotonic()
        self.path, self.status = Path(t.out_dir) / "log.csv", sys.stdout.isatty()
        try:
            self.write([r for r in self.read() if int(r[0]) <= start])  # rows behind the checkpoint are made again
        except OSError as e:
            raise UserError(f"cannot write {self.path} ({e.strerror or e})") from None
        self.flops = 0  # of a token, as a part of what all GPUs can do in a second
        if device.type == "cuda":
            from study import estimate
            name = torch.cuda.get_device_name(device)
            peak = next((tflops for gpu, (tflops, _) in estimate.GPUS.items() if re.search(rf"{gpu}\b", name)),
                        math.inf)
            world = dist.get_world_size() if dist.is_initialized() else 1
            self.flops = estimate.flops_per_token(cfg) / (peak * 1e12 * world)
        self.track, self.finish = open_tracker(cfg, t, start)

    def __enter__(self):
        return self

    def __exit__(self, kind, error, _):
        with suppress(OSError):  # a full disk has been told
            self.file.close()
        try:
            self.finish(kind is not None and not (kind is SystemExit and error.code))
        except Exception as e:  # whatever a tracker raises: the run is saved, and its own error is the one to show
            tell(f"warning: tracker={self.t.tracker} has not ended well ({first_line(e)})")

    def read(self):
        """Whole rows of the file, in today's columns, whatever else it holds (a csv.reader stops at damage)."""
        if not self.path.exists():
            return []
        with open(self.path, encoding="utf-8", errors="replace") as f:
            names = f.readline().strip().split(",")
            names = names if names[0] == "step" else self.columns
            lines = [line.strip() for line in f]
        rows = [line.split(",") for line in lines if re.fullmatch(self.row, line)]
        return [[dict(zip(names, r)).get(name, "") for name in self.columns] for r in rows if len(r) == len(names)]

    def write(self, rows):
        with open(self.path.with_suffix(".tmp"), "w", encoding="utf-8", newline="") as f:
            csv.writer(f).writerows([self.columns, *rows])
        os.replace(self.path.with_suffix(".tmp"), self.path)
        self.file = open(self.path, "a", encoding="utf-8", newline="")

    def step(self, done, row, val_loss, stopping):
        """Log step `done`; without a row, the val loss of a step that is logged already, or of the start."""
        t = self.t
        if row:
            loss, lr, norm, seconds, waited, crc, skew = row
            self.steps, self.seconds, self.waited = self.steps + 1, self.seconds + seconds, self.waited + waited
        if val_loss is not None or row and (stopping or done in (1, self.end) or done % t.log_every == 0):
            val, mem = "" if val_loss is None else val_loss, round(memory_mb(self.device), 1)
            values, line = dict(step=done, tokens=done * t.tokens_per_step, val_loss=val, mem_mb=mem), ""
            if row:
                ms, wait, speed = 1e3 * self.seconds / self.steps, 1e3 * self.waited / self.steps, (
                    self.steps * t.tokens_per_step / self.seconds)
                values |= dict(loss=loss, lr=lr, grad_norm=norm, tok_per_s=round(speed, 1), ms=round(ms, 2),
                               wait_ms=round(wait, 2), crc=f"{crc:08x}", load=skew or "")
                line = (f" lr:{lr:.1e} norm:{norm:.2f} ms:{ms:.0f} wait:{wait:.0f} tok/s:{short(speed)} "
                        f"{f'mfu:{speed * self.flops:.0%} ' * (self.flops > 0)}{f'load:{skew:.2f} ' * (skew > 0)}"
                        f"mem:{mem / 1024:.1f}G left:{self.left(done)}")
                self.steps, self.seconds, self.waited = 0, 0.0, 0.0
            try:
                self.add([values.get(name, "") for name in self.columns])
            except OSError as e:
                raise UserError(f"cannot write {self.path} ({e.strerror or e})") from None
            tell("\r\033[K" * self.status + f"step:{done}/{t.max_steps}" + (f" loss:{loss:.4f}" if row else "") +
                 (f" val:{val_loss:.4f}" if val_loss is not None else "") + line)
            try:
                self.track({k: v for k, v in values.items() if v != "" and k not in ("step", "tokens", "crc")}, done)
            except Exception as e:  # whatever a tracker raises: the run is worth more, and log.csv has it all
                tell(f"warning: tracker={t.tracker} has failed and gets no more rows ({first_line(e)})")
                self.track = self.finish = lambda *_: None
        if self.status:
            bar = "#" * (30 * done // t.max_steps)
            tell(f"\r[{bar:30}] {done}/{t.max_steps}, {self.left(done)} left\033[K", "" if done < self.end else "\n")

    def add(self, row):
        if row[2] == "" and (rows := self.read()) and rows[-1][0] == str(row[0]):  # a stop came before its evaluation
            rows[-1][3] = row[3]
            return self.write(rows)
        csv.writer(self.file).writerow(row)
        self.file.flush()

    def left(self, done):
        seconds = (time.monotonic() - self.begin) / max(1, done - self.start) * (self.end - done)
        return f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02d}:{int(seconds) % 60:02d}"


def tell(text, end="\n"):
    """Print; a closed pipe or a full disk behind stdout must not end the run."""
    try:
        print(text, end=end, flush=True)
    except OSError:
        sys.stdout = open(os.devnull, "w", encoding="utf-8")


def short(n):
    for unit, size in (("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.2f}{unit}"
    return f"{n:.0f}"


def memory_mb(device):
    """Peak memory: of the GPU where there is one, else of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / 2**20
    import resource  # which Windows lacks: it is told so before
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


def open_tracker(cfg, t, start):
    """(function (values, step) that passes a log row on to the experiment tracker, function (failed) that ends it)."""
    if t.tracker == "tensorboard":
        from torch.utils.tensorboard import SummaryWriter
        writer = SummaryWriter(t.out_dir, purge_step=start + 1 if start else None)  # later points are made again
        writer.add_text("config", f"    {to_toml(cfg, t)}".replace("\n", "\n    "), start)
        return (lambda values, step: [writer.add_scalar(k, v, step) for k, v in values.items()],
                lambda failed: writer.close())
    if t.tracker == "wandb":
        import wandb
        name = Path(t.out_dir) / "wandb_id.txt"  # a resumed run goes on with its curves
        try:
            if not name.exists():
                name.write_text(os.urandom(8).hex(), encoding="utf-8")
            run = wandb.init(project=os.environ.get("WANDB_PROJECT", "nanodepth"), name=Path(t.out_dir).name,
                             dir=t.out_dir, resume="allow", id=name.read_text(encoding="utf-8").strip(),
                             config=asdict(cfg) | asdict(t))
        except Exception as e:  # no account, no network, no space
            raise UserError(f"tracker=wandb: {first_line(e)} (log in with: wandb login; or use "
                            "--tracker=none)") from None
        run.define_metric("step")  # wandb's own steps cannot go back, as ours do after a kill
        run.define_metric("*", step_metric="step")
        return (lambda values, step: run.log(values | {"step": step}),
                lambda failed: run.finish(exit_code=int(failed)))
    return lambda values, step: None, lambda failed: None


TORCH = 2, 8  # the oldest that has all that is used here; requirements.txt names the one that is tested


def torch_version():
    return tuple(map(int, re.findall(r"\d+", torch.__version__)[:2]))


def check_torch():
    if torch_version() < TORCH:
        raise UserError(f"PyTorch {torch.__version__} is older than {'.'.join(map(str, TORCH))}: "
                        "pip install -r requirements.txt")


def guard(name, function, *args):
    """Run a script's main function: whatever a user can mend ends with one line, and processes end without noise."""
    print_anything()
    code, error = 0, None
    try:
        check_torch()
        function(*args)
    except UserError as e:
        error = str(e)
    except (torch.OutOfMemoryError, MemoryError):
        error = ("out of memory: lower the batch (--micro_batch in train.py, --batch in eval.py), or train with "
                 "--remat=true")
    except OSError as e:
        error = f"{e.filename or 'system'}: {e.strerror or e}"
    except KeyboardInterrupt:
        error = "interrupted"
    except SystemExit as e:
        code = e.code
    except RuntimeError as e:
        if "can't allocate memory" in str(e) or "Storage size calculation overflowed" in str(e):
            error = f"out of memory ({first_line(e)}): lower the batch or the size of the model"
        elif dist.is_initialized() and ("gloo" in str(e) or isinstance(e, dist.DistBackendError)):
            error = ("another process of this run has stopped, so this one stops too, or they cannot reach each other "
                     f"(...{' '.join(str(e).split())[-300:]})")
        else:
            raise
    rank = int(os.environ["RANK"]) if launched() and os.environ["RANK"].isdecimal() else 0
    if error:
        code = 1
        if rank:  # most errors are those of all ranks: the first says it, and torchrun ends the others
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(5)
        print(f"{name}: {f'rank {rank}: ' if rank else ''}{error}", file=sys.stderr)
    if dist.is_initialized():
        sys.stdout.flush()
        os._exit(code)  # the threads of gloo can abort a process that ends in the ordinary way
    if code:
        sys.exit(code)


def main(argv=None):
    guard("train.py", lambda: train(*load_config(sys.argv[1:] if argv is None else argv)))


if __name__ == "__main__":
    main()
