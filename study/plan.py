"""What a study trains and in which order: its configuration, its runs (cells), its rows."""
import csv
import dataclasses
import json
import math
import os
import re
import statistics
import tomllib
import zlib
from typing import NamedTuple

from model import RESIDUAL_MODES
from prepare_fineweb import UserError, first_line
from study.cell import branch_step, configure

COLUMNS = ("arm", "seed", "steps", "lr", "route_lr_mult", "tokens", "loss", "test", "documents", "added", "largest",
           "moved", "tok_per_s", "machine", "torch", "data", "settings", "commit")


class Cell(NamedTuple):
    """One finished run, as the first columns of its row."""
    arm: str
    seed: int
    steps: int
    lr: float
    mult: float

    @property
    def trunk(self):
        return f"{re.sub('[^a-z0-9_.=]+', '-', self.arm.lower())}-lr{self.lr:g}-x{self.mult:g}-seed{self.seed}"


class Arm(NamedTuple):
    keys: dict  # settings of train.py
    seeds: int
    group: int  # arms of a lower group are trained first
    base: str  # arm that it is compared with
    routed: bool  # whether its residual has parameters, whose learning rate is tuned too
    control: bool  # without routes, or from the papers' start: not one of those that Holm corrects for
    long: bool  # whether it may be one of the two with the longest budget
    blocks: bool  # whether it reads depth blocks of a size that can be chosen, as static weights do
    settings: str  # checksum of what all its rows share


@dataclasses.dataclass
class Study:
    """The table [study] of a configuration."""
    steps: list = dataclasses.field(default_factory=list)  # budgets of every arm, ascending; the last is the main one
    long_steps: int = 0  # a longer one for `standard` and the two best arms with routes and all seeds; 0: none
    long_seeds: int = 2
    seeds: int = 3  # pairs of an arm, seeds 1, 2, ...
    tuning_seed: int = 101  # of the trials, used for nothing else
    trials: int = 0  # of each arm at the first budget; 0: nothing is tuned
    papers: str = ""  # suffix of the arms with the papers' start: what an arm gains there, beside its gain elsewhere
    static: str = ""  # arm with static weights over depth
    planned: int = 0  # comparisons of the whole configuration that Holm corrects for, counted here


def read_config(path, args):
    """-> (Study, {name: Arm}, claims of papers)"""
    try:
        with open(path, "rb") as f:
            content = tomllib.load(f)
    except (OSError, ValueError) as e:
        raise UserError(f"cannot read {path}: {first_line(e)}") from None
    table, tables, claims = (content.pop(k, d) for k, d in (("study", {}), ("arm", {}), ("claim", [])))
    kinds = {f.name: f.type for f in dataclasses.fields(Study) if f.name != "planned"}
    steps = table["steps"] = table.get("steps", [])
    if set(table) - set(kinds) or any(type(v) is not kinds[k] for k, v in table.items()):
        raise UserError(f"{path}: [study] knows " + ", ".join(f"{k} ({v.__name__})" for k, v in kinds.items()))
    if not steps or any(type(n) is not int or n < 3 for n in steps) or sorted(set(steps)) != steps:
        raise UserError(f"{path}: [study] needs steps = [...], the lengths of its runs, ascending and at least 3")
    study = Study(**table)
    if not 0 <= study.trials < 8:
        raise UserError(f"{path}: [study] has trials = {study.trials}, and must have 0 (nothing is tuned) to 7")
    full, study.seeds = study.seeds, args.seeds or study.seeds

    def is_control(name, keys):
        mode = keys.get("residual_mode", name)
        return mode == "standard" or bool(study.papers) and name.endswith(study.papers)
    planned = {name for name, keys in tables.items() if not is_control(name, keys)}
    if args.modes:
        picked = {}
        for text in ["standard", *args.modes.split(",")]:
            mode, *knobs = text.split(":")
            for knob in knobs:
                if "=" not in knob or knob.split("=")[0] in ("seeds", "group", "base", "residual_mode"):
                    raise UserError(f"--modes: {knob!r} of {text} is no knob: mhar:route_heads=4")
            picked[text] = tables.get(text, {"residual_mode": mode} | dict(k.split("=", 1) for k in knobs))
        picked |= {base: tables[base] for p in picked.values() if (base := p.get("base")) in tables}
        tables = picked
    if "standard" not in tables:
        raise UserError(f"{path} has no arm `standard`: name the modes to compare with it, --modes=attnres_block,rd")
    common = content | ({"data_dir": args.data_dir, "prepare": ""} if args.data_dir else {})
    arms = {}
    for name, keys in tables.items():
        keys = dict(keys)
        seeds, group, base = (keys.pop(k, d) for k, d in (("seeds", full), ("group", 1), ("base", "standard")))
        keys = common | {"residual_mode": name} | keys
        try:
            cfg, t = configure(keys)
        except UserError as e:
            raise UserError(f"{path}, arm {name}: {str(e).removeprefix('command line: ')}") from None
        same = {k: v for k, v in (dataclasses.asdict(cfg) | dataclasses.asdict(t)).items() if k in keys and k not in (
            "data_dir", "prepare", "out_dir", "lr", "seed", "device", "log_every", "save_every")}
        settings = f"{zlib.crc32(json.dumps(same, sort_keys=True).encode()):08x}"
        routed, control = cfg.residual_mode != "standard", is_control(name, keys)
        long = bool(study.long_steps) and routed and not control and (seeds, base) == (full, "standard")
        blocks = "depth_block" in RESIDUAL_MODES[cfg.residual_mode].knobs
        arms[name] = Arm(keys, args.seeds or seeds, group, base, routed, control, long, blocks, settings)
    study.planned = len(planned | {name for name, arm in arms.items() if not arm.control})
    for name, arm in arms.items():
        if arm.base not in arms:
            raise UserError(f"{path}: arm {name} is compared with {arm.base!r}, which is not among the arms")
    return study, arms, claims


