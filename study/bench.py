"""How fast routing is: its passes, the routing alone, training steps of all modes against `standard`.

    python -m study.bench [--quick] [--json]     on this device, at least five interleaved rounds
    python -m study.bench --model                memory traffic per site, counted, on any machine
"""
import functools
import json
import statistics
import sys
import time

import torch
import torch.nn.functional as F

from kernels import Chain, Torch, fused_form, routed
from model import GPT, RESIDUAL_MODES, GPTConfig
from train import compile_model


class Counted(Torch):
    """The passes in PyTorch, counting the planes that the kernels of the same names would move."""
    planes = 0

    @classmethod
    def score(cls, r, k, t, reads, eps, y=None, below=None):
        cls.planes += 1 + (y is not None) + (below is not None)
        Torch.score(r, k, t, reads, eps, y, below)

    @classmethod
    def mix(cls, r, reads, t, lo, hi, carries=None, final=None):
        cls.planes += hi - lo + len(reads) * (1 + bool(carries) + bool(final and final[0] is not None))
        return Torch.mix(r, reads, t, lo, hi, carries, final)

    @classmethod
    def own(cls, r, u, x, scale, dx, added, factor):
        cls.planes += 3 + (added is not None)
        return Torch.own(r, u, x, scale, dx, added, factor)

    @classmethod
    def pull(cls, r, columns, t, reads, carries=None):
        carried = sum(g is not None for carry in carries or () for g in carry or ())
        each = 3 if r.keys is r.values else 5  # the source, its gradient, and the source again for dq
        cls.planes += len(reads) + carried + len(columns) * each
        return Torch.pull(r, columns, t, reads, carries)

    @classmethod
    def transport(cls, new, old, y, gate):
        cls.planes += 3 if old is None else 5
        Torch.transport(new, old, y, gate)

    @classmethod
    def transport_backward(cls, g, old, y, gate):
        cls.planes += 4 if old is None else 8
        return Torch.transport_backward(g, old, y, gate)


def planes_per_site(mode, n_layer, chunk, **knobs):
    """Planes that the kernels move per site, forward and backward. A plain residual with a fused norm moves 4 and 4."""
    residual = RESIDUAL_MODES[mode].cls(GPTConfig(n_layer=n_layer, n_head=8, n_embd=16, residual_mode=mode, **knobs))
    with torch.no_grad():
        residual.init_weights()
    Counted.planes = 0
    x = routed(fused_form(residual)[0](residual, Counted, chunk), torch.ones(1, 1, 16, requires_grad=True), 2 * n_layer)
    forward = Counted.planes
    x.sum().backward()
    return forward / (2 * n_layer + 1), (Counted.planes - forward) / (2 * n_layer + 1)


def stack_and_einsum(query, e, eps=1e-6):
    """The textbook form of `attnres`, for comparison: every read stacks its sources."""
    x, sources = e, [e]
    for q in [None, *query.values()]:
        V = torch.stack(sources)
        if q is not None:
            alpha = torch.einsum("d,sbtd->sbt", q.to(V.dtype), F.rms_norm(V, V.shape[-1:], eps=eps)).softmax(0)
            V = torch.einsum("sbt,sbtd->sbtd", alpha, V)
        x = F.rms_norm(V.sum(0), V.shape[-1:], eps=eps / len(sources) ** 2)
        sources.append(2 * x)
    return x


class Clock:
    """Wall time of calls in interleaved rounds, so that a slow minute hits all of them."""

    def __init__(self, device):
        self.sync = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def once(self, call):
        self.sync()
        start = time.perf_counter()
        call()
        self.sync()
        return time.perf_counter() - start

    def rounds(self, calls, seconds, least=2, warm=True):
        """{name: list of times}, after one round that warms up; at least so many rounds, more while `seconds` last."""
        for call in calls.values() if warm else ():
            call()
        times, end, done = {name: [] for name in calls}, time.perf_counter() + seconds, 0
        while done < least or time.perf_counter() < end:
            for name in list(calls)[::(-1) ** done]:  # there and back: no one always comes after the same neighbour
                times[name].append(self.once(calls[name]))
            done += 1
        return times


