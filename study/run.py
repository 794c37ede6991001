"""Train, tune and compare residual modes in pairs of equal seed.

    python -m study.run study/configs/quick.toml --data_dir=data/mine --modes=attnres_block     two modes on your text
    python -m study.run study/configs/main.toml --jobs=1 --minutes=60                           an hour of the study
    python -m study.run study/configs/main.toml --out=study/main --minutes=0                    table of its stored rows
    python -m study.run study/configs/main.toml --out=study/main --speed                        once, on an idle machine
    python -m study.run study/configs/main.toml --out=study/main --test                         losses on test, once

A configuration is one of train.py's with a table [study] and a table [arm.NAME] for each arm. Every finished run is a
row of rows.csv in --out. Whatever is cut short goes on where it was when the same command is given again.
"""
import csv
import dataclasses
import functools
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import torch

from eval import ngram_losses
from model import GPT
from prepare_fineweb import Parser, UserError, cores, lock_folder
from study.bench import Clock, kept_bytes
from study.cell import configure, machine, split_losses
from study.plan import COLUMNS, left_to_train, read_config, read_rows, wanted, write_rows
from study.table import compare, markdown, origin, sentences, so_far, text_table
from train import autocast, choose_device, choose_dtype, guard, launched, open_data, prepare_data


def parse_args(argv):
    p = Parser("study.run", description=__doc__)
    p.add_argument("config", help="a .toml of study/configs")
    p.add_argument("--modes", default="", help="arms to compare, or modes with knobs: rd,mhar:route_heads=4")
    p.add_argument("--seeds", type=int, default=0, help="pairs of runs for each arm (default: the configuration's)")
    p.add_argument("--data_dir", default="", help="folder with token shards (default: the configuration's)")
    p.add_argument("--jobs", type=int, default=0, help="runs at a time, each on a core or a GPU (default: GPUs, or 2)")
    p.add_argument("--minutes", type=float, default=1e9, help="start no run after this time; 0: show what there is")
    p.add_argument("--runs", default="", help="where the run folders lie (default runs/study-CONFIG)")
    p.add_argument("--out", default="", help="folder of rows, table and figures (default: that of the runs)")
    p.add_argument("--speed", action="store_true", help="measure the speed of all arms with AdamW on this idle "
                   "machine, no more")
    p.add_argument("--test", action="store_true", help="evaluate the runs of the main budget on test, once, at the end")
    args = p.parse_args(argv)
    if args.jobs < 0 or args.seeds < 0 or args.minutes < 0:
        p.error("--jobs, --seeds and --minutes must not be negative")
    if launched():
        raise UserError("study.run starts processes of its own: run it without torchrun")
    args.jobs = args.jobs or torch.cuda.device_count() or min(2, cores())
    usual = f"runs/study-{Path(args.config).stem}"
    args.runs = args.runs or usual
    args.out = args.out or args.runs
    flags = dict(modes="", seeds=0, data_dir="", runs=usual, out=args.runs)  # and what each is while it is not given
    args.again = shlex.join([args.config, *(f"--{key}={value}" for key, default in flags.items() if (
        value := getattr(args, key)) and value != default)])
    return args


# ---------------------------------------------------------------------------------------------------------------------
# Training


def seconds_per_step(arm, vocab_size):
    """Measured on one micro-batch in one thread; the optimizer's share is not in it."""
    cfg, t = configure(arm.keys)
    device = choose_device(t.device)[0]
    model = GPT(dataclasses.replace(cfg, vocab_size=vocab_size)).to(device)
    idx = torch.zeros(t.micro_batch, cfg.seq_len, dtype=torch.long, device=device)

    def step():
        with autocast(device, choose_dtype(t.dtype, device)[0]):
            loss = model(idx, idx)[1]
        loss.backward()
    return min(Clock(device).rounds({"": step}, 0)[""]) * t.tokens_per_step / idx.numel()


