"""What a run would need, before it is paid for: `python train.py CONFIG --estimate=true --gpus=8`.

Nothing is computed and nothing is allocated: the model itself runs forward and backward on tensors without content
(FakeTensorMode), and every operation's FLOPs and every tensor's life are counted. There are no formulas to go wrong but
those of what runs outside of the model: 16 bytes of state a parameter, and what FSDP gathers.
"""
import functools
import itertools
import math
import weakref
from dataclasses import replace
from unittest import mock

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import kernels
from model import GPT, RESIDUAL_MODES, GPTConfig, all_knobs

# part of torch.cuda.get_device_name, the first that fits: dense bf16 TFLOP/s, GB
GPUS = {"GB200": (2500, 186), "B200": (2250, 180), "H200": (989, 141), "H100 PCIe": (756, 80), "H100 NVL": (835, 94),
        "H100": (989, 80), "A100": (312, 80), "L40S": (362, 48), "RTX 5090": (209, 32), "RTX 4090": (165, 24),
        "RTX 3090": (71, 24)}


class Meter(TorchDispatchMode):
    """Counts FLOPs, and the bytes of the tensors made inside that are alive: now and at most, and how many of those at
    most are in storages whose size is a multiple of `unit`, or one number more."""

    def __init__(self, elementwise=False, unit=2**62):
        super().__init__()
        self.known, self.flops, self.elementwise, self.unit = weakref.WeakSet(), 0, elementwise, unit
        self.now = self.now_in_units = self.peak = self.peak_in_units = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for x in args:  # views of what was made outside, and what is written to it, are not made here
            if isinstance(x, torch.Tensor):
                self.known.add(x.untyped_storage())
        out = function(*args, **kwargs or {})
        if function is torch.ops.prim.device.default:  # which autograd asks for: every second call
            return out
        tensors = [x for x in (out if isinstance(out, (tuple, list)) else (out,)) if isinstance(x, torch.Tensor)]
        if function.overloadpacket in flop_registry:
            self.flops += flop_registry[function.overloadpacket](*args, **kwargs or {}, out_val=out)
        elif "flash_attention_for_cpu" in str(function):  # not in PyTorch's table; causal: half of all pairs
            q = args[1] if "backward" in str(function) else args[0]
            self.flops += (2 if "backward" in str(function) else 1) * 2 * q.numel() * q.shape[-2]
        elif self.elementwise and not function.is_view:
            self.flops += max([x.numel() for x in (*args, *tensors) if isinstance(x, torch.Tensor)], default=0)
        for x in tensors:
            if x.untyped_storage() not in self.known:
                storage, n = x.untyped_storage(), x.untyped_storage().nbytes()
                units = n * (n % self.unit in (0, 8))
                self.known.add(storage)
                self.free(-n, -units)
                if self.now > self.peak:
                    self.peak, self.peak_in_units = self.now, self.now_in_units
                weakref.finalize(storage, self.free, n, units)
        return out

    def free(self, n, units):
        self.now, self.now_in_units = self.now - n, self.now_in_units - units


class Norm(torch.autograd.Function):
    """In the place of model.rms_norm what a GPU keeps of it: the input and a number for each row, where a CPU keeps a
    copy in fp32."""

    @staticmethod
    def forward(ctx, x, eps):
        ctx.save_for_backward(x, x.new_empty((*x.shape[:-1], 1), dtype=torch.float32))
        return x.clone(memory_format=torch.contiguous_format)

    @staticmethod
    def backward(ctx, dy):
        return dy.clone(), None


def measure(cfg, batch, sharded=False, mode=FakeTensorMode, unit=2**62):
    """(FLOPs, peak bytes beyond weights and gradients, those of them that come in multiples of `unit`) of forward and
    backward on `batch` sequences in bf16."""
    with mode():
        model = GPT(cfg)
        # FSDP gathers sublayers in bf16; otherwise autocast makes such copies, which are seen
        for module in model.sublayers.modules() if sharded else ():
            for name, p in list(module.named_parameters(recurse=False)):
                module._parameters[name] = torch.nn.Parameter(p.detach().to(torch.bfloat16))
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        idx = torch.zeros(batch, cfg.seq_len, dtype=torch.long)
        kernels.SPARE.clear()
        with Meter(unit=unit) as meter:
            with mock.patch("model.rms_norm", Norm.apply), torch.autocast("cpu", torch.bfloat16):
                loss = model(idx, idx)[1]
                loss.backward()
        kernels.SPARE.clear()  # banks without content are of no use to a real pass
    return meter.flops, meter.peak, meter.peak_in_units


@functools.cache
def flops_without_routing(shape):
    return measure(GPTConfig(**dict(shape)), 1)[0]


