"""nanodepth: one GPT, and one switch (`residual_mode`) for the published ways to carry information through depth.

The model is a Qwen3-style decoder: RMSNorm before each sublayer, rotary positions, per-head QK-norm, grouped-query
attention, SwiGLU, no biases. What a sublayer reads and where its output goes is decided by one module, the residual:

    state = residual.start(e)               token embedding -> state, a tuple of (B, T, D) tensors
    n_qk, n_v = residual.read(site, state)  normalised input of sublayer `site`: one tensor twice, except in `rd`
    state = residual.write(site, state, y)  the sublayer's output enters a new state

Words.   A *layer* is attention + MLP; a *sublayer* is one of the two. *Site* s = 0 .. 2L-1 is the input of sublayer s
         (even: attention, odd: MLP), site 2L is the input of the head. A *source* is a tensor that a site may read. A
         *depth block* is a run of sublayers whose outputs are summed into one source. A *route* is one
         weighted read of the sources, with one query; a *depth head* is a group of channels with a softmax of its own.
Letters. B batch, T time, D width, V vocabulary, L layers, S sources of a site, G depth heads, K channels per head;
         e embedding, y output of a sublayer, x running sum, h what a site reads (in MLP and GPT: behind its norm).

    python train.py configs/tiny.toml --residual_mode=attnres_block

To add a mode: subclass `Residual` or `AttnRes`, override `gather`, `write` or `weights`, and add a row to
RESIDUAL_MODES. To add a knob: a field of GPTConfig, and its name in that row.
"""
import math
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

# ---------------------------------------------------------------------------------------------------------------------
# Configuration: every field is also a key of train.py's TOML files and a flag of its command line


@dataclass
class GPTConfig:
    """Shape and residual mode of a model. Fills in fields left at 0; raises ValueError on what cannot work."""
    vocab_size: int = 0  # tokens in the vocabulary; 0 = that of the data
    n_layer: int = 12  # layers, each attention + MLP
    n_head: int = 12  # query heads
    n_kv_head: int = 0  # key and value heads (grouped-query attention); 0 = n_head
    head_dim: int = 0  # channels per attention head; 0 = n_embd / n_head
    n_embd: int = 768  # width of the model
    n_ffn: int = 0  # hidden width of the MLP or an expert; 0 = 8/3 of n_embd / active experts, in multiples of 64
    n_expert: int = 0  # experts in the place of each MLP; 0 = none
    n_expert_active: int = 0  # experts that a token passes through: two at least, for the router of one learns nothing
    seq_len: int = 1024  # context in tokens
    residual_mode: str = "standard"  # how information travels through depth
    depth_block: int = 0  # sublayers per depth block; 0 = the mode's own, mostly at most eight depth blocks
    route_heads: int = 0  # depth heads per route; 0 = the mode's own number
    rd_control: Literal["none", "tied", "average", "frozen_v"] = "none"  # rd: see `RoleDecoupled`
    dar_routing: Literal["reciprocal", "self_kv", "cross_v", "fixed_kv", "sep_v"] = "reciprocal"  # dar: see `Dual`
    delta_sources: Literal["true", "released"] = "true"  # delta_block; released: the released code's recursion
    n_streams: int = 4  # hc, mhc: number of residual streams
    dynamic_gates: bool = False  # hc, dar: gates depend on the token too
    route_impl: Literal["auto", "reference", "fused"] = "auto"  # auto: kernels.py in training where it has the mode
    remat: bool = False  # recompute sublayers in the backward pass instead of keeping their activations
    rope_theta: float = 10000.0  # base of the rotary frequencies
    rope_scale: float = 1.0  # Llama 3's stretch of the slow rotary frequencies: 8 in 3.1, 32 in 3.2; 1 = none
    norm_eps: float = 1e-6  # epsilon of every RMSNorm
    qk_norm: bool = True  # RMSNorm on each query and key head
    tie_embeddings: bool = True  # the head's matrix is the token embedding
    init: Literal["papers", "gpt2", "fan_in", "zero"] = "zero"  # start of the weights, see `start_std`

    def __post_init__(self):
        for name in ("n_layer", "n_head", "n_embd", "seq_len"):
            require(getattr(self, name) >= 1, f"{name}={getattr(self, name)}: must be at least 1")
        for name in ("vocab_size", "n_kv_head", "head_dim", "n_ffn", "depth_block", "route_heads"):
            require(getattr(self, name) >= 0, f"{name}={getattr(self, name)}: must not be negative")
        require(self.n_layer <= 10_000, f"n_layer={self.n_layer}: must be at most 10,000")  # or building has no end
        for name in ("rope_theta", "norm_eps"):
            require(getattr(self, name) > 0, f"{name}={getattr(self, name)}: must be positive")
        require(self.rope_scale >= 1, f"rope_scale={self.rope_scale}: must be at least 1")
        require(self.head_dim or self.n_embd % self.n_head == 0, f"n_embd={self.n_embd} does not divide by "
                f"n_head={self.n_head}: change one of them, or set head_dim")
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.n_embd // self.n_head
        require(self.n_expert == self.n_expert_active == 0 or 2 <= self.n_expert_active <= self.n_expert,
                f"n_expert_active={self.n_expert_active}: must be 2 to n_expert={self.n_expert}, or both must be 0")
        self.n_ffn = self.n_ffn or 64 * math.ceil(self.n_embd * 8 / 3 / 64 / max(1, self.n_expert_active))
        require(self.n_head % self.n_kv_head == 0, f"n_head={self.n_head} does not divide by "
                f"n_kv_head={self.n_kv_head}")
        require(self.head_dim % 2 == 0, f"head_dim={self.head_dim}: rotary positions need an even number")
        require_choice("residual_mode", self.residual_mode, RESIDUAL_MODES)
        require_choices(self)
        for name in all_knobs():
            users = [mode for mode, row in RESIDUAL_MODES.items() if name in row.knobs]
            require(self.residual_mode in users or getattr(self, name) == getattr(GPTConfig, name), f"{name}="
                    f"{getattr(self, name)} has no effect in residual_mode={self.residual_mode}: remove it, or use a "
                    f"mode that reads it ({', '.join(users)})")
        heads = self.knob("route_heads") or 1
        require(self.n_embd % heads == 0, f"n_embd={self.n_embd} does not divide by route_heads={heads}")

    def knob(self, name):
        """Value in force of a residual knob: the user's or, while that is the field's default, the mode's own."""
        row, value = RESIDUAL_MODES[self.residual_mode], getattr(self, name)
        if value == getattr(GPTConfig, name):
            value = (row.knobs | row.fixed).get(name, value)
        return value(self) if callable(value) else value


def require(condition, message):
    if not condition:
        raise ValueError(message)


