"""Evaluate a trained model, or let it write.

    python eval.py runs/tiny-standard-seed1                           exact loss on val
    python eval.py runs/tiny-standard-seed1 --split=test --json       the same on test, for programs
    python eval.py runs/tiny-standard-seed1 --prompt="def main("      sample
    python eval.py runs/tiny-attnres-seed1 --routing                  where each site reads: tables and figures
    python eval.py configs/tiny.toml --scales                         sizes of embedding, outputs, stream at the start
    python eval.py runs/tiny-standard-seed1 --copying                 whether it copies from its context
    torchrun --standalone --nproc_per_node=8 eval.py runs/...         on several processes: the same numbers
    python eval.py runs/tiny-standard-seed1 --export=folder           weights that transformers loads
    python eval.py runs/tiny-standard-seed1 --tasks=hellaswag,piqa    benchmarks of lm-eval
    python eval.py --compare runs/tiny-standard-seed1 runs/...        their differences, item by item
    python eval.py Qwen/Qwen3-0.6B --data_dir=data/val                a Hugging Face folder or Hub id for the run
    python eval.py runs/tiny-standard-seed1 --ngram=5                 the loss of n-gram counts of its training tokens

The loss is the mean negative log-likelihood over the whole split in nats per token: every token but the first is
predicted once, from at most seq_len tokens before it. Neither the batch size nor the number of processes changes it.
Bits per byte are those of all these tokens, ends of documents too, over the bytes of the text.
"""
import json
import math
import sys
from contextlib import suppress
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from itertools import takewhile
from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import cross_entropy

import hub
from model import AttnRes, at_least_fp32, depth_logits, span
from prepare_fineweb import Parser, UserError, get_encoding, read_meta
from train import (Tokens, autocast, build, build_from, check_agreement, choose_device, choose_dtype, evaluate, guard,
                   load_config, load_source, start_processes, weights_checksum, with_vocabulary)


REPORTS = "routing", "scales", "copying"


def parse_args(argv):
    p = Parser("eval.py", description=__doc__)
    p.add_argument("run", nargs="?", help="run folder (its last.pt), checkpoint file, Hugging Face folder or Hub id")
    p.add_argument("--split", choices=("train", "val", "test"), help="default val")
    p.add_argument("--data_dir", help="folder with the token shards (default: that of the run)")
    p.add_argument("--batch", type=int, help="sequences per forward pass (default 8, of windows above 1,024 "
                   "tokens fewer)")
    p.add_argument("--seq_len", type=int, help="tokens that a prediction may look back on (default: the model's)")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float64"))
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.add_argument("--routing", action="store_true", help="report the routing weights instead of the loss")
    p.add_argument("--scales", action="store_true", help="report the sizes of embedding, sublayer outputs and stream; "
                   "the run may be a configuration: its model before training")
    p.add_argument("--copying", action="store_true", help="report the loss on random tokens and on the same once more: "
                   "whether the model copies from what it has read (induction)")
    p.add_argument("--windows", type=int, help="windows of seq_len tokens for these three (default 32)")
    p.add_argument("--figures", help="folder for the figures of --routing (default: routing/ in the run folder)")
    p.add_argument("--ngram", type=int, help="print the losses of 1- to n-gram counts of its training tokens instead")
    p.add_argument("--prompt", help="continue this text, until the model ends it, instead of evaluating")
    p.add_argument("--tokens", type=int, help="tokens to write at most (default 200)")
    p.add_argument("--samples", type=int, help="continuations to write (default 1)")
    p.add_argument("--temperature", type=float, help="0 takes the likeliest token (default 0.8)")
    p.add_argument("--top_k", type=int, help="sample among the k likeliest tokens; 0: among all (default)")
    p.add_argument("--seed", type=int, help="of the samples (default 1)")
    p.add_argument("--tasks", help="benchmarks of lm-eval, with commas between: hellaswag,piqa,arc_easy")
    p.add_argument("--limit", type=int, help="items of each task (default: all)")
    p.add_argument("--shots", type=int, help="examples before each item (default: those of the task)")
    p.add_argument("--task_dir", help="folder with further tasks for lm-eval")
    p.add_argument("--compare", nargs=2, metavar=("RUN_A", "RUN_B"), help="two runs with results of --tasks, in pairs")
    p.add_argument("--export", help="write the weights to this folder; transformers loads those of standard")
    p.add_argument("--form", choices=("huggingface", "nanodepth"), help="of --export (default: the first that fits)")
    args = p.parse_args(argv)
    # which flags belong to which of the tasks, with their defaults
    tasks = {"without --prompt": {"batch": 0, "seq_len": 0}, "without --prompt and --tasks": {"split": "val"},
             "with --routing, --scales or --copying": {"windows": 32}, "with --routing": {"figures": ""},
             "with --export": {"form": ""},
             "with --tasks": {"limit": 0, "shots": None, "task_dir": ""},
             "with --prompt": {"tokens": 200, "samples": 1, "temperature": 0.8, "top_k": 0, "seed": 1}}
    from_zero = "temperature", "top_k", "seed", "shots"
    given = args.given = [name for name in ("compare", "export", "ngram", "prompt", "tasks", *REPORTS)
                          if getattr(args, name) not in (None, False)]
    if len(given) > 1:
        p.error(f"--{given[1]} has no effect with --{given[0]}")
    if (args.run is None) != (given == ["compare"]):
        p.error("--compare takes two runs and no other" if args.run else "which run? give its folder")
    if args.ngram is not None and not 1 <= args.ngram <= 10:
        p.error(f"--ngram={args.ngram}: must be 1 to 10")
    report = bool({*given} & {*REPORTS})
    on_split = given in ([], ["ngram"]) or report
    active = [f"with --{name}" for name in given] + ["without --prompt and --tasks"] * on_split
    active += ["with --routing, --scales or --copying"] * report
    active += ["without --prompt"] * (on_split or given == ["tasks"])
    for task, flags in tasks.items():
        for name, default in flags.items():
            value = getattr(args, name)
            if value is None:
                setattr(args, name, default)
            elif task not in active:
                p.error(f"--{name} has an effect only {task}")
            elif not isinstance(value, str) and not (0 if name in from_zero else 1) <= value < 2**62:
                p.error(f"--{name}={value}: out of range")
    return args