def clock(seconds):
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02d} min" if minutes >= 60 else f"{minutes} min" if minutes else "a minute"


def progress(folder, cell):
    """What the log of a run says, in one line."""
    for part in (folder / str(cell.steps), folder / "trunk"):
        try:
            with open(part / "log.csv", newline="", encoding="utf-8") as f:
                row = list(csv.DictReader(f))[-1]
            left = clock((cell.steps - int(row["step"])) * float(row["ms"]) / 1000)
            return f"step {row['step']}/{cell.steps}, loss {float(row['loss']):.3f}, {left} left"
        except (OSError, ValueError, IndexError, KeyError, TypeError):
            continue
    return "starting"


def start(args, arms, cell, slot):
    """(process that trains a cell, the cell, its folder)"""
    folder = Path(args.runs) / cell.trunk
    folder.mkdir(parents=True, exist_ok=True)
    keys = arms[cell.arm].keys | dict(seed=cell.seed, lr=cell.lr, route_lr_mult=cell.mult)
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    if torch.cuda.is_available():
        cards = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")
        cards = cards if cards[0] else [str(i) for i in range(torch.cuda.device_count())]
        env["CUDA_VISIBLE_DEVICES"] = cards[slot % len(cards)]
    with open(folder / "log.txt", "ab") as log:
        return subprocess.Popen([sys.executable, "-m", "study.cell", folder, str(cell.steps), json.dumps(keys)],
                                stdout=log, stderr=log, env=env), cell, folder


def train_all(args, study, arms, rows, data):
    """Train what is wanted until args.minutes are over; rows are stored one by one."""
    end, told, running, failed, free = time.monotonic() + 60 * args.minutes, time.monotonic(), {}, set(), None
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)  # which stops as Ctrl-C does
    try:
        while True:
            for slot, (job, cell, folder) in list(running.items()):
                if job.poll() is None:
                    continue
                del running[slot]
                free, path = None, folder / str(cell.steps) / "row.json"
                row = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
                if job.returncode and not (row.get("loss") == "inf" and cell.seed == study.tuning_seed):
                    failed.add(cell.trunk)
                    why = (folder / "log.txt").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
                    print(f"FAILED: {cell.trunk}, {cell.steps} steps ({''.join(why)[:200]}); see {folder}/log.txt")
                    continue
                rows[cell] = dict.fromkeys(COLUMNS, "") | {k: str(v) for k, v in row.items()} | dict(
                    data=data, settings=arms[cell.arm].settings)
                write_rows(Path(args.out) / "rows.csv", rows)
                print(f"done: {cell.trunk}, {cell.steps} steps, loss {float(row['loss']):.4f}", flush=True)
            if free is None:  # a row or a failure changes what is wanted
                busy = {cell.trunk for _, cell, _ in running.values()} | failed
                free = [c for c in wanted(study, arms, rows) if c.trunk not in busy]
                for slot in set(range(args.jobs)) - set(running):
                    if free and time.monotonic() < end:
                        running[slot] = start(args, arms, free.pop(0), slot)
            if not running:
                return failed
            if time.monotonic() - told > 60:
                told = time.monotonic()
                for _, cell, folder in running.values():
                    print(f"  {cell.trunk}: {progress(folder, cell)}", flush=True)
            time.sleep(0.2)
    except KeyboardInterrupt:
        raise UserError("stopped, all is saved: the same command goes on") from None
    finally:
        for job, _, _ in running.values():  # what is cut short saves
            job.terminate()
        for job, _, _ in running.values():
            job.wait()
        signal.signal(signal.SIGTERM, before)


# ---------------------------------------------------------------------------------------------------------------------
# Everything else