median = statistics.median


def ratio(times, name, base="standard"):
    """Median over rounds of base time / time."""
    return median([a / b for a, b in zip(times[base], times[name])])


def kept_bytes(model, idx, autocast):
    """Bytes that a forward pass keeps for its backward pass, in saved tensors and banks; parameters do not count."""
    found, ours, make = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}, model.fused
    chains = []

    def keep(x):
        if isinstance(x, torch.Tensor) and x.untyped_storage().data_ptr() not in ours:
            found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x
    if make:
        model.fused = lambda residual: chains.append(make(residual)) or chains[-1]
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x), autocast():
        loss = model(idx, idx)[1]
    for chain in chains:
        routes = chain.route if isinstance(chain.route, list) else [chain.route]
        for x in (*chain.banks, *getattr(chain, "y", ()), *(v for r in routes for v in vars(r).values())):
            keep(x)
    model.fused = make
    loss.backward()
    model.zero_grad()
    return sum(found.values())


def trainer(device, autocast, batch, seq_len, mode, **settings):
    """(model, function that makes one training step) in the fastest setting of the mode."""
    torch.manual_seed(0)
    model = GPT(GPTConfig(seq_len=seq_len, residual_mode=mode, **settings)).to(device)
    optimizer = torch.optim.AdamW(model.param_groups(0.1), lr=1e-4, fused=True)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    optimizer.step()  # makes its state
    optimizer.zero_grad()
    compile_model(model, "auto", device, lambda message: None)
    idx = torch.randint(settings["vocab_size"], (batch, seq_len), device=device)

    def step():
        with autocast():
            loss = model(idx, idx)[1]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, idx, step


def flops_per_step(model, idx):
    """Multiply-adds count two, backward twice forward; causal attention counts half its square."""
    cfg, tokens = model.cfg, idx.numel()
    matrices = model.count()["non_embedding"] + cfg.vocab_size * cfg.n_embd
    return tokens * (6 * matrices + 6 * cfg.n_layer * cfg.n_head * cfg.head_dim * idx.shape[1])


TARGETS = {"attnres": {}, "attnres_block": {}, "delta": {}, "delta_block": {}, "mhar": dict(route_heads=4), "rd": {},
           "dar_block": {}}


