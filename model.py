"""nanodepth: one GPT, and one switch (`residual_mode`) for every way to carry information through depth.

The host is a Qwen3-style decoder: RMSNorm before each sublayer, rotary positions, per-head QK-norm, grouped-query
attention, SwiGLU, no biases. What a sublayer reads and where its output goes is decided by one module, the residual:

    state = residual.start(e)               token embedding -> state, a tuple of (B, T, D) tensors
    h_qk, h_v = residual.read(site, state)  normalised input of sublayer `site` (one tensor twice, unless roles differ)
    state = residual.write(site, state, y)  the sublayer's output enters a new state

Words.   A *layer* is attention + MLP; a *sublayer* is one of the two. *Site* s = 0 .. 2L-1 is the input of sublayer s
         (even: attention, odd: MLP), site 2L is the input of the head. A *source* is a tensor that a site may read. A
         *depth block* is a run of sublayers whose outputs are summed into one source. A *route* is one softmax over
         sources; a *depth head* is a group of channels with a softmax of its own.
Letters. B batch, T time, D width, V vocabulary, L layers, S sources, G depth heads, H attention heads, K channels per
         head; e embedding, y output of a sublayer, x running sum, h what a site reads.

    python train.py configs/tiny.toml --residual_mode=attnres_block

To add a mode: subclass `Residual` or `AttnRes`, override `read`, `write` or `mix`, and add a row to RESIDUAL_MODES.
"""
import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------------------------------------------------------------
# Configuration: every field is also a key of train.py's TOML files and a flag of its command line


@dataclass
class GPTConfig:
    """Shape and residual mode of a model. Derives the shape's zeros; raises ValueError on what cannot work."""
    vocab_size: int = 0  # tokens in the vocabulary; 0 = that of the data
    n_layer: int = 12  # layers, each attention + MLP
    n_head: int = 12  # query heads
    n_kv_head: int = 0  # key and value heads (grouped-query attention); 0 = n_head
    head_dim: int = 0  # channels per attention head; 0 = n_embd / n_head
    n_embd: int = 768  # width of the model
    n_ffn: int = 0  # hidden width of the MLP; 0 = 8/3 of n_embd, rounded up to a multiple of 64
    seq_len: int = 1024  # context in tokens
    residual_mode: str = "standard"  # how information travels through depth
    depth_block: int = 0  # sublayers per depth block; 0 = whole layers, about eight depth blocks
    route_heads: int = 0  # depth heads per route; 0 = the mode's own number
    route_impl: str = "auto"  # who computes the routing: auto | reference | fused
    remat: bool = False  # recompute sublayers in the backward pass instead of keeping their activations
    rope_theta: float = 10000.0  # base of the rotary frequencies
    norm_eps: float = 1e-6  # epsilon of every RMSNorm
    qk_norm: bool = True  # RMSNorm on each query and key head
    tie_embeddings: bool = True  # the head's matrix is the token embedding

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_embd", "seq_len"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("vocab_size", "n_kv_head", "head_dim", "n_ffn", "depth_block", "route_heads", "norm_eps"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}: must not be negative")
        require(self.rope_theta > 0, f"rope_theta={self.rope_theta}: must be positive")
        require(self.head_dim or self.n_embd % self.n_head == 0, f"n_embd={self.n_embd} does not divide by "
                f"n_head={self.n_head}: change one of them, or set head_dim")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        self.n_ffn = self.n_ffn or 64 * math.ceil(self.n_embd * 8 / 3 / 64)
        require(self.n_head % self.n_kv_head == 0, f"n_head={self.n_head} does not divide by "
                f"n_kv_head={self.n_kv_head}")
        require(self.head_dim % 2 == 0, f"head_dim={self.head_dim}: rotary positions need an even number")
        require_choice("residual_mode", self.residual_mode, RESIDUAL_MODES)
        require_choice("route_impl", self.route_impl, ("auto", "reference", "fused"))
        require(self.route_impl != "fused", "route_impl=fused: there is no fused routing yet, use auto or reference")
        for knob in KNOBS:
            users = [name for name, mode in RESIDUAL_MODES.items() if knob in mode.knobs]
            require(self.residual_mode in users or getattr(self, knob) == KNOBS[knob], f"{knob}={getattr(self, knob)} "
                    f"has no effect in residual_mode={self.residual_mode}: remove it, or use a mode that reads it "
                    f"({', '.join(users)})")
        require(self.n_embd % self.knob("route_heads") == 0, f"n_embd={self.n_embd} does not divide by "
                f"route_heads={self.knob('route_heads')}")

    def knob(self, name):
        """Value in force of a residual knob: the user's; at its default the mode's own, then the general rule."""
        value = getattr(self, name)
        if value == KNOBS[name]:
            value = RESIDUAL_MODES[self.residual_mode].sets.get(name, DERIVED.get(name, value))
        return value(self) if callable(value) else value