def flops_per_token(cfg):
    """Of training, forward and backward, without what remat repeats: of the sublayers, the same in every mode, and of
    routing: all its operations, forward times three."""
    plain = dict(residual_mode="standard", remat=False, route_impl="reference")
    flops = flops_without_routing(tuple(vars(replace(cfg, **plain | {k: getattr(GPTConfig, k) for k in all_knobs()})
                                             ).items()))
    with FakeTensorMode(), torch.no_grad():
        model = GPT(replace(cfg, route_impl="reference"))
        state, y = model.residual.start(torch.zeros(1, 8, cfg.n_embd)), torch.zeros(1, 8, cfg.n_embd)
        with Meter(elementwise=True) as meter:
            for site in range(2 * cfg.n_layer):
                model.residual.read(site, state)
                state = model.residual.write(site, state, y)
            model.residual.read(2 * cfg.n_layer, state)
    return flops / cfg.seq_len + 3 * meter.flops / 8


def memory(cfg, shards, micro_batch, muon=False):
    """(parameters, bytes on each GPU: states, gathered by FSDP, {remat: (fixed rest, per sequence)})."""
    with torch.device("meta"):
        model = GPT(cfg)
    n = model.count()["total"]
    unit = max(sum(p.numel() for p in s.parameters()) for s in model.sublayers)
    root, sharded = n - sum(p.numel() for p in model.sublayers.parameters()), shards > 1
    of_muon = sum(p.numel() for name, p in model.sublayers.named_parameters() if p.dim() == 2 and "router" not in name)
    states = (16 * n - 4 * of_muon * muon) / shards  # fp32 weight, gradient and two moments, with Muon one
    gathered = 8 * root + 3 * 2 * unit + 4 * unit if sharded else 0  # root whole with its gradient; units in flight
    rest = {}
    # sequences of eight times a prime, near the real ones: the storages that are a multiple of it grow with the batch
    numbers = {p.numel() * bytes for p in model.parameters() if p.numel() > 1000 for bytes in (1, 2, 4)}
    unit = next(n for n in itertools.count(max(101, cfg.seq_len // 8)) if all(
        n % k for k in range(2, math.isqrt(n) + 1)) and all(number % n not in (0, 8) for number in numbers))
    for remat in (False, True):
        _, peak, grown = measure(replace(cfg, remat=remat, seq_len=8 * unit), micro_batch, sharded, unit=unit)
        rest[remat] = peak - grown, grown / micro_batch * cfg.seq_len / (8 * unit)
    return n, states, gathered, rest


def estimate(cfg, t, say=print):
    """Print the table, a line for every mode."""
    tflops, size = GPUS[t.gpu]
    shards = min(t.gpus, 8) if t.parallel == "fsdp" else 1  # within a machine, which has eight GPUs at most
    tokens = t.max_steps * t.tokens_per_step
    say(f"{t.gpus} x {t.gpu} ({size} GB, {tflops} TFLOP/s in bf16), parallel={t.parallel}"
        f"{f' ({shards} shards)' * (shards > 1)}, micro_batch={t.micro_batch}, seq_len={cfg.seq_len}; {tokens:,} tokens"
        f"; hours at an MFU of {t.mfu:.0%} (an assumption: --mfu)")
    say(f"{'':18} parameters  GFLOP/token  hours | GB on each GPU: states gathered fixed activations  total | largest "
        "micro-batch, with remat")
    for mode, row in RESIDUAL_MODES.items():
        knobs = {k: getattr(cfg if mode == cfg.residual_mode or k in row.knobs else GPTConfig, k) for k in all_knobs()}
        try:
            of = replace(cfg, residual_mode=mode, route_impl="auto" if cfg.route_impl == "fused" else cfg.route_impl,
                         **knobs)
            flops, (n, states, gathered, rest) = flops_per_token(of), memory(
                of, shards, t.micro_batch, t.optimizer == "muon")
        except ValueError as e:
            say(f"{mode:18} {e}")
            continue
        gb, base, (fixed, each) = 1e9, states + gathered, rest[cfg.remat]
        largest = [max(0, math.floor((0.94 * size * gb - base - more) / each)) for more, each in rest.values()]
        hours = tokens * flops / (t.gpus * tflops * 1e12 * t.mfu) / 3600
        activations = t.micro_batch * each
        say(f"{mode:18} {n / 1e6:9,.1f}M {flops / 1e9:12.3f} {hours:6.2f} | {states / gb:22.1f} {gathered / gb:8.1f} "
            f"{fixed / gb:5.1f} {activations / gb:11.1f} {(base + fixed + activations) / gb:6.1f} | {largest[0]:11}, "
            f"{largest[1]:10}")