def load_model(run, device, dtype):
    """(model in eval mode, checkpoint, its path) of a run, a Hugging Face folder or a Hub id."""
    saved, path = load_source(run)
    model = build_from(saved, path).to(device, torch.float64 if dtype == torch.float64 else None)
    return model.eval(), saved, path


def data_folder(args, saved):
    """Of the tokens: what args name, or what the run was trained on."""
    folder = args.data_dir or saved["config"].get("data_dir")
    if not folder:
        raise UserError(f"{args.run} was not trained here: give the folder of the tokens with --data_dir")
    return folder


def open_split(args, model, saved):
    """(the split's tokens, meta.json or None)"""
    folder = data_folder(args, saved)
    meta = read_meta(folder)
    if meta:
        check_tokenizer(args, saved, meta["tokenizer"])
    if args.seq_len > model.cfg.seq_len:
        raise UserError(f"--seq_len={args.seq_len}: the model was made for {model.cfg.seq_len}")
    length = args.seq_len or model.cfg.seq_len
    args.batch = args.batch or max(1, 8192 // max(1024, length))
    return Tokens(folder, args.split, length, model.cfg.vocab_size), meta


def check_tokenizer(args, saved, name):
    """Ids of another tokenizer mean other text, even where the vocabularies have one size."""
    trained = saved["data"].get("tokenizer")  # empty: shards that came without meta.json
    if trained and trained != name:
        raise UserError(f"{data_folder(args, saved)} is of the tokenizer {name}, but {args.run} was trained on "
                        f"{trained}: give a folder prepared with that one to --data_dir")


def measure(args, model, saved, device, dtype, rank, world):
    """Loss on a whole split as a dictionary; the same on every rank."""
    data, meta = open_split(args, model, saved)
    check_agreement({"the step": saved["step"], "the checksum of the weights": weights_checksum(model), "the data's "
                     "crc32": data.crc, "--batch": args.batch, "the dtype": str(dtype)})

    def show(part):
        if sys.stderr.isatty() and rank == 0:
            print(f"\r{100 * part:3.0f} %\033[K\r", end="", file=sys.stderr, flush=True)
    nll, count = evaluate(model, data, args.batch, device, dtype, None, rank, world, show)
    text_bytes = meta["splits"][args.split]["text_bytes"] if meta else None  # the first token is never text
    return {"run": args.run, "mode": model.cfg.residual_mode, "step": saved["step"],
            "data_dir": data_folder(args, saved), "split": args.split, "tokens": count, "loss": nll,
            "perplexity": math.exp(min(nll, 700)),
            "bits_per_byte": nll * count / math.log(2) / text_bytes if text_bytes else None}


def sample(args, model, saved, device, dtype):
    """Continuations of the prompt as a list of texts."""
    encoding = find_encoding(args, model, saved)
    ids = [*encoding.first, *encoding.encode_ordinary(args.prompt)]
    stops = {encoding.eot_token, *saved.get("stops", ())}
    for token in (t for t in encoding.spec["special_tokens"] if t in args.prompt and t not in encoding.spec["added"]):
        print(f"note: {token} in the prompt is taken as ordinary text", file=sys.stderr)
    torch.manual_seed(args.seed)
    with autocast(device, dtype):
        prompts = torch.tensor([ids] * args.samples, device=device)
        out = model.generate(
            prompts, args.tokens, args.temperature, args.top_k, encoding.n_vocab,
            lambda idx: bool(torch.isin(idx[:, len(ids):], torch.tensor([*stops], device=device)).any(1).all()))
    written = [takewhile(lambda i: i not in stops, row[len(ids):]) for row in out.tolist()]
    return [encoding.decode([*ids[len(encoding.first):], *row]) for row in written]


def find_encoding(args, model, saved):
    """The tokenizer beside the data, or that of a Hugging Face model: no network needed."""
    folder = saved.get("folder", "") if not args.data_dir else ""
    path = Path(folder or data_folder(args, saved)) / "tokenizer.json"
    if not path.exists() and saved["data"].get("tokenizer") != "bytes":
        raise UserError(f"{path} is missing, so text cannot be encoded: give a folder that prepare_fineweb.py "
                        "has filled with the same --tokenizer to --data_dir")
    encoding = get_encoding(str(path) if path.exists() else "bytes")
    if encoding.n_vocab > model.cfg.vocab_size:
        raise UserError(f"{path} has a vocabulary of {encoding.n_vocab}, more than the model's {model.cfg.vocab_size}: "
                        "give the folder of the data it was trained on with --data_dir, or remove from that file what "
                        "was added to it")
    check_tokenizer(args, saved, encoding.name)
    return encoding


def run_tasks(args, model, saved, path, device, dtype, rank):
    """Benchmarks of lm-eval; results go to tasks.json and tasks/ in the run folder."""
    encoding, table = find_encoding(args, model, saved), {}
    folder = path.parent if path.is_file() else Path("runs", str(args.run).strip("/").replace("/", "--"))

    def store(results):
        if rank:
            return
        found = hub.write_results(results, folder, saved["step"])
        table.update(found)
        for task, row in () if args.json else found.items():
            print(f"{task}: {', '.join(f'{k} {v:.4f}' for k, v in row.items() if isinstance(v, float))}"
                  f"{', n {:,}'.format(row['n']) if row['n'] else ''}", flush=True)  # a group of tasks has none
    try:
        hub.run_tasks(args.tasks.split(","), model, encoding, encoding.decode, partial(autocast, device, dtype),
                      args.batch or 8, args.seq_len or model.cfg.seq_len, saved.get("stops", ()),
                      limit=args.limit or None, shots=args.shots, folder=args.task_dir or None, store=store)
    finally:
        if args.json and table:
            print(json.dumps(table))
        elif table:
            print(f"wrote {folder}/tasks.json and tasks/; two models in pairs: python eval.py --compare RUN {folder}")


def compare_runs(args):
    rows = hub.compare(*args.compare)
    if args.json:
        return print(json.dumps(rows))
    for r in rows:
        if "metric" not in r:
            print(f"{r['task']}  not compared: its items have no score of their own  n {r['n']:,}")
            continue
        test = (f"only A {r['only_a']:,}, only B {r['only_b']:,}  p {r['p']:.4f}, of {len(rows)} tasks {r['holm']:.4f}"
                if "p" in r else "no test: not a score of 0 or 1")
        print(f"{r['task']}  {r['metric']} {r['a']:.4f} -> {r['b']:.4f}  {r['difference']:+.4f} (95 % {r['low']:+.4f} "
              f"to {r['high']:+.4f})  {test}  n {r['n']:,}")
    print("p: McNemar's exact test on the items that one of the two gets right, then Holm's over all tasks; interval: "
          "paired bootstrap")


def export(args):
    saved, _ = load_source(args.run)
    dtype = None if args.dtype == "auto" else getattr(torch, args.dtype)
    source = saved.get("folder") or saved["config"].get("init_from")  # of the tokenizer's files
    meta = None
    with suppress(UserError):  # the data may be gone
        meta = read_meta(data_folder(args, saved))
    print("\n".join(hub.export(saved, args.export, args.form, dtype, source, meta and meta.get("end_of_text"))))


def run(args):
    device, _ = choose_device(args.device)
    if device.type == "mps" and (args.routing or args.scales):  # in float64, which Apple's GPUs do not have
        device = torch.device("cpu")
    rank, world = start_processes(device)
    if rank and {*args.given} & {"compare", "export", "ngram", *REPORTS}:
        return None  # these are for one process
    if args.compare:
        return compare_runs(args)
    if args.export is not None:
        return export(args)
    dtype, _ = choose_dtype(args.dtype, device)
    make = start_of if args.scales and args.run.endswith(".toml") else load_model
    model, saved, path = make(args.run, device, dtype)
    if args.prompt is not None:
        texts = sample(args, model, saved, device, dtype)
        if rank == 0:
            print(json.dumps(texts) if args.json else "\n---\n".join(texts))
        return
    if args.tasks is not None:
        return run_tasks(args, model, saved, path, device, dtype, rank)
    if args.routing:
        return report_routing(args, model, saved, device, dtype)
    if args.ngram:
        return report_ngrams(args, model, saved)
    if args.scales:
        return report_scales(args, model, saved, device, dtype)
    if args.copying:
        return report_copying(args, model, saved, device, dtype)
    result = measure(args, model, saved, device, dtype, rank, world)
    if rank == 0 and args.json:
        print(json.dumps(result))
    elif rank == 0:
        bpb = f"{result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else "bits per byte n/a"
        print(f"{path} ({result['mode']}, step {result['step']}) on {result['data_dir']} {args.split}: loss "
              f"{result['loss']:.6f}, perplexity {result['perplexity']:.3f}, {bpb}, {result['tokens']:,} tokens")


def main(argv=None):
    guard("eval.py", lambda: run(parse_args(sys.argv[1:] if argv is None else argv)))


# ---------------------------------------------------------------------------------------------------------------------
# Scales: how large what the stream is made of


def start_of(path, device, dtype):
    """What load_model returns, for a configuration before its first step."""
    cfg, t = load_config([path])
    model = build(with_vocabulary(cfg, t))
    model.init_weights(t.seed)
    saved = dict(step=0, cfg=model.cfg, config=asdict(model.cfg) | asdict(t), data={})
    return model.to(device, torch.float64 if dtype == torch.float64 else None).eval(), saved, path


@torch.no_grad()
def scales(model, idx):
    """Sizes (rms) on tokens idx (B, T): embedding; [(sublayer, its output, the standard stream e + sum of outputs)];
    and the cosine between what the head reads and the embedding. A drowned embedding is one that the last has lost."""
    outputs, e = [], model.embed(idx).double()
    hooks = [s.register_forward_hook(lambda _, __, y: outputs.append(y.double())) for s in model.sublayers]
    try:
        h = model.trunk(idx).double()
    finally:
        for hook in hooks:
            hook.remove()
    x, found = e, []
    for site, y in enumerate(outputs):
        x = x + y
        found.append((span(site, site), rms(y), rms(x)))
    return rms(e), found, torch.cosine_similarity(h, e, dim=-1).mean().item()


def rms(x):
    return x.square().mean().sqrt().item()


def report_scales(args, model, saved, device, dtype):
    data, _ = open_split(args, model, saved)
    rows = torch.from_numpy(data.rows(range(min(args.windows, data.windows)))).to(device)
    with autocast(device, dtype):
        embedding, found, cosine = scales(model, rows[:, :-1])
    if args.json:
        return print(json.dumps(dict(
            run=args.run, mode=model.cfg.residual_mode, init=model.cfg.init, step=saved["step"], embedding=embedding,
            sublayers=found, cosine=cosine)))
    print(f"{args.run} ({model.cfg.residual_mode}, init {model.cfg.init}, step {saved['step']}), rms over "
          f"{rows[:, 1:].numel():,} tokens\n\n{'':10} {'output':>9} {'stream':>9}")
    print(f"{'embedding':10} {'':9} {embedding:9.4f}")
    for name, output, stream in found:
        print(f"{name:10} {output:9.4f} {stream:9.4f}")
    return print(f"\ncosine between what the head reads and the embedding: {cosine:.3f}")


def report_copying(args, model, saved, device, dtype):
    """Random tokens cannot be told, the same once more can: by a model that looks up what came behind the token before
    (induction, 2209.11895). Tokens are drawn from the split, as often as they are in its first million."""
    data, _ = open_split(args, model, saved)
    generator, half = torch.Generator().manual_seed(0), data.seq_len // 2
    if half < 2:
        raise UserError(f"seq_len={data.seq_len}: --copying needs 4 tokens or more")
    known = torch.from_numpy(data.read(0, min(data.total, 10**6)).astype(np.int64))
    idx = known[torch.randint(len(known), (args.windows, half), generator=generator)].repeat(1, 2).to(device)
    nll = []
    for part in idx.split(args.batch):
        with torch.no_grad(), autocast(device, dtype):
            logits = model(part[:, :-1])[0]
        nll.append(cross_entropy(logits.transpose(1, 2).to(at_least_fp32(logits.dtype)), part[:, 1:],
                                 reduction="none"))
    nll = torch.cat(nll)  # that of token t + 1 at t; the first token that comes again cannot be told either
    first, again = nll[:, :half - 1].mean().item(), nll[:, half:].mean().item()
    if args.json:
        return print(json.dumps(dict(run=args.run, mode=model.cfg.residual_mode, step=saved["step"], first=first,
                                     again=again)))
    return print(f"{args.run} ({model.cfg.residual_mode}, step {saved['step']}), {len(idx):,} rows of {half:,} random "
                 f"tokens: loss {first:.3f}, of the same once more {again:.3f}")


# ---------------------------------------------------------------------------------------------------------------------
# Routing: where the sites read


def entropy(p, dim=0):
    """In nats, over one axis of probabilities."""
    return -(p * p.clamp_min(1e-30).log()).sum(dim)


def shares(weights):
    """What part of a read each source has (S, ...): the weights where they are a softmax; modes need not have one."""
    return weights.abs() / weights.abs().sum(0).clamp_min(1e-30)


def js(p, q):
    """Jensen-Shannon divergence over the first axis, in nats: 0 for equal distributions, ln 2 for disjoint ones."""
    return entropy((p + q) / 2) - (entropy(p) + entropy(q)) / 2


def random_like(q, generator):
    """A random query of the norm of a trained one: the null of the comparisons."""
    r = torch.randn(q.shape, generator=generator, dtype=torch.float64).to(q)
    return r * (q.norm() / r.norm())


def measure_routing(model, rows, batch, device, dtype):
    """Statistics of all routes on windows of tokens (n, seq_len + 1), averaged over tokens."""
    res, generator, sums = model.residual, torch.Generator().manual_seed(0), {}

    def add(route, **values):
        mine = sums.setdefault(route, {})
        for name, value in values.items():
            mine[name] = mine.get(name, 0) + value.double() * len(idx) / len(rows)

    def look(site, state):
        routes = {r: w.double() for r, w in res.depth_weights(site, state).items()}
        for route, w in routes.items():
            p = shares(w)
            add(route, weights=w.mean((1, 2, 3)), max=w.amax(0).mean(), entropy=entropy(p).mean(),
                heads=(entropy(p.mean(-1)) - entropy(p).mean(-1)).mean())
        if f"{site}_v" in routes:
            nulls = [res.query[r] for r in routes]
            weights = [model_depth_weights(res, random_like(q, generator), state) for q in nulls]
            add(str(site), roles=js(*map(shares, routes.values())).mean(), roles_null=js(*weights).mean())
        if type(res) is AttnRes and res.route_heads == 1 and routes and model.cfg.n_embd % 4 == 0:
            q = res.query[str(site)]
            for name, query in (("probe", q), ("probe_null", random_like(q, generator))):
                z = depth_logits(query.view(4, -1), state, res.eps).double()  # the four slices' logits add up
                part, whole = z.softmax(0), z.sum(-1, keepdim=True).softmax(0)
                kl = (part * (part.clamp_min(1e-30).log() - whole.clamp_min(1e-30).log())).sum(0)
                add(str(site), **{name: kl.mean()})
    for idx in torch.from_numpy(rows[:, :-1]).split(batch):
        with torch.no_grad(), autocast(device, dtype):
            model.trunk(idx.to(device), look=look)
    out = []
    for route, s in sums.items():
        site, names = int(route.split("_")[0]), res.source_names(int(route.split("_")[0]))
        n, weights = len(names), s.pop("weights")
        row = dict(site=site, route=route, place=site_name(model, site), sources=names, weights=weights.tolist(),
                   **{k: v.item() for k, v in s.items()})
        row["entropy_share"], row["usage"] = row["entropy"] / math.log(n), math.exp(entropy(shares(weights))) / n
        out.append(row)
    return out


def model_depth_weights(res, query, keys):
    return depth_logits(query.view(res.route_heads, -1), keys, res.eps).double().softmax(0)


def site_name(model, site):
    return "head" if site == len(model.sublayers) else span(site, site)


def linear_cka(x, y):
    """Similarity of two representations (tokens, D), 0 to 1; free of rotations and of scale (1905.00414)."""
    x, y = x - x.mean(0), y - y.mean(0)
    return ((y.T @ x).square().sum() / ((x.T @ x).norm() * (y.T @ y).norm())).item()


def measure_histories(model, rows, batch, device, dtype):
    """Dual modes: linear CKA between the entries of both histories, and the rescue gain of each by site.

    Rescue gain: at one site both reads are exchanged between the sequences of a batch, then read j is put back.
    R_j = (loss without either - loss with j) / (loss without either - clean loss); 1: read j alone is enough.
    """
    res, last, idx = model.residual, [], torch.from_numpy(rows[:max(2, batch)]).to(device)
    with torch.no_grad(), autocast(device, dtype):
        model.trunk(idx[:, :-1], look=lambda site, state: last.append(state))
    first, second = ([t.flatten(0, 1).double() for t in h] for h in res.histories(last[-1]))
    cka = [[linear_cka(x, y) for y in second] for x in first]
    retrieve, rescue = res.retrieve, []

    def loss(site, keep):
        def corrupted(s, state):
            return [h if s != site or j in keep else h.roll(1, 0) for j, h in enumerate(retrieve(s, state))]
        res.retrieve = corrupted
        with torch.no_grad(), autocast(device, dtype):
            return model(idx[:, :-1], idx[:, 1:])[1].item()
    clean = loss(-1, ())
    for site in range(1, len(model.sublayers) + 1):
        none = loss(site, ())
        damage = none - clean
        gain = [(none - loss(site, (j,))) / damage for j in (0, 1)] if damage > 0.01 else None  # else noise
        rescue.append(dict(site=site, place=site_name(model, site), damage=damage, rescue=gain))
    res.retrieve = retrieve
    return dict(cka=cka, cka_off_diagonal=mean(c for i, r in enumerate(cka) for j, c in enumerate(r) if i != j),
                entries=res.source_names(len(model.sublayers)), rescue=rescue)


def mean(values):
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def report_routing(args, model, saved, device, dtype):
    """Print the routing statistics and, where matplotlib is installed, draw them."""
    if not hasattr(model.residual, "query"):
        raise UserError(f"residual_mode={model.cfg.residual_mode} has no routes to report")
    data, _ = open_split(args, model, saved)
    rows = data.rows(range(min(args.windows, data.windows)))
    routes = measure_routing(model, rows, args.batch, device, dtype)
    result = dict(run=args.run, mode=model.cfg.residual_mode, step=saved["step"], tokens=rows[:, 1:].size,
                  routes=routes)
    roles = [r["roles"] for r in routes if "roles" in r]
    if roles:  # a site with a single source cannot tell roles apart: reported with and without
        result["roles"] = dict(js=mean(roles), js_all_layers=sum(roles) / model.cfg.n_layer, null=mean(
            r["roles_null"] for r in routes if "roles" in r), js_share=mean(roles) / math.log(2))
    if any("probe" in r for r in routes):
        result["probe"] = {k: mean(r[k] for r in routes) for k in ("probe", "probe_null", "entropy")}
    if hasattr(model.residual, "histories"):
        result |= measure_histories(model, rows, args.batch, device, dtype)
    if args.json:
        print(json.dumps(result))
    else:
        print_routing(result)
    folder = Path(args.figures or (Path(args.run) if Path(args.run).is_dir() else Path(args.run).parent) / "routing")
    say = (lambda text: None) if args.json else print
    if find_spec("matplotlib") is None:
        return say("no figures: pip install matplotlib")
    folder.mkdir(parents=True, exist_ok=True)
    draw_routing(result, folder)
    return say(f"figures: {', '.join(sorted(p.name for p in folder.glob('*.png')))} in {folder}")


def print_routing(result):
    columns = [c for c in ("max", "entropy", "entropy_share", "usage", "heads", "roles", "probe", "probe_null")
               if any(abs(r.get(c, 0)) > 1e-12 for r in result["routes"])]
    print(f"{result['run']} ({result['mode']}, step {result['step']}), {result['tokens']:,} tokens\n")
    print(f"{'site':>8} {'route':>6} {'sources':>7}  " + "  ".join(f"{c.replace('_', ' '):>13}" for c in columns)
          + "  largest sources")
    for r in result["routes"]:
        top = sorted(zip(r["weights"], r["sources"]), reverse=True)[:3]
        print(f"{r['place']:>8} {r['route']:>6} {len(r['sources']):>7}  "
              + "  ".join(f"{r[c]:13.4f}" if c in r else " " * 13 for c in columns)
              + "  " + ", ".join(f"{name} {w:.2f}" for w, name in top))
    if "roles" in result:
        r = result["roles"]
        print(f"\nroles: Jensen-Shannon divergence {r['js']:.4f} nats ({r['js_share']:.4f} of ln 2), random queries "
              f"{r['null']:.4f}; with single-source sites counted as 0: {r['js_all_layers']:.4f}")
    if "probe" in result:
        r = result["probe"]
        print(f"\nprobe: the quarters of a query disagree with the whole by {r['probe']:.4f} nats (random queries "
              f"{r['probe_null']:.4f}); entropy of the whole {r['entropy']:.4f}")
    if "cka" in result:
        print(f"\nlinear CKA between the histories, off the diagonal: {result['cka_off_diagonal']:.4f}")
        for r in result["rescue"]:
            gain = "by history 0: {:6.3f}, 1: {:6.3f}".format(*r["rescue"]) if r["rescue"] else "n/a, too little damage"
            print(f"{r['place']:>8}  damage {r['damage']:8.4f} nats  rescue {gain}")


def pyplot():
    import matplotlib
    matplotlib.use("agg")  # files only, no screen needed
    import matplotlib.pyplot
    return matplotlib.pyplot


def draw_routing(result, folder):
    plt = pyplot()
    routes, title = result["routes"], f"{result['mode']}, step {result['step']}"
    kinds = {}  # role or history -> its routes
    for r in routes:
        suffix = r["route"].partition("_")[2]
        kinds.setdefault({"": "", "v": "values", "0": "history 0", "1": "history 1"}[suffix], []).append(r)
    names = max((r["sources"] for r in reversed(routes)), key=len)
    largest = max(w for r in routes for w in r["weights"])

    def save(figure, name):
        figure.tight_layout()
        figure.savefig(folder / name, dpi=110)
        plt.close(figure)

    width = 2.5 + 0.32 * len(names)
    fig, axes = plt.subplots(1, len(kinds), figsize=(width * len(kinds) + 0.8, 1.6 + 0.24 * len(routes) / len(kinds)),
                             squeeze=False)
    for ax, (kind, mine) in zip(axes[0], kinds.items()):
        table = [r["weights"] + [math.nan] * (len(names) - len(r["weights"])) for r in mine]
        image = ax.imshow(table, cmap="viridis", vmin=0, vmax=largest, aspect="auto")
        ax.set_xticks(range(len(names)), names, rotation=90, fontsize=8)
        ax.set_yticks(range(len(mine)), [r["place"] for r in mine], fontsize=8)
        ax.set_xlabel("source")
        ax.set_ylabel("site that reads")
        ax.set_title(f"{title}{': ' if kind else ''}{kind}", fontsize=10)
    fig.colorbar(image, ax=axes[0][-1], label="mean weight")
    save(fig, "weights.png")

    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6))
    for kind, mine in kinds.items():
        for parity, name in ((0, "attention and head"), (1, "MLP")):
            part = [r for r in mine if r["site"] % 2 == parity]
            label = f"{kind}{', ' if kind else ''}{name}"
            if part:
                left.plot([r["site"] for r in part], [r["max"] for r in part], "o-", ms=3, label=label)
                right.plot([r["site"] for r in part], [r["entropy_share"] for r in part], "o-", ms=3, label=label)
    sites = sorted({(r["site"], len(r["sources"])) for r in routes})
    left.plot([s for s, _ in sites], [1 / n for _, n in sites], "k:", lw=1, label="equal weights")
    left.set(xlabel="site (sublayer that reads)", ylabel="largest weight, mean over tokens", ylim=(0, 1), title=title)
    right.set(xlabel="site (sublayer that reads)", ylabel="entropy / ln(number of sources)", ylim=(0, 1.05),
              title=title)
    left.legend(fontsize=7)
    save(fig, "depth.png")

    for key, null, label, name in (("roles", "roles_null", "divergence of QK and V routes (nats)", "roles.png"),
                                   ("probe", "probe_null", "disagreement of a query's quarters (nats)", "probe.png"),
                                   ("heads", None, "disagreement of depth heads (nats)", "heads.png")):
        part = [r for r in routes if r.get(key, 0) > 1e-12]
        if part:
            fig, ax = plt.subplots(figsize=(5.5, 3.4))
            ax.plot([r["site"] for r in part], [r[key] for r in part], "o-", ms=3, label="trained queries")
            if null:
                ax.plot([r["site"] for r in part], [r[null] for r in part], "o--", ms=3, label="random queries")
            ax.set(xlabel="site (sublayer that reads)", ylabel=label, ylim=(0, None), title=title)
            ax.legend(fontsize=8)
            save(fig, name)
    if "cka" in result:
        fig, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2))
        image = left.imshow(result["cka"], cmap="magma", vmin=0, vmax=1)
        entries = result["entries"]
        left.set_xticks(range(len(entries)), entries, rotation=90, fontsize=8)
        left.set_yticks(range(len(entries)), entries, fontsize=8)
        left.set(xlabel="entry of history 1", ylabel="entry of history 0", title=f"{title}: linear CKA")
        fig.colorbar(image, ax=left)
        harmed = [r for r in result["rescue"] if r["rescue"]]
        for j in (0, 1):
            gains = [r["rescue"][j] for r in harmed]
            right.plot([r["site"] for r in harmed], gains, "o", label=f"history {j} put back")
        right.axhline(1, color="k", lw=0.8, ls=":")
        right.set(xlabel="site where both reads are corrupted", ylabel="share of the loss that is rescued", title=title)
        right.legend(fontsize=8)
        save(fig, "histories.png")