def require_choice(name, value, choices):
    if value not in choices:
        near = get_close_matches(str(value), list(choices), 1)
        raise ValueError(f"{name}={value} is unknown{f', did you mean {near[0]}?' if near else ''} "
                         f"(choices: {', '.join(choices)})")


def require_choices(config):
    """Every Literal field of a dataclass has one of its values."""
    for f in fields(config):
        if get_args(f.type):
            require_choice(f.name, getattr(config, f.name), get_args(f.type))


# ---------------------------------------------------------------------------------------------------------------------
# Primitives


def at_least_fp32(dtype):
    """Precision of norms, logits and accumulation: fp32 for bf16 and fp32, fp64 for fp64."""
    return torch.promote_types(dtype, torch.float32)


def rms_norm(x, eps):
    """x / sqrt(mean(x^2) + eps) over the last axis, without a gain; in at least fp32, returned in x's dtype."""
    with torch.autocast(x.device.type, enabled=False):  # which on CUDA returns fp32, and keeps a copy in it
        return F.rms_norm(x, (x.shape[-1],), eps=eps)


def mean_of_squares(x):
    """(..., D) -> (..., 1) in at least fp32; of fp32 without a temporary of x's size."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=at_least_fp32(x.dtype)).square() / x.shape[-1]


def scaled_linear(x, gain, weight, whole=None):
    """(x * gain) @ weight.T, with the gain multiplied into whichever of the two is smaller.

    `whole`: the matrix of which `weight` is a part; its size decides then, so that the parts round as the whole does.
    """
    size = (weight if whole is None else whole).numel()
    return F.linear(x * gain, weight) if x.numel() < size else F.linear(x, weight * gain)


def rotary(start, T, K, theta, device, dtype, scale=1.0):
    """cos and sin, each (T, K/2), of the rotary angles of positions start .. start+T-1 (RoFormer, 2104.09864).

    scale > 1 is Llama 3's: frequencies that turn less than once in 8192 positions are divided by it, those that turn
    more than 4 times are kept, between the two it is interpolated.
    """
    frequency = 1 / theta ** (torch.arange(0, K, 2, device=device, dtype=dtype) / K)  # rounds as in Hugging Face's
    if scale != 1:
        keep = ((8192 * frequency / (2 * math.pi) - 1) / (4 - 1)).clamp(0, 1)
        frequency = frequency * (keep + (1 - keep) / scale)
    angle = torch.arange(start, start + T, device=device, dtype=dtype)[:, None] * frequency
    return angle.cos(), angle.sin()


def rotate(x, rope):
    """Rotate the pairs (x[i], x[i + K/2]) of (B, H, T, K) by their position's angle, in at least fp32."""
    (cos, sin), (a, b) = rope, x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def exact_linear(x, weight):
    """F.linear in at least fp32, also under autocast: for gates and connections."""
    dtype = at_least_fp32(weight.dtype)
    with torch.autocast(x.device.type, enabled=False):
        return F.linear(x.to(dtype), weight.to(dtype))


def depth_logits(query, keys, eps):
    """z_i = <query_g, key_i,g> / rms(key_i): query (D,) or (G, D/G), keys S x (B, T, D) -> (S, B, T, G), at least fp32.

    The RMS is over the full width, then heads are sliced. There is no gain on the keys: it would enter only as its
    product with the query. Keys are never stacked: per source nothing wider than (B, T, G) is kept for backward.
    """
    query, logits = query.view(-1, query.shape[-1]), []
    for key in keys:
        dot = (key.unflatten(-1, query.shape) * query).sum(-1)  # not a matmul: autocast would run it in bf16
        logits.append(dot * torch.rsqrt(mean_of_squares(key) + eps))
    return torch.stack(logits)


def depth_sum(weights, values):
    """sum_i weights[i] values[i]: values S x (B, T, D), weights S tensors that broadcast to (B, T, G) -> (B, T, D)."""
    out = None
    for w, value in zip(weights, values):
        part = w.unsqueeze(-1) * value.unflatten(-1, (w.shape[-1], -1))  # (B, T, G, D/G) in at least fp32
        out = part if out is None else out + part
    return out.flatten(-2).to(values[0].dtype)


# ---------------------------------------------------------------------------------------------------------------------
# Residuals: how information travels through depth. `read` is pure and `write` never changes the old state; both may
# branch on the site, never on values. A parameter exists only where it can act: a site with one source has no query.


class Residual(nn.Module):
    """`standard`: one running sum. x <- x + f(norm(x)).      State: (x,)"""
    copies = 1  # of the embedding, at the start of the state

    def __init__(self, cfg):
        super().__init__()
        self.cfg, self.eps, self.n_sublayer = cfg, cfg.norm_eps, 2 * cfg.n_layer

    def start(self, e):
        """Embedding (B, T, D) -> state, in autocast's dtype if there is one, so that streams and sources have it."""
        device = e.device.type
        if torch.is_autocast_enabled(device):
            e = e.to(torch.get_autocast_dtype(device))
        return (e,) * self.copies

    def read(self, site, state):
        """Normalised input of a sublayer: (for queries and keys, for values); MLP and head take the first. The norm's
        gain is the sublayer's own."""
        return (rms_norm(self.gather(site, state), self.eps),) * 2

    def gather(self, site, state):
        """What a site reads, before the norm: (B, T, D)."""
        return state[0]

    def write(self, site, state, y):
        """The state after sublayer `site` has returned y (B, T, D), in the dtype of the state."""
        return (state[0] + y,)

    def init_weights(self):
        """All zero, unless a subclass says otherwise. Without random numbers: modes of one seed share all the rest."""
        for p in self.parameters():
            nn.init.zeros_(p)

    def depth_weights(self, site, state):
        """Weights of a site's routes, to look at: {route: (S, B, T, G)}, sources in the order of `source_names`."""
        return {}


