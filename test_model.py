"""Tests: identities rather than snapshots, on CPU, over every mode of RESIDUAL_MODES.

    python -m pytest                  everything but what is marked slow
    python -m pytest -m slow          the long runs
    python -m pytest -k attnres       what has a word in its name
"""
import contextlib
import csv
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import eval as evaluation
import kernels
import model as model_file
import prepare_fineweb
import train
from model import GPT, KNOBS, RESIDUAL_MODES, GPTConfig, KVCache, depth_mix
from prepare_fineweb import UserError

HERE = Path(__file__).resolve().parent
MODES = list(RESIDUAL_MODES)
ROUTED = [m for m in MODES if RESIDUAL_MODES[m].knobs]
# every mode, and the knobs that change what a mode computes
VARIANTS = {m: (m, {}) for m in MODES} | {
    f"rd: {c}": ("rd", dict(rd_control=c)) for c in ("tied", "average", "frozen_v")} | {
    f"dar_block: {c}": ("dar_block", dict(dar_routing=c)) for c in ("self_kv", "cross_v", "fixed_kv", "sep_v")} | {
    "rd: heads": ("rd", dict(route_heads=4)), "dar: heads": ("dar", dict(route_heads=4)),
    "delta: heads": ("delta", dict(route_heads=4)), "attnres_block: size 4": ("attnres_block", dict(depth_block=4)),
    "delta_block: released": ("delta_block", dict(delta_sources="released")),
    "delta_block: size 3": ("delta_block", dict(depth_block=3)),
    "mhar_delta: size 1": ("mhar_delta", dict(depth_block=1)), "dar: dynamic": ("dar", dict(dynamic_gates=True)),
    "hc: dynamic": ("hc", dict(dynamic_gates=True)), "hc: 2 streams": ("hc", dict(n_streams=2)),
    "mhc: 2 streams": ("mhc", dict(n_streams=2))}
SMALL = dict(vocab_size=61, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, seq_len=16)

# ---------------------------------------------------------------------------------------------------------------------
# Helpers


def make(mode, seed=0, randomise=True, dtype=torch.float64, **changes):
    """A small model; `randomise` moves gains and residual parameters away from their neutral start."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SMALL | dict(residual_mode=mode) | changes)).to(dtype)
    if randomise:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1 or name.startswith("residual"):
                    p.add_(torch.randn_like(p) * (0.5 if name.startswith("residual") else 0.2))
    return model


def variant(name, **changes):
    mode, knobs = VARIANTS[name]
    return make(mode, **knobs | changes)


def tokens(batch=2, length=16, seed=1, vocab=61):
    return torch.randint(vocab, (batch, length + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(model, idx):
    return model(idx[:, :-1], idx[:, 1:])[1]


def gradients(model, idx):
    model.zero_grad()
    loss = loss_of(model, idx)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_close(a, b, tol):
    """Largest difference, relative to the largest value."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        scale = max(v.abs().max() for v in b.values())
        for name in a:
            assert (a[name] - b[name]).abs().max() <= tol * scale, name
    else:
        assert (a - b).abs().max() <= tol * b.abs().max().clamp_min(1e-300)


def run_script(script, *args, processes=1, timeout=180, **env):
    """A real command line; with processes > 1 under torchrun."""
    launch = [sys.executable] + (["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
                                 if processes > 1 else [])
    return subprocess.run([*launch, str(script), *map(str, args)], capture_output=True, text=True, timeout=timeout,
                          env={**os.environ, "OMP_NUM_THREADS": "1", **env})


@pytest.fixture(scope="session")
def data(tmp_path_factory):
    """Token shards made from generated text: 120 documents, 20 % of them held out."""
    root = tmp_path_factory.mktemp("data")
    (root / "text").mkdir()
    rng = np.random.default_rng(0)
    words = ["".join(chr(97 + c) for c in rng.integers(26, size=rng.integers(2, 9))) for _ in range(200)]
    for i in range(120):
        text = " ".join(rng.choice(words, size=rng.integers(50, 300)))
        (root / "text" / f"{i:03d}.txt").write_text(text + ("\n<|endoftext|> é ☃" if i % 10 == 0 else ""), "utf-8")
    prepare_fineweb.main([f"--source={root}/text", f"--out={root}/shards", "--holdout=10", "--shard_tokens=30000",
                          "--workers=1"])
    return root / "shards"


def flags(data, out, **settings):
    base = dict(data_dir=data, out_dir=out, n_layer=2, n_head=2, n_embd=32, n_ffn=48, seq_len=32, micro_batch=2,
                tokens_per_step=256, max_steps=6, lr=1e-2, min_lr=1e-3, warmup_steps=2, eval_every=3, eval_tokens=500,
                log_every=1, save_every=2, device="cpu", dtype="float64")
    return [f"--{k}={v}" for k, v in (base | settings).items()]


def run_training(data, out, **settings):
    """Train in this process; returns the rows of log.csv."""
    cfg, t = train.load_config(flags(data, out, **settings))
    old = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    try:
        train.train(cfg, t)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return read_log(out)


def read_log(out):
    with open(Path(out) / "log.csv", newline="") as f:
        return list(csv.DictReader(f))


def measured(rows):
    """Log rows without what depends on the clock and the machine."""
    return [{k: v for k, v in r.items() if k not in ("tok_per_s", "ms", "mem_mb")} for r in rows]


def same_weights(a, b):
    a, b = (torch.load(p, weights_only=True)["model"] for p in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


# ---------------------------------------------------------------------------------------------------------------------
# depth_mix


def sources(n=5, d=12, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, d, generator=generator, dtype=dtype) for _ in range(n))


@pytest.mark.parametrize("heads", [1, 3, 12])
def test_depth_mix_is_its_equation(heads):
    s, q = sources(), sources(1, seed=1)[0][0, 0].view(heads, -1)
    stacked = torch.stack(s)  # (S, B, T, D)
    keys = stacked / (stacked.square().mean(-1, keepdim=True) + 0.1).sqrt()
    logits = torch.einsum("sbtgk,gk->sbtg", keys.unflatten(-1, (heads, -1)), q)
    expected = torch.einsum("sbtg,sbtgk->btgk", logits.softmax(0), stacked.unflatten(-1, (heads, -1))).flatten(-2)
    assert_close(depth_mix(q, s, eps=0.1), expected, 1e-14)
    assert torch.equal(depth_mix(q.flatten(), s), depth_mix(q.view(1, -1), s))


def test_depth_mix_properties():
    s, q = sources(), sources(1, seed=1)[0][0, 0]
    mixed = depth_mix(q, s)
    assert torch.equal(depth_mix(q, s[:1]), s[0])  # one source: that source, whatever the query
    assert_close(depth_mix(q, (s[0],) * 4), s[0], 1e-14)
    assert_close(depth_mix(q * 0, s), sum(s) / len(s), 1e-14)
    assert_close(depth_mix(q, s[::-1]), mixed, 1e-14)  # order does not matter
    stacked = torch.stack(s)
    assert (mixed <= stacked.amax(0) + 1e-12).all() and (mixed >= stacked.amin(0) - 1e-12).all()
    # the scale of a source does not change the weights, only what it contributes
    scaled = (7 * s[0], *s[1:])
    assert_close(depth_mix(q, s, keys=scaled, eps=0), depth_mix(q, s, eps=0), 1e-14)
    assert not torch.allclose(depth_mix(q, scaled, eps=0), depth_mix(q, s, eps=0))
    # a head sees only its own channels, and the width-wide norm
    q3, d = q.view(3, 4), s[0].shape[-1]
    moved = s[0].clone()
    moved[..., :4] = s[0][..., :4].flip(-1)  # permuted inside head 0: the norm stays
    changed = (depth_mix(q3, (moved, *s[1:])) - depth_mix(q3, s)).abs().amax((0, 1))
    assert (changed[:4] > 1e-3).any() and (changed[4:] < 1e-14).all() and d == 12


def test_depth_mix_extremes_are_finite():
    s, q = list(sources()), sources(1, seed=1)[0][0, 0] * 1e4
    s[1] = torch.zeros_like(s[1])
    s = [t.requires_grad_() for t in s]
    q.requires_grad_()
    out = depth_mix(q, s)
    out.sum().backward()
    assert out.isfinite().all() and all(t.grad.isfinite().all() for t in (*s, q))


def test_depth_mix_gradients():
    s = tuple(t.requires_grad_() for t in sources(3, 6))
    q = torch.randn(2, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(3)).requires_grad_()
    k = tuple(t.requires_grad_() for t in sources(3, 6, seed=5))
    assert torch.autograd.gradcheck(lambda q, *s: depth_mix(q, s, eps=1e-3), (q, *s))
    assert torch.autograd.gradcheck(lambda q, *t: depth_mix(q, t[:3], t[3:], eps=1e-3), (q, *s, *k))


def test_depth_mix_keeps_no_copies_for_backward():
    """In bf16: the sources themselves and scalars per token, whatever the number of sites that read them."""
    s = [t.requires_grad_() for t in sources(6, 256, dtype=torch.bfloat16)]
    q = torch.zeros(256, requires_grad=True)
    kept = {}
    with torch.autograd.graph.saved_tensors_hooks(
            lambda t: kept.setdefault(t.untyped_storage().data_ptr(), t.untyped_storage().nbytes()) and t, lambda t: t):
        for _ in range(3):
            depth_mix(q, s)
    assert sum(kept.values()) < 1.35 * sum(t.nbytes for t in s)


# ---------------------------------------------------------------------------------------------------------------------
# The host


class PlainGPT(nn.Module):
    """An ordinary pre-norm Transformer, written by hand: what `standard` has to equal and must not be slower than."""

    def __init__(self, cfg):
        super().__init__()
        self.cfg, D, K = cfg, cfg.n_embd, cfg.head_dim
        self.embed = nn.Embedding(cfg.vocab_size, D)
        self.layers = nn.ModuleList(nn.ModuleDict(dict(
            norm1=nn.RMSNorm(D, cfg.norm_eps), qkv=nn.Linear(D, (cfg.n_head + 2 * cfg.n_kv_head) * K, bias=False),
            q_norm=nn.RMSNorm(K, cfg.norm_eps), k_norm=nn.RMSNorm(K, cfg.norm_eps),
            out=nn.Linear(cfg.n_head * K, D, bias=False), norm2=nn.RMSNorm(D, cfg.norm_eps),
            up=nn.Linear(D, 2 * cfg.n_ffn, bias=False), down=nn.Linear(cfg.n_ffn, D, bias=False)))
            for _ in range(cfg.n_layer))
        self.norm = nn.RMSNorm(D, cfg.norm_eps)

    def forward(self, idx, targets):
        (B, T), K = idx.shape, self.cfg.head_dim
        x = self.embed(idx)
        frequency = self.cfg.rope_theta ** (-torch.arange(0, K, 2, dtype=x.dtype) / K)
        angle = torch.arange(T, dtype=x.dtype)[:, None] * frequency
        cos, sin = angle.cos(), angle.sin()

        def rotate(t):
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)
        for m in self.layers:
            sizes = [n * K for n in (self.cfg.n_head, self.cfg.n_kv_head, self.cfg.n_kv_head)]
            q, k, v = m["qkv"](m["norm1"](x)).split(sizes, -1)
            q, k, v = (t.view(B, T, -1, K).transpose(1, 2) for t in (q, k, v))
            q, k = rotate(m["q_norm"](q)), rotate(m["k_norm"](k))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=q.shape[1] != k.shape[1])
            x = x + m["out"](y.transpose(1, 2).reshape(B, T, -1))
            gate, up = m["up"](m["norm2"](x)).chunk(2, -1)
            x = x + m["down"](F.silu(gate) * up)
        logits = F.linear(self.norm(x), self.embed.weight)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def names(self):
        """Own parameter name -> name in GPT."""
        out = {"embed.weight": "embed.weight", "norm.weight": "gain"}
        for i in range(self.cfg.n_layer):
            for own, s, name in (("norm1", 0, "gain"), ("qkv", 0, "qkv.weight"), ("q_norm", 0, "q_gain"),
                                 ("k_norm", 0, "k_gain"), ("out", 0, "out.weight"), ("norm2", 1, "gain"),
                                 ("up", 1, "up.weight"), ("down", 1, "down.weight")):
                out[f"layers.{i}.{own}.weight"] = f"sublayers.{2 * i + s}.{name}"
        return out


def test_standard_equals_a_plain_transformer():
    model, idx = make("standard", norm_eps=1e-2), tokens()
    plain = PlainGPT(model.cfg).double()
    plain.load_state_dict({own: model.state_dict()[name] for own, name in plain.names().items()})
    loss, grads = gradients(model, idx)
    plain_loss, plain_grads = gradients(plain, idx)
    assert_close(loss, plain_loss, 1e-12)
    assert_close(model(idx)[0], plain(idx, idx)[0], 1e-10)
    assert_close({own: grads[name] for own, name in plain.names().items()}, plain_grads, 1e-10)


def test_standard_is_as_fast_as_a_plain_transformer():
    cfg = GPTConfig(vocab_size=257, n_layer=4, n_head=4, n_kv_head=2, n_embd=128, seq_len=128)
    models, idx = [PlainGPT(cfg), GPT(cfg)], tokens(8, 128)
    for _ in range(3):  # the machine may be busy: one clean measurement is enough
        seconds = [[], []]
        for _ in range(21):
            for model, times in zip(models, seconds):
                start = time.perf_counter()
                gradients(model, idx)
                times.append(time.perf_counter() - start)
        ratio = sorted(seconds[0])[10] / sorted(seconds[1])[10]
        print(f"speed of standard relative to a plain Transformer: {ratio:.3f}")
        if ratio >= 0.97:
            return
    pytest.fail(f"standard runs at {ratio:.3f} of a plain Transformer's speed")


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("changes", [{}, dict(qk_norm=False, tie_embeddings=False, head_dim=6, n_kv_head=1)])
def test_shapes_and_start(mode, changes):
    model, idx = make(mode, randomise=False, dtype=torch.float32, **changes), tokens()
    logits, loss = model(idx[:, :-1], idx[:, 1:])
    assert logits.shape == (2, 16, 61) and logits.dtype == torch.float32
    assert abs(loss.item() - math.log(61)) < 0.3
    assert model(idx)[1] is None
    ignored = idx[:, 1:].clone()
    ignored[:, 8:] = -1
    kept = F.cross_entropy(logits[:, :8].flatten(0, 1), idx[:, 1:9].flatten())
    assert_close(model(idx[:, :-1], ignored)[1], kept, 1e-6)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_gets_its_start_from_the_init_function(name):
    model = variant(name, randomise=False)
    before = {n: p.clone() for n, p in model.state_dict().items()}
    for p in (*model.parameters(), *model.buffers()):
        nn.init.constant_(p, math.nan)
    torch.manual_seed(0)
    model.init_weights()
    assert all(p.isfinite().all() for p in model.state_dict().values())
    torch.manual_seed(0)
    again = GPT(model.cfg).double()  # drawn in float32
    assert all(torch.equal(again.state_dict()[n], before[n]) for n in before)


@pytest.mark.parametrize("name", VARIANTS)
def test_modes_of_one_seed_share_all_other_weights(name):
    mine, base = variant(name, randomise=False).state_dict(), make("standard", randomise=False).state_dict()
    assert all(torch.equal(mine[n], base[n]) for n in base)
    assert all(n.startswith("residual.") for n in mine.keys() - base.keys())


@pytest.mark.parametrize("name", VARIANTS)
def test_future_tokens_do_not_matter(name):
    model, idx = variant(name), tokens()
    other = idx.clone()
    other[:, 9:] = (other[:, 9:] + 1) % 61
    a, b = model(idx[:, :16])[0], model(other[:, :16])[0]
    assert torch.equal(a[:, :9], b[:, :9]) and not torch.allclose(a[:, 9:], b[:, 9:])


@pytest.mark.parametrize("name", VARIANTS)
def test_generation_with_a_cache_equals_the_full_forward(name):
    model, idx = variant(name), tokens()[:, :16]
    cache, full = KVCache(model.cfg, 2, 16, "cpu", torch.float64), model(idx)[0]
    pieces = [model(part, cache=cache)[0] for part in idx.split([5, 4, 1, 1, 1, 4], dim=1)]
    assert_close(torch.cat(pieces, 1), full, 1e-12)
    greedy, out = idx[:, :3], model.generate(idx[:, :3], 10, temperature=0)
    for _ in range(10):
        greedy = torch.cat([greedy, model(greedy)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(out, greedy)


def test_generation_edge_cases():
    model, idx = make("standard"), tokens()
    for top_k in (0, 1, 10**9):
        for temperature in (0, 1e-6, 1.0):
            out = model.generate(idx[:, :4], 20, temperature, top_k)  # runs past seq_len
            assert out.shape == (2, 24) and torch.equal(out[:, :4], idx[:, :4])
    assert model.generate(torch.cat([idx] * 3, 1), 3).shape == (2, 54)  # a prompt longer than seq_len
    assert torch.equal(model.generate(idx, 5, 1.0, 1), model.generate(idx, 5, 0.0))
    with pytest.raises(ValueError, match="prompt is empty"):
        model.generate(idx[:, :0], 3)
    firsts = {tuple(model.generate(idx[:1, :2].expand(3, 2), 1)[:, -1].tolist()) for _ in range(20)}
    assert len(firsts) > 10  # samples of one batch are independent


@pytest.mark.parametrize("name", VARIANTS)
def test_remat_gives_the_same_gradients_bit_for_bit(name):
    plain, remat = variant(name), variant(name, remat=True)
    (loss, grads), (loss_2, grads_2) = gradients(plain, tokens()), gradients(remat, tokens())
    assert torch.equal(loss, loss_2) and all(torch.equal(grads[n], grads_2[n]) for n in grads)


@pytest.mark.parametrize("name", [*MODES, "dar: dynamic", "hc: dynamic", "dar_block: sep_v", "rd: average"])
def test_the_whole_model_traces_as_one_graph(name):
    torch._dynamo.reset()
    model, idx = variant(name, dtype=torch.float32, n_layer=2), tokens()
    loss, grads = gradients(model, idx)
    model.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    loss_2, grads_2 = gradients(model, idx)
    assert_close(loss, loss_2, 1e-6)
    assert_close(grads, grads_2, 1e-5)


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.parametrize("mode", ["standard", "attnres_block", "rd"])
def test_inductor_gives_the_same_numbers(mode):
    torch._dynamo.reset()
    model, idx = make(mode, dtype=torch.float32, n_layer=2), tokens()
    loss, grads = gradients(model, idx)
    model.compile(dynamic=False)
    loss_2, grads_2 = gradients(model, idx)
    assert_close(loss, loss_2, 1e-6)
    assert_close(grads, grads_2, 1e-5)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_parameter_acts(name):
    """A gradient for each on the first step, so that DDP needs no search, and a real one within three steps."""
    model, idx, still = variant(name, randomise=False), tokens(4), None
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):  # mhc: the streams separate, then W moves, then its factor; all others need two
        _, grads = gradients(model, idx)
        assert all(g is not None for g in grads.values())
        scale = max(g.abs().max() for g in grads.values())
        zero = {n for n, g in grads.items() if g.abs().max() < 1e-12 * scale}
        still = zero if still is None else still & zero
        optimizer.step()
    assert still == set()


@pytest.mark.parametrize("mode", MODES)
def test_optimizer_groups_are_a_partition(mode):
    model = make(mode, tie_embeddings=False)
    groups, names = model.param_groups(0.1, 3.0), {p: n for n, p in model.named_parameters()}
    found = [names[p] for g in groups for p in g["params"]]
    assert sorted(found) == sorted(names.values())
    for g in groups:
        for n in (names[p] for p in g["params"]):
            matrix = n.endswith((".qkv.weight", ".out.weight", ".up.weight", ".down.weight"))
            assert g["weight_decay"] == (0.1 if matrix else 0.0), n
            assert g["lr_mult"] == (3.0 if n.startswith("residual.") else 1.0), n


@pytest.mark.parametrize("name", VARIANTS)
def test_thirty_steps_overfit_a_batch(name):
    model, idx = variant(name, randomise=False, dtype=torch.float32), tokens()
    optimizer = torch.optim.AdamW(model.param_groups(0.0), lr=1e-2)
    before = loss_of(model, idx).item()
    for _ in range(30):
        gradients(model, idx)
        optimizer.step()
    assert loss_of(model, idx).item() < 0.2 * before


def test_autocast_keeps_streams_in_bf16_and_logits_in_fp32():
    for mode in MODES:
        model, seen = make(mode, dtype=torch.float32), []
        for sublayer in model.sublayers:
            sublayer.register_forward_hook(lambda m, x, y, seen=seen: seen.append({x[0].dtype, x[1].dtype, y.dtype}))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert model(tokens())[0].dtype == torch.float32
        assert set().union(*seen) == {torch.bfloat16}, mode


# ---------------------------------------------------------------------------------------------------------------------
# Modes: what they read, what they reduce to, and an independent implementation of each

# Sources of sites 0 .. 6 of a 3-layer model by hand: e the embedding, digits the outputs that a source sums, 0 a null.
# The head of the delta modes has no sources. dar: those of one history, with all write weights one and no transport.
BLOCK_2 = ["e", "e 0", "e 01", "e 01 2", "e 01 23", "e 01 23 4", "e 01 23 45"]
FULL = ["e", "e 0", "e 0 1", "e 0 1 2", "e 0 1 2 3", "e 0 1 2 3 4", "e 0 1 2 3 4 5"]
LATE_2 = ["e", "e", "e", "e 01", "e 01", "e 01 23", ""]
SOURCE_TABLE = [
    ("attnres", {}, FULL),
    ("mhar", {}, FULL),
    ("attnres_block", {}, BLOCK_2),
    ("mhar_block", {}, BLOCK_2),
    ("rd", {}, BLOCK_2),
    ("attnres_block", {"depth_block": 1}, FULL),
    ("attnres_block", {"depth_block": 4}, ["e", "e 0", "e 01", "e 012", "e 0123", "e 0123 4", "e 0123 45"]),
    ("attnres_block", {"depth_block": 5}, ["e", "e 0", "e 01", "e 012", "e 0123", "e 01234", "e 01234 5"]),
    ("attnres_block", {"depth_block": 9}, ["e", "e 0", "e 01", "e 012", "e 0123", "e 01234", "e 012345"]),
    ("attnres_cumulative", {}, ["e", "e e0", "e e0 e01", "e e0 e01 e012", "e e0 e01 e012 e0123",
                                "e e0 e01 e012 e0123 e01234", "e e0 e01 e012 e0123 e01234 e012345"]),
    ("delta", {}, FULL[:6] + [""]),
    ("delta_block", {}, LATE_2),
    ("delta_block", {"delta_sources": "released"}, ["e", "e", "e", "e 01", "e 01", "e 01 e23", ""]),
    ("delta_block", {"depth_block": 1}, ["e", "e", "e 0", "e 0 1", "e 0 1 2", "e 0 1 2 3", ""]),
    ("delta_block", {"depth_block": 1, "delta_sources": "released"},
     ["e", "e", "e 0", "e 0 e1", "e 0 e1 02", "e 0 e1 02 e13", ""]),
    ("mhar_delta", {}, ["n e", "n e", "n e", "n e 01", "n e 01", "n e 01 e23", ""]),
    ("dar", {}, BLOCK_2),
    ("dar_block", {"depth_block": 3}, ["e", "e 0", "e 01", "e 012", "e 012 3", "e 012 34", "e 012 345"]),
]


@pytest.mark.parametrize("mode, knobs, table", SOURCE_TABLE, ids=lambda v: v if isinstance(v, str) else str(v)[:40])
def test_sources_of_each_site(mode, knobs, table):
    model = make(mode, **knobs)
    res, outputs = model.residual, {name: torch.randn(1, 1, 32).double() for name in "e012345n"}
    with torch.no_grad():
        for name, p in res.named_parameters():
            if name.startswith("null"):
                p.copy_(outputs["n"][0, 0])
            elif name.startswith("gate."):
                p.fill_(100.0 if "rho" in name else 0.0)
    state, seen = res.start(outputs["e"]), []
    for site in range(7):
        find = (lambda site, state: res.histories(state)[0]) if hasattr(res, "histories") else res.sources
        seen.append(find(site, state) if table[site] else ())
        if site < 6:
            state = res.write(site, state, outputs[str(site)])
    for site, row in enumerate(table):
        expected = [sum(outputs[c] for c in name) for name in row.split()]
        assert len(seen[site]) == len(expected) == len(res.source_names(site)), site
        assert all(torch.allclose(a, b) for a, b in zip(seen[site], expected)), site
        routes = {r.split("_")[0] for r in res.query}
        assert (str(site) in routes) == (len(expected) > 1), site


@pytest.mark.parametrize("depth_block", [1, 2, 3, 4, 5, 6, 7])
def test_sources_add_up_to_the_stream(depth_block):
    res = make("attnres_block", depth_block=depth_block, n_layer=5).residual
    e, *y = sources(11, 32)
    state, x = res.start(e), e
    for site in range(10):
        state, x = res.write(site, state, y[site]), x + y[site]
        assert_close(sum(state), x, 1e-14)
    assert len(state) == len(res.source_names(10)) == 1 + math.ceil(10 / depth_block)


@pytest.mark.parametrize("released", ["true", "released"])
def test_what_delta_sources_add_up_to(released):
    res = make("delta_block", depth_block=2, n_layer=5, delta_sources=released).residual
    e, *y = sources(11, 32)
    state, at_start = res.start(e), [e]  # of the stream, where depth block k begins
    for site in range(10):
        state = res.write(site, state, y[site])
        if site % 2:
            at_start.append(state[0])
    entries = state[1:]
    for k in range(1, 6):
        total = sum(entries[:k + 1]) if released == "true" else entries[k] + entries[k - 1]
        assert_close(total, at_start[k], 1e-14)


@pytest.mark.parametrize("eps", [1e-6, 1e-2])
@pytest.mark.parametrize("name", VARIANTS)
def test_zero_queries_are_exactly_standard(name, eps):
    """Zero queries read the mean of a partition of the stream; the scaled epsilon makes that exact for any epsilon.

    A mode that starts elsewhere says so in its row of RESIDUAL_MODES (exact_start=False).
    """
    model, base = variant(name, randomise=False, norm_eps=eps), make("standard", randomise=False, norm_eps=eps)
    idx, exact = tokens(), RESIDUAL_MODES[model.cfg.residual_mode].exact_start
    exact = exact and not name.endswith(("average", "fixed_kv"))  # these have a start of their own
    (loss, grads), (base_loss, base_grads) = gradients(model, idx), gradients(base, idx)
    assert (abs(loss / base_loss - 1) < 1e-12) == exact, f"{name}: exact_start in its row of RESIDUAL_MODES is wrong"
    if exact:
        assert_close(model(idx)[0], base(idx)[0], 1e-11)
        assert_close({n: grads[n] for n in base_grads}, base_grads, 1e-10)


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "standard"])
def test_residual_parameters_change_the_function(name):
    assert not torch.allclose(variant(name)(tokens())[0], make("standard")(tokens())[0], atol=1e-3)