# ---------------------------------------------------------------------------------------------------------------------
# Counts of n-grams: what a loss is worth


MOST_COUNTED = 20_000_000  # tokens; their n-grams take about 3 GB of memory


def ngram_losses(train, split, starts, n):
    """Losses of a split under 1- to n-gram counts of some training windows, interpolated by Witten and Bell (1991).

    P_k(w | c) = (count(c w) + kinds(c) P_{k-1}(w | shorter c)) / (count(c) + kinds(c)), where kinds(c) is how many
    different tokens follow c; P_0 is uniform over the vocabulary. `train` and `split` are Tokens, starts those of the
    windows in train.
    """
    V, text, out = train.vocab_size, split.read(0, split.total), []
    rows = train.at(np.sort(starts))
    p = np.full(len(text) - 1, 1 / V)  # of text[1:]
    # contexts are numbers: of k tokens, that of the later k - 1 joined with the first, then its place among all seen
    seen, here = np.zeros_like(rows[:, 1:]), np.zeros_like(text[1:])  # before each target in rows and text
    for k in range(n):
        if k:
            keys = seen[:, k > 1:] * V + rows[:, :-k]
            contexts, seen = np.unique(keys, return_inverse=True)
            seen, here = seen.reshape(keys.shape), here[k > 1:]
            here = lookup(contexts, np.where(here < 0, -1, here * V + text[:-k]))
        first = max(k, 1)  # target that has a context of k tokens
        pairs, counts = np.unique(seen * V + rows[:, first:], return_counts=True)
        total, kinds = np.bincount(pairs // V, counts), np.bincount(pairs // V)
        known = here >= 0
        c, pair = here[known], lookup(pairs, (here * V + text[first:])[known])
        count, shorter = np.where(pair < 0, 0, counts[pair]), p[first - 1:][known]
        p[first - 1:][known] = (count + kinds[c] * shorter) / (total[c] + kinds[c])
        out.append(float(-np.log(p).mean()))
    return out


def report_ngrams(args, model, saved):
    """Print the n-gram losses of the tokens that a run has seen; of more than MOST_COUNTED, of the first ones."""
    split, _ = open_split(args, model, saved)
    train = Tokens(data_folder(args, saved), "train", model.cfg.seq_len, model.cfg.vocab_size)
    count = min(saved["tokens"], MOST_COUNTED, train.windows * train.seq_len) // train.seq_len
    if not count:
        raise UserError(f"{args.run} tells no training tokens to count")
    found = ngram_losses(train, split, train.order(saved["config"]["seed"], 0, count), args.ngram)
    result = dict(run=args.run, split=args.split, counted=count * train.seq_len, losses=found)
    print(json.dumps(result) if args.json else f"n-gram losses on {data_folder(args, saved)} {args.split}, counted in "
          f"{result['counted']:,} of the {saved['tokens']:,} training tokens of {args.run}:\n" +
          "\n".join(f"{n}-gram {loss:.4f}" for n, loss in enumerate(found, 1)))


def lookup(sorted_keys, wanted):
    """Index of each wanted key in sorted keys, -1 where it is not among them."""
    at = np.searchsorted(sorted_keys, wanted).clip(max=len(sorted_keys) - 1)
    return np.where(sorted_keys[at] == wanted, at, -1)


if __name__ == "__main__":
    main()
