"""Fused routing: the attention over depth of model.py for a few extra passes over memory.

The reference in model.py leaves the gradients to autograd, where each read writes one for each of its sources. Here
they are *pulled*: the gradient of a source is computed once, when its own sublayer is about to run backward, from the
input gradients dh of all the sites that read it. All sources of a forward pass lie in one tensor, the bank, and dh of a
site takes the place of a source that no one needs any more.

    score   new source      raw_iu = <q_u, s_i> for all later reads u     rho_i = (mean(s_i^2) + eps)^-1/2
    mix     read            alpha_iu = softmax_i(rho_i raw_iu)            h_u = share sum_i alpha_iu v_i + factor added
                                                                          x_u = r_u h_u, r_u = (mean(h_u^2) + eps)^-1/2
    own     read, backward  dh_u = r_u (dx_u - x_u mean(dx_u x_u))        delta_u = <dh_u, x_u / r_u - factor added>
    pull    source, backw.  c_iu = alpha_iu (share <dh_u, v_i> - delta_u)
                            dv_i = sum_u share alpha_iu dh_u              dq_u = sum_i rho_i c_iu s_i
                            dk_i = rho_i sum_u c_iu q_u - (rho_i^3 / D) (sum_u c_iu raw_iu) s_i

A query is a parameter, so that the logits of a source at all later sites are known when it is made, by one small matrix
product; the read itself is then a weighted sum. i numbers sources and u reads: a site has one read, an attention site
of `rd` two. With depth heads all but rho and r is per head. Keys s are values v but in `dar`, where share and factor
are its gates a_1, a_0 and `added` the read of the other history; in `delta` `added` is the stream. Neither h nor
normalised keys nor alpha are kept for the backward pass.

Two phases: `chunk` consecutive sites share one pass over the sources that were finished before the first of them, and
`chunk` consecutive sources one pass over dh of the sites behind the last of them. A site with N sources costs about
N / chunk + chunk / 2 + 5 planes forward and 5 more backward; see `python -m study.bench --model`.

Letters. M = B*T rows, D width, G depth heads, K = D/G, P planes; S sublayers in a depth block, T the last site; column
k: number of a source among those of its site. A plane is one (M, D) tensor of a bank.
"""
from __future__ import annotations  # kernels are defined also where there is no Triton

import dataclasses
import functools
import math
import warnings

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from model import (RESIDUAL_MODES, AttnRes, Delta, DeltaBlock, Dual, GPTConfig, RoleDecoupled, at_least_fp32,
                   mean_of_squares)

try:
    import triton
    import triton.language as tl
    jit = triton.jit
except ImportError:  # macOS; routing then runs on the PyTorch back end
    triton, jit = None, lambda function=None, **options: function or jit

# ---------------------------------------------------------------------------------------------------------------------
# PyTorch back end. Every pass has a twin with the same signature in the Triton back end below.


def grouped(x, G):
    """(..., D) -> (..., G, K)"""
    return x.unflatten(-1, (G, -1))


def rows_of(planes, n_rows, device):
    """Row numbers (n_rows, len(planes)) of the same row in several planes of a bank seen as (planes * n_rows, K)."""
    return torch.tensor(planes, device=device) * n_rows + torch.arange(n_rows, device=device).unsqueeze(1)


try:
    with warnings.catch_warnings():  # PyTorch says once in a process that sparse tensors are young
        warnings.simplefilter("ignore")
        torch.sparse.sampled_addmm(torch.eye(1).to_sparse_csr(), torch.ones(1, 1), torch.ones(1, 1))
    sparse = True
except RuntimeError:  # a build of PyTorch without it
    sparse = False


def has_sparse_kernels(bank):
    return sparse and bank.device.type == "cpu" and bank.dtype in (torch.float32, torch.float64)