class AttnRes(Residual):
    """Attention Residuals (2603.15031, sections 3 and 4); multi-head (2607.27230) when route_heads > 1.

        V = torch.stack(sources)                                          # (S, B, T, D)
        z = torch.einsum("d,sbtd->sbt", q, rms_norm(V, eps))              # q: the site's query, a parameter
        h = S * torch.einsum("sbt,sbtd->btd", z.softmax(0), V)

    is what the code below computes without stacking. Sources are the embedding and the depth blocks; depth blocks of
    one sublayer are the full form. The factor S is ours: queries start at zero, every weight is 1/S, and h is the plain
    sum of the sources, which is the standard stream x. The norm behind h cancels S, but for its eps.

    State: (e, closed depth blocks ..., open one). Wherever there is a route, sources(site, state), n_sources(site) and
    source_names(site) agree in length (`Dual` reads by `histories` instead). Routes are named SITE or SITE_suffix.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        self.depth_block, self.route_heads = cfg.knob("depth_block") or 1, cfg.knob("route_heads") or 1
        self.query = nn.ParameterDict({route: nn.Parameter(torch.empty(cfg.n_embd)) for route in self.routes()})

    def routes(self):
        """Names of the queries: the sites where there is a choice."""
        return [str(site) for site in range(self.n_sublayer + 1) if self.n_sources(site) > 1]

    def n_sources(self, site):
        return 1 + math.ceil(site / self.depth_block)

    def weights(self, route, keys):
        """alpha (S, B, T, G) of a route over S keys (B, T, D)."""
        return depth_logits(self.query[route].view(self.route_heads, -1), keys, self.eps).softmax(0)

    def mix(self, route, sources, factor=1):
        """factor * sum_i alpha_i v_i (B, T, D) over S sources (B, T, D); a single source as it is."""
        if len(sources) == 1:
            return sources[0]
        return depth_sum(factor * self.weights(route, sources), sources)

    def gather(self, site, state):
        sources = self.sources(site, state)
        return self.mix(str(site), sources, factor=len(sources))

    def write(self, site, state, y):
        if site % self.depth_block == 0:
            return (*state, y)  # opens a depth block; the one before is closed by no longer being the last
        return (*state[:-1], state[-1] + y)

    def sources(self, site, state):
        """The tensors of the state that a site may read."""
        return state

    def source_names(self, site):
        """Names of the tensors in `sources`: e, and depth blocks by their first and last sublayer."""
        size = self.depth_block
        blocks = [span(first, min(first + size, site) - 1) for first in range(0, site, size)]
        return ["e", *blocks][:self.n_sources(site)]  # some subclasses read fewer

    def depth_weights(self, site, state):
        mine = [route for route in self.query if route.split("_")[0] == str(site)]
        return {route: self.weights(route, self.sources(site, state)) for route in mine}


def span(first, last):
    """Name of a sum of sublayer outputs: `attn 3`, `layer 3`, `layers 3-4`, `attn 3 - attn 5`."""
    names = [f"{('attn', 'mlp')[s % 2]} {s // 2 + 1}" for s in (first, last)]
    if first == last:
        return names[0]
    if first % 2 or not last % 2:
        return " - ".join(names)
    return f"layer {last // 2 + 1}" if last == first + 1 else f"layers {first // 2 + 1}-{last // 2 + 1}"


class Cumulative(AttnRes):
    """`attnres_cumulative`: the sources are the running sums x_0 .. x_s, the baseline of the delta paper (2605.18855).

    h = sum_i alpha_i x_i. Early outputs are in more of the sums, so that zero queries weigh them more: this is not the
    standard start.
    """

    def gather(self, site, state):
        return self.mix(str(site), state)

    def write(self, site, state, y):
        return (*state, state[-1] + y)

    def source_names(self, site):
        return [f"x{s}" for s in range(site + 1)]


class Static(AttnRes):
    """`static_block`: each source has a learned weight that is the same for all tokens, softmax(logits). The logits,
    (S, G), are kept in `query`.

    Routing without attention: the input-independent control of 2603.15031, section 5.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        for route in self.query:
            self.query[route] = nn.Parameter(torch.empty(self.n_sources(int(route)), self.route_heads))

    def weights(self, route, keys):
        return self.query[route].softmax(0)[:, None, None].expand(-1, *keys[0].shape[:2], -1)


class Delta(AttnRes):
    """Delta Attention Residuals (2605.18855): the running sum x is kept as in `standard`; a sublayer reads x plus a
    weighted sum of the sources, which does not enter x.

        h = (x + sum_i alpha_i v_i) / (1 + 1/S)      x <- x + y

    The divisor, which is not in the paper, makes zero queries read exactly x (see AttnRes). State: (x, e, outputs ...).
    The head reads x alone.
    """
    copies = 2

    def n_sources(self, site):
        return super().n_sources(site) if site < self.n_sublayer else 0

    def sources(self, site, state):
        return state[1:]

    def add(self, site, x, mixed, n_sources):
        """The stream x with what a site reads of its sources."""
        return (x + mixed) / (1 + 1 / n_sources)

    def gather(self, site, state):
        if site == self.n_sublayer:
            return state[0]
        sources = self.sources(site, state)
        return self.add(site, state[0], self.mix(str(site), sources), len(sources))

    def write(self, site, state, y):
        x, *sources = state
        return (x + y, *super().write(site, sources, y))


class DeltaBlock(Delta):
    """`delta_block` (2605.18855): sources are e and the closed depth blocks.

    The newest depth block, complete or not, is never a source: it becomes one when the next is opened, one read after
    its last sublayer (as in the released code). Zero queries add an old mean to x: this is not the standard start.
    delta_sources=released, also from that code: depth block P_k starts from P_(k-2) instead of zero, for k > 1, where
    P_0 = e.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        self.released = cfg.knob("delta_sources") == "released"

    def n_sources(self, site):
        return max(1, math.ceil(site / self.depth_block)) if site < self.n_sublayer else 0

    def sources(self, site, state):
        _, e, *blocks = state
        return (e, *blocks[:-1])

    def write(self, site, state, y):
        if self.released and site and site % self.depth_block == 0:  # opens a depth block, not the first
            x, *sources = state
            return (x + y, *sources, y + sources[-2])
        return super().write(site, state, y)


class GatedDelta(DeltaBlock):
    """`mhar_delta` (2607.27230, conversion of pretrained models): h = x + gate sum_i alpha_i v_i, a gate for each site.

    The first source is a learned vector, the null, so that a site may read nothing. Gates start at zero: a converted
    model is its base to the last bit, and needs no divisor. Queries and nulls have no gradient until the gates move.
    Depth blocks follow delta_sources=released.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        sites = [str(site) for site in range(self.n_sublayer)]
        self.null = nn.ParameterDict({site: nn.Parameter(torch.empty(cfg.n_embd)) for site in sites})
        self.gate = nn.ParameterDict({site: nn.Parameter(torch.empty(1)) for site in sites})

    def n_sources(self, site):
        return 1 + super().n_sources(site) if site < self.n_sublayer else 0

    def sources(self, site, state):
        return (self.null[str(site)].to(state[0].dtype).expand_as(state[0]), *super().sources(site, state))

    def source_names(self, site):
        return ["null", *super().source_names(site)][:self.n_sources(site)]

    def add(self, site, x, mixed, n_sources):
        return (x + self.gate[str(site)] * mixed).to(x.dtype)