# Residual knobs with their defaults. Set away from it in a mode that ignores it, a knob is an error.
KNOBS = {f.name: f.default for f in fields(GPTConfig) if f.name in ("depth_block", "route_heads")}
# What 0 means where the mode does not say: 2 ceil(2L/8/2) sublayers, so 12 layers 4, 24: 6, 36: 10; one depth head.
DERIVED = {"depth_block": lambda cfg: 2 * math.ceil(cfg.n_layer / 8), "route_heads": 1}


def require(condition, message):
    if not condition:
        raise ValueError(message)


def require_choice(name, value, choices):
    if value not in choices:
        near = get_close_matches(str(value), list(choices), 1)
        raise ValueError(f"{name}={value} is unknown{f', did you mean {near[0]}?' if near else ''} "
                         f"(choices: {', '.join(choices)})")


# ---------------------------------------------------------------------------------------------------------------------
# Primitives


def at_least_fp32(dtype):
    """Precision of norms, logits and accumulation: fp32 for bf16 and fp32, fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last axis, without a gain; in at least fp32, returned in x's dtype."""
    return F.rms_norm(x, (x.shape[-1],), eps=eps)


def scaled_linear(x, gain, weight):
    """(x * gain) @ weight.T, with the gain multiplied into whichever of the two is smaller."""
    return F.linear(x * gain, weight) if x.numel() < weight.numel() else F.linear(x, weight * gain)


def rotary(start, T, K, theta, device, dtype):
    """cos and sin, each (T, K/2), of the rotary angles of positions start .. start+T-1 (RoFormer, 2104.09864)."""
    frequency = theta ** (-torch.arange(0, K, 2, device=device, dtype=dtype) / K)
    angle = torch.arange(start, start + T, device=device, dtype=dtype)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """Rotate the pairs (x[i], x[i + K/2]) of (B, H, T, K) by their position's angle, in at least fp32."""
    (cos, sin), (a, b) = rope, x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def depth_mix(query, values, keys=None, eps=1e-6):
    """Attention over depth, the one primitive of all routed modes (Attention Residuals, 2603.15031, section 3).

        z_s = <query_g, key_s,g> / rms(key_s)     logits; the RMS is over the full width, then heads are sliced
        out_g = sum_s softmax_s(z)_s value_s,g    values enter as they are, without a norm and without a scale

    query (D,) for one head or (G, D/G); values and keys: sequences of S tensors (B, T, D), keys default to values.
    Returns (B, T, D) in the values' dtype; logits, softmax and sum are in at least fp32. There is no gain on the keys:
    it would enter only as its product with the query.

    Sources are never stacked: per pair of site and source nothing wider than (B, T, G) is kept for the backward pass.
    """
    query = query.view(-1, query.shape[-1])
    heads = query.shape  # (G, D/G)
    weights = depth_weights(query, values if keys is None else keys, eps)
    out = 0
    for w, value in zip(weights, values):
        out = out + w.unsqueeze(-1) * value.unflatten(-1, heads)  # (B, T, G, D/G)
    return out.flatten(-2).to(values[0].dtype)


def depth_weights(query, keys, eps):
    """Softmax over sources of one route: query (G, D/G), keys S x (B, T, D) -> (S, B, T, G)."""
    exact = at_least_fp32(keys[0].dtype)
    logits = []
    for key in keys:
        mean_square = torch.linalg.vector_norm(key, dim=-1, keepdim=True, dtype=exact).square() / key.shape[-1]
        dot = (key.unflatten(-1, query.shape) * query).sum(-1)  # not a matmul: autocast would run it in bf16
        logits.append(dot * torch.rsqrt(mean_square + eps))
    return torch.stack(logits).softmax(0)