# ---------------------------------------------------------------------------------------------------------------------
# Which run comes next


def trial(arm, done, lr):
    """(lr, route_lr_mult) of an arm's next trial; done: {(lr, mult): loss} of the earlier ones.

    Three rates a factor of 2 apart, then one further out if the best is at an edge. What is left goes to the rate of
    the router, 4 and 16 times the model's, or without a router to rates between: every arm has as many trials.
    """
    for rate in (lr, 2 * lr, lr / 2):
        if (rate, 1.0) not in done:
            return rate, 1.0
    rates = {r: loss for (r, mult), loss in done.items() if mult == 1}
    best = min(rates, key=rates.get)
    if len(done) == 3 and best in (min(rates), max(rates)):
        return best * (2 if best == max(rates) else 0.5), 1.0
    if arm.routed:
        return best, next(m for m in (4.0, 16.0, 64.0, 0.25) if (best, m) not in done)
    return next(r for f in (2**0.5, 2**-0.5, 2**0.25, 2**-0.25) if (r := float(f"{best * f:.3g}")) not in rates), 1.0


def trials(study, rows, name):
    """{(lr, route_lr_mult): loss} of an arm's trials that are done."""
    return {(c.lr, c.mult): float(r["loss"]) for c, r in rows.items()
            if c.arm == name and c.seed == study.tuning_seed and c.steps == study.steps[0]}


def tuned(study, arms, rows, name):
    """(lr, route_lr_mult) of an arm's runs, or None while its trials are not done."""
    if not study.trials:
        _, t = configure(arms[name].keys)
        return t.lr, t.route_lr_mult
    done = trials(study, rows, name)
    return min(done, key=done.get) if len(done) >= study.trials else None


def wanted(study, arms, rows):
    """Cells that are not done, the most useful first: by group the trials and the shortest budget, so that there is
    soon something of every arm; then by group the longer budgets, seed by seed, and behind the arms with all seeds the
    longest for `standard` and the two best of them. A cell waits for the trials of its arm and for the shorter budgets
    of its trunk."""
    out, long = [], [name for name, arm in arms.items() if arm.long]
    rates = {n: tuned(study, arms, rows, n) for n in arms}
    groups = {g: {n: a for n, a in arms.items() if a.group == g} for g in sorted({a.group for a in arms.values()})}

    def pairs(group, steps):
        return [Cell(n, seed, steps, *rates[n]) for seed in range(1, max(a.seeds for a in group.values()) + 1)
                for n, a in group.items() if seed <= a.seeds and rates[n]]
    for group in groups.values():
        for name, arm in group.items():
            done = trials(study, rows, name)
            if len(done) < study.trials:
                rate = trial(arm, done, configure(arm.keys)[1].lr)
                out.append(Cell(name, study.tuning_seed, study.steps[0], *rate))
        out += pairs(group, study.steps[0])
    for g, group in groups.items():
        for steps in study.steps[1:]:
            out += pairs(group, steps)
        if long and g == max(arms[n].group for n in long) and all(c in rows for c in out):
            at_main = {n: losses(finished(study, arms, rows, n, study.steps[-1])).values() for n in long}
            best = sorted(long, key=lambda n: statistics.mean(at_main[n]))[:2]
            out += [Cell(n, seed, study.long_steps, *rates[n])
                    for seed in long_seeds(study) for n in ("standard", *best)]
    left, seen = [c for c in out if c not in rows], set()
    return [c for c in left if not (c.trunk in seen or seen.add(c.trunk))]