class RoleDecoupled(AttnRes):
    """Role-Decoupled Attention Residuals (2608.01075): attention has one route for queries and keys, one for values.

    Both share sources, keys and pre-norm; MLP and head have one route. rd_control: `tied` uses the first route for both
    roles, `average` feeds the mean of both reads to both (the second query starts apart: not the standard start),
    `frozen_v` reads the plain sum for values.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        self.control = cfg.knob("rd_control")
        if self.control in ("none", "average"):
            for site in range(2, self.n_sublayer, 2):
                self.query[f"{site}_v"] = nn.Parameter(torch.empty(cfg.n_embd))

    def init_weights(self):
        super().init_weights()
        if self.control == "average":
            separate(self.query, "_v")

    def read(self, site, state):
        is_attention = site % 2 == 0 and 0 < site < self.n_sublayer
        if not is_attention or self.control == "tied":
            return super().read(site, state)
        S = len(state)
        h_qk = self.mix(str(site), state, factor=S)
        if self.control == "frozen_v":
            one = state[0].new_ones(1, dtype=at_least_fp32(state[0].dtype))
            h_v = depth_sum([one] * S, state)
        else:
            h_v = self.mix(f"{site}_v", state, factor=S)
        if self.control == "average":
            return (rms_norm((h_qk + h_v) / 2, self.eps),) * 2
        return rms_norm(h_qk, self.eps), rms_norm(h_v, self.eps)


def separate(query, suffix):
    """A small fixed start for the second of two routes that would stay equal forever if both started at zero."""
    for route, q in query.items():
        if route.endswith(suffix):
            q.copy_(0.02 * torch.arange(len(q)).cos())


class Dual(AttnRes):
    """Dual Attention Residuals (2607.18730): two histories; each is read using keys from the other.

        h_j = sum_i softmax_i(<q_j, norm(K_i)>) V_i        read j: K the sources of history 1-j, V those of history j
        h = S (a_0 h_0 + a_1 h_1)                          a: softmax of two logits
        P_j <- b_j y                                       where y opens depth block P_j of history j
        P_j <- rho P_j + (1 - rho) P_(1-j) + b_j y         where y joins it

    State: both histories one after the other, each (e, closed depth blocks ..., open one). The paper's code is not
    public. Our choices: queries and logits of a start at zero, rho at 0.98, the write weights b at 1.1 and 0.9, the
    other way round at MLPs, for equal ones would keep both histories equal forever. b_0 + b_1 = 2 then, so that the
    mean of both histories is the standard one: an exact start. dar_routing names the ablations: self_kv, cross_v,
    fixed_kv (keys of history 0, values of 1; the second query starts apart: not the standard start), and sep_v, with
    one more linear map of the reads, shared by all sites. dynamic_gates adds <norm(context), u> to the logits of a, b
    and rho, u = 0 at the start; the context is the read h_j for a, the output y for b and rho.
    """
    # the histories that (read 0, read 1) take their keys from, and their values
    KEYS_VALUES = {"reciprocal": ((1, 0), (0, 1)), "sep_v": ((1, 0), (0, 1)), "self_kv": ((0, 1), (0, 1)),
                   "cross_v": ((0, 1), (1, 0)), "fixed_kv": ((0, 0), (1, 1))}
    copies = 2

    def __init__(self, cfg):
        super().__init__(cfg)
        require(self.depth_block > 1, "depth_block=1: both histories would be multiples of each other, and dar_routing "
                "without effect; use 2 or more")
        self.keys, self.values = self.KEYS_VALUES[cfg.knob("dar_routing")]
        sites = range(self.n_sublayer)
        sizes = {f"a{s}": 2 for s in range(1, self.n_sublayer + 1)} | {f"b{s}": 2 for s in sites}
        sizes |= {f"rho{s}": 1 for s in sites if s % self.depth_block}
        self.gate = nn.ParameterDict({name: nn.Parameter(torch.empty(n)) for name, n in sizes.items()})
        if cfg.knob("dynamic_gates"):
            self.u = nn.ParameterDict({name: nn.Parameter(torch.empty(n, cfg.n_embd)) for name, n in sizes.items()})
        if cfg.knob("dar_routing") == "sep_v":
            self.sep_v = nn.Parameter(torch.empty(cfg.n_embd, cfg.n_embd))

    def routes(self):
        return [f"{route}_{j}" for route in super().routes() for j in (0, 1)]

    def init_weights(self):
        super().init_weights()
        for name, logit in self.gate.items():
            if name.startswith("b"):
                sign = 1 if int(name[1:]) % 2 == 0 else -1
                logit.copy_(sign * math.log(1.1 / 0.9) * torch.tensor([1.0, -1.0]))  # b = 2 sigmoid(logit)
            elif name.startswith("rho"):
                logit.fill_(4.0)
        if self.keys[0] == self.keys[1]:
            separate(self.query, "_1")

    def gates(self, name, context):
        """Logits of k gates: (k, 1, 1, 1), or (k, B, T, 1) when dynamic; context: k tensors (B, T, D)."""
        logit = self.gate[name].view(-1, 1, 1, 1)
        if hasattr(self, "u"):
            moved = [exact_linear(rms_norm(x, self.eps), u[None]) for x, u in zip(context, self.u[name])]
            logit = logit + torch.stack(moved)
        return logit

    def histories(self, state):
        n = len(state) // 2
        return state[:n], state[n:]

    def retrieve(self, site, state):
        """The reads h_0 and h_1."""
        H, out = self.histories(state), []
        for j in (0, 1):
            keys, values = H[self.keys[j]], H[self.values[j]]
            h = depth_sum(self.weights(f"{site}_{j}", keys), values)
            if hasattr(self, "sep_v"):
                h = h + F.linear(h, self.sep_v)
            out.append(h)
        return out

    def gather(self, site, state):
        if site == 0:  # both histories are e
            return state[0]
        reads, S = self.retrieve(site, state), len(state) // 2
        return depth_sum(S * self.gates(f"a{site}", reads).softmax(0), reads)

    def write(self, site, state, y):
        H0, H1 = self.histories(state)
        b0, b1 = 2 * self.gates(f"b{site}", (y, y)).sigmoid()
        if site % self.depth_block == 0:
            return (*H0, depth_sum([b0], [y]), *H1, depth_sum([b1], [y]))
        rho, = self.gates(f"rho{site}", (y,)).sigmoid()
        P0, P1 = H0[-1], H1[-1]
        new0 = depth_sum([rho, 1 - rho, b0], [P0, P1, y])
        new1 = depth_sum([1 - rho, rho, b1], [P0, P1, y])
        return (*H0[:-1], new0, *H1[:-1], new1)

    def depth_weights(self, site, state):
        H = self.histories(state)
        return {f"{site}_{j}": self.weights(f"{site}_{j}", H[self.keys[j]]) for j in (0, 1) if site}


class HyperConnections(Residual):
    """`hc`: Hyper-Connections (2409.19606). n streams H_j: h = sum_j A_j H_j, then H_i <- sum_j R_ji H_j + b_i y.

    State: the streams, all e at the start; the head reads their mean. Starts: A one-hot at stream s mod n, R the
    identity, b one: `standard`. dynamic_gates: + factor * tanh(norm(H_j) W) on A_j, R_j and b_j, W = 0, factor = 0.01.
    """

    def __init__(self, cfg):
        super().__init__(cfg)
        n = self.n_streams = self.copies = cfg.knob("n_streams")
        require(n > 1, f"n_streams={n}: needs at least 2")
        self.bias, self.w, self.factor = nn.ParameterDict(), nn.ParameterDict(), nn.ParameterDict()
        shapes, maps = {"A": (n,), "R": (n, n), "b": (n,)}, self.map_shapes(cfg)
        for site in range(self.n_sublayer):
            for kind in self.connections(site):
                self.bias[f"{kind}{site}"] = nn.Parameter(torch.empty(shapes[kind]))
                if maps:
                    self.w[f"{kind}{site}"] = nn.Parameter(torch.empty(maps[kind]))
                    self.factor[f"{kind}{site}"] = nn.Parameter(torch.empty(1))

    def connections(self, site):
        """A reads, R mixes, b writes. At site 0 the streams are equal: an A would only scale them."""
        return "ARb" if site else "Rb"

    def map_shapes(self, cfg):
        """Shapes of W, applied to each stream alike: A and b get one number from it, R one for each target stream."""
        n, D = self.n_streams, cfg.n_embd
        return {"A": (1, D), "R": (n, D), "b": (1, D)} if cfg.knob("dynamic_gates") else None

    def init_weights(self):
        super().init_weights()
        n = self.n_streams
        for name, p in self.bias.items():
            kind, site = name[0], int(name[1:])
            eye = torch.eye(n, device=p.device)
            p.copy_(eye[site % n] if kind == "A" else eye if kind == "R" else torch.ones_like(eye[0]))
        for p in self.factor.values():
            p.fill_(0.01)

    def connect(self, kind, site, state):
        """A or b as (n, B, T, 1), R as (n, B, T, n) from stream j (first axis) to i; B = T = 1 when static."""
        name = f"{kind}{site}"
        value = self.bias[name].view(self.n_streams, 1, 1, -1)
        if name in self.w:
            moved = [exact_linear(rms_norm(H, self.eps), self.w[name]).tanh() for H in state]
            value = value + self.factor[name] * torch.stack(moved)
        return value

    def gather(self, site, state):
        if site == 0:  # all streams are e
            return state[0]
        if site < self.n_sublayer:
            return depth_sum(self.connect("A", site, state), state)
        mean = state[0].new_full((1,), 1 / self.n_streams, dtype=at_least_fp32(state[0].dtype))
        return depth_sum([mean] * self.n_streams, state)

    def write(self, site, state, y):
        R, b = self.connect("R", site, state), self.connect("b", site, state)
        new = []
        for i in range(self.n_streams):
            from_streams = R[..., i].unsqueeze(-1)  # (n, B, T, 1)
            new.append(depth_sum([*from_streams, b[i]], (*state, y)))
        return tuple(new)


class ManifoldHyperConnections(HyperConnections):
    """`mhc`: manifold-constrained Hyper-Connections (2512.24880): always dynamic, R doubly stochastic.

        c = norm(all streams as one vector)    A = sigmoid(factor c W_A + bias) / a   b = 2 sigmoid(factor c W_b + bias)
        R = Sinkhorn(factor c W_R + bias), 20 iterations; for two streams in closed form

    c W is computed as (sum_j H_j W_j) / rms: the long vector is never made. Starts: W = 0, factor = 0.01; biases of A
    +1 at stream s mod n and -1 elsewhere, of R 4 I, of b 0; `a` is the sum of A at the start, which the norm behind the
    read cancels: equal streams are `standard`, and unequal A let training pull them apart. A doubly stochastic R keeps
    the mean, which is all that the head reads: the last sublayer has no R, and the first none as its streams are equal.
    """

    def connections(self, site):
        return "b" if site == 0 else "Ab" if site == self.n_sublayer - 1 else "ARb"

    def map_shapes(self, cfg):
        """Shapes of W: (outputs, stream, D); the outputs of R are pairs of target and source."""
        n, D = self.n_streams, cfg.n_embd
        return {"A": (n, n, D), "R": (n * n, n, D), "b": (n, n, D)}

    def init_weights(self):
        super().init_weights()
        for name, p in self.bias.items():
            if name[0] == "A":
                p.mul_(2).sub_(1)
            else:
                p.mul_(4 if name[0] == "R" else 0)

    def connect(self, kind, site, state):
        n, name = self.n_streams, f"{kind}{site}"
        if name not in self.bias:  # R where it cannot act
            return torch.eye(n, device=state[0].device).view(n, 1, 1, n)
        mean_square = sum(mean_of_squares(H) for H in state) / n
        dot = sum(exact_linear(H, self.w[name][:, j]) for j, H in enumerate(state))
        logits = self.factor[name] * torch.rsqrt(mean_square + self.eps) * dot + self.bias[name].flatten()
        if kind == "R":  # (target, source) here, (source, target) above
            return doubly_stochastic(logits.unflatten(-1, (n, n))).movedim(-1, 0)
        if kind == "A":
            sum_at_start = sum(1 / (1 + math.exp(-bias)) for bias in [1] + [-1] * (n - 1))
            return (logits.sigmoid() / sum_at_start).unsqueeze(-1).movedim(-2, 0)
        return (2 * logits.sigmoid()).unsqueeze(-1).movedim(-2, 0)


def doubly_stochastic(logits):
    """(..., n, n) -> positive matrices whose rows and columns sum to one, by Sinkhorn's iteration on exp(logits)."""
    if logits.shape[-1] == 2:
        rho = ((logits[..., 0, 0] + logits[..., 1, 1] - logits[..., 0, 1] - logits[..., 1, 0]) / 2).sigmoid()
        return torch.stack([rho, 1 - rho, 1 - rho, rho], dim=-1).unflatten(-1, (2, 2))
    for _ in range(20):  # of logarithms, which neither overflow nor vanish
        logits = logits - logits.logsumexp(-1, keepdim=True)
        logits = logits - logits.logsumexp(-2, keepdim=True)
    return logits.exp()


