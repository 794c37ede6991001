"""Tests of model.py and kernels.py: identities rather than snapshots, on CPU, over every mode of RESIDUAL_MODES.

    python -m pytest                  the first tier: minutes; tests of the scripts are in tests/
    python -m pytest -m slow          the second tier, which CI runs too: kills, damaged inputs, compilers, matrices
    python -m pytest -m long          the third, by hand: 50 kills, 2,000 damaged inputs, 2,000 steps
    python -m pytest -k attnres       what has a word in its name
"""
import contextlib
import json
import math
import re
import shutil
import sys
import time

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from helpers import (
    assert_close, copy_of, gradients, HERE, loss_of, make, MODES, SHIPPED, tiers, tokens, variant, VARIANTS,
)
from launch import started
import kernels  # behind helpers, which turns on Triton's interpreter where there is no GPU
import model as model_file
from model import GPT, RESIDUAL_MODES, GPTConfig, KVCache, depth_logits, depth_sum
from study import bench


# ---------------------------------------------------------------------------------------------------------------------
# depth_mix


def sources(n=5, d=12, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(2, 3, d, generator=generator, dtype=dtype) for _ in range(n))


def depth_mix(query, values, keys=None, eps=1e-6):
    """The read of a route, from its two primitives."""
    return depth_sum(depth_logits(query, values if keys is None else keys, eps).softmax(0), values)


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


@pytest.mark.slow
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
    (logits, loss), (none, loss) = model(idx[:, :-1]), model(idx[:, :-1], idx[:, 1:])
    assert none is None and logits.shape == (2, 16, 61) and logits.dtype == torch.float32
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


@pytest.mark.parametrize("init", ["papers", "gpt2", "fan_in", "zero"])
def test_each_start_has_the_deviations_of_its_row(init):
    L, D, F_ = 8, 256, 128
    shape = dict(n_layer=L, n_embd=D, n_head=4, n_kv_head=2, n_ffn=F_, vocab_size=500, tie_embeddings=False)
    model = make("standard", randomise=False, init=init, **shape)
    deep, plain = (2 * L) ** -0.5, init in ("papers", "gpt2")
    for name, p in model.named_parameters():
        if name.endswith("gain"):
            assert (p == 1).all()
            continue
        expected = 0.02 if plain else D**-0.5 if name in ("embed.weight", "head.weight") else p.shape[1] ** -0.5
        if name.endswith(("out.weight", "down.weight")):
            expected *= {"papers": 1, "gpt2": deep, "fan_in": deep, "zero": 0}[init]
        assert p.std().item() == pytest.approx(expected, rel=0.03), name


def test_a_seed_draws_the_same_weights_whatever_was_drawn_before():
    first, second = make("standard", seed=1, randomise=False), make("rd", seed=2, randomise=False)
    for model in (first, second):
        model.init_weights(seed=7)
    assert all(torch.equal(p, second.state_dict()[n]) for n, p in first.state_dict().items())
    torch.manual_seed(7)  # embedding, sublayers, head, in this order
    assert torch.equal(first.embed.weight, torch.empty(61, 32).double().normal_(std=0.02))


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
    cache = KVCache(model.cfg, 2, 16, "cpu", torch.float64)
    model(idx[:, :16], cache=cache)
    with pytest.raises(ValueError, match="KVCache: 17 tokens do not fit into 16"):
        model(idx[:, 16:], cache=cache)