# ---------------------------------------------------------------------------------------------------------------------
# Residuals. `read` is pure and `write` never modifies the old state; both may branch on the site, never on values.
# A parameter exists only where it can act: no query for a site with a single source. All start at exactly zero.


class Residual(nn.Module):
    """`standard`: one running sum. x <- x + f(norm(x)).      State: (x,)"""

    def __init__(self, cfg):
        super().__init__()
        self.eps, self.n_site = cfg.norm_eps, 2 * cfg.n_layer

    def start(self, e):
        """Embedding (B, T, D) -> state, in the compute dtype, so that streams and sources have it in every mode."""
        device = e.device.type
        return (e.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else e,)

    def read(self, site, state):
        """Normalised, gain-free input of a sublayer as a pair: for queries and keys, for values (else the first)."""
        x = rms_norm(state[0], self.eps)
        return x, x

    def write(self, site, state, y):
        return (state[0] + y,)

    def init_weights(self):
        for p in self.parameters():
            nn.init.zeros_(p)


class AttnRes(Residual):
    """Attention Residuals (2603.15031, sections 3 and 4): a site reads a softmax-weighted sum of its sources.

    State: (e, closed depth blocks ..., open one); depth blocks of one sublayer give the full form. The stream is
    replaced: nothing but the sources survives. The head reads through a route too.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        self.depth_block, self.route_heads = cfg.knob("depth_block"), cfg.knob("route_heads")
        self.query = nn.ParameterDict({str(site): nn.Parameter(torch.empty(cfg.n_embd))
                                       for site in range(self.n_site + 1) if self.n_sources(site) > 1})

    def n_sources(self, site):
        return 1 + math.ceil(site / self.depth_block)

    def mix(self, site, sources):
        """The route of a site: S tensors (B, T, D) -> (B, T, D)."""
        if len(sources) == 1:
            return sources[0]
        return depth_mix(self.query[str(site)].view(self.route_heads, -1), sources, eps=self.eps)

    def read(self, site, state):
        # The sources sum to the standard stream x, so a zero query reads x/S; with eps/S^2 its norm is exactly x's.
        x = rms_norm(self.mix(site, state), self.eps / len(state) ** 2)
        return x, x

    def write(self, site, state, y):
        if site % self.depth_block == 0:
            return (*state, y)  # opens a depth block; the one before is closed by no longer being the last
        return (*state[:-1], state[-1] + y)


class Mode(NamedTuple):
    """One row of RESIDUAL_MODES. The command line, the README's table and the tests are derived from it."""
    cls: type  # the residual's class
    knobs: tuple = ()  # the KNOBS that a user may set in this mode
    sets: dict = {}  # values (or functions of the configuration) of knobs that are at their default
    reads: str = ""  # what a site reads, before its norm
    stores: str = ""  # tensors of width D alive at the end of the model
    added: str = "0"  # added parameters
    paper: str = ""


RESIDUAL_MODES = {
    "standard": Mode(
        Residual, reads="x = e + Σ y", stores="1", paper="pre-norm Transformer"),
    "attnres": Mode(
        AttnRes, ("route_heads",), {"depth_block": 1},
        reads="Σ α_i s_i over e and every y", stores="2L + 1", added="2L·D", paper="2603.15031"),
    "attnres_block": Mode(
        AttnRes, ("depth_block", "route_heads"),
        reads="Σ α_i s_i over e and the sums of depth blocks", stores="N + 1", added="2L·D", paper="2603.15031"),
}


# ---------------------------------------------------------------------------------------------------------------------
# Sublayers. Their input is already normalised; each owns the gain that a pre-norm would have.