class Mode(NamedTuple):
    """One row of RESIDUAL_MODES. Command line and tests are derived from it, README's table is checked against it."""
    cls: type  # the residual's class
    knobs: dict = {}  # what a user may set in this mode, and its value while it is not set; may be functions of cfg
    fixed: dict = {}  # knobs that the mode itself decides
    reads: str = ""  # what a site reads, before its norm
    stores: str = ""  # tensors of width D alive at the end of the model
    added: str = "0"  # added parameters, in L, D, N = depth blocks, P = sublayers in each, n = streams
    paper: str = ""
    exact_start: bool = True  # whether it starts as the standard model


BLOCKS = {"depth_block": lambda cfg: 2 * math.ceil(cfg.n_layer / 8)}  # at most eight, of whole layers
FULL = {"depth_block": 1}
ONE_HEAD, KV_HEADS = {"route_heads": 1}, {"route_heads": lambda cfg: cfg.n_kv_head}
RESIDUAL_MODES = {
    "standard": Mode(Residual, reads="x = e + Σ y", stores="1", paper="pre-norm Transformer"),
    "attnres": Mode(
        AttnRes, knobs=ONE_HEAD, fixed=FULL, paper="2603.15031",
        reads="Σ α v over e and every y", stores="2L+1", added="2*L*D"),
    "attnres_block": Mode(
        AttnRes, knobs=BLOCKS | ONE_HEAD, paper="2603.15031",
        reads="Σ α v over e and depth blocks", stores="N+1", added="2*L*D"),
    "static_block": Mode(
        Static, knobs=BLOCKS | ONE_HEAD, paper="control in 2603.15031",
        reads="as attnres_block, α the same for all tokens", stores="N+1", added="L*(N+3)"),
    "mhar": Mode(
        AttnRes, knobs=KV_HEADS, fixed=FULL, paper="2607.27230",
        reads="as attnres, per depth head", stores="2L+1", added="2*L*D"),
    "mhar_block": Mode(
        AttnRes, knobs=BLOCKS | KV_HEADS, paper="2607.27230",
        reads="as attnres_block, per depth head", stores="N+1", added="2*L*D"),
    "mhar_delta": Mode(
        GatedDelta, knobs=BLOCKS | KV_HEADS, fixed={"delta_sources": "released"}, paper="2607.27230",
        reads="x + gate · Σ α v over a null, e and closed depth blocks", stores="N+2", added="2*L*(2*D+1)"),
    "rd": Mode(
        RoleDecoupled, knobs=BLOCKS | ONE_HEAD | {"rd_control": "none"}, paper="2608.01075",
        reads="as attnres_block, one read for Q and K, one for V", stores="N+1", added="2*L*D+(L-1)*D"),
    "delta": Mode(
        Delta, knobs=ONE_HEAD, fixed=FULL, paper="2605.18855",
        reads="x + Σ α v over e and every y", stores="2L+2", added="(2*L-1)*D"),
    "delta_block": Mode(
        DeltaBlock, knobs=BLOCKS | ONE_HEAD | {"delta_sources": "true"}, paper="2605.18855",
        reads="x + Σ α v over e and closed depth blocks", stores="N+2", added="(2*L-1-P)*D", exact_start=False),
    "attnres_cumulative": Mode(
        Cumulative, knobs=ONE_HEAD, fixed=FULL, paper="baseline in 2605.18855",
        reads="Σ α x over the running sums x_0 .. x_s", stores="2L+1", added="2*L*D", exact_start=False),
    "dar_block": Mode(
        Dual, knobs=BLOCKS | ONE_HEAD | {"dar_routing": "reciprocal", "dynamic_gates": False},
        paper="2607.18730", reads="two reads of two histories, mixed by learned gates", stores="2(N+1)",
        added="4*L*D+10*L-N"),
    "dar": Mode(
        Dual, knobs=ONE_HEAD | {"dar_routing": "reciprocal", "dynamic_gates": False}, fixed={"depth_block": 2},
        paper="2607.18730", reads="as dar_block, with depth blocks of one layer", stores="2(L+1)",
        added="4*L*D+9*L"),
    "hc": Mode(
        HyperConnections, knobs={"n_streams": 4, "dynamic_gates": False}, paper="2409.19606",
        reads="Σ A H over n streams", stores="n", added="2*L*n*(n+2)-n"),
    "mhc": Mode(
        ManifoldHyperConnections, knobs={"n_streams": 4}, paper="2512.24880",
        reads="Σ A H over n streams, mixed doubly stochastically", stores="n",
        added="2*L*((n*D+1)*(n*n+2*n)+3)-(n*D+1)*(2*n*n+n)-3"),
}