def benchmark(quick, say):
    """Everything that `python -m study.bench` prints, as a dictionary."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    gpu, clock, out = device.type == "cuda", Clock(device), {}
    dtype = torch.bfloat16 if gpu else torch.float32
    autocast = functools.partial(torch.autocast, device.type, dtype=torch.bfloat16, enabled=gpu)
    batch, seq_len, shape = 4, 256, dict(n_embd=384, n_head=6, n_kv_head=6, n_ffn=1024, vocab_size=257)
    if gpu:
        batch, seq_len = 32 if torch.cuda.mem_get_info()[1] > 100e9 else 8, 1024
        shape = dict(n_embd=768, n_head=12, n_kv_head=12, n_ffn=2048, vocab_size=50304)
    D, M = shape["n_embd"], batch * seq_len
    out["device"] = torch.cuda.get_device_name() if gpu else f"CPU, {torch.get_num_threads()} threads"

    copy, peak = speeds(clock, device, dtype, M, D)
    out |= dict(copy_gb_s=copy / 1e9, matmul_tflop_s=peak / 1e12)
    say(f"{out['device']}: copies {copy / 1e9:.0f} GB/s, matrix product {peak / 1e12:.2f} Tflop/s in {str(dtype)[6:]}")

    if not quick:
        out["passes"] = passes(clock, device, dtype, M, D, copy, say)
    e = torch.randn(min(batch, 8), seq_len, D, device=device).to(dtype).requires_grad_()
    out["chain_ms"] = chains(clock, e, GPTConfig(residual_mode="attnres", n_layer=12, **shape), quick, say)
    every = not quick and not gpu  # to compile the references on a GPU takes longer than all the rest
    modes = {m: {} for m in RESIDUAL_MODES if m != "standard"} | TARGETS if every else TARGETS
    make = functools.partial(trainer, device, autocast, batch, seq_len, n_layer=12, **shape)
    out |= steps(clock, modes, make, autocast, peak, 19 if quick else 150, say)
    if not quick:
        out["depth"] = growth(clock, device, autocast, batch, seq_len, shape, say)
        if not gpu:
            say("\nthe same in bfloat16")
            bf16 = functools.partial(torch.autocast, "cpu", dtype=torch.bfloat16)
            make = functools.partial(trainer, device, bf16, batch, seq_len, n_layer=12, **shape)
            out["bf16"] = steps(clock, {m: TARGETS[m] for m in ("attnres", "attnres_block")}, make, bf16, peak, 0, say)
    return out


def speeds(clock, device, dtype, M, D):
    """Bytes per second of a copy, read and written; operations per second of a matrix product."""
    planes, n = torch.randn(2, 64, M, D, device=device).to(dtype), 8192 if device.type == "cuda" else 1024
    a = torch.randn(n, n, device=device, dtype=dtype)
    copy = clock.rounds({"": lambda: planes[0].copy_(planes[1])}, 0.5)[""]
    return 2 * planes[0].nbytes / median(copy), 2 * n**3 / median(clock.rounds({"": lambda: a @ a}, 0.5)[""])


def chains(clock, e, cfg, quick, say):
    """Time of all reads of a model, forward and backward, in several ways."""
    say(f"\nrouting alone, forward + backward, {cfg.n_layer} layers, planes of {tuple(e.shape)}, full routing")
    residual, n = RESIDUAL_MODES["attnres"].cls(cfg).to(e.device), 2 * cfg.n_layer
    with torch.no_grad():
        residual.init_weights()
    ways = {"stack and einsum": lambda: stack_and_einsum(residual.query, e)}
    ways |= {"reference": lambda: routed(residual, e, n)}
    ways |= {f"fused, chunk {c}": lambda c=c: routed(Chain(residual, None, c), e, n) for c in (1, 4, 8)}
    upstream = torch.randn_like(e)
    times = clock.rounds({k: lambda f=f: f().backward(upstream) for k, f in ways.items()}, 0 if quick else 20, 1)
    for k in ways:
        say(f"  {k:18s} {1e3 * median(times[k]):8.1f} ms   {ratio(times, k, 'stack and einsum'):6.2f} times as fast")
    return {k: 1e3 * median(v) for k, v in times.items()}


def steps(clock, modes, make, autocast, peak, seconds, say):
    """Training steps of modes against `standard`."""
    runs = {mode: make(mode=mode, **knobs) for mode, knobs in ({"standard": {}} | modes).items()}
    kept = {mode: kept_bytes(model, idx, autocast) for mode, (model, idx, _) in runs.items()}
    calls = {mode: step for mode, (_, _, step) in runs.items()}
    times = clock.rounds(calls, seconds, warm=seconds > 60)  # in a hurry, kept_bytes has warmed up
    model, idx, _ = runs["standard"]
    say(f"\ntraining step, {model.cfg.n_layer} layers, width {model.cfg.n_embd}, {idx.numel()} tokens "
        f"({len(times['standard'])} interleaved rounds)\n"
        "  mode                    ms throughput      MFU   kept for backward")
    out = dict(step_ratio={}, step_ms={}, mfu={}, kept_ratio={})
    for mode in runs:
        ms = 1e3 * median(times[mode])
        found = ratio(times, mode), ms, flops_per_step(model, idx) / ms * 1e3 / peak, kept[mode] / kept["standard"]
        for key, value in zip(("step_ratio", "step_ms", "mfu", "kept_ratio"), found):
            out[key][mode] = round(value, 4)
        heads = "".join(f", {v} heads" for v in modes.get(mode, {}).values())
        say(f"  {mode + heads:18s} {ms:7.1f} {found[0]:10.3f} {found[2]:8.1%} {kept[mode] / 2**20:8.0f} MiB"
            f" {found[3]:5.2f}")
    return out


def growth(clock, device, autocast, batch, seq_len, shape, say):
    """Throughput against `standard` as models get deeper; the batch shrinks, or the deepest would take too long."""
    say("\nthroughput by number of layers\n  layers  tokens  attnres  attnres_block")
    out = {}
    for n_layer in (12, 24) if device.type == "cuda" else (6, 12, 24, 48):
        sequences = max(1, batch * 6 // n_layer)
        make = functools.partial(trainer, device, autocast, sequences, seq_len, **shape)
        modes = "standard", "attnres", "attnres_block"
        times = clock.rounds({m: make(mode=m, n_layer=n_layer)[2] for m in modes}, 10)
        out[n_layer] = [round(ratio(times, m), 4) for m in modes[1:]]
        say(f"  {n_layer:6d} {sequences * seq_len:7d} {out[n_layer][0]:8.3f} {out[n_layer][1]:8.3f}")
    return out


def passes(clock, device, dtype, M, D, copy, say):
    """Time of each pass, and its share of the speed of a copy."""
    say(f"\npasses over ({M}, {D}) planes     ms    GB/s  of copy")
    cfg = GPTConfig(residual_mode="attnres", n_layer=12, n_embd=D, n_head=1)
    residual, out = RESIDUAL_MODES["attnres"].cls(cfg).to(device), {}
    chain = Chain(residual)
    with torch.no_grad():
        residual.init_weights()
        x = chain.start(torch.randn(1, M, D, device=device).to(dtype))[0][0]
        for t in range(25):
            read = chain.forward(t, x)
        r, ops = chain.route, chain.ops
        for u in range(25):
            ops.own(r, u, *read[0], x, None, None)
        calls = {"score": (2, lambda: ops.score(r, 0, 0, range(25), 1e-6, x)),
                 "mix, 25 columns": (26, lambda: ops.mix(r, range(24, 25), 24, 0, 25, None, (None, None, 1e-6))),
                 "mix, 21 for 4 sites": (25, lambda: ops.mix(r, range(21, 25), 21, 0, 21)),
                 "own": (3, lambda: ops.own(r, 24, *read[0], x, None, None)),
                 "pull, 24 reads": (27, lambda: ops.pull(r, [0], 0, range(24))),
                 "pull, 4 from 20": (32, lambda: ops.pull(r, range(4), 3, range(4, 24)))}
        times = clock.rounds({k: call for k, (_, call) in calls.items()}, 5)
    for k, (planes, _) in calls.items():
        speed = planes * x.nbytes / median(times[k])
        out[k] = [1e3 * median(times[k]), speed / 1e9, speed / copy]
        say(f"  {k:22s} {out[k][0]:9.3f} {out[k][1]:7.0f} {out[k][2]:7.0%}")
    return out


def main(argv):
    unknown = set(argv) - {"--quick", "--json", "--model"}
    if unknown:
        sys.exit(f"study.bench knows --quick, --json and --model, not {' '.join(sorted(unknown))}")
    if {"--quick", "--model"} <= set(argv):
        sys.exit("study.bench: --quick has no effect with --model, which measures nothing")
    say = (lambda line: None) if "--json" in argv else functools.partial(print, flush=True)
    if "--model" not in argv:
        found = benchmark("--quick" in argv, say)
        return print(json.dumps(found)) if "--json" in argv else None
    out = {}
    say("planes moved per site, forward + backward (a plain residual with a fused norm: 4 + 4)\n"
        "  mode            layers    chunk 1       chunk 4       chunk 8")
    for mode, knobs in TARGETS.items():
        for n_layer in (12, 24, 36):
            found = [planes_per_site(mode, n_layer, chunk, **knobs) for chunk in (1, 4, 8)]
            out[f"{mode} {n_layer}"] = found
            say(f"  {mode:15s} {n_layer:5d}   " + "   ".join(f"{f:4.1f} + {b:4.1f}" for f, b in found))
    if "--json" in argv:
        print(json.dumps(out))


if __name__ == "__main__":
    main(sys.argv[1:])