def measure_speed(args, arms, vocab_size):
    """speed.csv: forward and backward pass of each arm against `standard` in interleaved rounds, and bytes kept."""
    if os.getloadavg()[0] > 0.5:
        print(f"warning: this machine is busy (load {os.getloadavg()[0]:.1f}), so the speeds will be wrong", flush=True)
    torch.set_num_threads(1)
    steps, kept, table = {}, {}, []
    for name, arm in arms.items():
        cfg, t = configure(arm.keys)
        if t.optimizer != "adamw":  # whose own time is not measured here
            continue
        device = choose_device(t.device)[0]
        model = GPT(dataclasses.replace(cfg, vocab_size=vocab_size)).to(device)
        idx = torch.zeros(t.micro_batch, cfg.seq_len, dtype=torch.long, device=device)
        precision = functools.partial(autocast, device, choose_dtype(t.dtype, device)[0])
        kept[name] = kept_bytes(model, idx, precision)

        def step(model=model, idx=idx, precision=precision):
            with precision():
                loss = model(idx, idx)[1]
            loss.backward()
        steps[name] = step
    times = Clock(device).rounds(steps, 0, 9)
    for name in steps:
        ratios = sorted(a / b for a, b in zip(times["standard"], times[name]))
        table.append(dict(arm=name, speed=f"{statistics.median(ratios):.2f}", low=f"{ratios[0]:.2f}",
                          high=f"{ratios[-1]:.2f}", kept=f"{kept[name] / kept['standard']:.2f}", machine=machine(t)))
        print(f"{name:24} {table[-1]['speed']} ({table[-1]['low']} to {table[-1]['high']}), "
              f"keeps {table[-1]['kept']} for backward", flush=True)
    with open(Path(args.out) / "speed.csv", "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, table[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(table)


def look_at_test(args, study, arms, rows):
    """Losses on test for all runs of the main budget: allowed once, when nothing is left to train."""
    mine = {c: r for c, r in rows.items()
            if c.arm in arms and c.steps >= study.steps[-1] and c.seed != study.tuning_seed}
    if any(r["test"] for r in mine.values()):
        raise UserError(f"{args.out}/rows.csv has losses on test already: test is looked at once")
    if wanted(study, arms, rows):
        raise UserError("there are runs left to train, and test is looked at once: train them first, without --test")
    for cell, row in mine.items():
        folder = Path(args.runs) / cell.trunk / str(cell.steps)
        row["test"] = f"{split_losses(folder, configure(arms[cell.arm].keys)[1], 'test')[0]:.6f}"
    write_rows(Path(args.out) / "rows.csv", rows)


def read_table(path):
    """{first column: row} of a .csv, {} where there is none."""
    if not path.exists():
        return {}
    with open(path, newline="", encoding="utf-8") as f:
        return {next(iter(r.values())): r for r in csv.DictReader(f)}


def store_ngrams(args, study, arms, rows):
    """ngrams.csv: loss of n-gram counts of the same training tokens, beside which a loss means something."""
    path = Path(args.out) / "ngrams.csv"
    known, (_, t) = read_table(path), configure(arms["standard"].keys, seed=1, eval_every=1)
    lengths = sorted({c.steps for c in rows})
    if [*map(str, lengths)] == [*known] or not any(Path(t.data_dir).glob("*.bin")):
        return known
    cfg, train, val, _ = open_data(configure(arms["standard"].keys)[0], t)
    table = []
    for steps in lengths:
        tokens = steps * t.tokens_per_step
        found = ngram_losses(train, val, train.order(t.seed, 0, tokens // cfg.seq_len), 5) if tokens <= 2e7 else []
        table.append([steps, tokens, *(f"{x:.4f}" for x in found)])
    with open(path, "w", newline="", encoding="utf-8") as f:
        csv.writer(f, lineterminator="\n").writerows([["steps", "tokens", *(f"{n}-gram" for n in range(1, 6))], *table])
    return read_table(path)


def announce(args, study, arms, rows, vocab_size, val_tokens):
    """Say what is missing and how long it will take: a forward and backward pass of each arm is timed."""
    left = left_to_train(study, arms, rows)
    if not left:
        return print(f"nothing to train: all runs of {args.config} are in {args.out}/rows.csv", flush=True)
    if args.minutes == 0:
        return print("nothing is trained (--minutes=0)", flush=True)
    torch.set_num_threads(1)
    seconds = 0
    for name, (runs, steps) in left.items():
        _, t = configure(arms[name].keys)
        evaluation = min(t.eval_tokens, val_tokens) / t.tokens_per_step / 3  # in steps
        seconds += (steps + runs * evaluation) * seconds_per_step(arms[name], vocab_size) + runs * 10
    return print(f"{sum(runs for runs, _ in left.values())} runs of {len(left)} arms to train, {args.jobs} at a time: "
                 f"about {clock(seconds / args.jobs)}; logs are {args.runs}/*/log.txt", flush=True)


def run(args):
    study, arms, claims = read_config(args.config, args)
    writes, failed = args.minutes or args.speed or args.test, ()
    folders = {os.path.realpath(folder) for folder in (args.runs, args.out)} if writes else ()
    locks = [lock_folder(folder, "running a study in") for folder in folders]
    rows = read_rows(Path(args.out) / "rows.csv")
    for cell, row in rows.items():
        if cell.arm in arms and row["settings"] != arms[cell.arm].settings:
            raise UserError(f"{args.out}/rows.csv has runs of {cell.arm} with other settings than {args.config} has "
                            "now: give other --out and --runs")
    Path(args.out).mkdir(parents=True, exist_ok=True)
    if writes:
        cfg, t = configure(arms["standard"].keys)
        prepare_data(t)
        cfg, _, val, about = open_data(cfg, dataclasses.replace(t, eval_every=1))
        data = f"{about['train_crc32']:08x}"
        if any(r["data"] != data for r in rows.values()):
            raise UserError(f"{args.out}/rows.csv has runs on other data than {t.data_dir}: give other --out and "
                            "--runs")
        if args.speed:
            return measure_speed(args, arms, cfg.vocab_size)
        if args.test:
            look_at_test(args, study, arms, rows)
    announce(args, study, arms, rows, *((cfg.vocab_size, val.total) if args.minutes else (0, 0)))
    if args.minutes and not args.test:
        failed = train_all(args, study, arms, rows, data)
    results = compare(study, arms, rows)
    missing = {n: so_far(study, arms, rows, n) for n in arms
               if n not in results or study.steps[-1] not in results[n]["loss"]}
    print(text_table(study, results, missing))
    if not study.trials:
        print(f"Nothing was tuned; standard has lr {configure(arms['standard'].keys)[1].lr:g}.")
    ngrams = store_ngrams(args, study, arms, rows) if rows else {}
    lines = sentences(study, results, ngrams)
    print("".join(f"{line}\n" for line in lines), end="")
    if any("cannot tell" in r["words"] for r in results.values()):
        print("To tell the rest, plan more seeds or longer runs and train all anew (--out): pairs that are added until "
              "p is small prove nothing.")
    left = sum(runs for runs, _ in left_to_train(study, arms, rows).values())
    state = f"{left} runs are left: python -m study.run {args.again} trains them" if left else "No run is left."
    if rows:
        text = markdown(study, results, missing, claims, read_table(Path(args.out) / "speed.csv"), lines)
        (Path(args.out) / "table.md").write_text(f"{text}\n{state}\n\nRows: {origin(rows)}.\n", encoding="utf-8")
        if find_spec("matplotlib"):
            from study.figures import draw
            draw(args, study, arms, rows, results, ngrams)
        what = "and figures are" if find_spec("matplotlib") else "(no new figures: pip install matplotlib) are"
        print(f"rows.csv, table.md {what} in {args.out}. {state}")
    for lock in locks:
        lock.close()
    if failed:
        raise UserError(f"{len(failed)} runs failed: {', '.join(sorted(failed))}; see log.txt in their folders")


if __name__ == "__main__":
    guard("study.run", lambda: run(parse_args(sys.argv[1:])))