def all_knobs():
    """Names of the fields of GPTConfig that only some modes read."""
    return [f.name for f in fields(GPTConfig) if any(f.name in row.knobs for row in RESIDUAL_MODES.values())]


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

    def forward(self, n_qk, n_v, rope, cache=None):
        if n_v is None:  # the same as n_qk; identity would not survive the hooks of FSDP
            q, k, v = scaled_linear(n_qk, self.gain, self.qkv.weight).split(self.sizes, dim=-1)
        else:
            w_qk, w_v = self.qkv.weight.split([self.sizes[0] + self.sizes[1], self.sizes[2]])
            q, k = scaled_linear(n_qk, self.gain, w_qk, self.qkv.weight).split(self.sizes[:2], dim=-1)
            v = scaled_linear(n_v, self.gain, w_v, self.qkv.weight)
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


class Router(nn.Linear):
    """Logits of the experts in at least fp32. A module of its own, so that FSDP does not cast it to bf16."""

    def forward(self, x):
        return exact_linear(x, self.weight)


class MoE(nn.Module):
    """Mixture of experts: each token passes through its choice of n_expert_active of n_expert SwiGLUs; none is dropped.

        score = sigmoid(W x)    chosen = top-k of score + bias    y = sum over the chosen of score f(x) / sum of score
    """
    gather = staticmethod(torch.compiler.disable(F.embedding))  # whose eager gradient has no atomics

    def __init__(self, cfg):
        super().__init__()
        self.k, E = cfg.n_expert_active, cfg.n_expert
        self.gain = nn.Parameter(torch.empty(cfg.n_embd))
        self.router = Router(cfg.n_embd, E, bias=False)
        self.up = nn.Linear(cfg.n_embd, E * 2 * cfg.n_ffn, bias=False)  # the experts' matrices, one below the other
        self.down = nn.Linear(cfg.n_ffn, E * cfg.n_embd, bias=False)
        self.register_buffer("bias", torch.zeros(E))  # train.py moves it against the load, after each step (2408.15664)

    def forward(self, h, _, rope, cache=None):
        x = (h.to(at_least_fp32(h.dtype)) * self.gain).flatten(0, 1)
        logits = self.router(x)  # (N, E)
        chosen = (logits.detach().sigmoid() + self.bias).topk(self.k).indices
        weight = F.logsigmoid(logits.gather(1, chosen)).softmax(-1)  # score / sum of score, but never 0 / 0
        self.load = torch.zeros_like(logits, dtype=torch.long).scatter_(1, chosen, 1).sum(0)  # set: remat repeats it
        order = chosen.flatten().argsort(stable=True)  # of the N k pairs of a token and an expert, by expert
        gate, up = self.linear(self.gather(order // self.k, x.to(h.dtype)), self.up.weight).chunk(2, dim=-1)
        y = self.gather(order.argsort().view(-1, self.k), self.linear(F.silu(gate) * up, self.down.weight))
        return (y * weight.unsqueeze(-1)).sum(1).to(y.dtype).view_as(h)

    @torch.compiler.disable  # it branches on values
    def linear(self, x, weight):
        """Rows x (N k, D), in the order of their experts, times their expert's part of weight (E F, D) -> (N k, F)."""
        w = weight.unflatten(0, (len(self.load), -1))
        if x.is_cuda and x.dtype == torch.bfloat16 and hasattr(F, "grouped_mm") and w.size(1) % 8 == w.size(2) % 8 == 0:
            return F.grouped_mm(x, w.to(x.dtype).mT, offs=self.load.cumsum(0, dtype=torch.int32))
        rows = [len(r) for r in x.tensor_split(len(w))] if hasattr(x, "fake_mode") else self.load.tolist()  # fake: even
        return torch.cat([F.linear(part, matrix) for part, matrix in zip(x.split(rows), w.unbind())])


class KVCache:
    """Keys and values of the tokens seen so far, for generation.

    There is no cache over depth: a route compares the sources of one token and never looks at another token, so the
    sources of a new token are all made in its own forward pass.
    """

    def __init__(self, cfg, batch, seq_len, device, dtype):
        shape = cfg.n_layer, 2, batch, cfg.n_kv_head, seq_len, cfg.head_dim
        self.kv, self.length = torch.empty(shape, device=device, dtype=dtype), 0

    def append(self, layer, k, v):
        """Store k, v (B, H, T, K) behind the others and return all. `length` moves after the last layer."""
        end = self.length + k.shape[2]
        require(end <= self.kv.shape[4], f"KVCache: {end} tokens do not fit into {self.kv.shape[4]}")
        self.kv[layer, 0, :, :, self.length:end], self.kv[layer, 1, :, :, self.length:end] = k, v
        return self.kv[layer, :, :, :, :end].unbind(0)


# ---------------------------------------------------------------------------------------------------------------------
# The model


CHUNK = 2**24  # logits, 64 MB in fp32: fewer than this are not split


def chunk_loss(x, weight, targets, scale, dw):
    """Rows x (n, D) and targets (n,) of `HeadLoss` -> (scale * sum of their losses, dx); adds the head's gradient to dw
    (V, D). Without dw: no gradients."""
    z = (x @ weight.t()).to(scale.dtype).log_softmax(-1)
    at, valid = targets.clamp(min=0)[:, None], targets[:, None] >= 0
    loss = (z.gather(1, at) * valid).sum() * -scale
    if dw is None:
        return loss, None
    dz = z.exp_().scatter_add_(1, at, torch.full_like(at, -1, dtype=z.dtype)).mul_(valid * scale).to(x.dtype)
    if dw.dtype == x.dtype:
        dw.addmm_(dz.t(), x)
    else:
        dw.add_(dz.t() @ x)
    return loss, dz @ weight


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of logits x @ weight.T: (N, D), (V, D), (N,) -> a number, 0 where all targets are -1.

    Rows come in chunks, in training at most eight; each has its gradients made at once (as in Liger, 2410.10989), so
    that nothing is computed twice. Products are in the precision of x; logits, losses and sums in at least fp32.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, chunk, gradients):
        gradients = gradients and any(ctx.needs_input_grad)
        n = 1 + x.shape[0] * weight.shape[0] // CHUNK
        n = min(8, n) if gradients else n  # each chunk rounds the gradient of the head once more
        scale = 1 / (targets >= 0).sum().clamp(min=1).to(at_least_fp32(x.dtype))
        dw = torch.zeros_like(weight, dtype=scale.dtype) if gradients else None
        weight, loss, dx = weight.to(x.dtype), 0.0, []
        for rows in zip(x.chunk(n), targets.chunk(n)):
            part = chunk(rows[0], weight, rows[1], scale, dw)
            loss = loss + part[0]
            dx.append(part[1])
        ctx.gradients = (torch.cat(dx), dw) if gradients else None
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx, d):
        if ctx.gradients is None:
            raise RuntimeError("the backward pass of the loss runs once")
        (dx, dw), ctx.gradients = ctx.gradients, None
        return dx * d, dw.mul_(d), None, None, None  # in place, to save one (V, D) matrix