class Attention(nn.Module):
    """Causal grouped-query attention with QK-norm and rotary positions."""

    def __init__(self, cfg, layer):
        super().__init__()
        self.layer, self.eps, self.K = layer, cfg.norm_eps, cfg.head_dim
        self.sizes = [n * cfg.head_dim for n in (cfg.n_head, cfg.n_kv_head, cfg.n_kv_head)]
        self.gain = nn.Parameter(torch.empty(cfg.n_embd))
        self.qkv = nn.Linear(cfg.n_embd, sum(self.sizes), bias=False)
        self.out = nn.Linear(self.sizes[0], cfg.n_embd, bias=False)
        self.qk_norm = cfg.qk_norm
        if cfg.qk_norm:
            self.q_gain, self.k_gain = nn.Parameter(torch.empty(self.K)), nn.Parameter(torch.empty(self.K))

    def forward(self, h_qk, h_v, rope, cache=None):
        if h_qk is h_v:
            q, k, v = scaled_linear(h_v, self.gain, self.qkv.weight).split(self.sizes, dim=-1)
        else:
            w_qk, w_v = self.qkv.weight.split([self.sizes[0] + self.sizes[1], self.sizes[2]])
            q, k = scaled_linear(h_qk, self.gain, w_qk).split(self.sizes[:2], dim=-1)
            v = scaled_linear(h_v, self.gain, w_v)
        q, k, v = (t.unflatten(-1, (-1, self.K)).transpose(1, 2) for t in (q, k, v))  # (B, H, T, K)
        if self.qk_norm:
            q, k = rms_norm(q, self.eps) * self.q_gain, rms_norm(k, self.eps) * self.k_gain
        q, k = rotate(q, rope).to(v.dtype), rotate(k, rope).to(v.dtype)
        past = 0
        if cache is not None:
            past = cache.length
            k, v = cache.append(self.layer, k, v)
        mask = None  # without a past: causal; with one: everything up to and including the own position
        if past and q.shape[2] > 1:
            mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).tril(past)
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=not past, enable_gqa=q.shape[1] != k.shape[1])
        return self.out(y.transpose(1, 2).flatten(-2))


class MLP(nn.Module):
    """SwiGLU: down(silu(gate) * up)."""

    def __init__(self, cfg):
        super().__init__()
        self.gain = nn.Parameter(torch.empty(cfg.n_embd))
        self.up = nn.Linear(cfg.n_embd, 2 * cfg.n_ffn, bias=False)  # gate and up in one matrix
        self.down = nn.Linear(cfg.n_ffn, cfg.n_embd, bias=False)

    def forward(self, h, _, rope, cache=None):
        gate, up = scaled_linear(h, self.gain, self.up.weight).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class KVCache:
    """Keys and values of the tokens seen so far, for generation.

    There is no cache over depth: a route compares the sources of one token and never looks at another token, so the
    sources of a new token are all made in its own forward pass.
    """

    def __init__(self, cfg, batch, seq_len, device, dtype):
        shape = cfg.n_layer, 2, batch, cfg.n_kv_head, seq_len, cfg.head_dim
        self.kv, self.length, self.seq_len = torch.empty(shape, device=device, dtype=dtype), 0, seq_len

    def append(self, layer, k, v):
        """Store k, v (B, H, T, K) behind the others and return all. `length` moves after the last layer."""
        end = self.length + k.shape[2]
        self.kv[layer, 0, :, :, self.length:end], self.kv[layer, 1, :, :, self.length:end] = k, v
        return self.kv[layer, :, :, :, :end].unbind(0)


# ---------------------------------------------------------------------------------------------------------------------
# The model