def weighted_sum(bank, planes, w):
    """sum_n w[n] bank[planes[n]]: bank (P, M, D), w (n, M, G) -> (M, D) in w's dtype."""
    (_, M, D), G = bank.shape, w.shape[-1]
    if has_sparse_kernels(bank) and planes:  # a bag of embeddings per row and head: one pass, summed in registers
        rows = rows_of(planes, M * G, bank.device)
        return F.embedding_bag(rows, bank.view(-1, D // G), mode="sum",
                               per_sample_weights=w.view(len(planes), -1).t().contiguous()).view(M, D)
    out = torch.zeros(M, G, D // G, dtype=w.dtype, device=bank.device)
    for w_n, p in zip(w, planes):
        out.addcmul_(grouped(bank[p], G).to(w.dtype), w_n.unsqueeze(-1))
    return out.view(M, D)


def row_dots(bank, planes, x, G):
    """<bank[planes[n]], x> per row and head: bank (P, M, D), x (M, D) in at least fp32 -> (n, M, G)."""
    (_, M, D), n = bank.shape, len(planes)
    if has_sparse_kernels(bank):  # a product sampled where a row meets itself, also one pass without a temporary
        rows, ends = rows_of(planes, M * G, bank.device), torch.arange(0, M * G * n + 1, n, device=bank.device)
        at = torch.sparse_csr_tensor(ends, rows.flatten(), x.new_zeros(M * G * n), (M * G, bank.shape[0] * M * G),
                                     check_invariants=False)
        dots = torch.sparse.sampled_addmm(at, x.view(-1, D // G), bank.view(-1, D // G).t(), beta=0.0)
        return dots.values().view(M, G, n).permute(2, 0, 1)
    return torch.stack([(grouped(bank[p], G).to(x.dtype) * grouped(x, G)).sum(-1) for p in planes])


def norm_backward(x, scale, dx):
    """Gradient of h where x = scale * h, scale = (mean(h^2) + eps)^-1/2; x and dx (M, D), in scale's dtype."""
    x, dx = x.to(scale.dtype), dx.to(scale.dtype)
    return torch.addcmul(dx, x, (dx * x).sum(-1, keepdim=True), value=-1 / x.shape[-1]).mul_(scale)


class Torch:
    """The passes in plain PyTorch, for every device. `r` is a Route, `t` the site that looks at its columns."""

    @staticmethod
    def score(r, k, t, reads, eps, y=None, below=None):
        """Column k = y (+ plane `below`) -> its rho, and its logits (but for the factor rho) at `reads`."""
        plane, G = r.plane(k, t), r.G
        if below is not None:
            torch.add(r.keys[below], y, out=r.keys[plane])
        elif y is not None:
            r.keys[plane] = y
        s = r.keys[plane].to(r.raw.dtype)
        r.rho[plane] = torch.rsqrt(mean_of_squares(s) + eps).squeeze(-1)
        q, at = r.q[reads.start:reads.stop], r.at(reads, k)
        r.raw[at] = (q @ s.t()).unsqueeze(-1) if G == 1 else torch.einsum("mgk,ngk->nmg", grouped(s, G), grouped(q, G))

    @staticmethod
    def mix(r, reads, t, lo, hi, carries=None, final=None):
        """Reads of columns lo .. hi-1, each on top of a carry, the normalised read of the columns below. Sets lse.

        Returns h (M, D) for every read; with final=(added, factor, eps) the pair x (M, D) and scale r (M, 1).
        """
        planes, out = [r.plane(k, t) for k in range(lo, hi)], []
        for j, u in enumerate(reads):
            z = r.raw[r.offset[u] + lo:r.offset[u] + hi] * r.rho[planes].unsqueeze(-1)
            below = r.lse[u:u + 1].clone() if carries else z[:0]
            r.lse[u] = lse = torch.cat([below, z]).logsumexp(0)
            h = weighted_sum(r.values, planes, (z - lse).exp())
            if carries:
                h += (grouped(carries[j], r.G) * (below[0] - lse).exp().unsqueeze(-1)).flatten(-2)
            if final is not None:
                added, factor, eps = final
                if r.share is not None:
                    h *= r.share[u]
                if added is not None:
                    h += added if factor is None else added * factor[u]
                scale = torch.rsqrt(mean_of_squares(h) + eps)
                h = (h.mul_(scale).to(r.values.dtype), scale)
            out.append(h)
        return out

    @staticmethod
    def own(r, u, x, scale, dx, added, factor):
        """Gradient dx of read u's output x -> dh and delta; returns <dh, factor * added> per row and head."""
        r.grads[u + 1] = norm_backward(x, scale, dx)
        dh = grouped(r.grads[u + 1].to(scale.dtype), r.G)  # rounded once, and used as rounded everywhere
        r.delta[u] = (dh * grouped(x, r.G)).sum(-1).div_(scale)
        if added is None:
            return None
        part = (dh * grouped(added, r.G)).sum(-1)
        part = part if factor is None else part * factor[u]
        r.delta[u] -= part
        return part

    @staticmethod
    def pull(r, columns, t, reads, carries=None):
        """Gradients of sources through `reads`, on top of carries; adds to dq.

        Returns a (dv, dk) for each, as a value and as a key; where keys are values, dv has both and dk is None.
        """
        out, u, dh = [], slice(reads.start, reads.stop), range(reads.start + 1, reads.stop + 1)
        for j, k in enumerate(columns):
            plane = r.plane(k, t)
            raw, rho = r.raw[r.at(reads, k)], r.rho[plane].unsqueeze(-1)
            alpha = (raw * rho - r.lse[u]).exp()
            w = alpha if r.share is None else alpha * r.share[u].unsqueeze(-1)
            c = w * row_dots(r.grads, dh, r.values[plane].to(w.dtype), r.G) - alpha * r.delta[u]
            dv, s, c_rho = weighted_sum(r.grads, dh, w), r.keys[plane].to(w.dtype), c * rho
            dk = dv if r.keys is r.values else torch.zeros_like(dv)
            if r.G == 1:
                dk.addmm_(c_rho.squeeze(-1).t(), r.q[u])
                r.dq[u].addmm_(c_rho.squeeze(-1), s)
            else:
                dk += torch.einsum("nmg,ngk->mgk", c_rho, grouped(r.q[u], r.G)).flatten(-2)
                r.dq[u] += torch.einsum("nmg,mgk->ngk", c_rho, grouped(s, r.G)).flatten(-2)
            dk.addcmul_(s, (c * raw).sum((0, 2)).unsqueeze(-1) * rho**3, value=-1 / s.shape[-1])
            pair = dv, None if dk is dv else dk
            out.append(pair if carries is None else add(pair, carries[j]))
        return out

    @staticmethod
    def transport(new, old, y, gate):
        """Writes of `dar`, gate = (rho, b_0, b_1): new_j = rho old_j + (1 - rho) old_1-j + b_j y; without old b_j y."""
        for j in (0, 1):
            h = gate[1 + j] * y
            if old is not None:
                h += torch.lerp(old[1 - j].to(h.dtype), old[j].to(h.dtype), gate[0])
            new[j].copy_(h)

    @staticmethod
    def transport_backward(g, old, y, gate):
        """Gradients g of what was written -> that of y, those of old, those of the gate (3,)."""
        g, y, zero = [x.to(gate.dtype) for x in g], y.to(gate.dtype), gate.new_zeros(())
        d_gate = torch.stack([zero if old is None else ((g[0] - g[1]) * (old[0] - old[1])).sum(),
                              (g[0] * y).sum(), (g[1] * y).sum()])
        d_old = None if old is None else (torch.lerp(g[1], g[0], gate[0]), torch.lerp(g[0], g[1], gate[0]))
        return torch.addcmul(gate[1] * g[0], g[1], gate[2]), d_old, d_gate


def add(a, b):
    """Sum of two tuples of gradients, None where there is none."""
    return a if b is None else tuple(x if y is None else y if x is None else x + y for x, y in zip(a, b))


# ---------------------------------------------------------------------------------------------------------------------
# Triton back end. p_ pointer, b_ value in registers, o_ offsets, m_ mask. A program of mix, own and pull is one row of
# the planes, a tile (GP, KP) of heads by channels, both rounded up to powers of two: registers that are masked out as a
# whole are deleted by the compiler, so that a width costs what its next multiple of 256 * warps costs.


@jit
def plane_of(k, t, STEP: tl.constexpr, PAIRS: tl.constexpr):
    """Chain.plane: slot min(k STEP, t), plus one plane for each attention site with two reads below it."""
    slot = tl.minimum(k * STEP, t)
    return tl.cast(slot + PAIRS * (tl.maximum(slot - 1, 0) // 2), tl.int64)


@jit
def row_tile(D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, KP: tl.constexpr):
    """Offsets (GP, KP) in a row of a plane with their mask, offsets (GP,) in a row of numbers per head with theirs."""
    K: tl.constexpr = D // G
    o_g, o_c = tl.arange(0, GP), tl.arange(0, KP)
    return o_g[:, None] * K + o_c[None, :], (o_g < G)[:, None] & (o_c < K)[None, :], o_g, o_g < G


@jit(do_not_specialize=["plane", "below", "k", "u0", "u1"])
def score_kernel(p_y, p_keys, p_q_hi, p_q_lo, p_raw, p_offset, p_rho, plane, below, k, u0, u1, M, eps,
                 D: tl.constexpr, G: tl.constexpr, BM: tl.constexpr, BK: tl.constexpr, BU: tl.constexpr,
                 WRITE: tl.constexpr, BELOW: tl.constexpr, SPLIT: tl.constexpr, UPCAST: tl.constexpr):
    """Program (i, j): BM rows, BU reads. keys[plane] = y (+ keys[below]); raw = <q, key>; rho = 1 / rms(key).

    SPLIT: queries as a sum of two bf16 parts, 16 bits of mantissa, for products on tensor cores, summed in fp32.
    """
    K: tl.constexpr = D // G
    o_m = tl.program_id(0).to(tl.int64) * BM + tl.arange(0, BM)
    m_m = o_m < M
    o_u = u0 + tl.program_id(1) * BU + tl.arange(0, BU)
    m_u = o_u < u1
    p_new = p_keys + tl.cast(plane, tl.int64) * M * D
    p_old = p_keys + tl.cast(below, tl.int64) * M * D
    o_raw = (tl.load(p_offset + o_u, mask=m_u, other=0) + k).to(tl.int64)
    b_squares = tl.zeros([BM], tl.float32)
    for g in range(G):
        b_acc = tl.zeros([BM, BU], tl.float32)
        for c in range(0, K, BK):
            o_c = c + tl.arange(0, BK)
            m_c = o_c < K
            m_x = m_m[:, None] & m_c[None, :]
            o_x = o_m[:, None] * D + g * K + o_c[None, :]
            if WRITE:
                b_x = tl.load(p_y + o_x, mask=m_x, other=0.0)
                if BELOW:
                    b_x = (b_x.to(tl.float32) + tl.load(p_old + o_x, mask=m_x, other=0.0).to(tl.float32)).to(b_x.dtype)
                if tl.program_id(1) == 0:
                    tl.store(p_new + o_x, b_x, mask=m_x)
            else:
                b_x = tl.load(p_new + o_x, mask=m_x, other=0.0)
            b_x32 = b_x.to(tl.float32)
            b_squares += tl.sum(b_x32 * b_x32, axis=1)
            o_q = o_u[None, :] * D + g * K + o_c[:, None]
            m_q = m_u[None, :] & m_c[:, None]
            b_left = b_x32 if UPCAST else b_x  # the interpreter keeps bf16 as integers and would multiply those
            b_q = tl.load(p_q_hi + o_q, mask=m_q, other=0.0).to(b_left.dtype)
            b_acc = tl.dot(b_left, b_q, b_acc, input_precision="ieee")
            if SPLIT:
                b_q = tl.load(p_q_lo + o_q, mask=m_q, other=0.0).to(b_left.dtype)
                b_acc = tl.dot(b_left, b_q, b_acc, input_precision="ieee")
        tl.store(p_raw + (o_raw[None, :] * M + o_m[:, None]) * G + g, b_acc, mask=m_m[:, None] & m_u[None, :])
    if tl.program_id(1) == 0:
        tl.store(p_rho + tl.cast(plane, tl.int64) * M + o_m, tl.rsqrt(b_squares / D + eps), mask=m_m)


@jit(do_not_specialize=["u", "t", "lo", "hi"])
def mix_kernel(p_values, p_raw, p_offset, p_rho, p_lse, p_carry, p_out, p_scale, p_added, p_factor, p_share,
               u, t, lo, hi, M, eps, D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, KP: tl.constexpr,
               NP: tl.constexpr, S: tl.constexpr, STEP: tl.constexpr, PAIRS: tl.constexpr, CARRY: tl.constexpr,
               FINAL: tl.constexpr, ADDED: tl.constexpr, FACTOR: tl.constexpr, SHARE: tl.constexpr,
               UNROLL: tl.constexpr):
    """Reads u .. u+S-1 of row m share one pass over columns lo .. hi-1. The softmax's denominators come first, so that
    the loop has no reduction and no rescaling."""
    m = tl.program_id(0).to(tl.int64)
    o_row, m_x, o_g, m_g = row_tile(D, G, GP, KP)
    o_x = m * D + o_row
    o_n = tl.arange(0, NP)
    m_n = o_n < hi - lo
    b_rho = tl.load(p_rho + plane_of(lo + o_n, t, STEP, PAIRS) * M + m, mask=m_n, other=0.0)
    accs, lses, raws = (), (), ()
    for s in tl.static_range(S):
        p_row = p_raw + (tl.load(p_offset + u + s).to(tl.int64) * M + m) * G
        b_raws = tl.load(p_row + tl.cast(lo + o_n, tl.int64)[:, None] * M * G + o_g[None, :],
                         mask=m_n[:, None] & m_g[None, :], other=0.0)
        b_z = tl.where(m_n[:, None], b_raws * b_rho[:, None], float("-inf"))
        b_max = tl.max(b_z, axis=0)
        if CARRY:
            b_old = tl.load(p_lse + (tl.cast(u + s, tl.int64) * M + m) * G + o_g, mask=m_g, other=0.0)
            b_max = tl.maximum(b_max, b_old)
            b_lse = b_max + tl.log(tl.sum(tl.exp(b_z - b_max[None, :]), axis=0) + tl.exp(b_old - b_max))
            b_acc = tl.load(p_carry + s * tl.cast(M, tl.int64) * D + o_x, mask=m_x, other=0.0).to(tl.float32)
            b_acc = b_acc * tl.exp(b_old - b_lse)[:, None]
        else:
            b_lse = b_max + tl.log(tl.sum(tl.exp(b_z - b_max[None, :]), axis=0))
            b_acc = tl.zeros([GP, KP], tl.float32)
        accs, lses, raws = accs + (b_acc,), lses + (b_lse,), raws + (p_row,)
    for n in tl.range(lo, hi, loop_unroll_factor=UNROLL):
        plane = plane_of(n, t, STEP, PAIRS)
        b_v = tl.load(p_values + plane * M * D + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_r = tl.load(p_rho + plane * M + m)
        new = ()
        for s in tl.static_range(S):
            b_raw = tl.load(raws[s] + tl.cast(n, tl.int64) * M * G + o_g, mask=m_g, other=0.0)
            new = new + (accs[s] + tl.exp(b_raw * b_r - lses[s])[:, None] * b_v,)
        accs = new
    for s in tl.static_range(S):
        tl.store(p_lse + (tl.cast(u + s, tl.int64) * M + m) * G + o_g, lses[s], mask=m_g)
        b_h = accs[s]
        if FINAL:
            if SHARE:
                b_h = b_h * tl.load(p_share + u + s)
            if ADDED:
                b_added = tl.load(p_added + o_x, mask=m_x, other=0.0).to(tl.float32)
                b_h += b_added * tl.load(p_factor + u + s) if FACTOR else b_added
            b_square = tl.sum(tl.sum(tl.where(m_x, b_h * b_h, 0.0), axis=1), axis=0)
            b_scale = tl.rsqrt(b_square / D + eps)
            tl.store(p_scale + s * tl.cast(M, tl.int64) + m, b_scale)
            b_h = b_h * b_scale
        tl.store(p_out + s * tl.cast(M, tl.int64) * D + o_x, b_h.to(p_out.dtype.element_ty), mask=m_x)


@jit
def own_kernel(p_dx, p_x, p_scale, p_dh, p_delta, p_added, p_factor, p_part, M,
               D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, KP: tl.constexpr, ADDED: tl.constexpr,
               FACTOR: tl.constexpr):
    """dx -> dh, rounded once and used as rounded, and delta = <dh, x / scale - factor * added> per head."""
    m = tl.program_id(0).to(tl.int64)
    o_row, m_x, o_g, m_g = row_tile(D, G, GP, KP)
    o_x = m * D + o_row
    b_dx = tl.load(p_dx + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_x = tl.load(p_x + o_x, mask=m_x, other=0.0).to(tl.float32)
    b_scale = tl.load(p_scale + m)
    b_mean = tl.sum(tl.sum(b_dx * b_x, axis=1), axis=0) / D
    b_dh = (b_scale * (b_dx - b_x * b_mean)).to(p_dh.dtype.element_ty)
    tl.store(p_dh + o_x, b_dh, mask=m_x)
    b_dh = b_dh.to(tl.float32)
    b_delta = tl.sum(b_dh * b_x, axis=1) / b_scale
    if ADDED:
        b_part = tl.sum(b_dh * tl.load(p_added + o_x, mask=m_x, other=0.0).to(tl.float32), axis=1)
        if FACTOR:
            b_part = b_part * tl.load(p_factor)
        tl.store(p_part + m * G + o_g, b_part, mask=m_g)
        b_delta = b_delta - b_part
    tl.store(p_delta + m * G + o_g, b_delta, mask=m_g)


@jit(do_not_specialize=["k", "t", "u0", "u1"])
def pull_kernel(p_values, p_keys, p_dh, p_raw, p_offset, p_rho, p_lse, p_delta, p_q, p_share, p_carry_v, p_carry_k,
                p_dv, p_dk, p_c, k, t, u0, u1, M,
                D: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, KP: tl.constexpr, S: tl.constexpr,
                STEP: tl.constexpr, PAIRS: tl.constexpr, KEYED: tl.constexpr, CARRY_V: tl.constexpr,
                CARRY_K: tl.constexpr, SHARE: tl.constexpr, UNROLL: tl.constexpr):
    """Columns k .. k+S-1 of row m share one pass over the dh of reads u0 .. u1-1. Writes dv, dk (keys that are not
    values) and c = rho c, the weights of the GEMM that makes dq."""
    m = tl.program_id(0).to(tl.int64)
    o_row, m_x, o_g, m_g = row_tile(D, G, GP, KP)
    o_x = m * D + o_row
    values, keys, rhos, dvs, dks, sums = (), (), (), (), (), ()
    for s in tl.static_range(S):
        plane = plane_of(k + s, t, STEP, PAIRS)
        values = values + (tl.load(p_values + plane * M * D + o_x, mask=m_x, other=0.0),)
        if KEYED:
            keys = keys + (tl.load(p_keys + plane * M * D + o_x, mask=m_x, other=0.0),)
        rhos = rhos + (tl.load(p_rho + plane * M + m),)
        if CARRY_V:
            dvs = dvs + (tl.load(p_carry_v + o_x, mask=m_x, other=0.0).to(tl.float32),)
        else:
            dvs = dvs + (tl.zeros([GP, KP], tl.float32),)
        if KEYED:
            if CARRY_K:
                dks = dks + (tl.load(p_carry_k + o_x, mask=m_x, other=0.0).to(tl.float32),)
            else:
                dks = dks + (tl.zeros([GP, KP], tl.float32),)
        sums = sums + (0.0,)
    for u in tl.range(u0, u1, loop_unroll_factor=UNROLL):
        o_u = (tl.cast(u, tl.int64) * M + m) * G + o_g
        p_row = p_raw + (tl.load(p_offset + u) + k).to(tl.int64) * M * G + m * G + o_g
        b_dh = tl.load(p_dh + tl.cast(u + 1, tl.int64) * M * D + o_x, mask=m_x, other=0.0).to(tl.float32)
        b_q = tl.load(p_q + u * D + o_row, mask=m_x, other=0.0, eviction_policy="evict_last").to(tl.float32)
        b_lse = tl.load(p_lse + o_u, mask=m_g, other=0.0)
        b_delta = tl.load(p_delta + o_u, mask=m_g, other=0.0)
        new_v, new_k, new_s = (), (), ()
        for s in tl.static_range(S):
            b_raw = tl.load(p_row + tl.cast(s, tl.int64) * M * G, mask=m_g, other=0.0)
            b_alpha = tl.where(m_g, tl.exp(b_raw * rhos[s] - b_lse), 0.0)
            b_w = b_alpha * tl.load(p_share + u) if SHARE else b_alpha
            b_c = b_w * tl.sum(b_dh * values[s].to(tl.float32), axis=1) - b_alpha * b_delta
            b_c_rho = b_c * rhos[s]
            o_c_out = (tl.cast(s * (u1 - u0) + u - u0, tl.int64) * M + m) * G + o_g
            tl.store(p_c + o_c_out, b_c_rho.to(p_c.dtype.element_ty), mask=m_g)
            if KEYED:
                new_v = new_v + (dvs[s] + b_w[:, None] * b_dh,)
                new_k = new_k + (dks[s] + b_c_rho[:, None] * b_q,)
            else:
                new_v = new_v + (dvs[s] + b_w[:, None] * b_dh + b_c_rho[:, None] * b_q,)
            new_s = new_s + (sums[s] + tl.sum(b_c * b_raw, axis=0),)
        dvs, dks, sums = new_v, new_k, new_s
    for s in tl.static_range(S):
        b_norm = sums[s] * rhos[s] * rhos[s] * rhos[s] / D
        o_out = s * tl.cast(M, tl.int64) * D + o_x
        if KEYED:
            tl.store(p_dk + o_out, (dks[s] - b_norm * keys[s].to(tl.float32)).to(p_dk.dtype.element_ty), mask=m_x)
            tl.store(p_dv + o_out, dvs[s].to(p_dv.dtype.element_ty), mask=m_x)
        else:
            b_dv = dvs[s] - b_norm * values[s].to(tl.float32)
            tl.store(p_dv + o_out, b_dv.to(p_dv.dtype.element_ty), mask=m_x)


@jit
def transport_kernel(p_new_0, p_new_1, p_old_0, p_old_1, p_y, p_gate, n, OLD: tl.constexpr, B: tl.constexpr):
    """A program writes B elements of both histories."""
    o = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m = o < n
    b_y = tl.load(p_y + o, mask=m, other=0.0).to(tl.float32)
    b_0, b_1 = b_y * tl.load(p_gate + 1), b_y * tl.load(p_gate + 2)
    if OLD:
        rho = tl.load(p_gate)
        b_old_0 = tl.load(p_old_0 + o, mask=m, other=0.0).to(tl.float32)
        b_old_1 = tl.load(p_old_1 + o, mask=m, other=0.0).to(tl.float32)
        b_0 += b_old_1 + rho * (b_old_0 - b_old_1)
        b_1 += b_old_0 + rho * (b_old_1 - b_old_0)
    tl.store(p_new_0 + o, b_0.to(p_new_0.dtype.element_ty), mask=m)
    tl.store(p_new_1 + o, b_1.to(p_new_1.dtype.element_ty), mask=m)


@jit
def transport_backward_kernel(p_g_0, p_g_1, p_old_0, p_old_1, p_y, p_gate, p_dy, p_d_old_0, p_d_old_1, p_sums, n,
                              OLD: tl.constexpr, B: tl.constexpr):
    """Sums of the gate's gradients over B elements are written for each program and added up afterwards."""
    o = tl.program_id(0).to(tl.int64) * B + tl.arange(0, B)
    m = o < n
    b_0 = tl.load(p_g_0 + o, mask=m, other=0.0).to(tl.float32)
    b_1 = tl.load(p_g_1 + o, mask=m, other=0.0).to(tl.float32)
    b_y = tl.load(p_y + o, mask=m, other=0.0).to(tl.float32)
    b_dy = b_0 * tl.load(p_gate + 1) + b_1 * tl.load(p_gate + 2)
    tl.store(p_dy + o, b_dy.to(p_dy.dtype.element_ty), mask=m)
    p_mine = p_sums + tl.program_id(0) * 3
    tl.store(p_mine + 1, tl.sum(b_0 * b_y, axis=0))
    tl.store(p_mine + 2, tl.sum(b_1 * b_y, axis=0))
    if OLD:
        rho = tl.load(p_gate)
        b_old = tl.load(p_old_0 + o, mask=m, other=0.0).to(tl.float32)
        b_old -= tl.load(p_old_1 + o, mask=m, other=0.0).to(tl.float32)
        tl.store(p_mine, tl.sum((b_0 - b_1) * b_old, axis=0))
        tl.store(p_d_old_0 + o, (b_1 + rho * (b_0 - b_1)).to(p_d_old_0.dtype.element_ty), mask=m)
        tl.store(p_d_old_1 + o, (b_0 + rho * (b_1 - b_0)).to(p_d_old_1.dtype.element_ty), mask=m)
    else:
        tl.store(p_mine, 0.0)


@functools.lru_cache(maxsize=64)
def table(numbers, device):
    """A tuple of whole numbers as a tensor for kernels."""
    return torch.tensor(numbers, dtype=torch.int32, device=device)


def power_of_2(n):
    """The next one, n or above."""
    return 1 << (n - 1).bit_length()


def n_warps(n_shared, G, D):
    """Launch table, from what ahead-of-time compilation shows: no spill, 128-bit loads, few reductions across warps."""
    if n_shared * D > 10_000:
        return 8
    return 4 if n_shared > 2 else 1 if n_shared == 1 and G == 1 and D <= 1024 else 2


class Triton:
    """The passes as Triton kernels; same signatures and results as `Torch`."""

    @staticmethod
    def tile(r):
        D = r.values.shape[-1]
        return dict(D=D, G=r.G, GP=power_of_2(r.G), KP=power_of_2(D // r.G))

    @staticmethod
    def score(r, k, t, reads, eps, y=None, below=None):
        plane, (_, M, D), device = r.plane(k, t), r.keys.shape, r.keys.device
        BU = min(64, max(16, power_of_2(max(1, len(reads)))))
        K, BM = D // r.G, 64 if device.type == "cuda" else 16
        grid = triton.cdiv(M, BM), max(1, triton.cdiv(len(reads), BU))
        score_kernel[grid](r.keys if y is None else y, r.keys, *r.split, r.raw, table(r.offset, device), r.rho, plane,
                           plane if below is None else below, k, reads.start, reads.stop, M, eps, D=D, G=r.G, BM=BM,
                           BK=min(64, max(16, power_of_2(K))), BU=BU, WRITE=y is not None, BELOW=below is not None,
                           SPLIT=r.keys.dtype == torch.bfloat16, UPCAST=device.type != "cuda", num_warps=4)

    @staticmethod
    def mix(r, reads, t, lo, hi, carries=None, final=None):
        (_, M, D), n, device = r.values.shape, len(reads), r.values.device
        added, factor, eps = final or (None, None, 0.0)
        out, scale = torch.empty(n, M, D, dtype=r.values.dtype, device=device), torch.empty(n, M, 1, device=device)
        mix_kernel[M,](r.values, r.raw, table(r.offset, device), r.rho, r.lse, carries[0] if carries else out, out,
                       scale, out if added is None else added, r.rho if factor is None else factor,
                       r.rho if r.share is None else r.share, reads.start, r.cap(t), lo, hi, M, eps, **Triton.tile(r),
                       NP=power_of_2(max(1, hi - lo)), S=n, STEP=r.step, PAIRS=r.pairs, CARRY=carries is not None,
                       FINAL=final is not None, ADDED=added is not None, FACTOR=factor is not None,
                       SHARE=r.share is not None, UNROLL=4 if n == 1 else 1, num_warps=n_warps(n, r.G, D))
        return list(zip(out, scale)) if final else list(out)

    @staticmethod
    def own(r, u, x, scale, dx, added, factor):
        M, D = x.shape
        part = None if added is None else torch.empty(M, r.G, device=x.device)
        own_kernel[M,](dx, x, scale, r.grads[u + 1], r.delta[u], x if added is None else added,
                       r.rho if factor is None else factor[u:], r.rho if part is None else part, M, **Triton.tile(r),
                       ADDED=added is not None, FACTOR=factor is not None, num_warps=n_warps(1, r.G, D))
        return part

    @staticmethod
    def pull(r, columns, t, reads, carries=None):
        (_, M, D), n, u, device = r.values.shape, len(columns), len(reads), r.values.device
        keyed = r.keys is not r.values

        def new(*shape):
            return torch.empty(shape, dtype=r.values.dtype, device=device)
        dv, c = new(n, M, D), new(n, u, M, r.G)
        dk = new(n, M, D) if keyed else dv
        carry_v, carry_k = (carries[0] if carries else None) or (None, None)
        pull_kernel[M,](r.values, r.keys, r.grads, r.raw, table(r.offset, device), r.rho, r.lse, r.delta, r.split[0],
                        r.rho if r.share is None else r.share, dv if carry_v is None else carry_v,
                        dv if carry_k is None else carry_k, dv, dk, c, columns[0], r.cap(t), reads.start, reads.stop, M,
                        **Triton.tile(r), S=n, STEP=r.step, PAIRS=r.pairs, KEYED=keyed, CARRY_V=carry_v is not None,
                        CARRY_K=carry_k is not None, SHARE=r.share is not None, UNROLL=1,
                        num_warps=n_warps(n + (r.G > 1 or keyed), r.G, D))
        for j, k in enumerate(columns):  # no atomics, no partial sums per row: one GEMM
            s = grouped(r.keys[r.plane(k, t)], r.G).transpose(0, 1)  # (G, M, K)
            dq = gemm(c[j].permute(2, 0, 1), s)  # (G, reads, K)
            r.dq[reads.start:reads.stop] += dq.transpose(0, 1).flatten(-2)
        return [(dv[j], dk[j] if keyed else None) for j in range(n)]

    @staticmethod
    def transport(new, old, y, gate):
        transport_kernel[triton.cdiv(y.numel(), 1024),](*new, *(old or new), y, gate, y.numel(),
                                                        OLD=old is not None, B=1024, num_warps=4)

    @staticmethod
    def transport_backward(g, old, y, gate):
        n, d_old = triton.cdiv(y.numel(), 1024), None if old is None else (torch.empty_like(y), torch.empty_like(y))
        dy, sums = torch.empty_like(y), torch.empty(n, 3, device=y.device)
        transport_backward_kernel[n,](*g, *(old or g), y, gate, dy, *(d_old or g), sums, y.numel(), OLD=old is not None,
                                      B=1024, num_warps=4)
        return dy, d_old, sums.sum(0)


def gemm(a, b):
    """Batched product of bf16 or fp32 matrices, accumulated and returned in fp32."""
    if a.is_cuda and a.dtype != torch.float32:
        return torch.bmm(a, b, out_dtype=torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32)


# ---------------------------------------------------------------------------------------------------------------------
# The chain: what autograd sees, and what the bank keeps


SPARE = []  # banks of finished backward passes


def new_bank(planes, e):
    """A bank for sources like e (M, D). On CPU one that was used before, if there is: to touch fresh memory for the
    first time costs more than all the writing of a forward pass."""
    for i, bank in enumerate(SPARE):
        if (bank.shape, bank.dtype, bank.device) == ((planes, *e.shape), e.dtype, e.device):
            return SPARE.pop(i)
    return e.new_empty(planes, *e.shape)


class Route:
    """One route of every site: its queries, logits and softmax statistics, and where its sources and dh lie.

    values, keys (P, M, D) planes of sources; grads: plane u + 1 is dh of read u; q, dq (U, D); raw (pairs, M, G);
    rho (P, M); lse, delta (U, M, G); share (U, 1): factor of this route in what its sites read, None for 1.
    """

    def __init__(self, chain, values, keys, grads, share=None):
        (P, M, D), dtype, G = values.shape, at_least_fp32(values.dtype), chain.G

        def empty(*shape):
            return torch.empty(shape, dtype=dtype, device=values.device)
        self.values, self.keys, self.grads, self.share, self.G = values, keys, grads, share, G
        self.plane, self.cap, self.step, self.pairs = chain.plane, chain.cap, chain.step, chain.pairs
        self.offset = tuple(chain.offset)
        self.raw, self.rho, self.lse, self.delta = empty(chain.offset[-1], M, G), empty(P, M), *empty(2, chain.U, M, G)
        self.q, self.dq = torch.zeros(2, chain.U, D, dtype=dtype, device=values.device)

    @functools.cached_property
    def split(self):
        """The queries in two parts of the bank's precision."""
        high = self.q.to(self.keys.dtype)
        return high, (self.q - high).to(self.keys.dtype)

    def at(self, reads, k):
        """Where raw has column k of some reads."""
        return [self.offset[u] + k for u in reads]


class Start(torch.autograd.Function):
    """The embedding enters. Its backward runs last and returns the gradients of the residual parameters."""

    @staticmethod
    def forward(ctx, chain, e, *params):
        ctx.chain = chain
        chain.choose_back_end(e)
        chain.allocate(e.detach().contiguous().flatten(0, -2), dict(zip(chain.names, params)))
        return e.view_as(e)

    @staticmethod
    @once_differentiable
    def backward(ctx, de):
        return None, de, *ctx.chain.close()


class Site(torch.autograd.Function):
    """The newest source enters, what site t reads leaves. Older sources are not edges of the graph: their gradients
    reach them through the bank, so that the graph stays a chain and autograd never adds up gradients of sources.

    `before` is the source before y: an edge without a gradient. Where a sublayer's output does not depend on its input
    (a layer that is dropped), the backward pass comes to the wrong site by it, and says so, instead of ending early.
    """

    @staticmethod
    def forward(ctx, chain, t, y, *before):
        with torch.autocast(y.device.type, enabled=False), torch.cuda.device_of(y):  # Triton runs on the current one
            read = chain.forward(t, y.detach().contiguous().flatten(0, -2))  # kernels know no strides
        xs = [x.view(y.shape) for x, _ in read]
        ctx.chain, ctx.t = chain, t
        ctx.save_for_backward(*xs, *[scale for _, scale in read])
        return tuple(xs) if len(xs) > 1 else xs[0]

    @staticmethod
    @once_differentiable
    def backward(ctx, *dxs):
        chain, saved, n = ctx.chain, ctx.saved_tensors, len(dxs)
        chain.check_order(ctx.t)
        with torch.autocast(dxs[0].device.type, enabled=False):
            dy = chain.backward(ctx.t, [(x.flatten(0, -2), scale, dx.contiguous().flatten(0, -2))
                                        for x, scale, dx in zip(saved[:n], saved[n:], dxs)])
        return None, None, dy.to(saved[0].dtype).view_as(saved[0]), None


def parameters(residual):
    """{name: tensor} by every name that the reference looks up: also those that are shared, parametrized or pruned."""
    return {f"{kind}.{name}": p for kind, group in residual.named_children() for name, p in group.items()}


class Chain:
    """One forward pass and its backward, with the interface of a Residual; the state is the newest source and, for the
    graph alone, the one before it.

    This class is attnres, attnres_block, mhar, mhar_block and rd. Slot t of the bank is what site t finds new: the last
    output, or the open depth block with it. Column k of site t is slot min(k S, t); for S = 1 that is every slot. A
    slot lies at the number of its site's first read; dh of read u lies at u + 1, whose owner is dead by then.
    """

    def __init__(self, residual, ops=None, chunk=0):
        self.residual, self.ops, self.chunk = residual, ops, chunk  # None and 0: what suits the device
        self.S, self.G, self.T, self.eps = residual.depth_block, residual.route_heads, residual.n_sublayer, residual.eps
        self.names = list(parameters(residual))
        self.first, self.offset = [0], [0]  # first read of each site; where raw has the logits of each read
        for t in range(self.T + 1):
            n = len(self.routes(t))
            self.first.append(self.first[-1] + n)
            self.offset += [self.offset[-1] + (j + 1) * self.columns(t) for j in range(n)]
        self.U, self.next = self.first[-1], self.T
        self.step, self.pairs = self.S, int(self.U > self.T + 1)  # `plane` for the kernels

    def routes(self, t):
        """Names of the queries of site t, one for each of its reads."""
        return [str(t), f"{t}_v"] if f"{t}_v" in self.residual.query else [str(t)]

    def reads(self, first, last):
        """The reads of sites first .. last."""
        return range(self.first[first], self.first[last + 1])

    def columns(self, t):
        """Number of sources of site t."""
        return self.newest(t) + 1

    def newest(self, t):
        """Column of slot t."""
        return math.ceil(t / self.S)

    def plane(self, k, t):
        """Plane of the bank that holds column k of site t."""
        return self.first[min(k * self.S, t)]

    def cap(self, t):
        """Largest slot that site t has: column k is slot min(k step, cap)."""
        return t

    # --- Residual

    @torch.compiler.disable  # the bank is written in place: a graph ends before each site and begins behind it
    def start(self, e):
        return (Start.apply(self, self.residual.start(e)[0], *parameters(self.residual).values()),)

    @torch.compiler.disable
    def read(self, t, state):
        x = Site.apply(self, t, *state)
        return x if isinstance(x, tuple) else (x, x)

    def write(self, t, state, y):
        return y, state[0]

    # --- forward

    def choose_back_end(self, e):
        """Back end and chunk that suit a device and a precision."""
        self.ops = self.ops or (Triton if triton and e.is_cuda and e.dtype != torch.float64 else Torch)
        self.chunk = self.chunk or (4 if self.ops is Triton else 1)

    def allocate(self, e, params):
        self.bank, = self.banks = new_bank(self.U + 1, e),
        self.route = self.fill(Route(self, self.bank, self.bank, self.bank), params)

    def fill(self, route, params, suffix=""):
        """Queries from the parameters; reads with a single source have none, and a zero here."""
        self.query_names = [name + suffix for t in range(self.T + 1) for name in self.routes(t)]
        for u, name in enumerate(self.query_names):
            if f"query.{name}" in params:
                route.q[u] = params[f"query.{name}"]
        return route

    def forward(self, t, y):
        """Site t finds y (M, D) new -> (x, scale) for each of its reads."""
        below = None if t == 0 or (t - 1) % self.S == 0 else self.first[t - 1]  # the open depth block so far
        self.ops.score(self.route, self.newest(t), t, self.reads(t, t if t % self.S else self.T), self.eps, y, below)
        return self.mix(self.route, t, (None, None, self.scaled_eps(t)))

    def scaled_eps(self, t):
        """AttnRes.gather is S times what is mixed here; the norm behind it then sees an eps smaller by S^2."""
        return self.eps / self.columns(t) ** 2

    def mix(self, route, t, final):
        """All reads of site t, in two phases where sites come in chunks: begin .. begin + chunk - 1."""
        lo, carries = 0, None
        if self.chunk > 1 and t > 0:
            begin = t - (t - 1) % self.chunk
            lo = math.ceil(begin / self.S)  # columns that were finished before site `begin`
            if t == begin:
                ahead = self.reads(t, min(t + self.chunk - 1, self.last_read))
                route.partial = dict(zip(ahead, self.ops.mix(route, ahead, t, 0, lo)))
            carries = [route.partial.pop(u) for u in self.reads(t, t)]
        return self.ops.mix(route, self.reads(t, t), t, lo, self.columns(t), carries, final)

    @property
    def last_read(self):
        return self.T

    # --- backward

    def check_order(self, t):
        if t != self.next:
            raise RuntimeError(f"fused routing: the backward pass came to {f'site {t}' if t >= 0 else 'the embedding'} "
                               f"where site {self.next} was due. It runs once, as a whole and in order, and needs "
                               "outputs that depend on their inputs; for anything else use route_impl=reference")
        self.next = t - 1

    def backward(self, t, reads):
        """(x, scale, dx) for each read of site t -> gradient of its newest source (M, D). In a depth block it is also
        that of slot t - 1: slot t is that slot plus y."""
        for u, (x, scale, dx) in zip(self.reads(t, t), reads):
            self.ops.own(self.route, u, x, scale, dx, None, None)
        self.g = self.pull(self.route, t, (self.g, None) if t % self.S and t < self.T else None)[0]
        return self.g

    def pull(self, route, t, carry=None):
        """Gradient of slot t; closed slots in two phases where they come in chunks."""
        k = self.newest(t)
        if t % self.S:
            return self.ops.pull(route, [k], t, self.reads(t, t), carry and [carry])[0]
        chunk = range(k - k % self.chunk, min(k - k % self.chunk + self.chunk, self.n_closed))
        last = chunk[-1] * self.S
        near = self.reads(self.first_reader(t), last if self.chunk > 1 else self.last_read)
        if self.chunk > 1:
            far = self.reads(last + 1, self.last_read) if last < self.last_read else ()
            if t == last and far:
                route.far = dict(zip(chunk, self.ops.pull(route, chunk, t, far)))
            if last < self.last_read:
                carry = add(route.far.pop(k), carry)
        return self.ops.pull(route, [k], t, near, carry and [carry])[0] if near else carry

    @property
    def n_closed(self):
        """Number of columns that are closed slots."""
        return self.T // self.S + 1

    def first_reader(self, t):
        """The first site that reads closed slot t."""
        return t

    def close(self):
        """Gradients of the residual's parameters, in order. The bank is given up: the graph may live on."""
        self.check_order(-1)
        found = self.gradients()
        grads = [found[name] for name in self.names]
        SPARE[:] = [b for b in (*self.banks, *SPARE) if b.device.type == "cpu"][:4]
        self.__dict__.clear()
        self.next = None
        return grads

    def gradients(self):
        return {f"query.{name}": dq for name, dq in zip(self.query_names, self.route.dq)}


class DeltaChain(Chain):
    """delta and delta_block: the stream is kept, x = norm(stream + mix), and lies in a second bank with the dh.

    Column k is plane k of the bank: a source in delta, a finished depth block in delta_block. The head reads no source.
    """

    def __init__(self, residual, *args):
        self.lag = int(isinstance(residual, DeltaBlock))  # delta_block: a depth block shows only behind the next read
        self.released = self.lag and residual.released
        super().__init__(residual, *args)
        self.step = 1

    def routes(self, t):
        return [str(t)] if t < self.T else []

    def columns(self, t):
        return self.newest(t) + 1 - self.lag or 1

    def plane(self, k, t):
        return k

    def cap(self, t):
        return self.n_closed

    @property
    def last_read(self):
        return self.T - 1

    @property
    def n_closed(self):
        return self.columns(self.T - 1)

    def first_reader(self, t):
        return t + self.lag if t else 0

    def scaled_eps(self, t):
        return self.eps * (1 + 1 / self.columns(t)) ** 2  # Delta.add divides by this factor

    def allocate(self, e, params):
        self.bank, self.stream = self.banks = new_bank(self.n_closed, e), new_bank(self.T + 1, e)
        self.route = self.fill(Route(self, self.bank, self.bank, self.stream), params)

    def forward(self, t, y):
        k = self.newest(t)
        if t:
            torch.add(self.stream[t - 1], y, out=self.stream[t])
        else:
            self.stream[0] = y
        if k < self.n_closed:
            opens = t == 0 or (t - 1) % self.S == 0
            below = k if not opens else k - 2 if self.released and k > 1 else None
            if t % self.S == 0:
                self.ops.score(self.route, k, t, self.reads(self.first_reader(t), self.last_read), self.eps, y, below)
            else:
                torch.add(y, 0 if below is None else self.bank[below], out=self.bank[k])
        if t == self.T:
            h = self.stream[t].to(self.route.raw.dtype)
            scale = torch.rsqrt(mean_of_squares(h) + self.eps)
            return [((h * scale).to(y.dtype), scale)]
        return self.mix(self.route, t, (self.stream[t], None, self.scaled_eps(t)))

    def backward(self, t, reads):
        (x, scale, dx), = reads
        if t == self.T:
            self.g_stream, self.g_block = norm_backward(x, scale, dx), {}
        else:
            self.ops.own(self.route, t, x, scale, dx, self.stream[t], None)
            self.g_stream = self.g_stream + self.stream[t + 1]  # dh of this read
        k = self.newest(t)
        if t % self.S == 0 and k < self.n_closed:
            carry = (self.g_block[k + 2], None) if self.released and k + 2 in self.g_block else None
            g = self.pull(self.route, t, carry)
            if g is not None:
                self.g_block[k] = g[0]
        return self.g_stream + self.g_block[k] if k in self.g_block else self.g_stream


class DualChain(Chain):
    """dar and dar_block: two histories, a bank each; route j reads values of one with keys of one.

    h = a_0 h_0 + a_1 h_1 is a single read with two routes. h_0 is kept for the gradients of a, the outputs y for those
    of the writes.
    """

    def routes(self, t):
        return [str(t)]

    def allocate(self, e, params):
        res, dtype = self.residual, at_least_fp32(e.dtype)
        gate = {name[5:]: p.detach().to(dtype) for name, p in params.items() if name.startswith("gate.")}
        one = e.new_tensor([1, 0], dtype=dtype)  # site 0 has one source, which is e
        self.a = torch.stack([one] + [gate[f"a{t}"].softmax(0) for t in range(1, self.T + 1)], dim=1)  # (2, T + 1)
        rho = [gate[f"rho{s}"].sigmoid() if s % self.S else one[1:] for s in range(self.T)]
        self.write_gate = torch.stack([torch.cat([rho[s], 2 * gate[f"b{s}"].sigmoid()]) for s in range(self.T)])
        *self.bank, self.h0 = self.banks = [new_bank(self.T + n, e) for n in (2, 1, 1)]
        self.y, self.g = [None] * (self.T + 1), None
        self.route = [self.fill(Route(self, self.bank[v], self.bank[k], self.bank[0], self.a[j].unsqueeze(1)),
                                params, f"_{j}")
                      for j, (k, v) in enumerate(zip(res.keys, res.values))]
        self.d_a, self.d_write = torch.zeros(self.T + 1, 2).to(self.a), torch.zeros_like(self.write_gate)

    def slots(self, t):
        """Slot t of both histories; None where slot t + 1 does not go on from it."""
        return (self.bank[0][t], self.bank[1][t]) if t % self.S else None

    def forward(self, t, y):
        self.y[t] = y
        if t == 0:
            self.bank[0][t] = self.bank[1][t] = y
        else:
            self.ops.transport([H[t] for H in self.bank], self.slots(t - 1), y, self.write_gate[t - 1])
        for route in self.route:
            self.ops.score(route, self.newest(t), t, self.reads(t, t if t % self.S else self.T), self.eps)
        self.h0[t], = self.mix(self.route[0], t, None)
        return self.mix(self.route[1], t, (self.h0[t], self.a[0], self.scaled_eps(t)))

    def backward(self, t, reads):
        (x, scale, dx), = reads
        r0, r1 = self.route
        r0.delta[t] = self.ops.own(r1, t, x, scale, dx, self.h0[t], self.a[0])
        d = self.a[1, t] * r0.delta[t].sum() - self.a[0, t] * r1.delta[t].sum()
        self.d_a[t] = torch.stack([d, -d])
        G = [None, None] if self.g is None else list(self.g)  # from slot t + 1
        for j, (k, v) in enumerate(zip(self.residual.keys, self.residual.values)):
            carry = G[v], None if k == v else G[k]
            dv, dk = self.pull(self.route[j], t, carry if any(c is not None for c in carry) else None)
            G[v] = dv
            if k != v:
                G[k] = dk
        if t == 0:
            return G[0] + G[1]
        dy, self.g, d_gate = self.ops.transport_backward(G, self.slots(t - 1), self.y[t], self.write_gate[t - 1])
        self.d_write[t - 1] = d_gate
        return dy

    def gradients(self):
        rho, b = self.write_gate[:, :1], self.write_gate[:, 1:]
        d_rho, d_b = self.d_write[:, :1] * rho * (1 - rho), self.d_write[:, 1:] * b * (1 - b / 2)
        found = {f"gate.{name}{t}": g for name, table in (("a", self.d_a), ("rho", d_rho), ("b", d_b))
                 for t, g in enumerate(table)}
        for j, route in enumerate(self.route):
            found |= {f"query.{t}_{j}": route.dq[t] for t in range(self.T + 1)}
        return found


# By the very class: a subclass may compute something else, so that it has a fused form only if it gets a row here.
FUSED = {AttnRes: Chain, RoleDecoupled: Chain, Delta: DeltaChain, DeltaBlock: DeltaChain, Dual: DualChain}


def fused_form(residual):
    """(a function that makes the chain of one forward pass from a residual, None), or (None, why there is none)."""
    cls = type(residual)
    if cls not in FUSED:
        return None, f"{cls.__name__} has no fused form"
    if residual.cfg.n_embd % 16:
        return None, f"n_embd={residual.cfg.n_embd} is not a multiple of 16"
    if getattr(residual, "control", "none") not in ("none", "tied"):
        return None, f"rd_control={residual.control} has no fused form"
    if hasattr(residual, "sep_v"):
        return None, "dar_routing=sep_v has no fused form"
    if hasattr(residual, "u"):
        return None, "dynamic_gates has no fused form"
    traced = type(torch.empty(0)) is not torch.Tensor  # shapes alone: nothing to compare
    gap = 0 if traced else difference(cls, dataclasses.astuple(small(residual.cfg)))
    if not gap < 1e-8:
        return None, f"{cls.__name__} and its fused form differ by {gap:.1e}: one of them was changed without the other"
    return FUSED[cls], None


def small(cfg):
    """The same mode at a size where a check costs little."""
    knobs = {name: cfg.knob(name) for name in RESIDUAL_MODES[cfg.residual_mode].knobs}
    return GPTConfig(n_layer=3, n_head=1, head_dim=2, n_embd=16 * cfg.knob("route_heads"), n_ffn=1,
                     residual_mode=cfg.residual_mode, **knobs)


@functools.lru_cache
def difference(cls, settings):
    """Largest relative difference between a residual and its fused form, on random rows in fp64: reads and gradients.

    The reference is the definition. Whoever changes it or the PyTorch back end alone gets the reference, and is told
    why; that both back ends agree is for the tests.
    """
    generator, found = torch.Generator().manual_seed(0), []
    with torch.device("cpu"), torch.enable_grad(), torch.autocast("cpu", enabled=False):
        residual = cls(GPTConfig(*settings)).double()
        for p in residual.parameters():
            p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        e = torch.randn(1, 3, residual.cfg.n_embd, generator=generator, dtype=torch.float64, requires_grad=True)
        upstream = torch.randn(e.shape, generator=generator, dtype=torch.float64)
        for form in (residual, FUSED[cls](residual, Torch, 1)):
            out = routed(form, e, residual.n_sublayer, lambda t, a, b: (a + b.roll(t + 1, -1)).sin())
            found.append([out, *torch.autograd.grad(out, [e, *residual.parameters()], upstream)])
    return max(((a - b).abs().max() / a.abs().max().clamp_min(1e-9)).item() for a, b in zip(*found))


def routed(residual, e, n_sublayer, sublayer=lambda t, a, b: 2 * a if a is b else a + b):
    """All reads of a Residual or a Chain, between sublayers that do next to nothing: e (B, T, D) -> (B, T, D)."""
    state = residual.start(e)
    for t in range(n_sublayer):
        state = residual.write(t, state, sublayer(t, *residual.read(t, state)))
    return residual.read(n_sublayer, state)[0]