def start_std(cfg, name, fan_in):
    """Standard deviation of a matrix at the start. L layers, D width; *outputs* write to the stream (`out`, `down`).

        init    embedding, head   matrices         outputs             used by
        papers  0.02              0.02             0.02                2603.15031, 2605.18855, 2607.27230, as they say
        gpt2    0.02              0.02             0.02 / sqrt(2L)     GPT-2, nanoGPT
        fan_in  1/sqrt(D)         1/sqrt(fan_in)   1/sqrt(2L fan_in)   muP (2203.03466) for the matrices
        zero    1/sqrt(D)         1/sqrt(fan_in)   0                   nanochat, modded-nanogpt for the outputs

    0.02 is a start for one width: at width 128 the embedding is smaller than what attention adds in a single layer, and
    little of it reaches the head (OLMo 2 keeps 0.02 and moves the norms behind the sublayers). 1/sqrt(D) gives tied
    logits a deviation of 1 at every width. Outputs of zero leave the stream to the embedding until they have learned:
    a tied head first repeats the token, so that the loss begins above ln V, and is the lowest of all soon after.
    """
    deep = (2 * cfg.n_layer) ** -0.5
    output = name.endswith(("out.weight", "down.weight"))
    if cfg.init in ("papers", "gpt2"):
        return 0.02 * deep if output and cfg.init == "gpt2" else 0.02
    if output:
        return deep * fan_in**-0.5 if cfg.init == "fan_in" else 0.0
    return fan_in**-0.5  # of embedding and head: D


def fused_form(residual):
    """(class of kernels.py that computes this residual faster, None), or (None, why there is none)."""
    try:
        import kernels
    except ImportError as e:
        return None, f"kernels.py cannot be imported ({e})"
    return kernels.fused_form(residual)