def copy_of(model, mode, **changes):
    """The same parameters in another mode, as far as it has them."""
    other = make(mode, **changes)
    state = model.state_dict()
    other.load_state_dict({n: state[n] for n in other.state_dict()})
    return other


def assert_same(a, b, tol=0.0):
    """Outputs and shared gradients of two models."""
    idx = tokens()
    (_, grads), (_, grads_2) = gradients(a, idx), gradients(b, idx)
    shared = [n for n in grads if n in grads_2]
    if tol == 0:
        assert torch.equal(a(idx)[0], b(idx)[0]) and all(torch.equal(grads[n], grads_2[n]) for n in shared)
    else:
        assert_close(a(idx)[0], b(idx)[0], tol)
        assert_close({n: grads[n] for n in shared}, {n: grads_2[n] for n in shared}, tol)


@pytest.mark.parametrize("a, b", [
    (("attnres", {}), ("attnres_block", {"depth_block": 1})),
    (("mhar", {}), ("attnres", {"route_heads": 2})),
    (("mhar", {"route_heads": 1}), ("attnres", {})),
    (("mhar_block", {"route_heads": 1}), ("attnres_block", {})),
    (("rd", {"rd_control": "tied"}), ("attnres_block", {})),
    (("rd", {"rd_control": "tied", "route_heads": 4}), ("mhar_block", {"route_heads": 4})),
    (("dar", {}), ("dar_block", {"depth_block": 2})),
], ids=str)
def test_modes_that_are_the_same_bit_for_bit(a, b):
    model = make(a[0], **a[1])
    assert_same(model, copy_of(model, b[0], **b[1]))


def test_several_heads_are_another_function_than_one():
    for mode in (m for m in MODES if "route_heads" in RESIDUAL_MODES[m].knobs):
        model = make(mode, route_heads=4)
        assert not torch.allclose(model(tokens())[0], copy_of(model, mode, route_heads=1)(tokens())[0], atol=1e-4), mode


def test_rd_with_equal_queries_is_its_parent():
    model = make("rd")
    for control in ("none", "average"):
        other = copy_of(model, "rd", rd_control=control)
        with torch.no_grad():
            for route, q in other.residual.query.items():
                if route.endswith("_v"):
                    q.copy_(other.residual.query[route[:-2]])
        idx = tokens()
        assert_close(other(idx)[0], copy_of(model, "attnres_block")(idx)[0], 1e-12)
    parent = copy_of(model, "attnres_block")(idx)[0]
    for control in ("none", "average", "frozen_v"):  # else they are other functions
        assert not torch.allclose(copy_of(model, "rd", rd_control=control)(idx)[0], parent, atol=1e-4), control


def test_rd_routes_reach_their_own_role_only():
    model, idx = make("rd"), tokens()
    with torch.no_grad():
        for sublayer in model.sublayers[::2]:
            sublayer.qkv.weight[-16:] = 0  # the values of 2 heads of 8 channels
    _, grads = gradients(model, idx)
    assert all(g.abs().max() == 0 for n, g in grads.items() if n.endswith("_v"))
    model = make("rd", qk_norm=False)
    with torch.no_grad():
        for sublayer in model.sublayers[::2]:
            sublayer.qkv.weight[:-16] = 0  # queries and keys
    _, grads = gradients(model, idx)
    assert grads["residual.query.2"].abs().max() == 0 and grads["residual.query.2_v"].abs().max() > 0


def test_closed_gates_are_the_base_bit_for_bit():
    model = make("mhar_delta")
    with torch.no_grad():
        for gate in model.residual.gate.values():
            gate.zero_()
    idx, base = tokens(), copy_of(model, "standard")
    assert torch.equal(model(idx)[0], base(idx)[0])
    (_, grads), (_, base_grads) = gradients(model, idx), gradients(base, idx)
    assert_close({n: grads[n] for n in base_grads}, base_grads, 1e-14)
    for n, g in grads.items():
        if n.startswith("residual"):
            assert (g.abs().max() == 0) == (".gate." not in n), n


def dual(**changes):
    """A dar_block model and a function that sets its gates: logits of a, b and rho."""
    model = make("dar_block", depth_block=3, **changes)

    def gates(a=None, b=None, rho=None):
        with torch.no_grad():
            for name, p in model.residual.gate.items():
                value = {"a": a, "b": b, "r": rho}[name[0]]
                if value is not None:
                    p.copy_(torch.tensor(value))
    return model, gates


ROUTINGS = "reciprocal", "self_kv", "cross_v", "fixed_kv"


def test_dual_routings_agree_on_equal_histories():
    model, gates = dual()
    gates(a=[0.0, 0.0], b=[0.0, 0.0])
    parent = make("attnres_block", depth_block=3)
    with torch.no_grad():
        for name, p in copy_of(model, "standard").named_parameters():
            parent.get_parameter(name).copy_(p)
        for route in parent.residual.query:
            for j in "01":
                model.residual.query[f"{route}_{j}"].copy_(parent.residual.query[route])
    for rho in (-1.0, 0.0, 3.0):
        gates(rho=[rho])
        for routing in ROUTINGS:
            other = copy_of(model, "dar_block", depth_block=3, dar_routing=routing)
            assert_close(other(tokens())[0], parent(tokens())[0], 1e-12)


def test_dual_routings_differ_on_different_histories():
    model, _ = dual()
    outs = [copy_of(model, "dar_block", depth_block=3, dar_routing=r)(tokens())[0] for r in ROUTINGS]
    for i in range(4):
        for j in range(i):
            assert not torch.allclose(outs[i], outs[j], atol=1e-4), (ROUTINGS[i], ROUTINGS[j])


def test_dual_histories_differ_only_through_the_write_weights():
    model, gates = dual()
    gates(b=[0.0, 0.0])
    state = model.residual.start(sources(1, 32)[0])
    for site, y in enumerate(sources(6, 32, seed=2)):
        state = model.residual.write(site, state, y)
    first, second = model.residual.histories(state)
    assert all(torch.allclose(a, b, atol=1e-14) for a, b in zip(first, second))
    other = copy_of(model, "dar_block", depth_block=3, dar_routing="self_kv")
    assert_close(model(tokens())[0], other(tokens())[0], 1e-12)  # equal keys


def test_dual_does_not_depend_on_the_names_of_its_histories():
    model, _ = dual()
    for routing in ROUTINGS:
        a, b = (copy_of(model, "dar_block", depth_block=3, dar_routing=routing) for _ in range(2))
        with torch.no_grad():
            for route in a.residual.query:
                b.residual.query[route[:-1] + "10"[int(route[-1])]].copy_(a.residual.query[route])
            for name, p in a.residual.gate.items():
                b.residual.gate[name].copy_(p.flip(0) if len(p) == 2 else p)
        same = torch.allclose(a(tokens())[0], b(tokens())[0], atol=1e-12)
        assert same == (routing != "fixed_kv"), routing


def test_dual_transport_is_doubly_stochastic():
    model, gates = dual()
    res, (e, y0, y1) = model.residual, sources(3, 32)
    state = res.write(0, res.start(e), y0)
    for rho in (-2.0, 0.0, 100.0):
        gates(rho=[rho])
        before, after = (sum(h[-1] for h in res.histories(s)) for s in (state, res.write(1, state, y1)))
        written = 2 * res.gate["b1"].sigmoid().sum() * y1
        assert_close(after, before + written, 1e-13)  # the sum moves by what is written, whatever rho is
    kept = [h[-1] + 2 * g * y1 for h, g in zip(res.histories(state), res.gate["b1"].sigmoid())]  # rho = 1
    assert all(torch.allclose(h[-1], n, atol=1e-12) for h, n in zip(res.histories(res.write(1, state, y1)), kept))


def test_combinations_without_sense_are_refused():
    with pytest.raises(ValueError, match="depth_block=1: both histories would be multiples"):
        make("dar_block", depth_block=1)
    with pytest.raises(ValueError, match="n_streams=1: needs at least 2"):
        make("hc", n_streams=1)


def test_sinkhorn_and_its_closed_form_for_two():
    logits = torch.randn(5, 4, 4, dtype=torch.float64)
    m = model_file.doubly_stochastic(logits)
    assert (m > 0).all() and (m.sum(-1) - 1).abs().max() < 1e-3 and (m.sum(-2) - 1).abs().max() < 1e-12
    two = torch.randn(50, 2, 2, dtype=torch.float64)
    exact, m = model_file.doubly_stochastic(two), two.exp()
    for _ in range(2000):
        m = m / m.sum(-1, keepdim=True)
        m = m / m.sum(-2, keepdim=True)
    assert_close(exact, m, 1e-9)


def test_default_depth_blocks():
    sizes = {12: 4, 16: 4, 24: 6, 28: 8, 36: 10}
    assert {n: GPTConfig(n_layer=n, residual_mode="attnres_block").knob("depth_block") for n in sizes} == sizes


@pytest.mark.parametrize("mode", MODES)
def test_counts_follow_the_formulas(mode):
    for n_layer, n_embd in ((3, 32), (5, 48)):
        model = make(mode, n_layer=n_layer, n_embd=n_embd)
        size = getattr(model.residual, "depth_block", 1)
        numbers = dict(L=n_layer, D=n_embd, S=size, N=math.ceil(2 * n_layer / size), n=4)
        base, n = make("standard", n_layer=n_layer, n_embd=n_embd).count(), model.count()
        assert n["router"] == eval(RESIDUAL_MODES[mode].added, numbers) == n["total"] - base["total"]
        assert n["total"] == sum(p.numel() for p in set(model.parameters())) == n["non_embedding"] + 61 * n_embd


def test_router_gradients():
    """Facts about the gradients of one route: the spec's derivation, without its formulas."""
    s, q = [t.requires_grad_() for t in sources(4, 12)], sources(1, 12, seed=1)[0][0, 0].requires_grad_()
    u = sources(1, 12, seed=2)[0]
    grad = torch.autograd.grad((depth_mix(q * 0, s) * u).sum(), [q, *s], retain_graph=True)
    for g in grad[1:]:
        assert_close(g, u / 4, 1e-12)  # zero query: the plain mean
    keys = [t.detach().clone().requires_grad_() for t in s]
    for g, k in zip(torch.autograd.grad((depth_mix(q, s, keys, eps=0.0) * u).sum(), keys), keys):
        assert (g * k).sum(-1).abs().max() < 1e-13  # keys are free of scale
    logits = model_file.depth_logits(q, s, 1e-6).detach().requires_grad_()
    out = model_file.depth_sum(logits.softmax(0), s)
    g, = torch.autograd.grad((out * u).sum(), logits)
    assert g.sum(0).abs().max() < 1e-14
    one = torch.autograd.grad(depth_mix(q, s[:1]).sum(), [q])[0]
    assert one.abs().max() == 0


@pytest.mark.parametrize("name", VARIANTS)
def test_each_mode_is_what_its_paper_says(name):
    """Against a naive implementation from the papers' equations, from random residual parameters."""
    model, idx = variant(name), tokens()
    (loss, grads), (naive_loss, naive_grads) = gradients(model, idx), naive_gradients(model, idx)
    assert_close(loss, naive_loss, 1e-12)
    assert_close(grads, naive_grads, 1e-10)
    assert_close(model(idx)[0], naive_logits(model.cfg, dict(model.named_parameters()), idx), 1e-10)


def naive_gradients(model, idx):
    params = {n: p.detach().clone().requires_grad_() for n, p in model.named_parameters()}
    logits = naive_logits(model.cfg, params, idx[:, :-1])
    loss = F.cross_entropy(logits.flatten(0, 1), idx[:, 1:].flatten())
    loss.backward()
    return loss.detach(), {n: p.grad if p.grad is not None else torch.zeros_like(p) for n, p in params.items()}


