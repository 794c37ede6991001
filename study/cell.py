"""One finished run of a study, in a process of its own: `study.run` starts it, and it writes its row as row.json.

A *trunk* is trained with a constant learning rate. At four fifths of a budget its folder is copied, and the copy decays
to the budget's end: one trunk gives a finished run at each budget (2405.18392). What is cut short goes on where it was.
"""
import csv
import json
import math
import platform
import shutil
import sys
import warnings
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch

from eval import js, load_model
from train import (GPT, Diverged, Tokens, UserError, autocast, choose_device, choose_dtype, commit, evaluate, guard,
                   load_checkpoint, load_config, open_data, train)

DECAY = 0.2  # share of a budget in which the learning rate falls to min_lr


def branch_step(steps):
    """Step at which the run of a budget leaves the trunk."""
    return steps - math.ceil(DECAY * steps)


def steps_done(folder):
    return load_checkpoint(folder / "last.pt")["step"] if (folder / "last.pt").exists() else 0


def configure(keys, **more):
    """train.py's settings from a dictionary -> (GPTConfig, TrainConfig)"""
    return load_config([f"--{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in (keys | more).items()])


def check_same(keys, folder):
    """The run that lies in a folder must be of these settings and data, or its losses are those of another study."""
    if not (folder / "last.pt").exists():
        return
    cfg, t = configure(keys, out_dir=folder)
    saved, now = load_checkpoint(folder / "last.pt", mmap=True), asdict(cfg) | asdict(t)
    free = "data_dir prepare device save_every log_every max_steps schedule decay_steps".split()
    other = [k for k in keys if k not in free and saved["config"].get(k) != now[k]]
    other += ["the data"] * (saved["data"] != open_data(cfg, t)[3])
    if other:
        raise UserError(f"{folder} holds a run that differs in {', '.join(other)}: give other --runs and --out, or "
                        f"delete {folder.parent}")


def finish(keys, folder, steps):
    """Train one run of `steps` steps in folder/<steps>, from folder/trunk -> its row, but for what the study knows."""
    trunk, end, leave = folder / "trunk", folder / str(steps), branch_step(steps)
    for part in (trunk, end):
        check_same(keys, part)
    keys = keys | dict(schedule="wsd", max_steps=steps, decay_steps=steps - leave, resume=True)
    early = folder / f"routes-{steps}.json"  # after two thirds of the run
    if not (trunk / "last.pt").exists():  # whatever there is was cut short before its first save
        shutil.rmtree(trunk, ignore_errors=True)
    if not (end / "last.pt").exists():
        for stop in (round(steps * 2 / 3), leave):
            if steps_done(trunk) < stop:
                train(*configure(keys, out_dir=trunk, stop_after=stop))
            if not early.exists():
                early.with_suffix(".new").write_text(json.dumps(mean_weights(trunk, keys)), encoding="utf-8")
                early.with_suffix(".new").replace(early)
        if steps_done(trunk) != leave:
            raise UserError(f"{trunk} is at step {steps_done(trunk)}, past step {leave}, where the run of {steps} "
                            f"steps leaves it: delete {folder}, and it is trained again")
        half = folder / f"{steps}.tmp"
        shutil.rmtree(half, ignore_errors=True)
        shutil.copytree(trunk, half, ignore=shutil.ignore_patterns("lock"))
        shutil.rmtree(end, ignore_errors=True)
        half.rename(end)
    if steps_done(end) < steps:
        train(*configure(keys, out_dir=end))
    _, t = configure(keys, out_dir=end)
    nll, documents = split_losses(end, t, "val")
    late, before = mean_weights(end, keys), json.loads(early.read_text(encoding="utf-8"))
    with open(end / "log.csv", newline="", encoding="utf-8") as f:
        speeds = [float(row["tok_per_s"]) for row in csv.DictReader(f) if row["tok_per_s"]]
    return dict(tokens=steps * t.tokens_per_step, loss=f"{nll:.6f}", documents=documents, machine=machine(t),
                added=GPT(load_checkpoint(end / "last.pt")["cfg"]).count()["residual"], torch=torch.__version__,
                tok_per_s=int(np.median(speeds)), commit=commit(), **moved(before, late))


def mean_weights(folder, keys):
    """{route: mean over tokens, positions and heads of its weights, and of its largest weight} on 32 windows of val."""
    _, t = configure(keys)
    model, saved, _ = load_model(folder, torch.device("cpu"), torch.float32)
    data = Tokens(t.data_dir, "val", model.cfg.seq_len, model.cfg.vocab_size)
    n = min(32, data.windows)
    rows = torch.from_numpy(data.rows([i * data.windows // n for i in range(n)]))[:, :-1]
    return {f["route"]: [f["weights"].double().mean((1, 2, 3)).tolist(), f["weights"].amax(0).double().mean().item()]
            for f in model.depth_weights(rows) if len(f["weights"]) > 1}


def moved(before, late):
    """Mean largest weight, and how far the routes still went: the larger of its relative change and of the distance
    (root of the Jensen-Shannon divergence) between both, as a share of the distance from even weights."""
    if not late:
        return dict(largest="", moved="")
    a, b = ([torch.tensor(x[r][0], dtype=torch.float64) for r in late] for x in (before, late))
    way, far = (sum(js(x, y).clamp_min(0).sqrt().item() for x, y in zip(b, other))
                for other in (a, [torch.full_like(y, 1 / len(y)) for y in b]))
    largest, was = (sum(x[r][1] for r in late) / len(late) for x in (late, before))
    return dict(largest=f"{largest:.4f}", moved=f"{max(abs(largest / was - 1), way / far if far else 0):.3f}")


def split_losses(folder, t, split):
    """(mean loss on a split, "tokens:loss tokens:loss ..." of its documents). A split of more than eval_tokens is
    evaluated on so many, spread evenly, and one of more than 100 documents is not taken apart."""
    device = choose_device(t.device)[0]
    dtype = choose_dtype(t.dtype, device)[0]
    model, _, _ = load_model(folder, device, dtype)
    data = Tokens(t.data_dir, split, model.cfg.seq_len, model.cfg.vocab_size)
    if data.total - 1 > t.eval_tokens:
        return evaluate(model, data, t.micro_batch, device, dtype, t.eval_tokens)[0], ""
    nll = token_losses(model, data, t.micro_batch, device, dtype)
    text = data.read(0, data.total)
    document = np.cumsum(text == text[0])[1:] - 1  # a document begins with the token that the split begins with
    counts, sums = np.bincount(document), np.bincount(document, nll)
    return nll.mean(), " ".join(f"{n}:{x / n:.4f}" for n, x in zip(counts, sums)) if len(counts) <= 100 else ""


@torch.no_grad()
def token_losses(model, data, batch, device, dtype):
    """Loss of each token of a split but the first, in the windows of `evaluate` without a limit: float64 (total-1,)."""
    T, out = data.seq_len, []
    for first in range(0, data.total - 1, batch * T):
        stretch = torch.from_numpy(data.read(first, min(batch * T, data.total - 1 - first) + 1))
        x, y = (torch.nn.functional.pad(part, (0, -len(part) % T)).view(-1, T).to(device)
                for part in (stretch[:-1], stretch[1:]))
        with autocast(device, dtype):
            logits = model(x)[0]
        nll = torch.nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction="none")
        out.append(nll[:len(stretch) - 1].cpu().double().numpy())
    return np.concatenate(out)


def machine(t):
    """Name of what computes."""
    device = choose_device(t.device)[0]
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        names = [line.split(":")[1].strip() for line in open("/proc/cpuinfo") if line.startswith("model name")]
    except OSError:
        names = []
    return (names or [platform.processor() or platform.machine()])[0].replace(",", " ")


def main(argv):
    folder, steps, keys = argv
    warnings.filterwarnings("ignore", message=".*routing runs on the reference")
    torch.set_num_threads(1)
    path, diverged = Path(folder) / steps / "row.json", None
    try:
        row = finish(json.loads(keys), Path(folder), int(steps))
    except Diverged as e:  # of a trial it is a result: this rate is too high
        tokens = int(steps) * configure(json.loads(keys))[1].tokens_per_step
        diverged, row = e, dict(loss="inf", tokens=tokens, added=0)
        path.parent.mkdir(exist_ok=True)
    path.with_suffix(".new").write_text(json.dumps(row), encoding="utf-8")
    path.with_suffix(".new").replace(path)
    if diverged:
        raise diverged


if __name__ == "__main__":
    guard("study.cell", main, sys.argv[1:])