class GPT(nn.Module):
    """Decoder language model; `cfg` decides its shape and residual mode."""

    def __init__(self, cfg):
        super().__init__()
        require(cfg.vocab_size > 0, "vocab_size=0: give the number of tokens in the vocabulary")
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab_size, cfg.n_embd)
        mlp = MoE if cfg.n_expert else MLP
        self.sublayers = nn.ModuleList(m for layer in range(cfg.n_layer) for m in (Attention(cfg, layer), mlp(cfg)))
        self.experts = [m for m in self.sublayers if isinstance(m, MoE)]
        self.gain = nn.Parameter(torch.empty(cfg.n_embd))  # of the final norm
        if not cfg.tie_embeddings:
            self.head = nn.Linear(cfg.n_embd, cfg.vocab_size, bias=False)
        self.residual = RESIDUAL_MODES[cfg.residual_mode].cls(cfg)
        self.chunk_loss = chunk_loss  # or its compiled form
        (self.fused, self.why_not_fused), self.fused_for = fused_form(self.residual), type(self.residual)
        require(self.fused or cfg.route_impl != "fused",
                f"route_impl=fused: {self.why_not_fused}; use auto or reference")
        self.init_weights()

    @torch.no_grad()
    def init_weights(self, seed=None):
        """Start values, behind a fresh seed where one is given. (train.fill draws the same, a parameter at a time.)

        Matrices are drawn from N(0, start_std^2) in the order embedding, sublayers, head; gains are 1. The residual's
        own start draws no random numbers: modes of one seed share all the rest exactly.
        """
        if seed is not None:
            torch.manual_seed(seed)
        for name, p in self.named_parameters():
            if not name.startswith("residual."):
                self.init_parameter(name, p)
        self.residual.init_weights()
        for bias in self.buffers():
            bias.zero_()

    def init_parameter(self, name, p):
        if p.dim() == 2:
            nn.init.normal_(p, std=start_std(self.cfg, name, fan_in=p.shape[1]))
        else:
            assert name.endswith("gain"), f"no start value for {name}"
            nn.init.ones_(p)

    def forward(self, idx, targets=None, cache=None):
        """Token ids (B, T) -> (logits (B, T, V) in at least fp32, None); with targets (B, T) (None, their mean loss in
        nats where they are not -1), without ever making the logits as a whole."""
        h = self.trunk(idx, cache)
        return (self.logits(h), None) if targets is None else (None, self.loss(h.flatten(0, 1), targets.flatten()))

    def trunk(self, idx, cache=None, look=None):
        """Token ids (B, T) -> normalised input of the head (B, T, D). `look(site, state)` is called before each read,
        with the reference's state; the reference then does the routing."""
        residual, look = (self.residual, look) if look else (self.residual_in_use(), lambda site, state: None)
        state = residual.start(self.embed(idx))
        past, dtype = cache.length if cache is not None else 0, at_least_fp32(self.embed.weight.dtype)
        cfg = self.cfg
        rope = rotary(past, idx.shape[1], cfg.head_dim, cfg.rope_theta, idx.device, dtype, cfg.rope_scale)
        for site, sublayer in enumerate(self.sublayers):
            look(site, state)
            n_qk, n_v = residual.read(site, state)
            n_v = None if n_v is n_qk else n_v
            if cfg.remat and cache is None and torch.is_grad_enabled():
                y = checkpoint(sublayer, n_qk, n_v, rope, use_reentrant=False)
            else:
                y = sublayer(n_qk, n_v, rope, cache)
            state = residual.write(site, state, y)
        if cache is not None:
            cache.length += idx.shape[1]
        look(len(self.sublayers), state)
        return residual.read(len(self.sublayers), state)[0]

    def residual_in_use(self):
        """What carries this forward pass through depth: the residual itself (the reference) or its fused form.

        route_impl=auto takes the fused form where there is one, for training; the reference is what can be traced.
        """
        impl, trains = self.cfg.route_impl, torch.is_grad_enabled() and not torch.compiler.is_compiling()
        wanted = impl == "fused" or impl == "auto" and trains
        fused = wanted and self.fused and type(self.residual) is self.fused_for  # and not one put in its place
        return self.fused(self.residual) if fused else self.residual

    def logits(self, h):
        """Head: (..., D) -> (..., V), in at least fp32."""
        y = scaled_linear(h, self.gain, self.head_matrix())
        return y.to(at_least_fp32(y.dtype))

    def loss(self, h, targets):
        """Mean loss in nats of the head on rows h (N, D) with targets (N,), those of -1 not counted."""
        x = (h * self.gain).to(self.compute_dtype())
        with torch.autocast(h.device.type, enabled=False):
            return HeadLoss.apply(x, self.head_matrix(), targets, self.chunk_loss, torch.is_grad_enabled())

    def head_matrix(self):
        return self.embed.weight if self.cfg.tie_embeddings else self.head.weight

    @torch.no_grad()
    def depth_weights(self, idx):
        """Routing weights of all sites on tokens idx (B, T): a list of dictionaries with site, route, sources (their
        names) and weights (S, B, T, G). The training path is not touched. Empty for modes that do not route."""
        residual, found = self.residual, []

        def look(site, state):
            found.extend(dict(site=site, route=route, sources=residual.source_names(site), weights=weights.detach())
                         for route, weights in residual.depth_weights(site, state).items())
        self.trunk(idx, look=look)
        return found

    @torch.no_grad()
    def generate(self, idx, n, temperature=1.0, top_k=0, n_vocab=0, stop=lambda idx: False):
        """Append n sampled tokens to the prompt idx (B, T), T >= 1; -> (B, T + n); ends once stop(tokens) is true.

        temperature 0 (or below 1e-6) takes the likeliest token; top_k > 0 samples among the k likeliest; n_vocab > 0
        allows only ids below it (a vocabulary may be padded). The model sees at most its last seq_len tokens; when the
        cache is full it is rebuilt from the newest half of them.
        """
        require(idx.shape[1] >= 1, "generate: the prompt is empty, give at least one token (for instance end-of-text)")
        require(temperature >= 0 and top_k >= 0, f"temperature={temperature}, top_k={top_k}: must not be negative")
        limit, cache, new = self.cfg.seq_len, None, idx
        size = min(limit, idx.shape[1] + n)
        for _ in range(n):
            if cache is None or cache.length + new.shape[1] > limit:
                new = idx[:, -limit:] if cache is None else idx[:, -max(1, limit // 2):]
                cache = KVCache(self.cfg, len(idx), size, idx.device, self.compute_dtype())
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
            if stop(idx):
                break
        return idx

    def compute_dtype(self):
        device = self.embed.weight.device.type
        return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else self.embed.weight.dtype

    def param_groups(self, weight_decay, route_lr_mult=1.0):
        """Optimizer groups, a partition of the parameters: matrices decayed; embeddings, gains and residual not.

        `lr_mult` is the group's factor on the learning rate.
        """
        groups = {name: dict(params=[], weight_decay=decay, lr_mult=mult, name=name) for name, decay, mult in (
            ("matrix", weight_decay, 1.0), ("plain", 0.0, 1.0), ("residual", 0.0, route_lr_mult))}
        for n, p in self.named_parameters():
            matrix = p.dim() == 2 and n not in ("embed.weight", "head.weight")
            groups["residual" if n.startswith("residual.") else "matrix" if matrix else "plain"]["params"].append(p)
        return [g for g in groups.values() if g["params"]]

    def count(self):
        """Number of parameters: total, without embedding and head, and of the residual."""
        total = sum(p.numel() for p in self.parameters())
        outer = sum(p.numel() for n, p in self.named_parameters() if n in ("embed.weight", "head.weight"))
        return dict(total=total, non_embedding=total - outer,
                    residual=sum(p.numel() for p in self.residual.parameters()))