class GPT(nn.Module):
    """Decoder language model; `cfg` decides its shape and residual mode."""

    def __init__(self, cfg):
        super().__init__()
        require(cfg.vocab_size > 0, "vocab_size=0: give the number of tokens in the vocabulary")
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        self.sublayers = nn.ModuleList(m for layer in range(cfg.n_layer) for m in (Attention(cfg, layer), MLP(cfg)))
        self.gain = nn.Parameter(torch.empty(cfg.n_embd))  # of the final norm
        if not cfg.tie_embeddings:
            self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.residual = RESIDUAL_MODES[cfg.residual_mode].cls(cfg)
        self.init_weights()

    @torch.no_grad()
    def init_weights(self):
        """The only place where parameters get their start values.

            matrices, embedding   N(0, 0.02^2), without scaling by depth
            gains                 1
            residual parameters   residual.init_weights(): no random numbers, so that modes share all the rest exactly
        """
        for name, p in self.named_parameters():
            if name.startswith("residual."):
                continue
            if p.dim() == 2:
                nn.init.normal_(p, std=0.02)
            else:
                assert name.endswith("gain"), f"no start value for {name}"
                nn.init.ones_(p)
        self.residual.init_weights()

    def forward(self, idx, targets=None, cache=None):
        """Token ids (B, T) -> logits (B, T, V) in at least fp32, and the mean loss in nats where targets are not -1."""
        logits = self.logits(self.trunk(idx, cache))
        if targets is None:
            return logits, None
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)

    def trunk(self, idx, cache=None):
        """Token ids (B, T) -> normalised input of the head (B, T, D)."""
        residual, state = self.residual, self.residual.start(self.embed(idx))
        past, dtype = cache.length if cache is not None else 0, at_least_fp32(self.embed.weight.dtype)
        rope = rotary(past, idx.shape[1], self.cfg.head_dim, self.cfg.rope_theta, idx.device, dtype)
        for site, sublayer in enumerate(self.sublayers):
            h_qk, h_v = residual.read(site, state)
            if self.cfg.remat and torch.is_grad_enabled():
                y = checkpoint(sublayer, h_qk, h_v, rope, use_reentrant=False)
            else:
                y = sublayer(h_qk, h_v, rope, cache)
            state = residual.write(site, state, y)
        if cache is not None:
            cache.length += idx.shape[1]
        return residual.read(len(self.sublayers), state)[0]

    def logits(self, h):
        """Head: (..., D) -> (..., V), in at least fp32."""
        matrix = self.embed.weight if self.cfg.tie_embeddings else self.head.weight
        y = scaled_linear(h, self.gain, matrix)
        return y.to(at_least_fp32(y.dtype))

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=0, n_vocab=0):
        """Append n sampled tokens to the prompt idx (B, T), T >= 1; returns (B, T + n).

        temperature 0 (or below 1e-6) takes the likeliest token; top_k > 0 samples among the k likeliest; n_vocab > 0
        allows only ids below it (a vocabulary may be padded). The model sees at most its last seq_len tokens; when the
        cache is full it is rebuilt from the newest half of them.
        """
        require(idx.shape[1] >= 1, "generate: the prompt is empty, give at least one token (for instance end-of-text)")
        require(temperature >= 0 and top_k >= 0, f"temperature={temperature}, top_k={top_k}: must not be negative")
        limit, cache, new = self.cfg.seq_len, None, idx
        for _ in range(n):
            if cache is None or cache.length + new.shape[1] > limit:
                new = idx[:, -limit:] if cache is None else idx[:, -max(1, limit // 2):]
                cache = KVCache(self.cfg, len(idx), limit, idx.device, self.kv_dtype())
            logits = self.logits(self.trunk(new, cache)[:, -1])
            if n_vocab:
                logits[:, n_vocab:] = -math.inf
            if top_k:
                kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]
                logits = logits.masked_fill(logits < kth, -math.inf)
            if temperature > 1e-6:  # shifted before the division, which must not overflow
                new = ((logits - logits.max(-1, keepdim=True).values) / temperature).softmax(-1).multinomial(1)
            else:
                new = logits.argmax(-1, keepdim=True)
            idx = torch.cat([idx, new], dim=1)
        return idx

    def kv_dtype(self):
        device = self.embed.weight.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.embed.weight.dtype

    def param_groups(self, weight_decay, route_lr_mult=1.0):
        """Optimizer groups, a partition of the parameters: matrices decayed; embeddings, gains and residual not.

        `lr_mult` is the group's factor on the learning rate.
        """
        names = {name: p for name, p in self.named_parameters()}
        kind = {n: "residual" if n.startswith("residual.") else "matrix" if p.dim() == 2 and n not in
                ("embed.weight", "head.weight") else "plain" for n, p in names.items()}
        groups = [dict(params=[names[n] for n in names if kind[n] == want], weight_decay=decay, lr_mult=mult, name=want)
                  for want, decay, mult in (("matrix", weight_decay, 1.0), ("plain", 0.0, 1.0),
                                            ("residual", 0.0, route_lr_mult))]
        return [g for g in groups if g["params"]]

    def count(self):
        """Number of parameters: total, without embedding and head, and of the residual."""
        total = sum(p.numel() for p in self.parameters())
        outer = sum(p.numel() for n, p in self.named_parameters() if n in ("embed.weight", "head.weight"))
        return dict(total=total, non_embedding=total - outer, router=sum(p.numel() for p in self.residual.parameters()))