def long_seeds(study):
    """Those of the longest budget: the last ones, whose trunks are there when the main budget has just been run."""
    return range(study.seeds, max(0, study.seeds - study.long_seeds), -1)


def left_to_train(study, arms, rows):
    """{arm: (runs, steps) that are missing}, by going through them; a longer run goes on where a shorter one left."""
    left, rows = {}, dict(rows)
    while cells := wanted(study, arms, rows):
        for c in cells:
            before = [branch_step(o.steps) for o in rows if o.trunk == c.trunk and o.steps < c.steps]
            runs, steps = left.get(c.arm, (0, 0))
            left[c.arm] = runs + 1, steps + c.steps - max(before, default=0)
            rows[c] = {"loss": "0"}
    return left


def finished(study, arms, rows, name, steps):
    """{seed: row} of an arm's runs of one budget, with its tuned rates and without its trials."""
    rate = tuned(study, arms, rows, name)
    return {c.seed: r for c, r in rows.items() if (c.arm, c.steps, (c.lr, c.mult)) == (name, steps, rate)
            and c.seed != study.tuning_seed}


def documents(row):
    """[(tokens, mean loss)] of the documents of val, [] where they were not kept apart."""
    return [(int(n), float(x)) for n, x in (part.split(":") for part in row["documents"].split())]


def losses(runs):
    return {seed: float(r["loss"]) for seed, r in runs.items()}


# ---------------------------------------------------------------------------------------------------------------------
# Rows


def read_rows(path):
    """{cell: row} of rows.csv; its row has all columns as text."""
    if not path.exists():
        return {}
    rows, lengths, line = {}, [], 1
    try:
        with open(path, newline="", encoding="utf-8") as f:
            for r in csv.DictReader(f):
                line += 1
                if set(r) != set(COLUMNS) or None in r.values():
                    raise ValueError(f"its columns must be {', '.join(COLUMNS)}, and every row must have all")
                cell = Cell(r["arm"], int(r["seed"]), int(r["steps"]), float(r["lr"]), float(r["route_lr_mult"]))
                loss = 0.0 if r["loss"] == "inf" else float(r["loss"])  # of a trial that has diverged
                numbers = [*cell[1:], loss, int(r["tokens"]), int(r["added"]), float(r["test"] or 0),
                           float(r["moved"] or 0)]
                if not all(map(math.isfinite, numbers)) or min(cell.steps, cell.lr, int(r["tokens"])) <= 0:
                    raise ValueError(f"{cell.trunk}: loss {r['loss']}, tokens {r['tokens']}")
                lengths = lengths or [n for n, _ in documents(r)]
                if r["documents"] and [n for n, _ in documents(r)] != lengths:
                    raise ValueError("its documents have other lengths than those above")
                if cell in rows:
                    raise ValueError(f"{cell.trunk} of {cell.steps} steps is there twice")
                rows[cell] = r
        return rows
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, csv.Error) as e:
        raise UserError(f"{path} is damaged (line {line}: {first_line(e)}): mend it, or give other --out and "
                        "--runs") from None


def write_rows(path, rows):
    with open(f"{path}.new", "w", newline="", encoding="utf-8") as f:
        writer = csv.DictWriter(f, COLUMNS, lineterminator="\n")
        writer.writeheader()
        for cell in sorted(rows):
            writer.writerow(rows[cell] | dict(zip(COLUMNS, cell)))
    os.replace(f"{path}.new", path)