def naive_logits(cfg, P, idx):
    """All modes, written from their equations: stack, normalise, einsum. Shares nothing with model.py but names."""
    mode, eps, L = cfg.residual_mode, cfg.norm_eps, cfg.n_layer
    e, T = P["embed.weight"][idx], idx.shape[1]

    def norm(x, k=1.0):
        """RMSNorm of x in units of k: x/k with the epsilon of x."""
        return x / torch.sqrt((x ** 2).mean(-1, keepdim=True) + eps * k ** 2)

    def f(s, qk, v=None, k=1.0):
        """Sublayer s with its pre-norm on unnormalised reads."""
        own = {n.split(".", 2)[2]: p for n, p in P.items() if n.startswith(f"sublayers.{s}.")}
        qk, v = norm(qk, k) * own["gain"], norm(qk if v is None else v, k) * own["gain"]
        if s % 2:
            gate, up = (qk @ own["up.weight"].T).split(cfg.n_ffn, -1)
            return (gate * torch.sigmoid(gate) * up) @ own["down.weight"].T
        H, G, K = cfg.n_head, cfg.n_kv_head, cfg.head_dim
        w = own["qkv.weight"]
        q = (qk @ w[:H * K].T).view(*qk.shape[:2], H, K)
        key = (qk @ w[H * K:(H + G) * K].T).view(*qk.shape[:2], G, K)
        val = (v @ w[(H + G) * K:].T).view(*qk.shape[:2], G, K)
        q, key = norm(q) * own["q_gain"], norm(key) * own["k_gain"]
        angle = torch.arange(T)[:, None].double() * cfg.rope_theta ** (-torch.arange(0, K, 2).double() / K)
        turn = torch.polar(torch.ones_like(angle), angle)[None, :, None]

        def rope(x):
            z = torch.complex(x[..., :K // 2], x[..., K // 2:]) * turn
            return torch.cat([z.real, z.imag], -1)
        key, val = (x.repeat_interleave(H // G, 2) for x in (rope(key), val))
        scores = torch.einsum("bthk,bshk->bhts", rope(q), key) / K ** 0.5
        scores = scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf)
        y = torch.einsum("bhts,bshk->bthk", scores.softmax(-1), val)
        return y.flatten(-2) @ own["out.weight"].T

    def head(x, k=1.0):
        return (norm(x, k) * P["gain"]) @ P["embed.weight"].T

    heads = cfg.route_heads or (cfg.n_kv_head if mode.startswith("mhar") else 1)
    size = 1 if mode in ("attnres", "mhar", "delta") else 2 if mode == "dar" else cfg.depth_block or 2

    def R(route, values, keys=None):
        """The router: softmax over sources of query times normalised key, per head."""
        V, C = torch.stack(values), torch.stack(keys or values)
        if len(V) == 1:
            return V[0]
        C = C / torch.sqrt((C ** 2).mean(-1, keepdim=True) + eps)
        q = P[f"residual.query.{route}"].view(heads, -1)
        a = torch.einsum("sbtgk,gk->sbtg", C.unflatten(-1, (heads, -1)), q).softmax(0)
        return torch.einsum("sbtg,sbtgk->btgk", a, V.unflatten(-1, (heads, -1))).flatten(-2)

    if mode == "standard":
        x = e
        for s in range(2 * L):
            x = x + f(s, x)
        return head(x)
    if mode == "attnres_cumulative":
        xs = [e]
        for s in range(2 * L):
            xs.append(xs[-1] + f(s, R(s, xs)))
        return head(R(2 * L, xs))
    if mode in ("attnres", "attnres_block", "mhar", "mhar_block", "rd"):
        closed, partial = [e], None
        for s in range(2 * L):
            src = closed if partial is None else [*closed, partial]
            h, c = R(s, src), len(src)
            if mode == "rd" and s % 2 == 0 and c > 1 and cfg.rd_control != "tied":
                v = sum(src) / c if cfg.rd_control == "frozen_v" else R(f"{s}_v", src)
                out = f(s, (h + v) / 2, k=1 / c) if cfg.rd_control == "average" else f(s, h, v, 1 / c)
            else:
                out = f(s, h, k=1 / c)
            partial = out if partial is None else partial + out
            if (s + 1) % size == 0:
                closed, partial = [*closed, partial], None
        src = closed if partial is None else [*closed, partial]
        return head(R(2 * L, src), 1 / len(src))
    if mode == "delta":
        h, D_ = e, [e]
        for s in range(2 * L):
            v = f(s, h + R(s, D_), k=1 + 1 / len(D_))
            h, D_ = h + v, [*D_, v]
        return head(h)
    if mode in ("delta_block", "mhar_delta"):
        released = mode == "mhar_delta" or cfg.delta_sources == "released"
        h, src, boundary, waiting = e, [e], e, None
        for s in range(2 * L):
            if s % size == 0 and s:  # a depth block has ended: its source is appended after this read
                waiting = h - (src[-1] if released else boundary)
                boundary = h
            if mode == "mhar_delta":
                x = h + P[f"residual.gate.{s}"] * R(s, [P[f"residual.null.{s}"].expand_as(e), *src])
                v = f(s, x)
            else:
                v = f(s, h + R(s, src), k=1 + 1 / len(src))
            if waiting is not None:
                src, waiting = [*src, waiting], None
            h = h + v
        return head(h)
    if mode in ("dar", "dar_block"):
        H, partial = [[e], [e]], [None, None]
        which = {"reciprocal": lambda j: (1 - j, j), "sep_v": lambda j: (1 - j, j), "self_kv": lambda j: (j, j),
                 "cross_v": lambda j: (j, 1 - j), "fixed_kv": lambda j: (0, 1)}[cfg.dar_routing]

        def gate(name, *context):
            logits = P[f"residual.gate.{name}"]
            if not cfg.dynamic_gates:
                return [logit for logit in logits]
            u = P[f"residual.u.{name}"]
            return [logit + (norm(x) * v).sum(-1, keepdim=True) for logit, v, x in zip(logits, u, context)]

        def retrieve(s):
            cand = [H[j] if partial[j] is None else [*H[j], partial[j]] for j in (0, 1)]
            if len(cand[0]) == 1:
                return e, 1.0
            h = [R(f"{s}_{j}", cand[which(j)[1]], cand[which(j)[0]]) for j in (0, 1)]
            if cfg.dar_routing == "sep_v":
                h = [x + x @ P["residual.sep_v"].T for x in h]
            a0, a1 = gate(f"a{s}", *h)
            return (a0.exp() * h[0] + a1.exp() * h[1]) / (a0.exp() + a1.exp()), 1 / len(cand[0])
        for s in range(2 * L):
            x, k = retrieve(s)
            y = f(s, x, k=k)
            b = [2 * torch.sigmoid(g) for g in gate(f"b{s}", y, y)]
            if partial[0] is None:
                partial = [b[0] * y, b[1] * y]
            else:
                rho = torch.sigmoid(gate(f"rho{s}", y)[0])
                partial = [rho * partial[j] + (1 - rho) * partial[1 - j] + b[j] * y for j in (0, 1)]
            if (s + 1) % size == 0:
                H, partial = [[*H[j], partial[j]] for j in (0, 1)], [None, None]
        return head(*retrieve(2 * L))
    n = cfg.n_streams
    H = torch.stack([e] * n, -2)  # (B, T, n, D)
    for s in range(2 * L):
        def get(name, s=s):
            return (P.get(f"residual.{part}.{name}{s}") for part in ("bias", "w", "factor"))
        if mode == "hc":
            A, Rs, b = torch.eye(n)[s % n].double(), *(next(get(name)) for name in "Rb")
            A = next(get("A")) if s else A
            if cfg.dynamic_gates:
                def move(name):
                    _, w, factor = get(name)
                    return factor * torch.tanh(norm(H) @ w.T)  # noqa: B023 called in this turn of the loop only
                A = A + (move("A")[..., 0] if s else 0)
                Rs, b = Rs + move("R"), b + move("b")[..., 0]
            x = (A[..., None] * H).sum(-2)
            y = f(s, x) if s else f(s, e)
            H = torch.einsum("btji,btjd->btid", Rs.expand(*e.shape[:2], n, n), H) + b[..., None] * y[..., None, :]
        else:
            c = norm(H.flatten(-2))  # over all streams

            def logits(name):
                bias, w, factor = get(name)
                return factor * torch.einsum("btx,kx->btk", c, w.flatten(1)) + bias.flatten()  # noqa: B023 called in this turn of the loop only
            k = 1 / (1 + math.exp(-1)) + (n - 1) / (1 + math.exp(1))
            y = f(s, (torch.sigmoid(logits("A"))[..., None] * H).sum(-2), k=k) if s else f(s, e)
            if 0 < s < 2 * L - 1:
                M = logits("R").exp().unflatten(-1, (n, n))
                for _ in range(20):
                    M = M / M.sum(-1, keepdim=True)
                    M = M / M.sum(-2, keepdim=True)
                if n == 2:
                    diagonal, other = (M[..., 0, 0] * M[..., 1, 1]) ** 0.5, (M[..., 0, 1] * M[..., 1, 0]) ** 0.5
                    M = torch.stack([diagonal, other, other, diagonal], -1).unflatten(-1, (2, 2))
                    M = M / M.sum(-1, keepdim=True)
                H = torch.einsum("btij,btjd->btid", M, H)
            H = H + 2 * torch.sigmoid(logits("b"))[..., None] * y[..., None, :]
    return head(H.mean(-2))


def test_streams_and_routes_separate_in_training():
    idx = tokens(4)
    for name in ("dar", "dar_block", "mhc", "mhc: 2 streams", "rd: average", "hc"):
        model = variant(name, randomise=False, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.param_groups(0.0), lr=1e-2)
        for _ in range(5):
            gradients(model, idx)
            optimizer.step()
        if name == "rd: average":
            q = model.residual.query
            assert all((q[r] - q[r[:-2]]).abs().max() > 1e-3 for r in q if r.endswith("_v"))
            continue
        states = []
        with torch.no_grad():
            model.trunk(idx, look=lambda site, state, states=states: states.append(state))
        last = states[-1]
        pairs = zip(*model.residual.histories(last)) if name.startswith("dar") else [(last[0], last[1])]
        assert max(((a - b).norm() / a.norm()).item() for a, b in pairs) > 1e-3, name


def test_depth_weights_are_the_weights_that_are_used():
    for name in VARIANTS:
        model, idx = variant(name), tokens()[:, :16]
        before = model(idx)[0]
        found = model.depth_weights(idx)
        assert torch.equal(model(idx)[0], before)
        routed = hasattr(model.residual, "query")
        assert len(found) == (len(model.residual.query) if routed else 0), name
        for r in found:
            assert r["weights"].shape == (len(r["sources"]), 2, 16, model.residual.route_heads)
            assert (r["weights"].sum(0) - 1).abs().max() < 1e-12 and not r["weights"].requires_grad
            assert len(set(r["sources"])) == len(r["sources"]) and r["route"].startswith(str(r["site"]))
    model = make("attnres", n_layer=1)
    e = model.embed(idx)
    weights = model.depth_weights(idx)[0]["weights"]
    y = model.sublayers[0](rms(e), rms(e), model_file.rotary(0, 16, 8, 1e4, None, torch.float64))
    read = (weights[0] * e + weights[1] * y)
    assert_close(model.residual.mix("1", (e, y)), read, 1e-12)


def rms(x, eps=1e-6):
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


# ---------------------------------------------------------------------------------------------------------------------
# Fused routing: kernels.py against the reference. Without a GPU its Triton kernels run in Triton's interpreter.

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    FUSED = {n: v for n, v in VARIANTS.items() if variant(n).fused()[0]}
FUSED |= {
    "attnres: 8 heads": ("attnres", dict(route_heads=8)),
    "attnres_block: size 3": ("attnres_block", dict(depth_block=3)),
    "mhar_block: 3 heads": ("mhar_block", dict(route_heads=3, n_embd=48)), "rd: size 1": ("rd", dict(depth_block=1)),
    "rd: size 3, 8 heads": ("rd", dict(depth_block=3, route_heads=8)),
    "dar_block: size 3, 4 heads": ("dar_block", dict(depth_block=3, route_heads=4)),
    "delta_block: 1, released": ("delta_block", dict(depth_block=1, delta_sources="released")),
    "mhar: wide": ("mhar", dict(n_embd=112, head_dim=8, route_heads=7))}


def fused_pair(name, ops=None, chunk=0, **changes):
    """The same model on the reference and fused, in a given back end and chunk."""
    mode, knobs = FUSED[name]
    models = [make(mode, **dict(route_impl=impl) | knobs | changes) for impl in ("reference", "fused")]
    chain = models[1].fused()[0]
    models[1].router = lambda: chain(models[1].residual, ops, chunk)
    return models


@pytest.fixture
def poisoned():
    """Fresh memory holds NaN, so that nothing is read that was not written; and only deterministic operations run."""
    kernels.SPARE.clear()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def assert_fused(reference, fused, idx, tol, repeat=True):
    expected, found = gradients(reference, idx), gradients(fused, idx)
    assert_close(found[0], expected[0], tol)
    assert_close(found[1], expected[1], 100 * tol)
    if not repeat:
        return
    assert_close(fused(idx)[0], reference(idx)[0], 10 * tol)
    for bank in kernels.SPARE:
        bank.fill_(math.nan)
    again = gradients(fused, idx)
    assert torch.equal(found[0], again[0]) and all(torch.equal(g, again[1][n]) for n, g in found[1].items())


@pytest.mark.parametrize("name", FUSED)
def test_fused_routing_is_the_reference(name, poisoned):
    """Outputs and all gradients, in one phase and in two of any chunk, the same bits on repetition."""
    for chunk in (1, 2, 3, 4, 5, 16):
        for batch, length in ((3, 7), (1, 1)):
            assert_fused(*fused_pair(name, kernels.Torch, chunk, n_layer=4), tokens(batch, length), 1e-13)


@pytest.mark.parametrize("name", FUSED)
def test_triton_kernels_are_the_reference(name, poisoned):
    for chunk in (1, 3):
        reference, fused = fused_pair(name, kernels.Triton, chunk)
        assert_fused(reference, fused.float(), tokens(1, 3), 2e-6, repeat=name == "rd")


@pytest.mark.parametrize("scale", [0.0, 100.0])
@pytest.mark.parametrize("ops", [kernels.Torch, kernels.Triton])
def test_fused_routing_with_flat_and_peaked_weights(scale, ops, poisoned):
    for name in ("attnres_block", "delta", "rd: heads", "dar_block: size 3, 4 heads"):
        reference, fused = fused_pair(name, ops, 2)
        for model in (reference, fused):
            with torch.no_grad():
                for q in model.residual.query.values():
                    q.mul_(scale)
        fp64 = ops is kernels.Torch
        assert_fused(reference, fused if fp64 else fused.float(), tokens(1, 3), 1e-12 if fp64 else 2e-5, repeat=fp64)


def isolated(residual, chain, sources, upstream):
    """Reads of given sources, not made by sublayers -> what all sites read, gradients of sources and of parameters."""
    ys, reads = [s.detach().clone().requires_grad_() for s in sources], []
    state = chain.start(ys[0])
    for t in range(len(ys)):
        reads += dict.fromkeys(chain.read(t, state))  # one tensor or two
        if t + 1 < len(ys):
            state = chain.write(t, state, ys[t + 1])
    sum((x * g).sum() for x, g in zip(reads, upstream)).backward()
    grads = [p.grad for p in residual.parameters()]
    residual.zero_grad()
    return [x.detach() for x in reads], [y.grad for y in ys], grads


@pytest.mark.parametrize("ops", [kernels.Torch, kernels.Triton])
@pytest.mark.parametrize("name", ["attnres", "attnres_block: size 3", "delta", "delta_block", "mhar", "dar_block"])
def test_fused_routing_in_bf16(name, ops):
    """bf16 planes against fp64 on the same numbers.

    Reads are better than those of the reference in bf16, gradients of sources about as good: autograd rounds every sum.
    Gradients of queries are noisier, for delta comes from the rounded x; the noise is independent between rows.
    """
    rows, tol = (64, 1) if ops is kernels.Torch else (3, 2)  # the interpreter is slow, and truncates to bf16
    reference, fused = (m.residual for m in fused_pair(name, n_embd=64, n_layer=4))
    fused.float()
    for a, b in zip(reference.parameters(), fused.parameters()):
        a.data = b.detach().double()
    g = torch.Generator().manual_seed(3)
    sources, upstream = torch.randn(2, 9, 1, rows, 64, generator=g).bfloat16()
    chain = getattr(kernels, type(fused).fused)
    expected = isolated(reference, reference, sources.double(), upstream.double())

    def errors(found):
        pairs = [[torch.cat([x.flatten().double() for x in r[i]]) for r in (found, expected)] for i in range(3)]
        return [((a - b).norm() / b.norm()).item() for a, b in pairs]
    usual = errors(isolated(fused, fused, sources, upstream))
    for chunk in (1, 4):
        found = errors(isolated(fused, chain(fused, ops, chunk), sources, upstream))
        for error, limit in zip(found, (min(4e-3, 1.1 * usual[0]), min(1e-2, 1.4 * usual[1]), 2e-2)):
            assert error <= tol * limit, (found, usual)


def test_fused_routing_takes_any_upstream_gradient(poisoned):
    reference, fused = (m.residual for m in fused_pair("attnres"))
    sources = torch.randn(7, 2, 3, 32).double()
    upstream = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in torch.randn(7, 2, 3, 32).double()]
    expanded = [torch.randn(32).double().expand(2, 3, 32) for _ in range(7)]
    for given in (upstream, expanded):
        a = isolated(reference, reference, sources, given)
        b = isolated(fused, kernels.Chain(fused), sources, given)
        for x, y in zip([*b[0], *b[1], *b[2]], [*a[0], *a[1], *a[2]]):
            assert_close(x, y, 1e-12)


def test_fused_routing_of_many_sources(poisoned):
    reference, fused = fused_pair("attnres", n_layer=50)
    assert_fused(reference, fused, tokens(1, 3), 1e-12)
    residual = make("attnres", n_layer=33, dtype=torch.float32).residual  # more than one tile of reads
    sources, upstream = torch.randn(2, 67, 1, 1, 32)
    found = isolated(residual, kernels.Chain(residual, kernels.Triton, 4), sources, upstream)
    expected = isolated(residual, residual, sources, upstream)
    assert_close(torch.stack(found[1]), torch.stack(expected[1]), 1e-4)
    assert_close(torch.stack(found[2]), torch.stack(expected[2]), 1e-4)


def test_two_forwards_may_come_before_a_backward(poisoned):
    reference, fused = fused_pair("rd")
    for order in ((0, 1), (1, 0), None):
        found = []
        for model in (reference, fused):
            model.zero_grad()
            losses = [loss_of(model, tokens(2, 9, seed)) for seed in (1, 2)]
            for loss in [losses[i] for i in order] if order else [sum(losses)]:
                loss.backward()
            found.append({n: p.grad for n, p in model.named_parameters()})
        assert_close(found[1], found[0], 1e-11)
    for _ in range(5):
        loss_of(fused, tokens()).backward()
    assert len(kernels.SPARE) <= 4


def test_what_fused_routing_cannot_do_is_refused():
    fused, idx = fused_pair("attnres")[1], tokens()
    loss = loss_of(fused, idx)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="runs once, as a whole and in order"):
        loss.backward()
    gradient = torch.autograd.grad(loss_of(fused, idx), fused.embed.weight, create_graph=True)[0]
    with pytest.raises(RuntimeError, match="twice"):
        gradient.sum().backward()
    chain = kernels.Chain(fused.residual)
    state = chain.start(torch.randn(1, 2, 32).double().requires_grad_())
    x = chain.read(0, state)[0]
    with pytest.raises(RuntimeError, match="came to site 0 where site 6 was due"):
        x.sum().backward()


def test_what_fused_routing_does_not_suit_runs_on_the_reference(monkeypatch):
    with pytest.warns(UserWarning, match="n_embd=40 is not a multiple of 16: routing runs on the reference"):
        model = make("attnres", n_embd=40)
    assert model.router() is model.residual
    with pytest.raises(ValueError, match="route_impl=fused: n_embd=40 is not a multiple of 16; use auto or reference"):
        make("attnres", n_embd=40, route_impl="fused")
    for name in ("rd: average", "rd: frozen_v", "dar_block: sep_v", "dar: dynamic"):
        with pytest.warns(UserWarning, match="has no fused form"):
            assert variant(name).fused()[0] is None
    for mode in ("standard", "attnres_cumulative", "mhar_delta", "hc", "mhc"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert make(mode).router() is not None
        with pytest.raises(ValueError, match=f"route_impl=fused: residual_mode={mode} has no fused form"):
            make(mode, route_impl="fused")
    model = make("attnres")
    assert isinstance(model.router(), kernels.Chain)
    with torch.no_grad():
        assert model.router() is model.residual  # nothing to gain without gradients
    monkeypatch.setitem(sys.modules, "kernels", None)
    with pytest.warns(UserWarning, match="kernels.py cannot be imported"):
        assert isinstance(make("attnres").router(), model_file.AttnRes)


def test_a_subclass_does_not_inherit_the_fused_form():
    class Mine(model_file.AttnRes):
        def scale(self, n_sources):
            return 1
    model = make("attnres")
    model.residual.__class__ = Mine
    assert model.fused() == (None, "Mine does not declare a fused form") and model.router() is model.residual


@pytest.mark.parametrize("name", ["attnres", "rd", "delta_block", "dar_block"])
def test_fused_routing_with_compiled_sublayers(name):
    torch._dynamo.reset()
    reference, fused = fused_pair(name)
    for sublayer in fused.sublayers:
        sublayer.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    assert_fused(reference, fused, tokens(), 1e-12)
    torch._dynamo.reset()
    whole = make(*VARIANTS[name][:1], route_impl="fused", **VARIANTS[name][1])
    whole.compile(backend="aot_eager", dynamic=False)  # in pieces between the sites
    assert_fused(reference, whole, tokens(), 1e-12)


def test_fused_routing_keeps_little_for_backward():
    idx, kept = tokens(2, 64)[:, :64], {}
    for mode in ("standard", "attnres"):
        model = make(mode, dtype=torch.float32, n_layer=12, n_embd=384, n_head=6, n_kv_head=6, n_ffn=1024, seq_len=64)
        kept[mode] = kernels.kept_bytes(model, idx, contextlib.nullcontext)
    assert 1 < kept["attnres"] / kept["standard"] <= 1.10


def test_fused_routing_without_sparse_kernels(monkeypatch, poisoned):
    monkeypatch.setattr(kernels, "sparse", False)
    for name in ("mhar", "dar_block: size 3, 4 heads"):
        assert_fused(*fused_pair(name), tokens(2, 5), 1e-13)


def test_geometry_of_the_bank():
    """What the kernels compute from step, pairs and cap is where the chain puts its planes."""
    for mode, knobs in FUSED.values():
        residual = make(mode, **knobs | dict(n_layer=5)).residual
        chain = getattr(kernels, type(residual).fused)(residual)
        for t in range(chain.T + 1):
            for k in range(chain.columns(t)):
                slot = min(k * chain.step, chain.cap(t))
                assert chain.plane(k, t) == slot + chain.pairs * (max(slot - 1, 0) // 2)
        chain.start(torch.zeros(1, 1, residual.width))
        for route in chain.route if isinstance(chain.route, list) else [chain.route]:
            single = [u for u in range(chain.U) if route.offset[u + 1] - route.offset[u] == 1]
            assert len(single) >= 1 and not route.q[single].any()  # no choice: rounding must not make a gradient of it


@contextlib.contextmanager
def counted_planes(D, skip):
    """Counts what the interpreter loads from and stores to bf16 planes of width D; `skip` lists other bf16 tensors."""
    from triton.runtime.interpreter import InterpreterBuilder as Builder
    found, old = [0], (Builder.create_masked_load, Builder.create_masked_store)

    def count(pointers, mask, dtype):
        first = int(pointers.data.min())
        other = any(t.data_ptr() <= first < t.data_ptr() + t.nbytes for t in skip)
        tile = mask.data.ndim == 2 or mask.data.size == 1024
        if dtype.primitive_bitwidth == 16 and tile and not other:
            found[0] += int(mask.data.sum()) / D

    def load(self, pointers, mask, *args):
        out = old[0](self, pointers, mask, *args)
        count(pointers, mask, out.dtype.scalar)
        return out

    def store(self, pointers, value, mask, *args):
        count(pointers, mask, value.dtype.scalar)
        return old[1](self, pointers, value, mask, *args)
    Builder.create_masked_load, Builder.create_masked_store = load, store
    try:
        yield found
    finally:
        Builder.create_masked_load, Builder.create_masked_store = old


@pytest.mark.skipif(torch.cuda.is_available(), reason="counts in Triton's interpreter, which a GPU turns off")
@pytest.mark.parametrize("name", ["attnres", "attnres_block", "delta", "delta_block", "mhar", "rd", "dar_block"])
def test_bytes_follow_the_formula(name, monkeypatch):
    gemms, M = [0], 2

    def gemm(a, b):
        gemms[0] += 1
        return a.float() @ b.float()
    monkeypatch.setattr(kernels, "gemm", gemm)
    for chunk in (1, 4):
        residual = variant(name, n_layer=4, dtype=torch.float32).residual
        chain = getattr(kernels, type(residual).fused)(residual, kernels.Triton, chunk)
        state = chain.start(torch.randn(1, M, 32).bfloat16().requires_grad_())
        routes, gemms[0] = chain.route if isinstance(chain.route, list) else [chain.route], 0
        with counted_planes(M * 32, [part for r in routes for part in r.split]) as found:
            for t in range(8):
                h_qk, h_v = chain.read(t, state)
                state = chain.write(t, state, h_qk * 2 if h_qk is h_v else h_qk + h_v)
            x = chain.read(8, state)[0]
            forward = found[0]
            x.sum().backward()
        moved = forward / 9, (found[0] - forward + gemms[0]) / 9  # the product for dq reads its source once more
        assert moved == pytest.approx(kernels.planes_per_site(VARIANTS[name][0], 4, chunk, **VARIANTS[name][1]))


def cells(archs, widths, heads, mix, pull):
    return [f"{kernel} {D} {G} {S} {arch}" for arch in archs for D in widths for G in heads for kernel in
            ("score", "mix", "own", "pull", "keyed", "write", "unwrite") for S in
            dict(mix=mix, pull=pull).get(kernel, (1,))]


def compile_ahead(cell):
    """Compile one kernel for an architecture without its GPU; returns what the machine code looks like."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    kernel, D, G, S, arch, *one_row = cell.split()
    D, G, S = int(D), int(G), int(S)
    tile = dict(D=D, G=G, GP=kernels.power_of_2(G), KP=kernels.power_of_2(D // G))
    function, n, constants = {  # the plainest and the fullest form of each kernel
        "score": (kernels.score_kernel, 0, dict(D=D, G=G, BM=64, BK=min(64, tile["KP"]), BU=32, WRITE=True, BELOW=True,
                                                SPLIT=True, UPCAST=False)),
        "mix": (kernels.mix_kernel, S, tile | dict.fromkeys(("CARRY", "FINAL", "ADDED", "FACTOR", "SHARE"), S == 1) |
                dict(NP=32, S=S, STEP=1, PAIRS=1, UNROLL=4 if S == 1 else 1)),
        "own": (kernels.own_kernel, 1, tile | dict(ADDED=True, FACTOR=True)),
        "pull": (kernels.pull_kernel, S + (G > 1), tile | dict(S=S, STEP=1, PAIRS=0, KEYED=False, CARRY_V=S == 1,
                                                               CARRY_K=False, SHARE=False, UNROLL=1)),
        "keyed": (kernels.pull_kernel, 2, tile | dict(S=1, STEP=1, PAIRS=0, KEYED=True, CARRY_V=True, CARRY_K=True,
                                                      SHARE=True, UNROLL=1)),
        "write": (kernels.transport_kernel, 0, dict(OLD=True, B=1024)),
        "unwrite": (kernels.transport_backward_kernel, 0, dict(OLD=True, B=1024))}[kernel]
    fp32 = {"p_raw", "p_rho", "p_lse", "p_scale", "p_factor", "p_share", "p_delta", "p_part", "p_gate", "p_sums"}
    names = function.arg_names
    kind = {n: "constexpr" if n in constants else "*i32" if n == "p_offset" else "*fp32" if n in fp32 else "*bf16"
            if n.startswith("p_") else "fp32" if n == "eps" else "i32" for n in names}
    if one_row and "M" in names:  # Triton compiles an argument that is 1 as a constant
        constants, kind = constants | dict(M=1), kind | dict(M="constexpr")
    aligned = {(i,): [["tt.divisibility", 16]] for i, n in enumerate(names)
               if n.startswith("p_") or (n in ("M", "n") and n not in constants)}
    source = ASTSource(fn=function, signature=kind, attrs=aligned,
                       constexprs={(names.index(n),): v for n, v in constants.items()})
    warps = kernels.n_warps(n, G, D) if n else 4
    built = triton.compile(source, target=GPUTarget("cuda", int(arch), 32), options=dict(num_warps=warps))
    tool = str(Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as f:
        f.write(built.asm["cubin"])
        f.flush()
        usage, code = (subprocess.run([tool, flag, f.name], capture_output=True, text=True, check=True).stdout
                       for flag in ("--dump-resource-usage", "--dump-sass"))
    number = {key: int(re.search(key + r":(\d+)", usage)[1]) for key in ("REG", "STACK")}
    return number | dict(warps=warps, spills=len(re.findall(r"\b(?:LDL|STL)\b", code)),
                         wide=len(re.findall(r"\bLDG(?:STS)?\.E\.(?:\w+\.)*128", code)),
                         barriers=len(re.findall(r"\bBAR\.", code)), shared=built.metadata.shared)


# registers seen at width 768 on sm_90, with one depth head and with eight
REGISTERS = {"score": (128, 190), "mix 1": (70, 76), "mix 4": (56, 72), "mix 6": (95, 96), "own": (66, 48),
             "pull 1": (80, 72), "pull 4": (120, 151), "pull 8": (232, 234), "keyed": (96, 96), "write": (32, 32),
             "unwrite": (48, 48)}


def check_compiled(wanted):
    """Ahead-of-time compilation in other processes: this one has the interpreter."""
    half = [wanted[::2], wanted[1::2]]
    jobs = [subprocess.Popen([sys.executable, str(HERE / "test_model.py"), "compile", *part], stdout=subprocess.PIPE,
                             text=True, env={**os.environ, "TRITON_INTERPRET": "0"}) for part in half]
    found = {}
    for job in jobs:
        found |= json.loads(job.communicate(timeout=1800)[0])
    assert set(found) == set(wanted)
    assert {cell: code for cell, code in found.items() if code["STACK"] or code["spills"]} == {}
    for cell, code in found.items():
        kernel, D, G, S, arch, *_ = cell.split()
        assert code["wide"] > 0, (cell, code)
        if code["warps"] == 1:
            assert code["barriers"] == 0, (cell, code)
        key = f"{kernel} {S}" if kernel in ("mix", "pull") else kernel
        if (D, arch) == ("768", "90"):
            assert code["REG"] <= REGISTERS[key][G != "1"] + 16, (cell, code)
    return found


needs_compiler = pytest.mark.skipif(not kernels.triton, reason="needs Triton")


@needs_compiler
def test_kernels_compile_without_spills():
    wanted = cells((90,), (768,), (1, 8), (1, 4), (1, 4))
    check_compiled([*wanted, *(f"{cell} row" for cell in wanted[::3])])


@needs_compiler
@pytest.mark.slow
def test_kernels_compile_without_spills_everywhere():
    wanted = cells((80, 90, 100), (576, 768, 1024, 1280, 2048), (1, 4, 8), (1, 4, 6), (1, 4, 8))
    for cell, code in check_compiled(wanted).items():
        print(f"{cell:22s}", *(f"{k} {v:4d}" for k, v in code.items()))


def test_benchmark(capsys, monkeypatch):
    clock, cpu = kernels.Clock(torch.device("cpu")), torch.device("cpu")
    shape = dict(n_embd=32, n_head=2, n_kv_head=2, n_ffn=64, vocab_size=50)
    make = functools.partial(kernels.trainer, cpu, contextlib.nullcontext, 1, 16, n_layer=2, **shape)
    found = kernels.steps(clock, kernels.TARGETS | {"mhc": {}}, make, contextlib.nullcontext, 1e12, 0, print)
    assert set(found["step_ratio"]) == {"standard", "mhc", *kernels.TARGETS} and found["step_ratio"]["standard"] == 1
    kernels.passes(clock, cpu, torch.float32, 16, 32, 1e9, print)
    e = torch.randn(1, 8, 32, requires_grad=True)
    kernels.chains(clock, e, GPTConfig(residual_mode="attnres", n_layer=2, **shape), True, print)
    kernels.main(["--model"])
    assert "attnres" in capsys.readouterr().out
    for argv, message in ((["--fast"], "knows --quick, --json and --model, not --fast"),
                          (["--model", "--quick"], "--quick has no effect with --model")):
        with pytest.raises(SystemExit, match=message):
            kernels.main(argv)
    monkeypatch.setattr(kernels, "benchmark", lambda quick, say: dict(step_ratio={"standard": 1.0}, quick=quick))
    kernels.main(["--quick", "--json"])
    assert json.loads(capsys.readouterr().out) == dict(step_ratio={"standard": 1.0}, quick=True)


def test_the_textbook_form_of_routing_is_the_reference():
    residual, e = make("attnres").residual, torch.randn(2, 3, 32).double()
    assert_close(kernels.stack_and_einsum(residual.query, e), kernels.routed(residual, e, 6), 1e-12)


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


def config_error(*argv):
    with pytest.raises(UserError) as e:
        train.load_config(list(map(str, argv)))
    assert "\n" not in str(e.value)
    return str(e.value)


def test_configuration_layers(tmp_path):
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text("n_layer = 3\nlr = 1\nmax_steps = 1_000\n")
    b.write_text('n_layer = 4\nresidual_mode = "attnres"\n')
    cfg, t = train.load_config([str(a), "--seed=7", str(b), "--qk_norm=False", "--max_steps=2_000", "--min_lr=6e-5",
                                "--prepare=--source=x --holdout=3"])
    assert (cfg.n_layer, cfg.residual_mode, cfg.qk_norm) == (4, "attnres", False)
    assert (t.lr, t.max_steps, t.min_lr, t.seed, t.prepare) == (1.0, 2000, 6e-5, 7, "--source=x --holdout=3")
    assert t.out_dir == "runs/b-attnres-seed7"


def test_configuration_mistakes_name_the_place_and_the_remedy(tmp_path):
    bad = tmp_path / "bad.toml"
    assert "did you mean n_layer" in config_error("--n_layers=3")
    for text, expected in (("n_lyer = 3", "did you mean n_layer"), ("[model]\nn_layer = 3", "unknown key 'model'"),
                           ('n_layer = "3"', "must be a whole number"), ("n_layer = 3.0", "must be a whole number"),
                           ("lr = nan", "must be a number"), ("resume = 1", "must be true or false"),
                           ("seed = true", "must be a whole number"), ("data_dir = 3", "must be a string"),
                           ("n_layer =", "cannot read"), ("n_layer = 1\nn_layer = 2", "cannot read")):
        bad.write_text(text)
        message = config_error(bad)
        assert expected in message and "bad.toml" in message
    for flag, expected in (("--lr=fast", "must be a number"), ("--lr=inf", "must be a number"),
                           ("--lr", "needs a value"), ("--seed", "needs a value"),
                           ("seed=3", "expected a .toml file"), ("--n_layer=", "whole number"),
                           ("--resume=yes", "must be true or false"), ("--seed=-1", "must not be negative"),
                           ("nothere.toml", "nothere.toml"), ("--residual_mode=attnres_blok", "mean attnres_block"),
                           ("--depth_block=4", "no effect in residual_mode=standard"), ("--n_embd=65", "n_head=12"),
                           ("--n_kv_head=5", "n_kv_head=5"), ("--head_dim=7", "even"), ("--schedule=cos", "cosine"),
                           ("--dtype=float16", "float16 is not supported"), ("--min_lr=1", "above lr"),
                           ("--eval_at_tokens=1,x", "whole numbers"), ("--tracker=w", "choices"),
                           ("--micro_batch=0", "at least 1")):
        assert expected in config_error(flag), flag
    assert "n_embd=64" in config_error("--n_embd=64", "--n_head=4", "--residual_mode=attnres", "--route_heads=3")
    assert "depth_block" in config_error("--residual_mode=attnres", "--depth_block=2")


def test_unused_knobs_are_refused_in_every_mode():
    for mode, row in RESIDUAL_MODES.items():
        for knob, default in KNOBS.items():
            other = 3 if type(default) is int else True
            value = next((c for c in model_file.CHOICES.get(knob, ()) if c != default), other)
            if knob in row.knobs:
                GPTConfig(residual_mode=mode, n_head=3, **{knob: value})
            else:
                with pytest.raises(ValueError, match=f"{knob}=.* has no effect in residual_mode={mode}"):
                    GPTConfig(residual_mode=mode, **{knob: value})


def test_written_configuration_can_be_passed_back(tmp_path):
    odd = 'a "quoted" \\ name\twith ☃, \x7f and\nnewline'
    cfg, t = train.load_config([f"--data_dir={odd}", "--lr=6e-05", "--adam_eps=1e-30", "--eval_at_tokens=1_000,20",
                                "--resume=true", "--residual_mode=attnres_block", "--n_layer=5"])
    path = tmp_path / "config.toml"
    path.write_text(train.to_toml(cfg, t), encoding="utf-8")
    cfg_2, t_2 = train.load_config([str(path)])
    assert cfg_2 == cfg and t_2 == dataclasses.replace(t, resume=False)


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit):
        train.load_config(["--help"])
    text = capsys.readouterr().out
    for name, field in train.SCHEMA.items():
        line = next(line for line in text.splitlines() if line.startswith(f"  --{name}={field.default}"))
        assert len(line.split(maxsplit=1)[1]) > 10, name


def test_learning_rate_schedule():
    t = train.TrainConfig(lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=100)
    rates = [t.lr_at(s) for s in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[-1] == pytest.approx(0.1) and min(rates) > 0
    assert all(a >= b for a, b in zip(rates[9:], rates[10:]))
    wsd = dataclasses.replace(t, schedule="wsd", decay_steps=30)
    rates = [wsd.lr_at(s) for s in range(100)]
    assert rates[9:70] == [1.0] * 61 and rates[-1] == pytest.approx(0.1) and rates[84] == pytest.approx(0.55)
    assert train.TrainConfig(warmup_steps=0, max_steps=1).lr_at(0) == pytest.approx(6e-5)
    assert 0 < train.TrainConfig(warmup_steps=10, max_steps=5).lr_at(4) < 6e-4


# ---------------------------------------------------------------------------------------------------------------------
# Data


def shard(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(header.tobytes() + np.asarray(ids, "<u2").tobytes())
    return path


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000, 4097])
def test_permutation(n):
    index = np.arange(n, dtype=np.uint64)
    a, b = train.permute(index, n, (1, 0)), train.permute(index, n, (1, 1))
    assert sorted(a.tolist()) == sorted(b.tolist()) == list(range(n))
    assert np.array_equal(a, train.permute(index, n, (1, 0))) and (n < 64 or not np.array_equal(a, b))
    assert a[n // 2:].tolist() == train.permute(index[n // 2:], n, (1, 0)).tolist()  # element by element


def test_permutation_mixes_well_and_has_no_limit():
    n = 10_000
    a = train.permute(np.arange(n, dtype=np.uint64), n, (3, 5)).astype(float)
    assert abs(np.corrcoef(np.arange(n), a)[0, 1]) < 0.05 and abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.05
    big = 10**15
    far = train.permute(np.arange(big - 100, big, dtype=np.uint64), big, (1, 2))
    assert len(set(far.tolist())) == 100 and far.max() < big


def test_windows_cover_the_stream_once_an_epoch_in_any_sharding(tmp_path):
    ids = np.random.default_rng(0).integers(50, size=1001)
    shard(tmp_path / "one/x_train_0.bin", ids)
    for i, part in enumerate(np.split(ids, [3, 4, 400, 990])):  # windows run over the ends of shards
        shard(tmp_path / f"many/x_train_{i}.bin", part)
    one, many = (train.Tokens(tmp_path / name, "train", 10, 50) for name in ("one", "many"))
    assert one.windows == many.windows == 100
    orders = [one.order(1, step, 20) for step in range(10)]
    for epoch in (orders[:5], orders[5:]):
        assert sorted(np.concatenate(epoch).tolist()) == list(range(100))
    assert not np.array_equal(np.concatenate(orders[:5]), np.concatenate(orders[5:]))
    across = one.order(1, 1, 80)  # one batch over two epochs
    assert np.array_equal(across[:20], np.concatenate([one.order(1, s, 20) for s in (4,)])) and len(across) == 80
    for w in orders:
        rows = one.rows(w)
        assert np.array_equal(rows, many.rows(w)) and rows.dtype == np.int64 and rows.shape == (20, 11)
        assert np.array_equal(rows[0], ids[int(w[0]) * 10:][:11])
    assert not np.array_equal(one.order(1, 0, 20), one.order(2, 0, 20))


def test_data_mistakes_are_named(tmp_path):
    def error(name="d", seq_len=10, vocab=50):
        with pytest.raises(UserError) as e:
            train.Tokens(tmp_path / name, "train", seq_len, vocab).rows(np.arange(1))
        assert name in str(e.value)
        return str(e.value)
    assert "prepare_fineweb.py" in error("nothing")
    (tmp_path / "void").mkdir()
    assert "prepare_fineweb.py" in error("void")
    shard(tmp_path / "noval/x_val_0.bin", range(20))
    assert "no train shards" in error("noval")
    good = shard(tmp_path / "d/x_train_0.bin", range(20))
    raw = good.read_bytes()
    for content, expected in ((b"", "not a token shard"), (raw[:100], "not a token shard"), (raw[:-2], "promises 20"),
                              (raw + b"\0", "promises 20"), (raw[::-1], "not a token"), (raw[:1024], "promises 20")):
        good.write_bytes(content)
        assert expected in error()
    shard(good, range(10))
    assert "fewer than one window" in error()
    assert "fewer than one window" in error(seq_len=10**6)
    shard(good, range(11))
    train.Tokens(tmp_path / "d", "train", 10, 50)  # exactly one window
    shard(good, [])
    assert "0 tokens" in error()
    shard(good, [*range(10), 50])
    assert "holds token 50" in error()
    shard(good, range(20), count=-1)
    assert "promises -1 tokens" in error()
    shard(good, range(20), version=9)
    assert "not a token shard" in error()
    for meta in ("{", "[]", '{"splits": 3}', '{"splits": {"train": {"shards": [{"file": 3}]}}}'):
        (tmp_path / "d/meta.json").write_text(meta)
        assert "meta.json is damaged" in error()
    (tmp_path / "d/meta.json").unlink()
    (tmp_path / "d/progress.json").write_text("{}")
    assert "half prepared" in error()


def test_shards_must_match_their_meta(data, tmp_path):
    import shutil
    shutil.copytree(data, tmp_path / "d")
    name = json.loads((data / "meta.json").read_text())["splits"]["train"]["shards"][1]["file"]
    shard(tmp_path / "d" / name, range(200))
    with pytest.raises(UserError, match="not the shard that meta.json describes"):
        train.Tokens(tmp_path / "d", "train", 16, 257)
    (tmp_path / "d" / name).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        train.Tokens(tmp_path / "d", "train", 16, 257)


# ---------------------------------------------------------------------------------------------------------------------
# Preparation


def prepare(source, out, *args):
    prepare_fineweb.prepare(prepare_fineweb.parse_args([f"--source={source}", f"--out={out}", "--workers=1", *args]))
    return json.loads((Path(out) / "meta.json").read_text(encoding="utf-8"))


def documents(out, meta, split):
    """Texts of a split, read back from its shards."""
    files = [Path(out) / s["file"] for s in meta["splits"][split]["shards"]]
    ids = np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in files])
    assert ids[0] == 256
    return [bytes(part.astype(np.uint8)).decode() for part in np.split(ids, np.flatnonzero(ids == 256))[1:]
            for part in [part[1:]]]


def test_documents_come_back_in_order_and_once(data):
    meta = json.loads((data / "meta.json").read_text())
    found = {s: documents(data, meta, s) for s in prepare_fineweb.SPLITS}
    texts = [p.read_bytes().decode() for p in sorted((data.parent / "text").glob("*.txt"))]
    for i, split in enumerate(prepare_fineweb.SPLITS):
        assert found[split] == [t for t in texts if prepare_fineweb.split_of(t.encode(), 10) == i]
        s = meta["splits"][split]
        assert s["documents"] == len(found[split]) and s["text_bytes"] == sum(len(t.encode()) for t in found[split])
        assert s["tokens"] == s["text_bytes"] + s["documents"] == sum(x["tokens"] for x in s["shards"])
    assert all(s["tokens"] == 30000 for s in meta["splits"]["train"]["shards"][:-1])
    assert len(meta["splits"]["train"]["shards"]) > 2 and meta["vocab_size"] == 257
    assert any("<|endoftext|> é ☃" in t for t in texts)


def test_held_out_splits_do_not_depend_on_the_rest(data, tmp_path):
    args = ["--holdout=10", "--val_tokens=5000", "--test_tokens=4000"]
    full, part = (prepare(data.parent / "text", tmp_path / name, *args, *extra)
                  for name, extra in (("full", []), ("part", ["--max_tokens=7000"])))
    for split, n in (("val", 5000), ("test", 4000)):
        assert full["splits"][split] == part["splits"][split] | {"dropped": full["splits"][split]["dropped"]}
        assert full["splits"][split]["tokens"] == n
        for s in full["splits"][split]["shards"]:
            assert (tmp_path / "full" / s["file"]).read_bytes() == (tmp_path / "part" / s["file"]).read_bytes()
    assert part["splits"]["train"]["tokens"] == 7000 and full["splits"]["train"]["tokens"] > 7000
    assert full["splits"]["val"]["dropped"] > 0  # what val cannot take never reaches train
    texts = set(documents(tmp_path / "full", full, "train"))
    assert not any(prepare_fineweb.split_of(t.encode(), 10) for t in texts)


def test_splits_are_a_function_of_the_text():
    buckets = np.bincount([prepare_fineweb.split_of(str(i).encode(), 1) for i in range(20_000)], minlength=3)
    assert 150 < buckets[1] < 250 and 150 < buckets[2] < 250


@pytest.mark.parametrize("method, workers", [("fork", 2), ("forkserver", 2), ("spawn", 3)])
def test_workers_do_not_change_the_shards(method, workers, data, tmp_path):
    argv = ["prepare_fineweb.py", f"--source={data.parent / 'text'}", f"--out={tmp_path}", "--holdout=10",
            "--shard_tokens=30000", f"--workers={workers}"]
    code = (f"import multiprocessing, sys, runpy; multiprocessing.set_start_method({method!r}); sys.argv = {argv!r}; "
            f"runpy.run_path({str(HERE / 'prepare_fineweb.py')!r}, run_name='__main__')")
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120, capture_output=True)
    for path in data.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_interrupted_preparation_continues_bit_for_bit(data, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_fineweb, "CHUNK_CHARS", 10_000)
    monkeypatch.setattr(prepare_fineweb, "SAVE_SECONDS", 0)
    args = [data.parent / "text", tmp_path / "d", "--holdout=10", "--shard_tokens=30000"]
    encode, stops = prepare_fineweb.encode_chunk, 0
    for stop in range(1, 14, 3):  # dies while it encodes one chunk after the other
        calls = []

        def dying(*a, calls=calls, stop=stop):
            calls.append(1)
            if len(calls) > stop:
                raise KeyboardInterrupt
            return encode(*a)
        monkeypatch.setattr(prepare_fineweb, "encode_chunk", dying)
        try:
            prepare(*args)
        except KeyboardInterrupt:
            stops += 1
            for path in tmp_path.glob("d/*.bin"):
                assert path.read_bytes() == (data / path.name).read_bytes()  # only whole shards under that name
    monkeypatch.setattr(prepare_fineweb, "encode_chunk", encode)
    meta, reference = prepare(*args), json.loads((data / "meta.json").read_text())
    assert stops >= 2 and meta["splits"] == reference["splits"] and sorted(
        p.name for p in tmp_path.glob("d/*")) == sorted(p.name for p in data.glob("*"))
    for path in data.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "d" / path.name).read_bytes()


def test_a_finished_folder_is_left_alone(data, tmp_path, capsys):
    stamps = {p.name: p.stat().st_mtime_ns for p in data.iterdir() if p.name != "lock"}
    prepare(data.parent / "text", data, "--holdout=10", "--shard_tokens=30000")
    assert "nothing to do" in capsys.readouterr().out
    assert stamps == {p.name: p.stat().st_mtime_ns for p in data.iterdir() if p.name != "lock"}
    with pytest.raises(UserError, match="prepared otherwise .holdout: 10 -> 11"):
        prepare(data.parent / "text", data, "--holdout=11", "--shard_tokens=30000")
    shard(tmp_path / "foreign/x_train_0.bin", range(5))
    with pytest.raises(UserError, match="another origin"):
        prepare(data.parent / "text", tmp_path / "foreign")


def test_text_that_cannot_be_used(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()

    def error(*args):
        with pytest.raises(UserError) as e:
            prepare(folder, tmp_path / "out", "--holdout=5", *args)
        return str(e.value)
    assert "no file that ends in .txt" in error()
    for i in range(300):
        (folder / f"{i:03d}.txt").write_text(f"document {i} " * 20)
    (folder / "100.txt").write_bytes(b"")
    assert "100.txt:1: empty" in error()
    (folder / "100.txt").write_text("\ufeff\u200d \n", "utf-8")
    assert "100.txt:1: empty" in error()
    (folder / "100.txt").write_bytes(b"good line\nbad \xff byte\n")
    assert "100.txt:1: not valid UTF-8 (byte 0xff after 14 characters)" in error()
    (folder / "101.txt").write_bytes(b"\xef\xbb\xbfwith a mark\r\nand CRLF\r\n")
    meta = prepare(folder, tmp_path / "out", "--skip_bad", "--holdout=5")
    assert meta["skipped"] == 1 and "100.txt" in meta["skipped_first"][0]
    found = [d for split in prepare_fineweb.SPLITS for d in documents(tmp_path / "out", meta, split)]
    assert "with a mark\r\nand CRLF\r\n" in found
    (folder / "one.txt").write_text("only one document")
    with pytest.raises(UserError, match="1 documents are too few, none falls into val and test.*--val_tokens=0"):
        prepare(folder / "one.txt", tmp_path / "one")
    meta = prepare(folder / "one.txt", tmp_path / "one", "--val_tokens=0", "--test_tokens=0")
    assert meta["splits"]["train"]["documents"] == 1
    with pytest.raises(UserError, match="no such file"):
        prepare(tmp_path / "nowhere", tmp_path / "out2")


def all_documents(out, meta):
    splits = [s for s in prepare_fineweb.SPLITS if meta["splits"][s]["shards"]]
    return [d for split in splits for d in documents(out, meta, split)]


TRAIN_ONLY = "--val_tokens=0", "--test_tokens=0"  # everything goes to train
BAD_LINES = ['{"text": "good"}', "", '{"txt": "x"}', '{"text": null}', '{"text": ""}', '{"text": 123}', "{broken",
             '{"text": "\u200d"}', '{"text": "\\ud800"}', "[1]", "[" * 10**5, '{"text": "also good"}']


def test_broken_lines_of_jsonl(tmp_path):
    path = tmp_path / "docs.jsonl"
    for i, line in enumerate(BAD_LINES):
        path.write_text(f'{{"text": "first"}}\n{line}\n', "utf-8")
        if "good" in line:
            continue
        with pytest.raises(UserError, match=r"docs.jsonl:2: .*--skip_bad") as e:
            prepare(path, tmp_path / f"strict{i}", *TRAIN_ONLY)
        assert "\n" not in str(e.value) and len(str(e.value)) < 500
    path.write_text("\ufeff" + "\n".join(BAD_LINES) + "\n", "utf-8")
    with open(path, "ab") as f:
        f.write(b'{"text": "\xff"}\n{"text": "no newline at the end"}')
    meta = prepare(path, tmp_path / "out", "--skip_bad", *TRAIN_ONLY)
    bad = sum("good" not in line for line in BAD_LINES) + 1
    assert meta["skipped"] == bad and "docs.jsonl:2: an empty line" in meta["skipped_first"][0]
    assert documents(tmp_path / "out", meta, "train") == ["good", "also good", "no newline at the end"]
    path.write_text('{"body": "other key"}')
    with pytest.raises(UserError, match="no key 'text' .it has: body.; give --text_key"):
        prepare(path, tmp_path / "key", *TRAIN_ONLY)
    meta = prepare(path, tmp_path / "key", "--text_key=body", *TRAIN_ONLY)
    assert documents(tmp_path / "key", meta, "train") == ["other key"]


def corpus(n=400):
    return [f"document {i} has a text of its own, " + "word " * (i % 50) for i in range(n)]


def write_corpus(folder, kind, texts):
    """The same documents as .jsonl, .parquet or compressed; returns the path."""
    import gzip

    import pyarrow
    import pyarrow.parquet
    import zstandard
    folder.mkdir(exist_ok=True)
    path = folder / f"docs{kind}"
    lines = "".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)).encode()
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path, row_group_size=70)
    else:
        path.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)(lines))
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_every_kind_of_file_gives_the_same_shards(kind, tmp_path, monkeypatch):
    texts = corpus()
    meta = prepare(write_corpus(tmp_path / "in", kind, texts), tmp_path / "whole", "--holdout=10")
    assert sorted(all_documents(tmp_path / "whole", meta)) == sorted(texts)
    # and interrupted in the middle of a file it goes on to the same bytes
    monkeypatch.setattr(prepare_fineweb, "CHUNK_CHARS", 3000)
    monkeypatch.setattr(prepare_fineweb, "SAVE_SECONDS", 0)
    args = tmp_path / "in" / f"docs{kind}", tmp_path / "cut", "--holdout=10"
    with monkeypatch.context() as m:
        encode, calls = prepare_fineweb.encode_chunk, []
        m.setattr(prepare_fineweb, "encode_chunk",
                  lambda *a: encode(*a) if len(calls) < 7 and not calls.append(1) else sys.exit("killed"))
        with pytest.raises(SystemExit):
            prepare(*args)
    assert prepare(*args)["splits"] == meta["splits"]


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_files_that_are_cut_short(kind, tmp_path):
    path = write_corpus(tmp_path / "in", kind, corpus(2000))
    raw = path.read_bytes()
    for content in (raw[:len(raw) // 2], raw[:3], b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"docs{kind}:.*--skip_bad"):
            prepare(path, tmp_path / f"out{len(content)}", *TRAIN_ONLY)
    (tmp_path / "in/more.jsonl").write_text('{"text": "whole"}\n')
    meta = prepare(tmp_path / "in", tmp_path / "skip", "--skip_bad", *TRAIN_ONLY)
    assert meta["skipped"] == 1 and documents(tmp_path / "skip", meta, "train") == ["whole"]


def test_parquet_mistakes(tmp_path):
    path = write_corpus(tmp_path / "in", ".parquet", ["one"])
    with pytest.raises(UserError, match="no column 'body' .it has: id, text"):
        prepare(path, tmp_path / "a", "--text_key=body")
    with pytest.raises(UserError, match="docs.parquet:row 0: id is int, not a string"):
        prepare(path, tmp_path / "b", "--text_key=id")


def test_folders_globs_and_standard_input(tmp_path, capsys):
    texts = corpus()
    write_corpus(tmp_path / "in", ".jsonl", texts[:200])
    write_corpus(tmp_path / "in" / "deep", ".parquet", texts[200:])
    (tmp_path / "in/notes.md").write_text("# not for training")
    meta = prepare(tmp_path / "in", tmp_path / "a", "--holdout=10")
    assert sorted(all_documents(tmp_path / "a", meta)) == sorted(texts) and "notes.md" in capsys.readouterr().out
    meta = prepare(tmp_path / "in/**/*.parquet", tmp_path / "b", "--holdout=10")
    assert sorted(all_documents(tmp_path / "b", meta)) == sorted(texts[200:])
    with open(tmp_path / "in/docs.jsonl", encoding="utf-8") as f:
        result = subprocess.run([sys.executable, HERE / "prepare_fineweb.py", "--source=-", "--format=jsonl",
                                 f"--out={tmp_path}/c", "--holdout=10"], stdin=f, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    meta = json.loads((tmp_path / "c/meta.json").read_text())
    assert sorted(all_documents(tmp_path / "c", meta)) == sorted(texts[:200])


def write_ranks(path, extra=()):
    """A rank file: all bytes, a few merges of English, and `extra` ranks."""
    import base64
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"do", b"cu", b"docu", b"  ", b"aa", b"aaaa"]
    ranks = dict(zip(tokens, range(len(tokens)))) | dict(extra)
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in ranks.items()))
    return path


def test_rank_files(tmp_path):
    ranks, texts = write_ranks(tmp_path / "mine.tiktoken"), corpus()
    meta = prepare(write_corpus(tmp_path, ".jsonl", texts), tmp_path / "out", f"--tokenizer={ranks}", "--holdout=10")
    assert meta["vocab_size"] == 266 and meta["end_of_text"] == 265
    encoding = prepare_fineweb.get_encoding(str(tmp_path / "out/tokenizer.json"))  # what eval.py uses
    ids = np.fromfile(next(tmp_path.glob("out/*_val_*.bin")), "<u2", offset=1024).tolist()
    text = encoding.decode(ids).split("<|endoftext|>")
    assert text[0] == "" and set(text[1:]) < set(texts) and len(text) - 1 == meta["splits"]["val"]["documents"]
    assert ids == [i for t in text[1:] for i in [265, *encoding.encode_ordinary(t)]] and 261 in ids
    again = [tmp_path / "docs.jsonl", tmp_path / "out", f"--tokenizer={ranks}", "--holdout=10"]
    ranks.write_bytes(ranks.read_bytes().replace(b"dGhl ", b"dGhp "))  # the same number of tokens, one of them another
    with pytest.raises(UserError, match="was prepared otherwise .tokenizer: mine-[0-9a-f]{8} -> mine-[0-9a-f]{8}"):
        prepare(*again)
    for content in (b"", b"no ranks here\n", b"dGg= x\n", ranks.read_bytes() + b"dGhl 3\n", ranks.read_bytes()[40:]):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(UserError, match="not a usable rank file"):
            prepare_fineweb.get_encoding(str(tmp_path / "bad"))
    with pytest.raises(UserError, match="is unknown: give bytes, a tiktoken encoding .*gpt2"):
        prepare_fineweb.get_encoding("gpt5")


def test_ids_above_65535_are_never_wrapped(tmp_path):
    ranks = write_ranks(tmp_path / "big.tiktoken", {b" has": 70_000})
    meta = prepare(write_corpus(tmp_path, ".jsonl", corpus()), tmp_path / "out", f"--tokenizer={ranks}", "--holdout=10")
    assert meta["vocab_size"] == 70_002
    path = next(tmp_path.glob("out/*_train_*.bin"))
    assert np.fromfile(path, "<i4", 3)[:2].tolist() == [20240801, 7]
    tokens = train.Tokens(tmp_path / "out", "train", 16, 70_002)
    ids = tokens.read(0, tokens.total)
    assert {70_000, 70_001} < set(ids.tolist()) and np.array_equal(ids, np.fromfile(path, "<u4", offset=1024))
    with pytest.raises(UserError, match="a vocabulary of 70002, more than vocab_size=65536"):
        train.Tokens(tmp_path / "out", "train", 16, 65_536)
    (tmp_path / "out/meta.json").unlink()
    with pytest.raises(UserError, match="docs_train_000000.bin holds token 7000"):
        train.Tokens(tmp_path / "out", "train", 16, 65_536).read(0, 1000)


def test_the_tokenizer_cache_takes_plain_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "vocab.bpe").write_bytes(b"content")
    assert prepare_fineweb.read_ranks("http://127.0.0.1:9/some/vocab.bpe") == b"content"
    start = time.monotonic()
    with pytest.raises(UserError, match="save it as encoder.json, put it into a folder here and set TIKTOKEN"):
        prepare_fineweb.read_ranks("http://127.0.0.1:9/some/encoder.json")
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("pattern", ["r50k", "cl100k", "o200k"])
def test_segments_encode_like_the_whole(pattern, tmp_path, monkeypatch):
    import tiktoken
    import tiktoken_ext.openai_public as public
    saved = json.loads((write_tokenizer(tmp_path)).read_text())
    monkeypatch.setattr(tiktoken.load, "load_tiktoken_bpe", lambda *a, **k: {bytes([i]): i for i in range(256)})
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *a, **k: {bytes([i]): i for i in range(256)}, raising=False)
    pat_str = public.ENCODING_CONSTRUCTORS[pattern + "_base"]()["pat_str"]
    prepare_fineweb.write_json(tmp_path / "tokenizer.json", saved | dict(pat_str=pat_str))
    encoding = prepare_fineweb.get_encoding(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(prepare_fineweb, "SEGMENT_CHARS", (7, 60))
    rng = np.random.default_rng(0)
    alphabet = [*"the  \n\t.'é1a,☃\r\xa0\x1c", "the ", "  the", "'s ", "!\n", " \n "]
    for _ in range(300):
        text = "".join(rng.choice(alphabet, 200)) + " x y" * 5
        parts = list(prepare_fineweb.segments(text))
        assert "".join(parts) == text and len(parts) > 3 and max(map(len, parts)) <= 60
        if max(map(len, parts)) < 60:  # no cut without a place for it
            assert sum((encoding.encode_ordinary(p) for p in parts), []) == encoding.encode_ordinary(text)


def write_tokenizer(folder):
    encoding = prepare_fineweb.get_encoding(str(write_ranks(folder / "mine.tiktoken")))
    prepare_fineweb.save_encoding(encoding, folder / "tokenizer.json")
    return folder / "tokenizer.json"


def test_endless_lines_and_runs_of_one_character_do_not_stall(tmp_path):
    ranks = write_ranks(tmp_path / "mine.tiktoken")
    texts = ["before", "^" * 10**6, "a" * 2 * 10**6, " " * 10**6 + "x", "word " * 10**6, "<|endoftext|>" * 1000, "end"]
    start = time.monotonic()
    meta = prepare(write_corpus(tmp_path, ".jsonl", texts), tmp_path / "out", f"--tokenizer={ranks}", *TRAIN_ONLY)
    assert time.monotonic() - start < 30
    encoding = prepare_fineweb.get_encoding(str(tmp_path / "out/tokenizer.json"))
    ids = np.fromfile(next(tmp_path.glob("out/*_train_*.bin")), "<u2", offset=1024)
    pieces = np.split(ids, np.flatnonzero(ids == encoding.eot_token))[1:]
    assert [encoding.decode(p[1:].tolist()) for p in pieces] == texts and meta["splits"]["train"]["documents"] == 7


class Hub:
    """A stand-in for the Hugging Face Hub on the loopback address; `trouble` lists what goes wrong, per file."""

    def __init__(self, files, card, trouble=()):
        import hashlib
        import http.server
        import threading
        hub, self.requests, trouble = self, [], {name: list(what) for name, what in dict(trouble).items()}

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.answer(head=True)

            def do_GET(self):
                self.answer()

            def send(self, status, body=b"", head=False, **headers):
                self.send_response(status)
                for name, value in (headers | {"Content-Length": len(body)}).items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                if not head:
                    self.wfile.write(body)

            def answer(self, head=False):
                path, _, query = self.path.partition("?")
                hub.requests.append((self.command, path))
                if path.startswith("/api/datasets/org/set"):
                    siblings = [dict(rfilename=name, size=len(content)) for name, content in files.items()]
                    return self.send(200, json.dumps(dict(id="org/set", sha="a" * 40, cardData=card, tags=[],
                                                          siblings=siblings)).encode())
                name = path.partition("/resolve/")[2].partition("/")[2]
                if name not in files:
                    return self.send(404, head=head)
                what = trouble[name].pop(0) if not head and trouble.get(name) else ""
                if what == "fail":
                    return self.send(500)
                body, start, extra = files[name], 0, {}
                if self.headers.get("Range"):
                    start = int(self.headers["Range"][6:].split("-")[0])
                    extra = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
                tag = f'"{hashlib.sha256(body).hexdigest()}"'
                if what == "cut":
                    self.send(206 if start else 200, body[start:], head=True, ETag=tag, X_Repo_Commit="a" * 40, **extra)
                    self.wfile.write(body[start:][:len(body) // 2])
                    self.wfile.flush()
                    self.close_connection = True
                    return None
                if what == "slow":
                    time.sleep(2)
                return self.send(206 if start else 200, body[start:], head, ETag=tag, X_Repo_Commit="a" * 40, **extra)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"


def prepare_from_hub(address, home, *args):
    return run_script(HERE / "prepare_fineweb.py", "--source=hf:org/set", "--tokenizer=bytes", "--holdout=10",
                      "--workers=1", *args, HF_ENDPOINT=address, HF_HOME=str(home), HF_HUB_DISABLE_XET="1")


def test_a_dataset_of_the_hub(tmp_path):
    texts = corpus(300)
    files = {"README.md": b"card", "data/other.parquet": b"not asked for"}
    for i in range(3):
        files[f"sample/ten/{i}.parquet"] = write_corpus(tmp_path, ".parquet", texts[i::3]).read_bytes()
    card = dict(configs=[dict(config_name="default", data_files=[dict(split="train", path="data/*")]),
                         dict(config_name="ten", data_files=[dict(split="train", path="sample/ten/*"),
                                                             dict(split="test", path="data/*")])])
    hub = Hub(files, card, {"sample/ten/0.parquet": ["cut", "fail"], "sample/ten/1.parquet": ["slow"]})
    args = hub.address, tmp_path / "home", "--config=ten", f"--out={tmp_path / 'out'}"
    result = prepare_from_hub(*args)
    assert result.returncode == 0, result.stderr
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert sorted(all_documents(tmp_path / "out", meta)) == sorted(texts)
    assert not any("other" in path for _, path in hub.requests) and meta["hub"]["revision"] == "a" * 40
    done = len(hub.requests)
    again = prepare_from_hub(*args)
    assert "nothing to do" in again.stdout and len(hub.requests) == done  # without asking the network
    # the cache serves a second preparation: nothing is downloaded twice
    prepare_from_hub(*args[:3], f"--out={tmp_path / 'second'}", "--discard")
    assert [command for command, path in hub.requests[done:] if "resolve" in path and command == "GET"] == []
    for name in ("set_train_000000.bin", "set_val_000000.bin"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert "has no configuration 'eleven' (it has: default, ten)" in prepare_from_hub(
        hub.address, tmp_path / "home", "--config=eleven", f"--out={tmp_path / 'x'}").stderr


def test_no_network_is_said_quickly(tmp_path):
    start = time.monotonic()
    result = prepare_from_hub("http://127.0.0.1:9", tmp_path, f"--out={tmp_path / 'out'}")
    assert result.returncode == 1 and time.monotonic() - start < 10
    assert "copy the dataset's .parquet files into a folder and give --source=FOLDER" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_download_that_fails_for_good_can_be_continued(tmp_path):
    texts = corpus(200)
    files = {f"{i}.jsonl": write_corpus(tmp_path, ".jsonl", texts[i::2]).read_bytes() for i in range(2)}
    args = tmp_path / "home", f"--out={tmp_path / 'out'}"
    hub = Hub(files, {}, {"1.jsonl": ["fail"] * 100})
    result = prepare_from_hub(hub.address, *args)
    assert result.returncode == 1 and "cannot download 1.jsonl" in result.stderr and "goes on" in result.stderr
    assert not (tmp_path / "out/meta.json").exists()
    assert prepare_from_hub(Hub(files, {}).address, *args).returncode == 0
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert sorted(all_documents(tmp_path / "out", meta)) == sorted(texts)


def test_a_checksum_that_differs(data, tmp_path):
    import shutil
    shutil.copytree(data, tmp_path / "d")
    run_script(HERE / "prepare_fineweb.py", "--verify", f"--out={tmp_path}/d").check_returncode()
    path = next(tmp_path.glob("d/*_val_*.bin"))
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    result = run_script(HERE / "prepare_fineweb.py", "--verify", f"--out={tmp_path}/d")
    assert result.returncode == 1 and f"{path}: damaged: its checksum is" in result.stderr
    with pytest.raises(UserError, match="damaged: its checksum is"):
        train.Tokens(tmp_path / "d", "val", 16, 257)


def test_shards_of_other_projects_train_here(data, tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        shard(tmp_path / f"d/edu_fineweb_{split}_000001.bin", rng.integers(100, size=5000))
    with pytest.raises(UserError, match="give --vocab_size"):
        run_training(tmp_path / "d", tmp_path / "a")
    rows = run_training(tmp_path / "d", tmp_path / "a", vocab_size=100)
    assert len(rows) == 6 and rows[-1]["val_loss"]


def test_a_full_disk_leaves_whole_files_and_one_line(data, tmp_path):
    """A limit on the size of a file stands for the disk that fills up."""
    import resource
    command = [sys.executable, str(HERE / "prepare_fineweb.py"), f"--source={data.parent / 'text'}",
               f"--out={tmp_path / 'out'}", "--holdout=10", "--shard_tokens=30000", "--workers=1"]
    result = subprocess.run(command, capture_output=True, text=True,
                            preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)))
    assert result.returncode == 1 and "File too large" in result.stderr and "goes on" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    subprocess.run(command, check=True, capture_output=True)
    for path in data.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_memory_does_not_grow_with_the_data_touched(tmp_path):
    shard(tmp_path / "x_train_0.bin", np.zeros(60_000_000, "<u2"))
    code = f"""
import sys; sys.path.insert(0, {str(HERE)!r})
import train
def resident(): return int(open("/proc/self/statm", encoding="utf-8").read().split()[1]) * 4096
t = train.Tokens({str(tmp_path)!r}, "train", 1024, 100)
for step in range(20): t.rows(t.order(1, step, 16))
before = resident()
for step in range(20, 3000): t.rows(t.order(1, step, 16))
print(resident() - before)"""
    if sys.platform == "linux":
        grown = int(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout)
        assert grown < 40e6  # the shard has 120 MB, and all of it was read


PAPER_SHAPES = {  # config -> the paper's vocabulary, parameters in millions (spread: what the paper leaves to guess)
    "mhar_100m": (151_936, 115.55, 0.01), "mhar_350m": (151_936, 533.12, 0.01), "mhar_1b": (151_936, 1079.31, 0.01),
    "delta_220m": (151_936, 220.52, 0.01), "delta_1044m": (151_936, 1043.92, 0.01),
    "delta_7.6b": (151_936, 7568.41, 0.01), "delta_qwen3_0.6b": (151_936, 596.05, 0.01),
    "rd_120m": (33_000, 119.89, 0.01), "rd_343m": (33_000, 343.15, 0.01)}


def test_configurations_have_the_papers_shapes():
    assert {p.stem for p in HERE.glob("configs/*.toml")} == {*PAPER_SHAPES, "tiny"}
    for name, (vocabulary, millions, spread) in PAPER_SHAPES.items():
        path = HERE / "configs" / f"{name}.toml"
        cfg, t = train.load_config([str(path)])
        with torch.device("meta"):
            model = GPT(dataclasses.replace(cfg, vocab_size=vocabulary))
        assert abs(model.count()["total"] / 1e6 - millions) < spread, name
        assert cfg.residual_mode == "standard" and all(getattr(cfg, k) == v for k, v in KNOBS.items())
        train.check_batch(cfg, t, 8)
        comment = path.read_text(encoding="utf-8").splitlines()[0]
        assert comment.startswith(f"# torchrun --standalone --nproc_per_node=8 train.py configs/{name}.toml")


def test_a_long_text_file_becomes_documents_cut_at_line_ends(tmp_path):
    text = "".join(f"line {i} of a long text\n" for i in range(40_000))
    (tmp_path / "long.txt").write_text(text)
    meta = prepare(tmp_path / "long.txt", tmp_path / "out")
    found = [documents(tmp_path / "out", meta, s) for s in prepare_fineweb.SPLITS]
    assert all(found) and all(d.endswith("\n") and len(d) < 10_100 for part in found for d in part)
    assert sorted("".join(sum(found, [])).splitlines()) == sorted(text.splitlines())


# ---------------------------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize("mode", MODES)
def test_resume_after_any_step_gives_the_identical_run(mode, data, tmp_path, monkeypatch):
    save, kept = train.save_checkpoint, {}

    def keep(folder, name, content):
        save(folder, name, content)
        if name == "last.pt":
            kept[content["step"]] = (Path(folder) / name).read_bytes()
    monkeypatch.setattr(train, "save_checkpoint", keep)
    settings = dict(residual_mode=mode, dtype="float32", save_every=1)
    rows = run_training(data, tmp_path / "whole", **settings)
    monkeypatch.setattr(train, "save_checkpoint", save)
    assert list(kept) == [1, 2, 3, 4, 5, 6]
    for step in range(1, 6):
        out = tmp_path / str(step)
        out.mkdir()
        (out / "last.pt").write_bytes(kept[step])
        (out / "log.csv").write_bytes((tmp_path / "whole" / "log.csv").read_bytes())  # with rows from behind the step
        again = run_training(data, out, resume="true", **settings)
        assert measured(again) == measured(rows)
        assert same_weights(out / "last.pt", tmp_path / "whole" / "last.pt")


def test_log_has_what_it_promises(data, tmp_path, capsys):
    rows = run_training(data, tmp_path / "a", log_every=2, eval_every=0, eval_at_tokens="500,1_300", max_steps=7)
    assert [r["step"] for r in rows] == ["2", "4", "6", "7"]
    assert list(rows[0]) == "step tokens loss val_loss lr grad_norm tok_per_s ms mem_mb crc".split()
    assert [bool(r["val_loss"]) for r in rows] == [True, False, True, False]  # 512 and 1536 tokens pass the milestones
    assert [int(r["tokens"]) for r in rows] == [512, 1024, 1536, 1792]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step:") and "/" in line]
    assert len(lines) == 4
    for line in lines:  # a fixed grammar: words of the form name:value
        assert len(dict(word.split(":", 1) for word in line.split())) == len(line.split())
    stream = train.Tokens(data, "train", 32, 257)
    import zlib
    assert rows[0]["crc"] == f"{zlib.crc32(stream.rows(stream.order(1, 1, 8)).astype('<u4').tobytes()):08x}"
    assert (tmp_path / "a/source/model.py").read_text() == (HERE / "model.py").read_text()


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_data_do_not_depend_on_micro_batches(mode, data, tmp_path):
    runs = [run_training(data, tmp_path / str(n), micro_batch=n, residual_mode=mode, max_steps=4)
            for n in ((1, 2, 4, 8) if mode == "attnres" else (1, 8))]
    for rows in runs[1:]:
        assert [r["crc"] for r in rows] == [r["crc"] for r in runs[0]]
        for a, b in zip(rows, runs[0]):
            for key in ("loss", "grad_norm", "val_loss"):
                assert a[key] == b[key] == "" or abs(float(a[key]) - float(b[key])) < 1e-10


def test_seeds_and_modes_share_data_and_start(data, tmp_path):
    runs = {mode: run_training(data, tmp_path / mode, residual_mode=mode, max_steps=3) for mode in MODES}
    for mode, rows in runs.items():
        assert [r["crc"] for r in rows] == [r["crc"] for r in runs["standard"]]
        if RESIDUAL_MODES[mode].exact_start:
            assert float(rows[0]["loss"]) == pytest.approx(float(runs["standard"][0]["loss"]), abs=1e-12)
    other = run_training(data, tmp_path / "other", seed=2, max_steps=3)
    assert other[0]["crc"] != runs["standard"][0]["crc"] and other[0]["loss"] != runs["standard"][0]["loss"]


def test_two_processes_give_the_numbers_of_one(data, tmp_path):
    """All modes, 20 steps: 1e-10 in fp64, 1e-5 in fp32; the same evaluation too."""
    tolerance, runs = {"float64": 1e-10, "float32": 1e-5}, []
    for mode in MODES:
        for dtype in tolerance:
            runs.append((mode, dtype, dict(residual_mode=mode, dtype=dtype, max_steps=20, eval_every=10, lr=3e-3)))
    argvs = [flags(data, tmp_path / f"{mode}-{dtype}-2", **s) for mode, dtype, s in runs]
    driver = tmp_path / "driver.py"
    driver.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r}); import train\n"
                      f"for argv in {argvs!r}: train.train(*train.load_config(argv))\n"
                      "train.dist.destroy_process_group()\n")
    result = run_script(driver, processes=2)
    assert result.returncode == 0, result.stderr[-3000:]
    for mode, dtype, s in runs:
        one, two = run_training(data, tmp_path / f"{mode}-{dtype}-1", **s), read_log(tmp_path / f"{mode}-{dtype}-2")
        assert len(one) == len(two) == 20
        for a, b in zip(one, two):
            assert a["crc"] == b["crc"]
            for key in ("loss", "val_loss", "grad_norm")[:2 if dtype == "float32" else 3]:  # norms feel rounding most
                assert a[key] == b[key] == "" or abs(float(a[key]) - float(b[key])) < tolerance[dtype], (mode, dtype)


def test_checkpoints_load_safely_and_carry_no_prefixes(data, tmp_path):
    run_training(data, tmp_path / "a", residual_mode="attnres_block")
    for name in ("last.pt", "best.pt"):
        saved = torch.load(tmp_path / "a" / name, weights_only=True)
        assert saved["model"].keys() == make("attnres_block", n_layer=2).state_dict().keys()
        assert ("optimizer" in saved) == (name == "last.pt")
    saved["model"] = {f"module._orig_mod.{k}": v for k, v in saved["model"].items()}
    torch.save(saved, tmp_path / "wrapped.pt")
    model, _, _ = evaluation.load_model(tmp_path / "wrapped.pt", torch.device("cpu"), torch.float64)
    assert all(torch.equal(v, saved["model"][f"module._orig_mod.{k}"]) for k, v in model.state_dict().items())
    assert not list(tmp_path.glob("a/*.tmp"))


def test_checkpoints_that_cannot_be_used(data, tmp_path):
    run_training(data, tmp_path / "a", max_steps=2)
    last, config = tmp_path / "a" / "last.pt", (tmp_path / "a/config.toml").read_text()
    good = last.read_bytes()

    def error(**settings):
        with pytest.raises(UserError) as e:
            run_training(data, tmp_path / "a", resume="true", **dict(max_steps=4) | settings)
        assert "last.pt" in str(e.value) and "\n" not in str(e.value)
        return str(e.value)
    assert "n_layer: 2 -> 3" in error(n_layer=3)
    assert "residual_mode: standard -> attnres" in error(residual_mode="attnres")
    assert "seed: 1 -> 2" in error(seed=2) and "tokens_per_step" in error(tokens_per_step=512)
    for content in (good[:1000], b"", b"not a zip file at all", good[:-100]):
        last.write_bytes(content)
        assert "not a usable checkpoint" in error()
    saved = torch.load(tmp_path / "a" / "best.pt", weights_only=True)
    torch.save(saved, last)
    assert "no optimizer state" in error()
    torch.save({k: v for k, v in saved.items() if k != "model"}, last)
    assert "not a usable checkpoint" in error()
    torch.save([1, 2], last)
    assert "not a usable checkpoint" in error()
    last.write_bytes(good)
    with pytest.raises(UserError, match="holds a run already"):
        run_training(data, tmp_path / "a")
    assert last.read_bytes() == good and (tmp_path / "a/config.toml").read_text() == config


def test_a_finished_run_stays_finished_and_can_be_extended(data, tmp_path, capsys):
    run_training(data, tmp_path / "a", schedule="wsd", decay_steps=1)
    run_training(data, tmp_path / "a", schedule="wsd", decay_steps=1, resume="true")
    assert "is finished: 6 of 6 steps" in capsys.readouterr().out
    rows = run_training(data, tmp_path / "a", schedule="wsd", decay_steps=1, resume="true", max_steps=9)
    assert [r["step"] for r in rows] == list("123456789") and "max_steps: 6 -> 9" in capsys.readouterr().out
    state = torch.load(tmp_path / "a" / "last.pt", weights_only=True)["optimizer"]["state"]
    assert {int(s["step"]) for s in state.values()} == {9}


def test_resume_without_a_checkpoint_starts_fresh(data, tmp_path, capsys):
    rows = run_training(data, tmp_path / "a", resume="true", max_steps=2)
    assert len(rows) == 2 and "nothing to resume" in capsys.readouterr().out


@pytest.mark.parametrize("settings, message", [
    (dict(tokens_per_step=100), "--tokens_per_step=64 or --tokens_per_step=128"),
    (dict(tokens_per_step=10), "use --tokens_per_step=64 or another --micro_batch"),
    (dict(vocab_size=100), "vocabulary of 257, more than vocab_size=100"),
    (dict(data_dir="/nonexistent"), "no data in /nonexistent: prepare it with: python prepare_fineweb.py"),
    (dict(seq_len=10**6, tokens_per_step=2 * 10**6), "fewer than one window"),
    (dict(out_dir="/proc/nope"), "cannot write to the run folder"),
    (dict(device="cuda"), "no CUDA device"),
])
def test_training_mistakes_are_named(settings, message, data, tmp_path):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        return
    with pytest.raises(UserError, match=".*".join(message.split("*"))):
        run_training(data, tmp_path / "a", **settings)
    assert not (tmp_path / "a" / "last.pt").exists()


def spoil_weights(monkeypatch, step, value):
    """The optimizer's update number `step` leaves one weight at `value`."""
    update, calls = torch.optim.AdamW.step, []

    def spoiled(self, *args):
        update(self, *args)
        calls.append(1)
        if len(calls) == step:
            self.param_groups[0]["params"][0].data[0, 0] = value
    monkeypatch.setattr(torch.optim.AdamW, "step", spoiled)


def test_a_loss_that_is_not_finite_stops_the_run(data, tmp_path, monkeypatch):
    spoil_weights(monkeypatch, 3, math.nan)
    with pytest.raises(UserError, match="step 4: loss nan, gradient norm nan"):
        run_training(data, tmp_path / "a", eval_every=0)
    saved = torch.load(tmp_path / "a" / "last.pt", weights_only=True)
    assert saved["step"] == 2 and all(v.isfinite().all() for v in saved["model"].values())


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on(number, data, tmp_path):
    settings = dict(max_steps=100_000, eval_every=0, save_every=0)
    process = subprocess.Popen([sys.executable, str(HERE / "train.py"), *flags(data, tmp_path / "a", **settings)],
                               stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        if line.startswith("step:5/"):
            process.send_signal(number)
            break
    rest = process.communicate(timeout=60)[0]
    assert process.returncode == 128 + number and "config.toml --resume=true" in rest
    step = torch.load(tmp_path / "a" / "last.pt", weights_only=True)["step"]
    rows = read_log(tmp_path / "a")
    assert step == int(rows[-1]["step"]) >= 5
    assert len(run_training(data, tmp_path / "a", **settings | dict(max_steps=step + 2, resume="true"))) == step + 2


def test_no_compiler_means_one_warning_and_eager(data, tmp_path, capsys, monkeypatch):
    def broken(*a, **k):
        raise RuntimeError("no compiler here\nlong trace")
    monkeypatch.setattr(torch, "compile", broken)
    run_training(data, tmp_path / "a", compile="on", max_steps=2)
    out = capsys.readouterr().out
    assert out.count("warning: torch.compile") == 1 and "compile: off, no working compiler" in out


def test_missing_data_is_prepared_when_the_configuration_says_how(data, tmp_path):
    how = f"--source={data.parent / 'text'} --holdout=10 --workers=1"
    run_training(tmp_path / "made", tmp_path / "a", prepare=how, max_steps=1)
    assert (tmp_path / "made/meta.json").exists()


# ---------------------------------------------------------------------------------------------------------------------
# Evaluation


def test_evaluation_is_exact_and_independent_of_batch_and_processes(data, tmp_path, capsys):
    run_training(data, tmp_path / "a", residual_mode="attnres_block", dtype="float32")
    model, saved, _ = evaluation.load_model(tmp_path / "a", torch.device("cpu"), torch.float64)
    val = train.Tokens(data, "val", 32, 257)
    stream, nll = torch.from_numpy(val.read(0, val.total)), 0.0
    for first in range(0, val.total - 1, 32):  # every token but the first, once
        x, y = stream[first:first + 32], stream[first + 1:first + 33]
        nll += F.cross_entropy(model(x[None, :len(y)])[0][0], y, reduction="sum").item()
    results = []
    capsys.readouterr()
    for batch in (1, 3, 8):
        evaluation.main([str(tmp_path / "a"), "--json", "--dtype=float64", "--device=cpu", f"--batch={batch}"])
        results.append(json.loads(capsys.readouterr().out))
    two = run_script(HERE / "eval.py", tmp_path / "a", "--json", "--dtype=float64", "--device=cpu", processes=2)
    results.append(json.loads(two.stdout.strip().splitlines()[-1]))
    meta = json.loads((data / "meta.json").read_text())["splits"]["val"]
    for r in results:
        assert r["tokens"] == val.total - 1 == meta["tokens"] - 1
        assert r["loss"] == pytest.approx(nll / r["tokens"], abs=1e-12)
        assert r["perplexity"] == pytest.approx(math.exp(r["loss"]))
        assert r["bits_per_byte"] == pytest.approx(nll / math.log(2) / meta["text_bytes"])
    limited, count = train.evaluate(model, val, 3, torch.device("cpu"), torch.float64, limit=100)
    assert count == 100


def test_eval_command_line(data, tmp_path, capsys):
    run_training(data, tmp_path / "a", dtype="float32")
    capsys.readouterr()
    evaluation.main([str(tmp_path / "a/best.pt"), "--split=test"])
    assert "loss" in capsys.readouterr().out
    evaluation.main([str(tmp_path / "a"), "--prompt=wörd", "--tokens=40", "--samples=2", "--json"])
    texts = json.loads(capsys.readouterr().out)
    assert len(texts) == 2 and all(t.startswith("wörd") for t in texts)
    evaluation.main([str(tmp_path / "a"), "--prompt=", "--tokens=3"])
    for args, message in ((["nothing"], "does not exist"), ([str(data)], "holds no checkpoint"),
                          ([str(tmp_path / "a"), "--data_dir=/nonexistent"], "no data in /nonexistent"),
                          ([str(data / "meta.json")], "not a usable checkpoint"),
                          ([str(tmp_path / "a"), "--top_k=3"], "an effect only with --prompt"),
                          ([str(tmp_path / "a"), "--prompt=x", "--batch=3"], "an effect only without --prompt")):
        with pytest.raises(SystemExit):
            evaluation.main(args)
        assert message in capsys.readouterr().err


def test_divergences():
    p, q, r = (torch.tensor(v, dtype=torch.float64) for v in ([0.5, 0.5, 0.0], [0.0, 0.0, 1.0], [1 / 3, 1 / 3, 1 / 3]))
    assert evaluation.entropy(p).item() == pytest.approx(math.log(2)) and evaluation.entropy(q).item() == 0
    assert evaluation.entropy(r).item() == pytest.approx(math.log(3))
    assert evaluation.js(p, p).item() == 0 and evaluation.js(p, q).item() == pytest.approx(math.log(2))
    assert evaluation.js(p, r).item() == evaluation.js(r, p).item() == pytest.approx(
        (-(5 / 12) * math.log(5 / 12) * 2 - (1 / 6) * math.log(1 / 6)) - (math.log(2) + math.log(3)) / 2)


def test_linear_cka():
    generator = torch.Generator().manual_seed(0)
    x, y = (torch.randn(3000, 6, generator=generator, dtype=torch.float64) for _ in range(2))
    turn = torch.linalg.qr(torch.randn(6, 6, generator=generator, dtype=torch.float64))[0]
    assert evaluation.linear_cka(x, x) == pytest.approx(1) == evaluation.linear_cka(x, 3 * x @ turn + 5)
    assert evaluation.linear_cka(x, y) < 0.02 and 0.1 < evaluation.linear_cka(x, x + y) < 0.9


def routing_rows(n=6):
    return np.random.default_rng(0).integers(61, size=(n, 17))


@pytest.mark.parametrize("name", [n for n in VARIANTS if hasattr(variant(n).residual, "query")])
def test_routing_statistics(name):
    """Against the weights of GPT.depth_weights, token by token; independent of the batch."""
    model, rows = variant(name), routing_rows()
    device = torch.device("cpu")
    found, other = (evaluation.measure_routing(model, rows, n, device, torch.float64) for n in (2, 6))
    direct = model.depth_weights(torch.from_numpy(rows[:, :-1]))
    assert [r["route"] for r in found] == [r["route"] for r in direct]
    for mine, again, r in zip(found, other, direct):
        w = r["weights"]
        assert mine["weights"] == pytest.approx(w.mean((1, 2, 3)).tolist())
        assert mine["weights"] == pytest.approx(again["weights"])
        assert mine["max"] == pytest.approx(w.amax(0).mean().item()) and mine["max"] >= 1 / len(w)
        assert mine["entropy"] == pytest.approx(-(w * w.log()).sum(0).mean().item())
        assert 0 <= mine["entropy_share"] <= 1 and 0 < mine["usage"] <= 1 + 1e-9
        assert (mine["heads"] > 1e-6) == (model.residual.route_heads > 1)
    if name == "rd":
        w = {r["route"]: r["weights"] for r in direct}
        js = evaluation.js(w["4"], w["4_v"]).mean().item()
        assert next(r for r in found if r["route"] == "4")["roles"] == pytest.approx(js) and js > 0
        assert {r["route"] for r in found if "roles" in r} == {"2", "4"}


def test_the_probe_of_a_query_without_structure_is_zero():
    model = make("attnres", randomise=False)
    for r in evaluation.measure_routing(model, routing_rows(), 3, torch.device("cpu"), torch.float64):
        assert abs(r["probe"]) < 1e-12 and r["entropy_share"] == pytest.approx(1)


def test_rescue_gain():
    model, rows, device = make("dar_block"), routing_rows(), torch.device("cpu")
    result = evaluation.measure_histories(model, rows, 6, device, torch.float64)
    size = len(result["entries"])
    assert len(result["cka"]) == size == len(result["cka"][0])
    assert [r["site"] for r in result["rescue"]] == [*range(1, 7)]
    assert model.residual.retrieve.__func__ is model_file.Dual.retrieve  # the intervention is undone
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(30):  # something to damage
        gradients(model, torch.from_numpy(rows))
        optimizer.step()
    with torch.no_grad():  # only history 0 is read: it rescues everything, the other nothing
        for name, p in model.residual.gate.items():
            if name.startswith("a"):
                p.copy_(torch.tensor([50.0, -50.0]))
    rescue = evaluation.measure_histories(model, rows, 6, device, torch.float64)["rescue"]
    harmed = [r for r in rescue if r["rescue"]]
    assert len(harmed) > 2 and all(r["rescue"] == pytest.approx([1, 0], abs=1e-9) for r in harmed)


@pytest.mark.parametrize("mode", ["attnres", "rd", "mhar_block", "dar"])
def test_routing_report(mode, data, tmp_path, capsys):
    run_training(data, tmp_path / "a", residual_mode=mode, n_head=2, dtype="float32", max_steps=3)
    capsys.readouterr()
    evaluation.main([str(tmp_path / "a"), "--routing", "--windows=6", "--device=cpu"])
    text = capsys.readouterr().out
    assert "mlp 1" in text and "weights.png" in text and ("roles:" in text) == (mode == "rd")
    evaluation.main([str(tmp_path / "a"), "--routing", "--json", "--device=cpu"])
    result = json.loads(capsys.readouterr().out)
    assert result["mode"] == mode and ("cka" in result) == (mode == "dar")
    figures = {p.name for p in (tmp_path / "a/routing").glob("*.png")}
    extra = {"attnres": {"probe.png"}, "rd": {"roles.png"}, "mhar_block": {"heads.png"}, "dar": {"histories.png"}}[mode]
    assert {"weights.png", "depth.png"} | extra == figures


def test_standard_has_no_routes_to_report(data, tmp_path, capsys):
    run_training(data, tmp_path / "a", dtype="float32", max_steps=1)
    with pytest.raises(SystemExit):
        evaluation.main([str(tmp_path / "a"), "--routing"])
    assert "residual_mode=standard has no routes to report" in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# The study


def test_paired_differences():
    def rows(*losses):
        return {str(seed): dict(loss=text) for seed, text in enumerate(losses)}
    base, mine = rows("3.0 2.0", "3.1 2.2", "3.0 2.1"), rows("2.9 1.9", "3.0 1.9", "3.1 2.0")
    (early, *_), (delta, error, width, won, n) = evaluation.paired(mine, base)
    assert early == pytest.approx(-0.1 / 3) and delta == pytest.approx(-0.5 / 3) and (won, n) == (3, 3)
    d = np.array([-0.1, -0.3, -0.1])
    assert error == pytest.approx(d.std(ddof=1) / 3**0.5) and width == pytest.approx(4.303 * error)
    assert evaluation.paired(rows("3.0 2.0"), base)[1][3:] == (0, 1)
    assert evaluation.paired({"7": dict(loss="1 1")}, base) == []  # only equal seeds are pairs
    curve = [(100, 4.0), (200, 3.0), (400, 2.0)]
    for loss, tokens in ((2.0, 400), (1.0, 800), (2.5, 200 * 2**0.5), (3.0, 200), (4.5, 100 / 2**0.5)):
        assert evaluation.tokens_needed(curve, loss) == pytest.approx(tokens)


def test_a_study_trains_what_is_missing_and_compares(data, tmp_path, capsys):
    lines = [f"{f[2:].split('=')[0]} = {f.split('=')[1]}" for f in flags("x", "x", eval_every=6, max_steps=6) if
             not f.startswith(("--data_dir", "--out_dir", "--device", "--dtype"))]
    config = tmp_path / "small.toml"
    config.write_text("\n".join([*lines, f'data_dir = "{data}"', 'eval_at_tokens = "512"']), encoding="utf-8")

    def study(*more):
        evaluation.main(["study", str(config), f"--runs={tmp_path / 'runs'}", f"--out={tmp_path / 'out'}", *more])
        return capsys.readouterr().out
    first = study("--modes=rd", "--seeds=1,2")
    assert first.count("done: ") == 4 and "| `rd` |" in first and "/2 |" in first
    before = (tmp_path / "out/results.csv").read_bytes()
    config.write_text(config.read_text(encoding="utf-8") + "# a remark changes nothing\n", encoding="utf-8")
    again = study("--modes=rd,rd:rd_control=tied", "--seeds=1,2", "--minutes=0")
    assert "done: " not in again and (tmp_path / "out/results.csv").read_bytes() == before
    assert "| `rd rd_control=tied` | not run |" in again
    with open(tmp_path / "out/results.csv", newline="") as f:
        rows = list(csv.DictReader(f))
    assert [(r["mode"], r["knobs"], r["seed"]) for r in rows] == [
        ("rd", "", "1"), ("rd", "", "2"), ("standard", "", "1"), ("standard", "", "2")]
    assert all(r["tokens"] == "512 1536" and len(r["loss"].split()) == 2 for r in rows)
    assert rows[2]["speed"] == rows[2]["kept"] == "1.0" and float(rows[0]["kept"]) > 1 and float(rows[0]["speed"]) > 0
    out = {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}
    other = study("--base=rd", "--minutes=0")
    there, back = (float(re.search(rf"\| `{mode}` \|.*", text)[0].split(" | ")[4]) for mode, text in
                   (("rd", again), ("standard", other)))
    assert back == -there and "needed by `rd`" in other
    assert out == {p.name: p.read_bytes() for p in (tmp_path / "out").iterdir()}  # printed only
    figures = {name for name in out if name.endswith(".png")}
    assert figures == {f"small_{x}.png" for x in ("loss", "difference", "speed", "depth")}
    more = study("--seeds=3")  # further seeds of the base tell the noise and leave the pairs alone
    assert "over its 2 seeds" in again and "over its 3 seeds" in more
    assert re.findall(r"\| `(?:rd|standard)` .*", more) == re.findall(r"\| `(?:rd|standard)` .*", again)
    assert study("--base=rd", "--minutes=0").split("\n\n")[0] == other.split("\n\n")[0]
    for argv, message in ((["--seeds=9", "--minutes=0", f"--out={tmp_path / 'new'}"], "no run of standard is finished"),
                          (["--modes=attnress"], "did you mean attnres?"), (["--seeds=one"], "--seeds=one"),
                          (["--jobs=0"], "--jobs=0: must be at least 1")):
        with pytest.raises(SystemExit):
            evaluation.main(["study", str(config), *argv])
        assert message in capsys.readouterr().err
    text = config.read_text(encoding="utf-8")
    for changed, message in ((text.replace("eval_at_tokens", "# "), "needs eval_every and eval_at_tokens"),
                             (text.replace("lr = 0.01", "lr = 0.02", 1), "has runs of small with other settings")):
        assert changed != text
        config.write_text(changed, encoding="utf-8")
        with pytest.raises(SystemExit):
            study("--seeds=1,2", "--minutes=0")
        assert message in capsys.readouterr().err


# ---------------------------------------------------------------------------------------------------------------------
# README and repository


def test_readme_tells_the_truth():
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    for name, row in RESIDUAL_MODES.items():
        added = row.added.replace("*", "·")
        expected = f"| `{name}` | {row.reads} | {row.stores} | {added} | {row.paper} | `{row.cls.__name__}` |"
        assert expected in readme, f"README's table of modes needs this row: {expected}"
    parsers = {"train.py": train.load_config, "eval.py": evaluation.parse_args,
               "prepare_fineweb.py": prepare_fineweb.parse_args}
    blocks = "".join(re.findall(r"```bash\n(.*?)```", readme, re.S))
    commands = re.findall(r"(?:python|torchrun [^&\n]*?) (\w+\.py)(.*)", blocks)
    assert len(commands) > 8 and {script for script, _ in commands} == {*parsers}
    for script, argv in commands:  # every command parses
        parsers[script](shlex.split(argv, comments=True))


def test_the_example_of_a_new_mode(monkeypatch):
    """README's example, exactly as it is printed, and the identity tests over it."""
    code, = re.findall(r"```python\n(class .*?)```", (HERE / "README.md").read_text(encoding="utf-8"), re.S)
    assert len(code.strip().splitlines()) <= 30
    monkeypatch.setattr(model_file, "RESIDUAL_MODES", dict(RESIDUAL_MODES))
    exec(code, vars(model_file))
    monkeypatch.setitem(RESIDUAL_MODES, "sigmoid", model_file.RESIDUAL_MODES["sigmoid"])
    monkeypatch.setitem(VARIANTS, "sigmoid", ("sigmoid", {}))
    assert not torch.allclose(make("sigmoid")(tokens())[0], copy_of(make("sigmoid"), "attnres")(tokens())[0], atol=1e-4)
    for test in (test_every_parameter_gets_its_start_from_the_init_function,
                 test_modes_of_one_seed_share_all_other_weights,
                 test_future_tokens_do_not_matter, test_generation_with_a_cache_equals_the_full_forward,
                 test_remat_gives_the_same_gradients_bit_for_bit, test_the_whole_model_traces_as_one_graph,
                 test_every_parameter_acts, test_optimizer_groups_are_a_partition, test_thirty_steps_overfit_a_batch,
                 test_residual_parameters_change_the_function, test_counts_follow_the_formulas):
        test("sigmoid")
    test_zero_queries_are_exactly_standard("sigmoid", 1e-2)


def test_the_small_print_of_the_code():
    for path in HERE.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "test_model.py":
            # an assertion that cannot fail; a cast that would make float64 less: at_least_fp32 says the precision
            assert "assert True" not in text and ".float()" not in text
            for call in re.findall(r"(?<![.\w])open\([^\n]*", text):  # text is UTF-8, whatever the system's locale
                assert "encoding=" in call or re.search(r'"[rwa]\+?b"', call), f"{path.name}: {call}"
    assert inspect_forward() <= 10


def inspect_forward():
    import inspect
    source = inspect.getsource(model_file.GPT.forward)
    assert not set(MODES) & set(re.findall(r"\w+", source))
    return len(source.splitlines())


# ---------------------------------------------------------------------------------------------------------------------
# What users of such repositories run into


PREFIXES = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_run_goes_on_from_a_wrapped_model_and_saves_plain_names(prefix, data, tmp_path):
    """Twice in a row: what was loaded from a file with prefixes must not bring them into the next one."""
    run_training(data, tmp_path, max_steps=2)
    names = make("standard", n_layer=2).state_dict().keys()
    for steps in (3, 4):
        saved = torch.load(tmp_path / "last.pt", weights_only=True)
        assert saved["model"].keys() == names
        saved["model"] = {prefix + k: v for k, v in saved["model"].items()}
        torch.save(saved, tmp_path / "last.pt")
        assert len(run_training(data, tmp_path, resume="true", max_steps=steps)) == steps
    assert evaluation.load_model(tmp_path, torch.device("cpu"), torch.float64)[1]["step"] == 4


def test_compiling_changes_no_names_and_compiles_few_times(monkeypatch):
    """Layers share their graphs, also between training and evaluation: a deep model stays far from dynamo's limit."""
    from torch._dynamo.testing import CompileCounter
    for mode in ("attnres", "rd"):
        torch._dynamo.reset()
        model, idx, counter = make(mode, n_layer=10, route_impl="fused"), tokens(), CompileCounter()
        names = list(model.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
            assert train.compile_model(model, "on", torch.device("cpu"), print).startswith("on")
        for _ in range(2):
            gradients(model, idx)
            with torch.no_grad():
                loss_of(model, idx)
        assert 2 < counter.frame_count <= 8 and list(model.state_dict()) == names


def test_nothing_asks_for_a_gpu_on_the_cpu(data, tmp_path, capsys, monkeypatch):
    def asked(*args, **kwargs):
        raise AssertionError("CUDA was initialised")
    for name in ("_lazy_init", "set_device", "get_device_name", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, asked)
    run_training(data, tmp_path / "a", dtype="auto", max_steps=1)
    assert re.search(r"device: cpu \(as asked\); dtype: (float32|bfloat16) \(.*here\)", capsys.readouterr().out)
    evaluation.main([str(tmp_path / "a"), "--device=cpu"])


def test_bfloat16_is_taken_where_the_gpu_has_it(monkeypatch):
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has, **kwargs: has)
        assert train.choose_dtype("auto", torch.device("cuda"))[0] == dtype
    with pytest.raises(UserError, match="this GPU has no bfloat16; use --dtype=float32"):
        train.choose_dtype("bfloat16", torch.device("cuda"))


def test_without_triton_all_works_and_without_tomllib_one_line_says_why():
    code = f"import sys; sys.path.insert(0, {str(HERE)!r}); sys.modules[sys.argv[1]] = None; import {{}}"
    for missing, module, message in (("triton", "kernels, model", ""), ("tomllib", "train", "Python 3.11 or newer")):
        result = subprocess.run([sys.executable, "-c", code.format(module), missing], capture_output=True, text=True)
        assert message in result.stderr and result.returncode == bool(message)
        assert len(result.stderr.splitlines()) == bool(message)


def test_an_old_pytorch_is_named(capsys, monkeypatch):
    for version, old in (("2.7.1+cu126", True), ("1.13.1", True), ("2.8.0a0+git", False), ("3.0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(SystemExit) if old else contextlib.nullcontext():
            train.guard("train.py", lambda: None)
        assert capsys.readouterr().err == old * (f"train.py: PyTorch {version} is older than 2.8: pip install -r "
                                                 "requirements.txt\n")


def test_val_shards_may_be_missing_only_where_they_are_not_needed(tmp_path):
    shard(tmp_path / "d/x_train_0.bin", range(300))
    with pytest.raises(UserError, match="d holds no val shards .*prepare_fineweb.py .*without val with --eval_every=0"):
        run_training(tmp_path / "d", tmp_path / "a", vocab_size=300)
    assert len(run_training(tmp_path / "d", tmp_path / "a", vocab_size=300, eval_every=0)) == 6


def test_a_wrong_file_in_the_tokenizer_cache_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"half a file")
    with pytest.raises(UserError, match="--tokenizer=r50k_base: Hash mismatch .*base.tiktoken.*TIKTOKEN_CACHE_DIR"):
        prepare_fineweb.get_encoding("r50k_base")


def test_training_and_sampling_never_touch_the_network(data, tmp_path, monkeypatch):
    import socket

    def touched(*args, **kwargs):
        raise AssertionError("the network was used")
    monkeypatch.setattr(socket.socket, "connect", touched)
    monkeypatch.setattr(socket, "getaddrinfo", touched)
    run_training(data, tmp_path / "a", max_steps=1)
    evaluation.main([str(tmp_path / "a"), "--prompt=a", "--tokens=2", "--device=cpu"])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_micro_steps_make_up_the_step_or_the_nearest_legal_numbers_are_named(world):
    cfg = GPTConfig(vocab_size=61, seq_len=32)
    for wanted in (1, 100, 192, 5000, 6144):
        t = train.TrainConfig(micro_batch=2, tokens_per_step=wanted)
        try:
            n = train.check_batch(cfg, t, world)
        except UserError as e:
            legal = [int(n) for n in re.findall(r"--tokens_per_step=(\d+)", str(e))]
            assert f"tokens_per_step={wanted} does not divide" in str(e) and legal and max(legal) > wanted
            n = [train.check_batch(cfg, dataclasses.replace(t, tokens_per_step=x), world) for x in legal]
            assert min(n) >= 1 and (len(n) == 1 or n[1] == n[0] + 1)
        else:
            assert n >= 1 and n * world * 2 * 32 == wanted


def test_weights_that_are_not_finite_are_never_saved(data, tmp_path, monkeypatch):
    """The loss of the step is still good when the update spoils the weights, and a save may be due at once."""
    spoil_weights(monkeypatch, 4, math.inf)
    with pytest.raises(UserError, match="step 4: loss [0-9.]+, gradient norm .* weights that are not finite"):
        run_training(data, tmp_path / "a", eval_every=0)
    assert train.load_checkpoint(tmp_path / "a" / "last.pt")["step"] == 2


def test_a_kill_in_the_middle_of_a_save_leaves_the_old_checkpoint(data, tmp_path, monkeypatch):
    run_training(data, tmp_path, max_steps=2)
    good, save = (tmp_path / "last.pt").read_bytes(), torch.save

    def half(content, file):
        file.write(good[:1000])
        raise KeyboardInterrupt  # as good as a kill: nothing of save_checkpoint's own runs after it
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        run_training(data, tmp_path, resume="true", max_steps=4, eval_every=0)
    assert (tmp_path / "last.pt").read_bytes() == good and (tmp_path / "last.pt.tmp").exists()
    monkeypatch.setattr(torch, "save", save)
    (tmp_path / "best.pt.tmp").write_bytes(b"half")
    assert len(run_training(data, tmp_path, resume="true", max_steps=4, eval_every=0)) == 4
    assert not list(tmp_path.glob("*.tmp"))


def test_resuming_keeps_nothing_of_the_file_in_memory(data, tmp_path, monkeypatch):
    import weakref
    load, step, seen, alive = train.load_checkpoint, torch.optim.AdamW.step, [], []

    def loading(path):
        content = load(path)
        assert {v.device.type for v in content["model"].values()} == {"cpu"}
        seen.extend(weakref.ref(v) for v in content["model"].values())
        return content

    def stepping(self, *args):
        alive.append(sum(r() is not None for r in seen))
        return step(self, *args)
    run_training(data, tmp_path, max_steps=2)
    monkeypatch.setattr(train, "load_checkpoint", loading)
    monkeypatch.setattr(torch.optim.AdamW, "step", stepping)
    run_training(data, tmp_path, max_steps=4, resume="true")
    assert seen and alive == [0, 0]


def test_the_optimizer_goes_on_with_the_settings_of_this_start(data, tmp_path, monkeypatch):
    """`fused` of a file from another device would put the step counters where this device's optimizer has none."""
    run_training(data, tmp_path, max_steps=2)
    saved, load = torch.load(tmp_path / "last.pt", weights_only=True), torch.optim.AdamW.load_state_dict
    for group in saved["optimizer"]["param_groups"]:
        group.update(fused=False, foreach=True, weight_decay=7.0)
    torch.save(saved, tmp_path / "last.pt")
    seen = []

    def loading(self, state):
        seen.extend((g["fused"], g["foreach"], g["weight_decay"]) for g in state["param_groups"])
        load(self, state)
        assert all(v.device == p.device for p, s in self.state.items() for v in s.values())
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", loading)
    run_training(data, tmp_path, max_steps=3, resume="true")
    assert seen == [(True, None, 0.1), (True, None, 0.0)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory from /proc, which Linux alone has")
def test_memory_does_not_grow_with_a_long_evaluation(tmp_path):
    """A split is read from end to end without `order`, which is called by training alone."""
    n = 40_000_000
    shard(tmp_path / "x_val_0.bin", [], count=n)
    os.truncate(tmp_path / "x_val_0.bin", 1024 + 2 * n)

    def resident():
        return int(Path("/proc/self/statm").read_text(encoding="utf-8").split()[1]) * 4096
    stream = train.Tokens(tmp_path, "val", 1024, 100)
    before = resident()
    for first in range(0, n - 2**16, 2**16):
        stream.read(first, 2**16)
    assert resident() - before < 40e6  # of 80 MB


def test_more_steps_than_data_begin_another_epoch(tmp_path, capsys):
    """Also where a run is resumed in the last windows of one: the same batches as in one go."""
    shard(tmp_path / "d/x_train_0.bin", np.random.default_rng(0).integers(300, size=700))  # 21 windows, 8 in a step
    settings = dict(vocab_size=300, eval_every=0, max_steps=9, lr=1e-3)
    rows = run_training(tmp_path / "d", tmp_path / "whole", **settings)
    assert len(rows) == 9 and len({r["crc"] for r in rows}) == 9 and "3.43 epochs" in capsys.readouterr().out
    for step in (2, 5):
        run_training(tmp_path / "d", tmp_path / str(step), **settings | dict(max_steps=step))
        again = run_training(tmp_path / "d", tmp_path / str(step), **settings | dict(resume="true"))
        assert [r["crc"] for r in again] == [r["crc"] for r in rows]


def test_commands_name_no_port_and_take_a_free_one():
    files = [*HERE.glob("*.py"), *HERE.glob("*.md"), *HERE.glob("configs/*.toml"), *HERE.glob(".ci/*")]
    for path in (p for p in files if p.name != Path(__file__).name):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"2950\d|MASTER_PORT['\"]?\]? ?=|master[_-]port", text), path
        assert text.count("torchrun --standalone --nproc") == text.count("torchrun --"), path


@pytest.mark.parametrize("device, backend", [("cpu", "gloo"), ("cuda", "nccl"), ("mps", "gloo")])
def test_the_device_decides_the_backend(device, backend, monkeypatch):
    """And sums of numbers go through memory that has float64: a lone process under torchrun takes part in them too."""
    started, dist = [], train.dist
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: started.append(backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for name in ("WORLD_SIZE", "RANK"):  # left behind by something else: still a run of its own
        monkeypatch.setenv(name, "1")
    assert train.start_processes(torch.device(device)) == (0, 1) and not started
    monkeypatch.setattr(train, "launched", lambda: True)
    assert train.start_processes(torch.device(device)) == (0, 1) and started == [backend]
    if device != "cuda":
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "all_reduce", lambda total: None)
        assert train.sum_over_ranks([1.0, 2**40 + 1], torch.device(device)) == [1.0, 2**40 + 1]


def test_the_other_processes_wait_for_hours_and_hear_of_mistakes(monkeypatch):
    """What one process does for all, such as preparing the data, takes longer than the usual time limits."""
    groups, told = [], []
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(train.dist, "new_group", lambda **settings: groups.append(settings))
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train.dist, "broadcast_object_list", lambda values, group: told.extend(values))

    def mistaken():
        raise UserError("no such folder")
    with pytest.raises(UserError, match="no such folder"):
        train.on_first_rank(mistaken)
    assert told == ["no such folder"] and groups[0]["backend"] == "gloo"
    assert groups[0]["timeout"].total_seconds() > 24 * 3600


def test_one_clip_of_the_gradient_of_the_whole_step(data, tmp_path):
    """With every step clipped, runs differ unless the sum over micro-steps, and nothing else, is what is clipped."""
    runs = [run_training(data, tmp_path / str(n), micro_batch=n, grad_clip=0.05, eval_every=0) for n in (1, 4, 8)]
    for rows in runs:
        for a, b in zip(rows, runs[0]):
            assert float(a["grad_norm"]) > 0.1
            for key in ("loss", "grad_norm"):
                assert float(a[key]) == pytest.approx(float(b[key]), abs=1e-10)


TWO_PROCESSES = """
import hashlib, json, os, signal, sys
sys.path.insert(0, HERE)
import train
rank, clip, forward, models = int(os.environ["RANK"]), train.torch.nn.utils.clip_grad_norm_, train.GPT.forward, []

def run(argv, at_3=lambda: None, factor=1.0):
    calls = []
    def clipping(*args):
        calls.append(1)
        if rank and len(calls) == 3:
            at_3()
        return clip(*args)
    def scaled(self, *args):
        models[:] = [self]
        logits, loss = forward(self, *args)
        return logits, loss * factor if rank and loss is not None and len(calls) == 2 else loss
    train.torch.nn.utils.clip_grad_norm_, train.GPT.forward = clipping, scaled
    try:
        train.train(*train.load_config(argv))
    except (train.UserError, SystemExit) as e:
        return str(e)

clipped, spoilt, stopped, failing = ARGVS
run(clipped)
found = {"weights": hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in models[0].parameters())).hexdigest()}
found["spoilt"] = run(spoilt, factor=float("nan"))
found["stopped"] = run(stopped, at_3=lambda: os.kill(os.getpid(), signal.SIGTERM))
with open(f"{OUT}/{rank}.json", "w", encoding="utf-8") as f:
    json.dump(found, f)
def fail():
    train.time.sleep = lambda seconds: None
    raise RuntimeError("rank one fails")
train.guard("train.py", lambda: run(failing, at_3=fail))
"""


def test_two_processes_clip_alike_and_stop_together(data, tmp_path):
    """One clip of the averaged gradient; a bad loss, a signal or an error of one process ends both."""
    settings = dict(clipped=dict(grad_clip=0.05, max_steps=4), spoilt={}, stopped=dict(max_steps=10**5, save_every=0),
                    failing=dict(max_steps=10**5))
    argvs = [flags(data, tmp_path / "runs" / name, eval_every=0, **s) for name, s in settings.items()]
    driver = tmp_path / "driver.py"
    driver.write_text(f"HERE, OUT, ARGVS = {str(HERE)!r}, {str(tmp_path)!r}, {argvs!r}\n{TWO_PROCESSES}", "utf-8")
    result = run_script(driver, processes=2, timeout=90)
    assert result.returncode != 0 and "rank one fails" in result.stderr, result.stderr[-3000:]
    assert "destroy_process_group" not in result.stderr
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert zero == one and zero["stopped"] == "143" and "step 3: loss nan, gradient norm nan" in zero["spoilt"]
    for name, step in (("spoilt", 2), ("stopped", 3)):
        saved = torch.load(tmp_path / "runs" / name / "last.pt", weights_only=True)
        assert saved["step"] == step and saved["model"].keys() == make("standard", n_layer=2).state_dict().keys()
    for a, b in zip(read_log(tmp_path / "runs/clipped"), run_training(data, tmp_path / "one", eval_every=0,
                                                                      **settings["clipped"]), strict=True):
        assert float(a["grad_norm"]) > 0.1 and all(
            float(a[k]) == pytest.approx(float(b[k]), abs=1e-10) for k in ("loss", "grad_norm"))


def test_a_second_interrupt_ends_the_run_at_once(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    for numbers, code in (([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGINT, signal.SIGTERM], None)):
        stop = train.StopSignal()
        stop.handle(numbers[0], None)
        assert stop.number == signal.SIGINT
        with pytest.raises(SystemExit, match="130") if code else contextlib.nullcontext():
            stop.handle(numbers[1], None)


def test_the_locale_does_not_change_the_shards(data, tmp_path):
    """The documents have accents, and a snowman."""
    result = run_script(HERE / "prepare_fineweb.py", f"--source={data.parent / 'text'}", f"--out={tmp_path / 'ö'}",
                        "--holdout=10", "--shard_tokens=30000", "--workers=1", PYTHONUTF8="0",
                        PYTHONCOERCECLOCALE="0", LC_ALL="C")
    assert result.returncode == 0, result.stderr
    for path in data.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "ö" / path.name).read_bytes()


def jitted():
    """{name: plain function} of what Triton compiles."""
    found = {name: getattr(f, "fn", None) for name, f in vars(kernels).items()}
    return {name: f for name, f in found.items() if getattr(f, "__module__", "") == "kernels"}


def test_kernels_read_no_globals_but_other_kernels():
    """A newer Triton refuses module constants that are not declared as such."""
    functions = jitted()
    assert len(functions) == (HERE / "kernels.py").read_text(encoding="utf-8").count("\n@jit") > 0
    for name, f in functions.items():
        used = set(f.__code__.co_names) & set(vars(kernels))
        assert used <= {"tl", *functions}, name


def test_offsets_of_kernels_are_64_bit():
    """Rows, planes and pairs are widened before they are multiplied: banks may have more than 2^31 elements."""
    import inspect
    for name, f in jitted().items():
        source = inspect.getsource(f)
        for use in re.findall(r"tl\.program_id\(0\)(.{0,14})", source):
            assert use.startswith((".to(tl.int64)", " * 3")), (name, use)  # the latter: one program in 1024 elements
        wide = ["int64", "plane_of("] + ["plane * M"] * ("plane = plane_of(" in source)  # plane_of is checked below
        wide += ["o_raw[None, :]"] * bool(re.search(r"o_raw = .*\.to\(tl\.int64\)", source))
        for line in source.splitlines():
            assert not re.search(r"\* M\b", line) or any(w in line for w in wide), (name, line)
    assert "return tl.cast(slot + PAIRS * (tl.maximum(slot - 1, 0) // 2), tl.int64)" in inspect.getsource(
        jitted()["plane_of"])


@pytest.mark.parametrize("impl", ["reference", "fused"])
def test_kept_memory_grows_with_the_depth_and_not_with_its_square(impl):
    models = [make("attnres", n_layer=n, n_embd=256, route_impl=impl, dtype=torch.float32) for n in (4, 8, 16)]
    a, b, c = (kernels.kept_bytes(model, tokens()[:1, :16], contextlib.nullcontext) for model in models)
    assert 1.8 < (c - b) / (b - a) < 2.2  # of twice the layers added; copies of what each site reads would make it 4


def test_operations_are_counted_as_pytorch_counts_them():
    """Whether the head is tied or not. Attention is added by hand: two products over half a square."""
    from torch.utils.flop_counter import FlopCounterMode
    idx, counts = tokens(2, 64)[:, :64], set()
    for tied in (True, False):
        model = make("standard", dtype=torch.float32, seq_len=64, n_embd=64, tie_embeddings=tied)
        cfg = model.cfg
        with FlopCounterMode(display=False) as counter:
            loss_of(model, tokens(2, 64))
        matrices = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
        attention = 2 * 2 * idx.numel() * 64 * cfg.n_layer * cfg.n_head * cfg.head_dim / 2
        counts.add(counted := kernels.flops_per_step(model, idx))
        assert counted == pytest.approx(3 * (matrices + attention), rel=0.02)
    assert max(counts) < 1.001 * min(counts)


def test_ids_without_a_token_are_shown_and_padding_is_never_sampled(data, tmp_path, capsys):
    """Vocabularies have gaps (cl100k_base has), and models are padded beyond them."""
    ranks = write_ranks(tmp_path / "gap.tiktoken", {b" has": 400})
    encoding = prepare_fineweb.get_encoding(str(ranks))
    assert evaluation.decode(encoding, [104, 300, 258, 401]) == "h\ufffd the<|endoftext|>"
    assert evaluation.decode(encoding, list("é☃".encode())) == "é☃"
    torch.manual_seed(0)
    out = make("standard").generate(tokens()[:, :1], 200, temperature=5.0, n_vocab=7)[:, 1:]
    assert out.max() < 7 and len(out.unique()) == 7
    run_training(data, tmp_path / "a", max_steps=1)
    prepare_fineweb.save_encoding(encoding, tmp_path / "tokenizer.json")
    with pytest.raises(SystemExit):
        evaluation.main([str(tmp_path / "a"), "--prompt=x", f"--data_dir={tmp_path}", "--device=cpu"])
    assert "tokenizer.json has a vocabulary of 402, more than the model's 257" in capsys.readouterr().err


def test_data_of_another_tokenizer_is_refused(data, tmp_path, capsys):
    """Also where its vocabulary has the size of the model's, so that every id is legal."""
    run_training(data, tmp_path / "a", max_steps=1, residual_mode="attnres")
    ranks = tmp_path / "same.tiktoken"
    ranks.write_bytes(b"".join(write_ranks(ranks).read_bytes().splitlines(keepends=True)[:256]))
    texts = write_corpus(tmp_path, ".jsonl", corpus())
    meta = prepare(texts, tmp_path / "other", f"--tokenizer={ranks}", "--holdout=10")
    assert meta["vocab_size"] == 257
    for task in ([], ["--routing"], ["--prompt=x"]):
        with pytest.raises(SystemExit):
            evaluation.main([str(tmp_path / "a"), f"--data_dir={tmp_path / 'other'}", "--device=cpu", *task])
        assert f"is of the tokenizer {meta['tokenizer']}, but" in capsys.readouterr().err


def test_a_worker_that_dies_is_said_and_idle_workers_do_no_harm(tmp_path):
    with pytest.raises(UserError, match="a worker process died .* goes on"):
        list(prepare_fineweb.in_order([((3,), "")], os._exit, 2, "bytes"))
    path = write_corpus(tmp_path, ".jsonl", ["one", "two", "three"])
    meta = prepare(path, tmp_path / "d", "--workers=4", *TRAIN_ONLY)
    assert documents(tmp_path / "d", meta, "train") == ["one", "two", "three"]


def test_counts_of_tokens_have_64_bits(tmp_path, monkeypatch):
    for i in range(3):
        shard(tmp_path / f"x_train_{i}.bin", [1])
    monkeypatch.setattr(train, "read_header", lambda path: (np.int32(2**31 - 1), np.dtype("<u2")))
    stream = train.Tokens(tmp_path, "train", 1024, 100)
    assert stream.total == 3 * (2**31 - 1) and stream.windows == (stream.total - 1) // 1024
    order = stream.order(1, 10**6, 488)  # step a million of half a million tokens
    assert order.max() < stream.windows and len(set(order.tolist())) == 488


# ---------------------------------------------------------------------------------------------------------------------
# Robustness: killed, fuzzed, odd


TINY_RUN = dict(n_embd=16, n_ffn=16, n_head=1, seq_len=16, tokens_per_step=64, eval_tokens=100)


def alone(command, **options):
    """A process of one thread whose output can be read line by line."""
    return subprocess.Popen(list(map(str, command)), text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
                            **dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT) | options)


def ordinary(*others, slow):
    """Values of a parameter: the ones of the ordinary run, and one that is marked slow."""
    return [*others, pytest.param(slow, marks=pytest.mark.slow)]


@pytest.mark.parametrize("kills", ordinary(5, slow=50))
def test_training_killed_at_any_moment_ends_in_the_same_weights(kills, data, tmp_path):
    rng, inside = np.random.default_rng(kills), 0
    settings = TINY_RUN | dict(max_steps=24 * kills, save_every=1, eval_every=7, residual_mode="attnres",
                               resume="true")

    def start(out):
        return alone([sys.executable, HERE / "train.py", *flags(data, out, **settings)])
    whole = start(tmp_path / "whole")
    text = whole.communicate(timeout=900)[0]
    assert whole.returncode == 0, text
    for kill in range(kills + 1):
        process = start(tmp_path / "killed")
        if kill < kills:
            if kill % 5 == 2:  # while it starts
                time.sleep(rng.uniform(0.2, 1))
            else:  # so many steps after the start, and anywhere within the step and its saves
                lines, wanted = 0, rng.integers(1, 12)
                while lines < wanted and (line := process.stdout.readline()):
                    lines += line.startswith("step:")
                time.sleep(rng.uniform(0, 0.02))
            process.kill()
        text = process.communicate(timeout=900)[0]
        assert process.returncode == (-signal.SIGKILL if kill < kills else 0), text
        inside += any((tmp_path / "killed").glob("*.tmp"))
        for path in (tmp_path / "killed").glob("*.pt"):
            train.load_checkpoint(path)
    print(f"{kills} kills, {inside} of them while a file was written")
    assert same_weights(tmp_path / "killed/last.pt", tmp_path / "whole/last.pt")
    assert same_weights(tmp_path / "killed/best.pt", tmp_path / "whole/best.pt")
    rows = read_log(tmp_path / "killed")
    assert [int(r["step"]) for r in rows] == list(range(1, 24 * kills + 1))
    assert measured(rows) == measured(read_log(tmp_path / "whole"))
    assert not list(tmp_path.glob("killed/*.tmp"))


@pytest.mark.parametrize("kills", ordinary(3, slow=20))
def test_preparation_killed_at_any_moment_ends_in_the_same_shards(kills, data, tmp_path):
    rng, done, rounds = np.random.default_rng(kills), 0, 0

    def start(out):  # in small chunks, the state saved behind each
        code = (f"import sys; sys.path.insert(0, {str(HERE)!r}); import prepare_fineweb as p; p.CHUNK_CHARS = 4000; "
                "p.SAVE_SECONDS = 0; p.main()")
        return alone([sys.executable, "-c", code, f"--source={data.parent / 'text'}", f"--out={tmp_path / out}",
                      "--holdout=10", "--shard_tokens=30000", f"--workers={1 + rounds % 2}"])
    begin = time.monotonic()
    start("whole").communicate(timeout=300)
    length = time.monotonic() - begin
    while done < kills or rounds == 0:
        rounds += 1
        while True:
            process = start(str(rounds))
            try:
                text = process.communicate(timeout=None if done == kills else rng.uniform(0.2, 1) * length)[0]
            except subprocess.TimeoutExpired:
                process.kill()
                process.communicate()
                done += 1
                continue
            assert process.returncode == 0, text
            break
        for out in ("whole", str(rounds)):
            assert json.loads((tmp_path / out / "meta.json").read_text()) == json.loads(
                (data / "meta.json").read_text())
            assert sorted(os.listdir(tmp_path / out)) == sorted(os.listdir(data))
            for path in data.glob("*.bin"):
                assert path.read_bytes() == (tmp_path / out / path.name).read_bytes()
    print(f"{done} kills in {rounds} preparations")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can limit a running process (prlimit)")
@pytest.mark.parametrize("what", ["last.pt", "log.csv"])
def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_says_so(what, data, tmp_path):
    """The limit on the size of a file falls on a running process, to half a checkpoint or just above the log."""
    import resource
    out, settings = tmp_path / "a", TINY_RUN | dict(max_steps=400, eval_every=0, save_every=5)
    process = alone([sys.executable, HERE / "train.py", *flags(data, out, **settings)], stderr=subprocess.PIPE)
    for line in process.stdout:
        if line.startswith("step:7/"):
            size = (out / what).stat().st_size
            size = size // 2 if what == "last.pt" else size + 150
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, size))
            break
    error = process.communicate(timeout=60)[1]
    assert process.returncode == 1 and re.fullmatch(f"train.py: cannot write {out / what} .*File too large.*\n", error)
    assert train.load_checkpoint(out / "last.pt")["step"] >= 5 and not list(out.glob("*.tmp"))
    step = train.load_checkpoint(out / "last.pt")["step"]
    rows = run_training(data, out, **settings | dict(max_steps=step + 2, resume="true"))
    assert [int(r["step"]) for r in rows] == list(range(1, step + 3))


# Fuzzing. Each case makes a damaged input, gives it to a loading function and compares what is accepted with what was
# there before the damage, or with a reading of the same input that shares no code with the loading function.


class Hang(BaseException):
    """Not an Exception: no handler of the code under test can take it for a damaged file."""


@contextlib.contextmanager
def time_limit(seconds):
    def stop(*_):
        raise Hang
    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


ODD_TEXT = ["", " ", "0", "-1", "1", "3", "1e3", "1_0", "0x10", "1" * 5000, "4611686018427387904", "nan", "inf",
            "-0.0", "1e-400", "1e400", "true", "True", "yes", "none", "auto", "cpu", "rd", "dar_block", "a\nb",
            "\0", "\udcff", "\ud800", "☃", "１２", "²", '"', "--help", "\x1b[31m", "a=b", "1,2", ",", "1,-2", "../x"]
ODD_TOML = ["", "nan", "-inf", "1e999", "0x" + "f" * 5000, "[0x" + "f" * 5000 + "]", "1" * 5000, "1.5", "-0", "3",
            "true", '"rd"', '"\\u0000"', '"\\uD800"', '"a\\nb"', "'''\na\nb'''", "2024-01-01", "07:30:00", "{}",
            "{a = 1}", "[]", "[" * 3000, "[1, 'a']", '"' + "x" * 5000 + '"', "1_000", "0o17", "\x00", "\x7f", "#"]
ODD_VALUES = [None, True, -1, 0, 1, 2**31, 2**62, 10**400, 1.5, math.nan, math.inf, "", "x", "\0.bin", "\ud800.bin",
              "../up.bin", "a\nb", [], {}, [1], [[]], {"a": 1}, "9" * 1000]


def damaged(rng, raw):
    """A copy of some bytes with up to three faults of the kinds that disks, transfers and editors make."""
    raw = bytearray(raw)
    for _ in range(rng.integers(4)):
        at, length = int(rng.integers(len(raw) + 1)), int(rng.integers(1, 40))
        match rng.integers(7):
            case 0 if at < len(raw):
                raw[at] ^= 1 << int(rng.integers(8))
            case 1:
                del raw[at:]
            case 2:
                raw[at:at] = rng.bytes(length)
            case 3:
                del raw[at:at + length]
            case 4:
                raw[at:at] = raw[at:at + length]
            case 5:
                raw[at:at + length] = bytes(len(raw[at:at + length]))
            case 6:
                raw[at:at + 1] = (b"\xef\xbb\xbf", b"\r\n", b"\0", b"\xff", b'"', b"{", b"]", b"9")[rng.integers(8)]
    return bytes(raw)


def replaced(rng, tree, odd=ODD_VALUES):
    """A copy of nested lists and dictionaries with one node replaced by an odd value, or removed."""
    spots = []

    def walk(node, path):
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            spots.append((*path, key))
            walk(node[key], (*path, key))

    def copy(node):
        if isinstance(node, dict):
            return {k: copy(v) for k, v in node.items()}
        return [copy(v) for v in node] if isinstance(node, list) else node
    walk(tree, ())
    tree = copy(tree)
    *path, last = spots[rng.integers(len(spots))]
    node = functools.reduce(lambda n, key: n[key], path, tree)
    if rng.integers(5):
        node[last] = odd[rng.integers(len(odd))]
    else:
        del node[last]
    return tree


class Fuzz:
    """The inputs of all cases lie in one folder; `good` are whole files, which no case changes."""

    def __init__(self, data, folder, rng):
        import shutil
        self.rng, self.folder, self.work = rng, folder, folder / "work"
        texts = folder / "texts"
        texts.mkdir()
        for i in range(60):
            (texts / f"{i}.txt").write_text(f"{i} is a document of few words " * (1 + i % 7), "utf-8")
        self.text_args = f"--source={texts}", f"--out={self.work}", "--holdout=20", "--shard_tokens=2000", "--workers=1"
        prepare(texts, folder / "shards", *self.text_args[2:])
        self.shards = {p.name: p.read_bytes() for p in (folder / "shards").iterdir() if p.name != "lock"}
        self.stream = {s: self.read(folder / "shards", s) for s in ("train", "val")}
        with pytest.MonkeyPatch.context() as m:  # a preparation that stopped half way
            m.setattr(prepare_fineweb, "CHUNK_CHARS", 1000)
            m.setattr(prepare_fineweb, "SAVE_SECONDS", 0)
            encode, calls = prepare_fineweb.encode_chunk, []
            m.setattr(prepare_fineweb, "encode_chunk",
                      lambda *a: encode(*a) if len(calls) < 4 and not calls.append(1) else sys.exit("killed"))
            with pytest.raises(SystemExit):
                prepare(texts, folder / "half", *self.text_args[2:])
        self.half = {p.name: p.read_bytes() for p in (folder / "half").iterdir() if p.name != "lock"}
        self.settings = TINY_RUN | dict(max_steps=4, eval_every=2, residual_mode="attnres", dtype="float32")
        run_training(data, folder / "run", **self.settings)
        self.data, self.run = data, {p.name: p.read_bytes() for p in (folder / "run").glob("*.*")}
        self.saved, self.shutil = torch.load(folder / "run/last.pt", weights_only=True), shutil
        self.tokenizer = write_tokenizer(folder)
        self.config = train.load_config([str(folder / "run/config.toml")])

    def pick(self, values):
        return values[self.rng.integers(len(values))]

    def read(self, folder, split):
        tokens = train.Tokens(folder, split, 16, 300)
        return tokens.read(0, tokens.total).tolist()

    def lay_out(self, files):
        self.shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name, content in files.items():
            (self.work / name).write_bytes(content)

    # each case returns what was accepted, after it has looked at it; refusals are exceptions

    def toml(self):
        base = self.run["config.toml"]
        if self.rng.integers(2):
            key = self.pick([*train.SCHEMA, "n_lyer", "model.x", '"\\n"'])
            lines = [line for line in base.decode().splitlines() if not line.startswith(key + " ")]
            mild = json.dumps(train.SCHEMA[key].default) if key in train.SCHEMA else "1"
            base = "\n".join([*lines, f"{key} = {self.pick([mild, self.pick(ODD_TOML)])}"]).encode()
        else:
            base = damaged(self.rng, base)
        self.lay_out({"c.toml": base})
        cfg, t = train.load_config([str(self.work / "c.toml")])
        import tomllib
        found = dataclasses.asdict(cfg) | dataclasses.asdict(t)
        for key, value in tomllib.loads(base.decode()).items():
            assert found[key] == value or value in ("", 0), key
        (self.work / "again.toml").write_text(train.to_toml(cfg, t), "utf-8")
        assert train.load_config([str(self.work / "again.toml")]) == (cfg, dataclasses.replace(t, resume=False))

    def flags(self):
        key, text = self.pick([*train.SCHEMA] * 3 + ["n_lyer", "", "-", "seed "]), self.pick(ODD_TEXT)
        text = self.pick([text, text, str(train.SCHEMA[key].default) if key in train.SCHEMA else text])
        arg = self.pick([f"--{key}={text}"] * 6 + [f"--{key}", f"-{key}={text}", text, damaged(
            self.rng, f"--{key}={text}".encode(errors="surrogatepass")).decode("utf-8", "surrogateescape")])
        if {"-h", "--help"} & {arg}:
            return
        cfg, t = train.load_config([arg])
        key, _, text = arg.removeprefix("--").partition("=")
        found, kind = (dataclasses.asdict(cfg) | dataclasses.asdict(t))[key], train.SCHEMA[key].type
        assert found == (text.lower() == "true" if kind is bool else kind(text)) or text in ("", "0")
        assert kind is not bool or text.lower() in ("true", "false")

    def shard(self):
        """Beside a meta.json every change of a token is seen."""
        name = self.pick([n for n in self.shards if n.endswith(".bin") and "_test_" not in n])
        raw, at = self.shards[name], 1024 if self.rng.integers(2) else 16
        raw = damaged(self.rng, raw[:at]) + raw[at:] if self.rng.integers(2) else raw[:at] + damaged(self.rng, raw[at:])
        self.lay_out(self.shards | {name: raw})
        for split in self.stream:
            assert self.read(self.work, split) == self.stream[split]

    def foreign_shard(self):
        """Without a meta.json the header and the length must agree."""
        raw = self.pick([v for k, v in self.shards.items() if k.endswith(".bin")])
        for _ in range(self.rng.integers(1, 3)):
            raw = damaged(self.rng, raw[:16]) + raw[16:] if self.rng.integers(2) else damaged(self.rng, raw)
        self.lay_out({"x_train_0.bin": raw})
        tokens = train.Tokens(self.work, "train", 16, 2**32)
        dtype = {20240520: "<u2", 20240801: "<u4"}[int(np.frombuffer(raw, "<i4", 1)[0])]
        assert tokens.read(0, tokens.total).tolist() == np.frombuffer(raw[1024:], dtype).tolist()

    def meta(self):
        """The seal sees every fault; one without a seal is checked as well as can be."""
        text, sealed = self.shards["meta.json"], self.rng.integers(2)
        text = damaged(self.rng, text) if sealed else json.dumps(
            replaced(self.rng, {k: v for k, v in json.loads(text).items() if k != "seal"})).encode()
        self.lay_out(self.shards | {"meta.json": text})
        meta = prepare_fineweb.read_meta(self.work)
        for split in self.stream:
            assert self.read(self.work, split) == self.stream[split]
            assert meta["splits"][split]["tokens"] == len(self.stream[split])
        assert not sealed or meta == json.loads(self.shards["meta.json"])
        evaluation.measure(evaluation.parse_args(["x", f"--data_dir={self.work}"]), self.model(), self.saved,
                           torch.device("cpu"), torch.float32, 0, 1)

    def model(self):
        cfg = dataclasses.replace(self.config[0], vocab_size=257)
        return GPT(cfg).eval()

    def progress(self):
        """What a continued preparation accepts ends in the very shards that were meant."""
        text = self.half["progress.json"]
        text = damaged(self.rng, text) if self.rng.integers(2) else json.dumps(
            replaced(self.rng, json.loads(text))).encode()
        self.lay_out(self.half | {"progress.json": text})
        prepare_fineweb.prepare(prepare_fineweb.parse_args([*self.text_args]))
        for name, content in self.shards.items():
            if name.endswith(".bin"):
                assert (self.work / name).read_bytes() == content
        mine, meant = (json.loads((f / "meta.json").read_text()) for f in (self.work, self.folder / "shards"))
        assert mine["splits"] == meant["splits"]

    def collect(self, path, skip_bad):
        args = prepare_fineweb.parse_args([f"--source={path}", "--out=x"] + ["--skip_bad"] * skip_bad)
        chunks = list(prepare_fineweb.read_chunks(prepare_fineweb.find_source(args, None), [0, 0], args))
        return [text for texts, *_ in chunks for text in texts], [s for *_, skipped in chunks for s in skipped]

    def compare(self, name, raw, expected):
        """`expected`: per document its text, or None where it cannot be used."""
        self.lay_out({name: raw})
        skipping = self.collect(self.work / name, True)
        assert skipping[0] == [e for e in expected if e is not None]
        bad = sum(e is None for e in expected)
        assert len(skipping[1]) == bad and not any("\n" in s for s in skipping[1])
        found = self.collect(self.work / name, False)[0]  # raises when there are bad ones
        assert not bad and found == expected

    def jsonl(self):
        good = [{"text": "one"}, {"text": "two é ☃"}, {"text": "a\r\nb"}, {"text": "x", "text2": 10**50}]
        odd = [3, None, [], "text", {"text": None}, {"txt": "x"}, {"text": ["a"]}, {"a\nb": 1}, *(
            {"text": t} for t in ("\ud800", "  ", "\0"))]
        kinds, ascii_only = self.pick([[good], [good, good, odd]]), bool(self.rng.integers(2))
        lines = [json.dumps(self.pick(self.pick(kinds)), ensure_ascii=ascii_only)
                 for _ in range(self.rng.integers(1, 6))]
        encoding = self.pick(["utf-8"] * 6 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"])
        raw = self.pick(["\n", "\n", "\r\n"]).join(lines).encode(encoding, "surrogatepass" if "utf" in encoding else
                                                                 "replace")
        raw = damaged(self.rng, raw) if self.rng.integers(3) else raw
        expected = []
        for line in raw.split(b"\n")[:-1] + [raw.split(b"\n")[-1]] * (not raw.endswith(b"\n") and raw != b""):
            try:
                text = json.loads(line.decode("utf-8-sig"))["text"]
                expected.append(text if self.usable(text) else None)
            except (ValueError, LookupError, TypeError, RecursionError):
                expected.append(None)
        self.compare("docs.jsonl", raw, expected or [None])

    def usable(self, text):
        import unicodedata
        if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text):
            return False
        return text.count("\0") * 4 <= len(text) and any(unicodedata.category(c)[0] not in "ZC" for c in text)

    def text(self):
        text = "".join(self.pick(["word ", "é", "☃", "\r\n", "\n", "\t", "\0", " ", "\ufeff", "\u200d"])
                       for _ in range(self.rng.integers(0, 60)))
        encoding = self.pick(["utf-8"] * 4 + ["utf-8-sig", "utf-16", "utf-16-le", "latin-1", "cp1252"])
        raw = text.encode(encoding, "replace")
        raw = damaged(self.rng, raw) if self.rng.integers(2) else raw
        try:
            text = raw.removeprefix(b"\xef\xbb\xbf").decode()
        except UnicodeDecodeError:
            text = None
        self.compare("doc.txt", raw, [text if self.usable(text) else None])

    def compressed(self):
        """Both kinds of compression have checksums."""
        import gzip

        import zstandard
        kind = self.pick([".gz", ".zst"])
        content = b"".join(b'{"text": "document %d"}\n' % i for i in range(40))
        compress = gzip.compress if kind == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress
        raw = compress(content)
        self.lay_out({f"docs.jsonl{kind}": damaged(self.rng, raw)})
        assert self.collect(self.work / f"docs.jsonl{kind}", False)[0] == [f"document {i}" for i in range(40)]

    def ranks(self):
        """A tokenizer that is accepted gives back what it encodes."""
        name = self.pick(["tokenizer.json", "mine.tiktoken"])
        raw = (self.folder / name).read_bytes()
        if name.endswith("json") and self.rng.integers(2):
            raw = json.dumps(replaced(self.rng, {k: v for k, v in json.loads(raw).items() if k != "seal"})).encode()
        else:
            raw = damaged(self.rng, raw)
        self.lay_out({name: raw})
        encoding = prepare_fineweb.get_encoding(str(self.work / name))
        try:
            ids = encoding.encode_ordinary("some text é")
        except ValueError:  # what the preparation and eval.py turn into a line
            return
        assert encoding.n_vocab > max(ids)

    def resume(self):
        cfg, t = self.config
        t = dataclasses.replace(t, out_dir=str(self.work), data_dir=str(self.data))
        cfg, data, _, about = train.open_data(cfg, t)
        torch.manual_seed(0)
        model = GPT(cfg)
        optimizer = train.make_optimizer(model, t, torch.device("cpu"))
        rng = torch.get_rng_state()
        try:
            step, best = train.resume(cfg, t, model, optimizer, about, lambda line: None)
            idx = torch.from_numpy(data.rows(np.arange(2)))
            gradients(model, idx)
            optimizer.step()  # its state must be fit for use
        finally:
            torch.set_rng_state(rng)
        assert type(step) is int and type(best) is float and not math.isnan(best) and step >= 0

    def checkpoint_bytes(self):
        raw = damaged(self.rng, self.run["last.pt"])
        self.lay_out({"last.pt": raw})
        content = train.load_checkpoint(self.work / "last.pt")
        for part in ("model", "config", "step", "tokens", "best", "data"):
            same = content[part] == self.saved[part] if part != "model" else all(
                torch.equal(content[part][k], v) for k, v in self.saved[part].items())
            assert same, part
        self.resume()

    def checkpoint_content(self):
        odd = ODD_VALUES + [torch.zeros(()), torch.zeros(3), torch.ones(2, dtype=torch.int64), torch.tensor(math.nan)]
        content = self.pick([self.saved, *(replaced(self.rng, self.saved, odd) for _ in range(3)), self.pick(odd)])
        self.lay_out({})
        torch.save(content, self.work / "last.pt")
        self.resume()
        model, saved, _ = evaluation.load_model(self.work / "last.pt", torch.device("cpu"), torch.float32)
        args = evaluation.parse_args(["x", "--prompt=ab", "--tokens=1"])
        evaluation.sample(args, model, saved, torch.device("cpu"), torch.float32)

    def checkpoint_with_code(self):
        import pickle
        marker = self.folder / "code was executed"

        class Code:
            def __reduce__(self):
                return os.mkdir, (str(marker),)
        content = self.pick([Code(), self.saved | {"data": Code()}, {"model": Code()}, [Code()]])
        self.lay_out({})
        match self.rng.integers(3):
            case 0:
                torch.save(content, self.work / "last.pt")
            case 1:
                torch.save(content, self.work / "last.pt", _use_new_zipfile_serialization=False)
            case 2:
                (self.work / "last.pt").write_bytes(pickle.dumps(content))
        try:
            train.load_checkpoint(self.work / "last.pt")
        finally:
            assert not marker.exists()
        raise AssertionError("code was accepted")

    def results(self):
        """The table of a study: no row loses a number, or gets another kind of value."""
        row = b"study,rd,,%d,768,65536 131072,2.54321 2.41234,0.81,1.25,19fd5cb9,abc\n"
        raw = ",".join(evaluation.STUDY_COLUMNS).encode() + b"\n" + row % 1 + row % 2
        self.lay_out({"r.csv": damaged(self.rng, raw)})
        for r in evaluation.read_results(self.work / "r.csv").values():
            assert len(evaluation.losses(r)) == len(r["tokens"].split()) > 0 and int(r["added"]) + float(r["speed"])

    def log(self):
        """Of a log only whole rows are taken over, whatever else the file holds."""
        raw = self.run["log.csv"]
        raw = damaged(self.rng, raw) if self.rng.integers(4) else raw + self.pick([
            "²" + ",1" * 9, "9" * 5000 + ",1" * 9, '"' + "x" * 200_000, "1,2", "-1" + ",1" * 9]).encode() + b"\r\n"
        self.lay_out({"log.csv": raw})
        log = train.Log(dataclasses.replace(self.config[1], out_dir=str(self.work)), 4, torch.device("cpu"))
        log.file.close()
        rows = read_log(self.work)
        assert all(set(r) == set(log.columns) and 0 <= int(r["step"]) <= 4 for r in rows)


FUZZED = [name for name, f in vars(Fuzz).items() if callable(f) and f.__code__.co_argcount == 1 and name not in (
    "model", "resume")]


@pytest.mark.parametrize("inputs", ordinary(200, slow=2000))
def test_damaged_inputs_are_refused_in_one_line_or_mean_what_they_meant(inputs, data, tmp_path, capsys):
    import io
    fuzz, counts, failures = Fuzz(data, tmp_path, np.random.default_rng(inputs)), {}, []
    for i in range(inputs):
        case, fuzz.rng = FUZZED[i % len(FUZZED)], np.random.default_rng((inputs, i))
        outcome, noise = "accepted", io.StringIO()
        try:
            with time_limit(10), contextlib.redirect_stderr(noise), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(fuzz, case)()
        except UserError as e:
            outcome = "refused"
            if len(str(e).splitlines()) != 1 or not str(e).isprintable():
                failures.append(f"{case} {i}: not one line: {str(e)[:300]!r}")
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            import traceback
            place = traceback.extract_tb(e.__traceback__)[-1]
            failures.append(f"{case} {i}: {type(e).__name__}: {str(e)[:200]} ({place.name}:{place.lineno})")
        counts.setdefault(case, dict(accepted=0, refused=0))[outcome] += 1
    with capsys.disabled():
        if inputs > 200:
            print(f"\n{inputs} inputs: {counts}")
    assert not failures, "\n".join([f"{len(failures)} of {inputs}", *failures])
    missing = [f"{name} {o}" for name, c in counts.items() for o in c if not c[o]]
    assert missing == ["checkpoint_with_code accepted", "log refused"]  # and every other outcome was seen


# Command lines: (script and arguments; what its one line says). {d}: shards, {r}: a run, {t}: a folder for anything.
TRAIN = "train.py --data_dir={d} --out_dir={t}/new --n_head=2 --n_embd=32 --n_layer=2 --seq_len=32 --micro_batch=2 "
MISTAKES = [
    ("train.py {r}/config.toml --out_dir={t}/new --vocab_size=4611686018427387902", "out of memory"),
    ("eval.py {r} --batch=0", "--batch=0: out of range"),
    ("prepare_fineweb.py --source={t} --out=", "--out is empty"),
    ("kernels.py --nope", "knows --quick, --json and --model, not --nope"),
    ("train.py {r}/config.toml", "holds a run already"),
    ("train.py nothere.toml", "cannot read nothere.toml"),
    ("train.py {d}/meta.json", "expected a .toml file"),
    ("train.py --n_lyer=3", "unknown key 'n_lyer', did you mean n_layer?"),
    ("train.py --lr", "--lr needs a value"),
    ("train.py --lr=1e-3 extra", "'extra': expected a .toml file"),
    ("train.py --tracker=one\ntwo", r"tracker=one\ntwo is unknown"),
    ("train.py --n_layer=1000000000000", "n_layer=1000000000000: must be at most 10,000"),
    ("train.py --seed=" + "9" * 5000, "must be a whole number"),
    (TRAIN + "--tokens_per_step=100", "use --tokens_per_step=64 or --tokens_per_step=128"),
    (TRAIN + "--tokens_per_step=128 --residual_mode=hc --route_impl=fused", "route_impl=fused: residual_mode=hc"),
    (TRAIN + "--tokens_per_step=128 --n_ffn=4611686018427387902", "out of memory"),
    (TRAIN + "--tokens_per_step=128 --vocab_size=100", "vocabulary of 257, more than vocab_size=100"),
    ("train.py --data_dir={t}/nothing", "no data in {t}/nothing: prepare it"),
    ("train.py --data_dir={t}/nothing --prepare=--sorce=x", "prepare=--sorce=x: unrecognized arguments: --sorce=x"),
    ("eval.py", "the following arguments are required: run"),
    ("eval.py {t}/nothing", "does not exist"),
    ("eval.py {t}", "holds no checkpoint"),
    ("eval.py {r}/config.toml", "not a usable checkpoint"),
    ("eval.py {r} --splt=val", "unrecognized arguments: --splt=val"),
    ("eval.py {r} --split=vall", "invalid choice: 'vall'"),
    ("eval.py {r} --data_dir={t}/nothing", "no data in {t}/nothing"),
    ("eval.py {r} --temperature=nan --prompt=x", "--temperature=nan: out of range"),
    ("eval.py {r} --routing", "residual_mode=standard has no routes"),
    ("eval.py study", "the following arguments are required: config"),
    ("eval.py study {r}/config.toml --seeds=a", "--seeds=a: must be whole numbers"),
    ("eval.py study {r}/config.toml --jobs=0", "--jobs=0: must be at least 1"),
    ("eval.py study {r}/config.toml --modes=attnress", "did you mean attnres"),
    ("eval.py study {r}/config.toml --modes=rd:heads=2", "unknown key 'heads'"),
    ("prepare_fineweb.py", "the following arguments are required: --out"),
    ("prepare_fineweb.py --source={t}/nothing --out={t}/o", "no such file or folder"),
    ("prepare_fineweb.py --source={r}/source --out={t}/o", "no file that ends in .txt"),
    ("prepare_fineweb.py --source= --out={t}/o", "--source is empty"),
    ("prepare_fineweb.py --source={r}/last.pt --format=jsonl --out={t}/o", "not JSON"),
    ("prepare_fineweb.py --source={r}/last.pt --format=txt --out={t}/o", "not valid UTF-8"),
    ("prepare_fineweb.py --source=stdlib --out={t}/o --tokenizer=gpt5", "--tokenizer=gpt5 is unknown"),
    ("prepare_fineweb.py --source=stdlib --out={t}/o --holdout=50", "--holdout=50: must be 1 to 49"),
    ("prepare_fineweb.py --source=stdlib --out=/proc/nope", "cannot write to this folder"),
    ("prepare_fineweb.py --verify --out={t}/nothing", "no data in {t}/nothing"),
    ("kernels.py --model --fast", "not --fast")]


@pytest.mark.parametrize("mistakes", ordinary(MISTAKES[:4], slow=MISTAKES[4:]), ids=len)
def test_a_command_line_with_a_mistake_ends_in_one_line(mistakes, data, tmp_path):
    run_training(data, tmp_path / "run", max_steps=1, eval_every=0)
    train.folder_lock = None  # which this process would hold for the others to find
    (tmp_path / "t").mkdir()
    places, failures = dict(d=data, r=tmp_path / "run", t=tmp_path / "t"), []
    for command, message in mistakes:
        words = [word.format(**places) for word in command.split(" ") if word]
        start = time.monotonic()
        result = run_script(HERE / words[0], *words[1:], timeout=60)
        output = [*result.stdout.splitlines(), *result.stderr.splitlines()]
        good = result.returncode not in (0, -signal.SIGKILL) and len(result.stderr.splitlines()) == 1 and output[
            -1].startswith(words[0]) and message.format(**places) in output[-1] and time.monotonic() - start < 30
        if not good:
            failures.append(f"{command[:200]!r} took {time.monotonic() - start:.0f} s, exit code {result.returncode}: "
                            f"{output[-3:]}")
    assert not failures, "\n".join(failures)


# Odd users


def test_folders_may_have_any_name_and_data_may_be_read_only(data, tmp_path, capsys):
    import shlex
    import shutil
    source, out = tmp_path / "Daten ☃ 'a' $b", tmp_path / "ein Lauf; \"é\" --x"
    shutil.copytree(data, source)
    for path in (*source.iterdir(), source):
        path.chmod(path.stat().st_mode & ~0o222)

    def state():  # root can write all the same, so what is there is compared
        return {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in (source, *source.iterdir())}
    before = state()
    run_training(source, out, dtype="float32")
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert shlex.split(line.split("evaluate with: ")[1]) == ["python", "eval.py", str(out)]
    evaluation.main([str(out), "--json", "--device=cpu"])
    evaluation.main([str(out), "--prompt=é", "--tokens=3", "--json", "--device=cpu"])
    loss, texts = map(json.loads, capsys.readouterr().out.splitlines())
    assert loss["run"] == str(out) and texts[0].startswith("é")
    _, t = train.load_config([str(out / "config.toml")])
    assert (t.data_dir, t.out_dir) == (str(source), str(out))
    run_training(source, out, dtype="float32", resume="true", max_steps=7)
    assert state() == before
    source.chmod(0o755)


@pytest.mark.parametrize("options", ordinary([], slow=["-O"]))  # slow: all of PyTorch is compiled anew for python -O
def test_two_runs_at_a_time_do_not_disturb_each_other(options, data, tmp_path):
    processes = [alone([sys.executable, *more, HERE / "train.py", *flags(data, tmp_path / name, dtype="float32")])
                 for name, more in (("a", []), ("b", options))]
    for process in processes:
        text = process.communicate(timeout=120)[0]
        assert process.returncode == 0, text
    assert same_weights(tmp_path / "a/last.pt", tmp_path / "b/last.pt")
    assert measured(read_log(tmp_path / "a")) == measured(read_log(tmp_path / "b"))


@pytest.mark.parametrize("lacking", ["triton and a compiler", "kernels.py"])
def test_what_is_missing_is_said_and_the_rest_works(lacking, data, tmp_path):
    import shutil
    code, place = tmp_path / "code", {"PATH": "/nonexistent", "CC": "/nonexistent/cc", "CXX": "/nonexistent/cc"}
    code.mkdir()
    for path in HERE.glob("*.py"):
        shutil.copy(path, code)
    block = "sys.modules['triton'] = None" if lacking != "kernels.py" else (code / "kernels.py").unlink() or ""
    argv = flags(data, tmp_path / "run", residual_mode="attnres", dtype="float32", max_steps=2,
                 compile="on" if block else "off")
    driver = code / "driver.py"
    driver.write_text(f"import sys\n{block}\nimport train\ntrain.main({argv!r})\nimport eval\n"
                      f"eval.main([{str(tmp_path / 'run')!r}])\n"
                      f"eval.main([{str(tmp_path / 'run')!r}, '--prompt=a', '--tokens=3'])\n"
                      f"train.main([*{argv!r}, '--route_impl=fused', {f'--out_dir={tmp_path}/fused'!r}])\n", "utf-8")
    cache = tmp_path / "cache"  # a graph that was compiled earlier needs no compiler
    result = run_script(driver, TORCHINDUCTOR_CACHE_DIR=str(cache), **place if block else {})
    assert "step:2/2" in result.stdout and ", perplexity " in result.stdout, result.stderr
    if block:
        assert result.returncode == 0 and "done: 2 steps" in result.stdout.splitlines()[-1]
        assert result.stdout.count("warning: torch.compile does not work here") == 2  # once in each training
        assert "routing: fused" in result.stdout
    else:
        assert "routing: reference (kernels.py cannot be imported (No module named 'kernels'))" in result.stdout
        error = result.stderr.splitlines()[-1]
        assert result.returncode == 1 and error.startswith("train.py: route_impl=fused: kernels.py cannot be imported")


def test_a_corpus_of_one_document_trains(tmp_path):
    (tmp_path / "one.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "' + b"one document " * 40 + b'"}\r\n')
    meta = prepare(tmp_path / "one.jsonl", tmp_path / "d", *TRAIN_ONLY)
    assert documents(tmp_path / "d", meta, "train") == ["one document " * 40]
    with pytest.raises(UserError, match="holds no val shards.*--eval_every=0"):
        run_training(tmp_path / "d", tmp_path / "a")
    rows = run_training(tmp_path / "d", tmp_path / "b", eval_every=0, max_steps=20)
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 1


def test_when_one_process_dies_the_others_stop_and_say_why(data, tmp_path):
    argv = flags(data, tmp_path / "a", max_steps=100_000, eval_every=0, save_every=5)
    driver = tmp_path / "driver.py"  # rank 1 leaves without a word, as if the system had killed it
    driver.write_text(f"""import os, sys
sys.path.insert(0, {str(HERE)!r})
import train
order = train.Tokens.order
def dying(self, seed, step, size):
    if step == 12 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    return order(self, seed, step, size)
train.Tokens.order = dying
train.main({argv!r})
""", "utf-8")
    start = time.monotonic()
    result = run_script(driver, processes=2, timeout=120)
    assert result.returncode != 0 and time.monotonic() - start < 60
    assert "device: cpu" in result.stdout and "step:12/" in result.stdout
    assert "train.py: another process of this run has stopped, so this one stops too" in result.stderr
    assert train.load_checkpoint(tmp_path / "a/last.pt")["step"] == 10


# The same numbers


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_gradients_do_not_depend_on_how_a_batch_is_cut(mode):
    model, idx = make(mode), tokens(batch=6)
    loss, whole = gradients(model, idx)
    for size in (1, 2, 3):
        model.zero_grad()
        parts = [loss_of(model, part) * len(part) / 6 for part in idx.split(size)]
        for part in parts:
            part.backward()
        assert_close(sum(p.detach() for p in parts), loss, 1e-12)
        assert_close({n: p.grad for n, p in model.named_parameters()}, whole, 1e-12)


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_gives_one_run_and_evaluation_does_not_depend_on_the_batch(mode, data, tmp_path):
    runs = [run_training(data, tmp_path / name, residual_mode=mode, dtype="float32", max_steps=3) for name in "ab"]
    assert measured(runs[0]) == measured(runs[1]) and same_weights(tmp_path / "a/last.pt", tmp_path / "b/last.pt")
    device, val = torch.device("cpu"), train.Tokens(data, "val", 32, 257)
    model = evaluation.load_model(tmp_path / "a", device, torch.float32)[0]
    losses = [train.evaluate(model, val, batch, device, torch.float32, limit=3001) for batch in (1, 7, 64, 10**18)]
    assert {count for _, count in losses} == {3001} and max(losses)[0] - min(losses)[0] < 1e-6


@pytest.mark.slow
def test_long_runs_keep_their_memory_and_their_speed(data, tmp_path, steps=2000):
    settings = dict(residual_mode="attnres", dtype="float32", n_layer=4, n_embd=64, n_ffn=128, max_steps=steps,
                    eval_every=100, save_every=100)
    result = run_script(HERE / "train.py", *flags(data, tmp_path / "a", **settings), timeout=3600)
    assert result.returncode == 0, result.stderr
    rows = read_log(tmp_path / "a")
    memory, ms = ([float(r[name]) for r in rows] for name in ("mem_mb", "ms"))
    assert memory[-1] < 1.05 * memory[steps // 10 - 1]  # mem_mb is the peak so far
    first, last = (np.median(part) for part in (ms[steps // 100:][:steps // 10], ms[-steps // 10:]))
    assert last < 1.1 * first, (first, last)


if __name__ == "__main__":
    print(json.dumps({cell: compile_ahead(cell) for cell in sys.argv[2:]}))