def test_generation_beyond_the_window_goes_on_from_its_newest_half():
    model, idx, start = make("attnres", tie_embeddings=False), tokens()[:, :4], 0
    out = model.generate(idx, 40, temperature=0)
    for _ in range(40):
        if idx.shape[1] - start > 16:  # seq_len
            start = idx.shape[1] - 8
        idx = torch.cat([idx, model(idx[:, start:])[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(out, idx)


@pytest.mark.parametrize("name", VARIANTS)
def test_remat_gives_the_same_gradients_bit_for_bit(name):
    plain, remat = variant(name), variant(name, remat=True)
    (loss, grads), (loss_2, grads_2) = gradients(plain, tokens()), gradients(remat, tokens())
    assert torch.equal(loss, loss_2) and all(torch.equal(grads[n], grads_2[n]) for n in grads)
    cache = KVCache(remat.cfg, 2, 17, "cpu", torch.float64)  # which is filled once, also while gradients are on
    pieces = [remat(part, cache=cache)[0] for part in tokens().split([9, 8], dim=1)]
    assert_close(torch.cat(pieces, 1), plain(tokens())[0], 1e-12)


@pytest.mark.parametrize("name", tiers([*MODES, "dar: dynamic", "hc: dynamic", "dar_block: sep_v", "rd: average"],
                                       "attnres_block"))
def test_the_whole_model_traces_as_one_graph(name):
    torch._dynamo.reset()
    model, idx = variant(name, dtype=torch.float32, n_layer=2), tokens()
    loss, grads = gradients(model, idx)
    model.compile(backend="aot_eager", fullgraph=True, dynamic=False)
    loss_2, grads_2 = gradients(model, idx)
    assert_close(loss, loss_2, 1e-6)
    assert_close(grads, grads_2, 1e-5)


@pytest.mark.skipif(not any(map(shutil.which, ("cc", "gcc", "clang"))), reason="Inductor needs a C++ compiler on a CPU")
@pytest.mark.slow
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


@pytest.mark.parametrize("name", tiers(VARIANTS, *MODES))
def test_thirty_steps_overfit_a_batch(name):
    model, idx = variant(name, randomise=False, dtype=torch.float32), tokens()
    optimizer = torch.optim.AdamW(model.param_groups(0.0), lr=1e-2)
    before = loss_of(model, idx).item()
    for _ in range(30):
        gradients(model, idx)
        optimizer.step()
    assert loss_of(model, idx).item() < 0.2 * before


@pytest.mark.parametrize("mode", MODES)
def test_autocast_keeps_streams_in_bf16_and_logits_in_fp32(mode, monkeypatch):
    def as_on_cuda(x, *args, norm=F.rms_norm, **options):
        return norm(x.float() if torch.is_autocast_enabled(x.device.type) else x, *args, **options)
    monkeypatch.setattr(F, "rms_norm", as_on_cuda)
    model, seen = make(mode, dtype=torch.float32), []
    for sublayer in model.sublayers:
        sublayer.register_forward_hook(lambda m, x, y: seen.append({x[0].dtype, y.dtype}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert model(tokens())[0].dtype == torch.float32
    assert set().union(*seen) == {torch.bfloat16}


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


@pytest.mark.parametrize("mode", [m for m in MODES if "route_heads" in RESIDUAL_MODES[m].knobs])
def test_several_heads_are_another_function_than_one(mode):
    model, one = make(mode, route_heads=4), make(mode, route_heads=1)
    if any(p.shape != q.shape for p, q in zip(model.parameters(), one.parameters())):
        pytest.skip("each head has parameters of its own")
    assert not torch.allclose(model(tokens())[0], copy_of(model, mode, route_heads=1)(tokens())[0], atol=1e-4)


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
    logits[:, 0, 0] = 1e4
    assert (model_file.doubly_stochastic(logits).sum(-2) - 1).abs().max() < 1e-12
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
        numbers = dict(L=n_layer, D=n_embd, P=size, N=math.ceil(2 * n_layer / size), n=4)
        base, n = make("standard", n_layer=n_layer, n_embd=n_embd).count(), model.count()
        assert n["residual"] == eval(RESIDUAL_MODES[mode].added, numbers) == n["total"] - base["total"]
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
    if VARIANTS[name][0] not in SHIPPED:
        pytest.skip("write the equations of a new mode into naive_logits, and its name into SHIPPED")
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
        q = P[f"residual.query.{route}"]
        if mode == "static_block":
            a = q.softmax(0)[:, None, None].expand(-1, *e.shape[:2], -1)
        else:
            a = torch.einsum("sbtgk,gk->sbtg", C.unflatten(-1, (heads, -1)), q.view(heads, -1)).softmax(0)
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
    if mode in ("attnres", "attnres_block", "static_block", "mhar", "mhar_block", "rd"):
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


@pytest.mark.parametrize("name", VARIANTS)
def test_depth_weights_of_every_route(name):
    model, idx = variant(name), tokens()[:, :16]
    before = model(idx)[0]
    found = model.depth_weights(idx)
    assert torch.equal(model(idx)[0], before)
    if model.fused:
        fused = variant(name, route_impl="fused").depth_weights(idx)
        assert all(torch.equal(a["weights"], b["weights"]) for a, b in zip(found, fused))
    routed = hasattr(model.residual, "query")
    assert len(found) == (len(model.residual.query) if routed else 0)
    for r in found:
        assert r["weights"].shape == (len(r["sources"]), 2, 16, model.residual.route_heads)
        assert r["weights"].isfinite().all() and not r["weights"].requires_grad
        assert VARIANTS[name][0] not in SHIPPED or (r["weights"].sum(0) - 1).abs().max() < 1e-12
        assert len(set(r["sources"])) == len(r["sources"]) and r["route"].startswith(str(r["site"]))


def test_depth_weights_are_the_weights_that_are_used():
    idx = tokens()[:, :16]
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

FUSED = {n: v for n, v in VARIANTS.items() if variant(n).fused}
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
    chain = models[1].fused
    models[1].fused = lambda residual: chain(residual, ops, chunk)
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
    """Outputs and all gradients, in one phase and in two, the same bits on repetition."""
    for chunk, shape in ((1, (3, 7)), (3, (1, 1)), (16, (3, 7))):
        assert_fused(*fused_pair(name, kernels.Torch, chunk, n_layer=4), tokens(*shape), 1e-13)


@pytest.mark.slow
@pytest.mark.parametrize("name", FUSED)
def test_fused_routing_of_any_chunk_is_the_reference(name, poisoned):
    for chunk in (1, 2, 3, 4, 5, 16):
        for batch, length in ((3, 7), (1, 1)):
            assert_fused(*fused_pair(name, kernels.Torch, chunk, n_layer=4), tokens(batch, length), 1e-13)


@pytest.mark.parametrize("name", tiers(FUSED, "rd", "delta_block", "dar_block: size 3, 4 heads"))
def test_triton_kernels_are_the_reference(name, poisoned):
    for chunk in (1, 3):
        reference, fused = fused_pair(name, kernels.Triton, chunk)
        assert_fused(reference, fused.float(), tokens(1, 3), 2e-6, repeat=name == "rd")


@pytest.mark.parametrize("ops, scale", [(kernels.Torch, 0.0), (kernels.Torch, 100.0), (kernels.Triton, 100.0),
                                        pytest.param(kernels.Triton, 0.0, marks=pytest.mark.slow)])
def test_fused_routing_with_flat_and_peaked_weights(ops, scale, poisoned):
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


LAYOUTS = {
    "transposed": lambda y: y.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda y: torch.cat([y, 7 * y], -1)[..., :y.shape[-1]],
    "stepped": lambda y: y.repeat_interleave(2, -1)[..., ::2],
    "rows stepped": lambda y: y.repeat_interleave(2, 1)[:, ::2],
    "expanded": lambda y: y.mean((0, 1), keepdim=True).expand_as(y)}


TIERS = {name: [pytest.mark.slow if name in ("stepped", "expanded") else pytest.mark.long] for name in LAYOUTS}


@pytest.mark.parametrize("ops, name, layout", [
    pytest.param(ops, name, layout, marks=TIERS[layout] if ops is kernels.Triton and name != "delta_block" else [])
    for ops, names in ((kernels.Torch, ("attnres", "rd", "delta_block", "dar_block")), (kernels.Triton, FUSED))
    for name in names for layout in LAYOUTS])
def test_sources_and_gradients_may_have_any_layout(ops, name, layout, poisoned):
    """A sublayer may end in chunk(), a transposition or an expansion; so may the gradient of what a site reads."""
    mode, knobs = FUSED[name]
    residual = make(mode, **knobs | dict(n_layer=2), dtype=torch.float32).residual
    change, n, found = LAYOUTS[layout], 2 * residual.cfg.n_layer, []
    e = change(torch.randn(2, 3, residual.cfg.n_embd, generator=torch.Generator().manual_seed(1)))
    u = torch.randn(2, 3, residual.cfg.n_embd, generator=torch.Generator().manual_seed(2))

    def sublayer(t, a, b):
        a, b = (x.roll(t + 1, -1).transpose(1, 2).transpose(1, 2) for x in (a, b))
        return change((a + b + u).sin())
    for form in (residual, kernels.FUSED[type(residual)](residual, ops, 2)):
        leaf = e.detach().as_strided(e.shape, e.stride()).requires_grad_()
        out = kernels.routed(form, leaf, n, sublayer)
        assert layout in ("expanded",) or not leaf.is_contiguous()
        names = ["e", *(name for name, _ in residual.named_parameters())]
        grads = torch.autograd.grad(out, [leaf, *residual.parameters()], change(u))
        found.append((out.detach(), dict(zip(names, grads))))
    assert_close(found[1][0], found[0][0], 3e-6)
    assert_close(found[1][1], found[0][1], 1e-5)


BF16 = ["attnres", "attnres_block: size 3", "delta", "delta_block", "mhar", "dar_block"]


@pytest.mark.parametrize("ops, name", [(kernels.Torch, name) for name in BF16] + [
    pytest.param(kernels.Triton, name, marks=[] if name == "delta_block" else pytest.mark.slow) for name in BF16])
def test_fused_routing_in_bf16(ops, name):
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
    chain = kernels.FUSED[type(fused)]
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


@pytest.mark.slow
def test_triton_kernels_of_many_sources(poisoned):
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
    with pytest.raises(RuntimeError, match="runs once"):
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
    model = make("attnres", n_embd=40)
    assert model.why_not_fused == "n_embd=40 is not a multiple of 16" and model.residual_in_use() is model.residual
    with pytest.raises(ValueError, match="route_impl=fused: n_embd=40 is not a multiple of 16; use auto or reference"):
        make("attnres", n_embd=40, route_impl="fused")
    for name in ("rd: average", "rd: frozen_v", "dar_block: sep_v", "dar: dynamic"):
        assert not variant(name).fused and "has no fused form" in variant(name).why_not_fused
    for mode in ("standard", "attnres_cumulative", "static_block", "mhar_delta", "hc", "mhc"):
        model = make(mode)
        assert model.residual_in_use() is model.residual
        with pytest.raises(ValueError, match=f"route_impl=fused: {type(model.residual).__name__} has no fused form"):
            make(mode, route_impl="fused")
    model = make("attnres")
    assert isinstance(model.residual_in_use(), kernels.Chain)
    with torch.no_grad():
        assert model.residual_in_use() is model.residual  # nothing to gain without gradients
    monkeypatch.setitem(sys.modules, "kernels", None)
    model = make("attnres")
    assert model.residual_in_use() is model.residual and "kernels.py cannot be imported" in model.why_not_fused


def test_a_subclass_does_not_inherit_the_fused_form():
    class Mine(model_file.AttnRes):
        pass
    model = make("attnres")
    assert kernels.fused_form(Mine(model.cfg)) == (None, "Mine has no fused form")
    model.residual = Mine(model.cfg).double()  # put in the place of another that has one
    assert model.residual_in_use() is model.residual


class Detached(nn.Module):
    """A sublayer whose output does not depend on its input, as of a layer that is dropped."""

    def forward(self, n_qk, *_):
        return torch.zeros_like(n_qk)


@pytest.mark.parametrize("name", ["attnres_block", "rd", "delta_block", "dar_block"])
@pytest.mark.parametrize("at", [0, 3, 5])
def test_a_graph_that_is_cut_is_refused_and_not_half_a_gradient(name, at):
    reference, fused = fused_pair(name)
    for model in (reference, fused):
        model.sublayers[at] = Detached()
    assert_close(loss_of(fused, tokens()), loss_of(reference, tokens()), 1e-12)
    with pytest.raises(RuntimeError, match="came to .* where site . was due.* use route_impl=reference"):
        gradients(fused, tokens())


def test_fused_routing_with_shared_and_parametrized_queries():
    def share(query):
        for route in query:
            query[route] = query["3"]

    def parametrize(query):
        for route in ("1", "4"):
            torch.nn.utils.parametrizations.weight_norm(query, route, dim=None)
    for change in (share, parametrize):
        models = fused_pair("attnres")
        for model in models:
            change(model.residual.query)
        (loss, grads), (loss_2, grads_2) = (gradients(model, tokens()) for model in models)
        assert_close(loss_2, loss, 1e-12)
        assert_close(grads_2, grads, 1e-10)


@pytest.mark.parametrize("cls, method, changed", [
    (model_file.AttnRes, "weights", lambda old: lambda self, *args: old(self, *args).square()),
    (model_file.Delta, "add", lambda old: lambda self, site, x, m, S: x + m),
    (model_file.Dual, "retrieve", lambda old: lambda self, *args: old(self, *args)[::-1]),
    (model_file.RoleDecoupled, "read", lambda old: lambda self, *args: old(self, *args)[::-1])])
def test_a_residual_that_was_changed_loses_its_fused_form_and_says_so(cls, method, changed, monkeypatch):
    mode = next(m for m, row in RESIDUAL_MODES.items() if row.cls is cls)
    assert make(mode).fused
    monkeypatch.setattr(cls, method, changed(getattr(cls, method)))
    kernels.difference.cache_clear()
    model = make(mode)
    assert not model.fused and f"{cls.__name__} and its fused form differ" in model.why_not_fused
    monkeypatch.undo()
    kernels.difference.cache_clear()
    assert make(mode).fused


@pytest.mark.parametrize("name", ["attnres", "rd", "delta_block", "dar_block"])
@pytest.mark.slow
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
        kept[mode] = bench.kept_bytes(model, idx, contextlib.nullcontext)
    assert 1 < kept["attnres"] / kept["standard"] <= 1.10


def test_fused_routing_without_sparse_kernels(monkeypatch, poisoned):
    monkeypatch.setattr(kernels, "sparse", False)
    for name in ("mhar", "dar_block: size 3, 4 heads"):
        assert_fused(*fused_pair(name), tokens(2, 5), 1e-13)


def test_geometry_of_the_bank():
    """What the kernels compute from step, pairs and cap is where the chain puts its planes."""
    for mode, knobs in FUSED.values():
        residual = make(mode, **knobs | dict(n_layer=5)).residual
        chain = kernels.FUSED[type(residual)](residual)
        for t in range(chain.T + 1):
            for k in range(chain.columns(t)):
                slot = min(k * chain.step, chain.cap(t))
                assert chain.plane(k, t) == slot + chain.pairs * (max(slot - 1, 0) // 2)
        chain.start(torch.zeros(1, 1, residual.cfg.n_embd))
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
@pytest.mark.parametrize("name", tiers(
    ["attnres", "attnres_block", "delta", "delta_block", "mhar", "rd", "dar_block"], "dar_block"))
def test_bytes_follow_the_formula(name, monkeypatch):
    gemms, M = [0], 2

    def gemm(a, b):
        gemms[0] += 1
        return a.float() @ b.float()
    monkeypatch.setattr(kernels, "gemm", gemm)
    for chunk in (1, 4):
        residual = variant(name, n_layer=4, dtype=torch.float32).residual
        chain = kernels.FUSED[type(residual)](residual, kernels.Triton, chunk)
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
        assert moved == pytest.approx(bench.planes_per_site(VARIANTS[name][0], 4, chunk, **VARIANTS[name][1]))


def cells(archs, widths, heads, mix, pull):
    return [f"{kernel} {D} {G} {S} {arch}" for arch in archs for D in widths for G in heads for kernel in
            ("score", "mix", "own", "pull", "keyed", "write", "unwrite") for S in
            dict(mix=mix, pull=pull).get(kernel, (1,))]


# registers seen at width 768 on sm_90, with one depth head and with eight
REGISTERS = {"score": (128, 190), "mix 1": (70, 76), "mix 4": (56, 72), "mix 6": (95, 96), "own": (66, 48),
             "pull 1": (80, 72), "pull 4": (120, 151), "pull 8": (232, 234), "keyed": (96, 96), "write": (32, 32),
             "unwrite": (48, 48)}


def check_compiled(wanted):
    """Ahead-of-time compilation in other processes: this one has the interpreter."""
    found = {}
    with contextlib.ExitStack() as stack:
        jobs = [started(HERE / "tests/compile_ahead.py", *part, fresh=True, TRITON_INTERPRET="0")
                for part in (wanted[::2], wanted[1::2])]
        for job in [stack.enter_context(job) for job in jobs]:
            assert job.wait(1800) == 0, job.said
            found |= json.loads(job.read("out"))
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
@pytest.mark.slow
def test_kernels_compile_without_spills():
    wanted = cells((90,), (768,), (1, 8), (1, 4), (1, 4))
    check_compiled([*wanted, *(f"{cell} row" for cell in wanted[::3])])


@needs_compiler
@pytest.mark.long
def test_kernels_compile_without_spills_everywhere():
    wanted = cells((80, 90, 100), (576, 768, 1024, 1280, 2048), (1, 4, 8), (1, 4, 6), (1, 4, 8))
    for cell, code in check_compiled(wanted).items():
        print(f"{cell:22s}", *(f"{k} {v:4d}" for k, v in code.items()))


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
                 test_remat_gives_the_same_gradients_bit_for_bit,
                 test_every_parameter_acts, test_optimizer_groups_are_a_partition, test_thirty_steps_overfit_a_batch,
                 test_residual_parameters_change_the_function, test_counts_follow_the_formulas):
        test("sigmoid")
    test_zero_queries_are_exactly_standard("sigmoid", 1e-2)


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
    a, b, c = (bench.kept_bytes(model, tokens()[:1, :16], contextlib.nullcontext) for model in models)
    assert 1.8 < (c - b) / (b - a) < 2.2  # of twice the layers added; copies of what each site reads would make it 4


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


def test_a_batch_without_targets_has_no_loss_and_no_gradient():
    model, idx = make("attnres"), tokens()
    loss = model(idx, torch.full_like(idx, -1))[1]
    loss.backward()
    assert loss == 0 and all((p.grad == 0).all() for p in model.parameters())
    half = idx.clone()
    half[0] = -1
    assert_close(model(idx, half)[1], model(idx[1:], idx[1:])[1], 1e-12)
