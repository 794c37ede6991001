"""Mixtures of experts: model.MoE, and what train.py does for its balance."""
import csv
import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    HERE,
    MODES,
    assert_close,
    config_error,
    flags,
    gradients,
    loss_of,
    make,
    measured,
    run_training,
    same_weights,
    tokens,
)
from test_scale import assert_same_run, spawn

import eval as evaluation
import hub
import train
from model import GPT, GPTConfig, KVCache, MoE
from prepare_fineweb import UserError
from study import estimate

EXPERTS = dict(n_expert=5, n_expert_active=2, n_ffn=24)


def make_moe(E, k, dtype=torch.float64, n_ffn=24):
    torch.manual_seed(0)
    moe = MoE(GPTConfig(vocab_size=61, n_head=4, n_embd=32, n_ffn=n_ffn, n_expert=E, n_expert_active=k)).to(dtype)
    with torch.no_grad():
        for p in moe.parameters():
            p.normal_(std=0.3)
        moe.bias.normal_(std=0.1)
    return moe


def dense(moe, h):
    """The same by a loop over all experts, each for all tokens."""
    E, x = len(moe.bias), (h * moe.gain).flatten(0, 1)
    score = torch.sigmoid(x @ moe.router.weight.t())
    chosen = torch.zeros_like(score).scatter(1, (score + moe.bias).topk(moe.k).indices, 1)
    weight, y = score * chosen / (score * chosen).sum(1, keepdim=True), 0
    for e, (w, down) in enumerate(zip(moe.up.weight.chunk(E), moe.down.weight.chunk(E))):
        gate, up = (x @ w.t()).chunk(2, dim=1)
        y = y + weight[:, e:e + 1] * ((F.silu(gate) * up) @ down.t())
    return y.view_as(h), chosen.sum(0)


@pytest.mark.parametrize("E, k", [(8, 2), (16, 4), (5, 3), (4, 4)])
def test_output_and_gradients_are_those_of_a_dense_loop_and_always_the_same_bits(E, k):
    moe, h = make_moe(E, k), torch.randn(3, 17, 32, dtype=torch.float64, requires_grad=True)
    moe.bias[1] -= 9.0 * (k < E)  # an expert without a token
    used, g = [h, *moe.parameters()], torch.randn(3, 17, 32, dtype=torch.float64)
    y, (expected, load) = moe(h, None, None), dense(moe, h)
    assert_close(y, expected, 1e-12)
    assert torch.equal(moe.load, load.long()) and load.sum() == 51 * k and (load[1] == 0) == (k < E)
    grads = torch.autograd.grad(y, used, g)
    for ours, theirs in zip(grads, torch.autograd.grad(expected, used, g)):
        assert theirs.abs().max() > 1e-3
        assert_close(ours, theirs, 1e-12)
    again = moe(h, None, None)
    assert torch.equal(again, y) and all(map(torch.equal, grads, torch.autograd.grad(again, used, g)))


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="F.grouped_mm came with PyTorch 2.13; before, a loop runs")
def test_one_grouped_product_gives_the_numbers_of_the_loop(monkeypatch):
    """What CUDA runs in bfloat16; the CPU has that product too."""
    calls, product = [], F.grouped_mm
    for n_ffn in (24, 20):  # a row of 20 numbers is no multiple of 16 bytes, which the product needs
        moe, h, out = make_moe(8, 2, torch.float32, n_ffn), torch.randn(2, 16, 32, requires_grad=True), []
        moe.bias[1] -= 9.0
        for cuda in (False, True):
            with monkeypatch.context() as patch, torch.autocast("cpu", torch.bfloat16):
                patch.setattr(torch.Tensor, "is_cuda", cuda)
                patch.setattr(F, "grouped_mm", lambda *a, n=n_ffn, **k: calls.append(n) or product(*a, **k))
                y = moe(h.bfloat16(), None, None)
            assert y.dtype == torch.bfloat16
            out.append((y, *torch.autograd.grad(y.float().square().sum(), [h, *moe.parameters()])))
        for a, b in zip(*out):
            assert_close(a.float(), b.float(), 1e-2)
    assert calls == [24, 24, 20]


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_generates_and_recomputes_with_experts(mode):
    model, remat, idx = (make(mode, **EXPERTS), make(mode, remat=True, **EXPERTS), tokens())
    loss, grads = gradients(model, idx)
    assert all(g is not None and g.isfinite().all() and g.any() for g in grads.values())
    loss_2, grads_2 = gradients(remat, idx)
    assert torch.equal(loss, loss_2) and all(torch.equal(grads[n], grads_2[n]) for n in grads)
    for a, b in zip(model.experts, remat.experts):
        assert torch.equal(a.load, b.load) and a.load.sum() == 2 * idx[:, 1:].numel()
    cache, full = KVCache(model.cfg, 2, 16, "cpu", torch.float64), model(idx[:, :16])[0]
    pieces = [model(part, cache=cache)[0] for part in idx[:, :16].split([9, 1, 6], dim=1)]
    assert_close(torch.cat(pieces, 1), full, 1e-12)
    greedy, out = idx[:, :3], model.generate(idx[:, :3], 5, temperature=0)
    for _ in range(5):
        greedy = torch.cat([greedy, model(greedy)[0][:, -1].argmax(-1, keepdim=True)], 1)
    assert torch.equal(out, greedy)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@torch._dynamo.config.patch(fail_on_recompile_limit_hit=True)
def test_compiled_sublayers_give_the_same_numbers(backend):
    torch._dynamo.reset()
    layers = 12 if backend == "aot_eager" else 1  # more than a function may be compiled anew
    model, idx = make("rd", dtype=torch.float32, n_layer=layers, **EXPERTS), tokens()
    loss, grads = gradients(model, idx)
    load = [moe.load for moe in model.experts]
    for sublayer in model.sublayers:
        sublayer.compile(backend=backend, dynamic=False)
    for _ in range(2):
        loss_2, grads_2 = gradients(model, idx)
        assert_close(loss, loss_2, 1e-6)
        assert_close(grads, grads_2, 1e-5)
        assert all(torch.equal(moe.load, n) for moe, n in zip(model.experts, load))


def test_compilation_leaves_the_trunk_alone_and_takes_the_sublayers(monkeypatch):
    seen, model = [], make("standard", **EXPERTS)
    monkeypatch.setattr(torch, "compile", lambda function, **_: seen.append(function) or function)
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: seen.append(self))
    assert train.compile_model(model, "on", torch.device("cpu"), print) == "on, sublayers and head"
    assert model.trunk not in seen and all(s in seen for s in model.sublayers)


@pytest.mark.parametrize("init", ["papers", "gpt2", "fan_in", "zero"])
def test_experts_start_as_an_mlp_does(init):
    shape = dict(vocab_size=61, n_layer=2, n_head=4, n_embd=64, n_ffn=96, n_expert=6, n_expert_active=2, init=init)
    model = train.fill(train.build(GPTConfig(**shape), "meta"), torch.device("cpu"), 3)
    again = GPT(GPTConfig(**shape))
    for moe in again.experts:
        moe.bias += 1
    again.init_weights(3)  # one matrix after the other, the biases back at zero
    assert all(torch.equal(p, again.state_dict()[n]) for n, p in model.state_dict().items())
    plain, deep = init in ("papers", "gpt2"), 0.5  # 1 / sqrt(2 L)
    out = {"papers": 0.02, "gpt2": 0.02 * deep, "fan_in": deep * 96**-0.5, "zero": 0}[init]
    for moe in model.experts:
        assert moe.router.weight.std().item() == pytest.approx(0.02 if plain else 1 / 8, rel=0.2)
        for e in range(6):  # each by itself
            assert moe.up.weight.chunk(6)[e].std().item() == pytest.approx(0.02 if plain else 1 / 8, rel=0.05)
            assert moe.down.weight.chunk(6)[e].std().item() == pytest.approx(out, rel=0.05)
        assert not moe.bias.any()
    decayed, = (g["params"] for g in model.param_groups(0.1) if g["weight_decay"])
    assert all(any(m.weight is p for p in decayed) for moe in model.experts for m in (moe.router, moe.up, moe.down))


def test_parameters_and_operations_are_counted_for_the_active_experts():
    shape = dict(vocab_size=600, n_layer=2, n_head=2, n_embd=32, seq_len=32)
    moe, mlp = GPTConfig(**shape, n_expert=8, n_expert_active=2, n_ffn=48), GPTConfig(**shape, n_ffn=96)
    (a, b), router = (GPT(c).count() for c in (moe, mlp)), 2 * 8 * 32
    assert a["total"] == b["total"] + router + 2 * 6 * 3 * 32 * 48
    assert estimate.flops_per_token(moe) == estimate.flops_per_token(mlp) + 6 * router
    assert GPTConfig(n_expert=8, n_expert_active=4).n_ffn * 4 == GPTConfig().n_ffn == 2048


@pytest.mark.parametrize("remat", [False, True])
def test_an_estimate_has_the_bytes_of_a_real_pass(remat):
    cfg = GPTConfig(vocab_size=600, n_layer=2, n_head=2, n_embd=32, seq_len=32, remat=remat, **EXPERTS)
    assert estimate.measure(cfg, 2) == estimate.measure(cfg, 2, mode=train.nullcontext)


def test_muon_orthogonalises_each_expert_and_leaves_the_router_to_adamw():
    t, model = train.TrainConfig(optimizer="muon", lr=0.01), make("standard", n_layer=1, **EXPERTS)
    optimizer, moe = train.make_optimizer(model, t, torch.device("cpu")), model.experts[0]
    loss_of(model, tokens()).backward()
    whole = (moe.up.weight, 10), (moe.down.weight, 5), (moe.router.weight, 1)  # gate and up are two
    parts = [[torch.nn.Parameter(p.clone()) for p in w.detach().chunk(n)] for w, n in whole]
    for (w, n), ps in zip(whole, parts):
        for p, g in zip(ps, w.grad.clone().chunk(n)):
            p.grad = g
    torch.optim.Muon([*parts[0], *parts[1]], 0.01, 0.1, adjust_lr_fn="match_rms_adamw").step()
    torch.optim.AdamW(parts[2], 0.01, (0.9, 0.95), weight_decay=0.1, fused=True).step()
    optimizer.step()
    for (w, _), ps in zip(whole, parts):
        assert torch.equal(w, torch.cat(ps))


# ---------------------------------------------------------------------------------------------------------------------
# Training

RUN = dict(n_expert=5, n_expert_active=2, n_ffn=16, eval_every=0, save_every=0)


def biases(run):
    state = torch.load(run / "last.pt", weights_only=True)["model"]
    return torch.stack([v for n, v in state.items() if n.endswith(".bias")])


def test_the_bias_balances_a_skewed_router_and_the_log_says_so(data, tmp_path, capsys, monkeypatch):
    """Tokens that have a direction in common, and a learning rate of almost nothing: all that moves is the bias."""
    def skewed(*args, fill=train.fill):
        model = fill(*args)
        model.embed.weight.detach().add_(0.04)
        return model
    monkeypatch.setattr(train, "fill", skewed)
    settings = RUN | dict(init="papers", lr=1e-12, min_lr=0, max_steps=50, dtype="float32", n_layer=1, micro_batch=16,
                          tokens_per_step=512)
    rows = run_training(data, tmp_path / "a", **settings)
    load = [float(r["load"]) for r in rows]
    assert load[0] > 1.5 and sum(load[-10:]) / 10 < 1 + 0.25 * (load[0] - 1), load
    said = capsys.readouterr().out.splitlines()
    assert f" load:{load[-1]:.2f} " in said[-2] and ", 2 of 5 experts for each token)" in "".join(said)
    steps = biases(tmp_path / "a").double() / 1e-3
    assert steps.abs().max() > 5 and (steps - steps.round()).abs().max() < 1e-2
    run_training(data, tmp_path / "b", **settings | dict(max_steps=4, route_first=3, residual_mode="rd"))
    assert biases(tmp_path / "b").abs().max() == pytest.approx(1e-3, rel=1e-5)  # of the last step alone
    with open(tmp_path / "b/log.csv", newline="") as f:
        assert next(csv.reader(f)) == [*train.Log.columns, "load"]
    assert "load" not in run_training(data, tmp_path / "c", max_steps=1, eval_every=0)[0]


def test_a_run_with_experts_is_resumed_to_the_bit_and_evaluation_changes_nothing(data, tmp_path):
    settings = RUN | dict(residual_mode="rd", min_lr=1e-2, dtype="float32")
    rows = run_training(data, tmp_path / "whole", max_steps=4, **settings)
    for steps in (2, 4):
        parts = run_training(data, tmp_path / "parts", resume="true", max_steps=steps, **settings)
    run_training(data, tmp_path / "remat", max_steps=4, remat="true", **settings | dict(eval_every=1, eval_tokens=64))
    assert measured(parts) == measured(rows)
    for name in ("parts", "remat"):
        assert same_weights(tmp_path / name / "last.pt", tmp_path / "whole" / "last.pt")
    assert biases(tmp_path / "whole").abs().max() > 2.5e-3
    with pytest.raises(UserError, match="is of another run .n_expert_active: 2 -> 3"):
        run_training(data, tmp_path / "parts", resume="true", max_steps=7, **settings | dict(n_expert_active=3))


def test_accumulation_moves_the_bias_once_a_step(data, tmp_path):
    one, many = (run_training(data, tmp_path / f"{n}", micro_batch=n, **RUN) for n in (8, 2))
    assert [r["load"] for r in one] == [r["load"] for r in many] and len(one) == 6
    assert torch.equal(biases(tmp_path / "8"), biases(tmp_path / "2"))
    assert abs(float(one[-1]["loss"]) - float(many[-1]["loss"])) < 1e-10


@pytest.mark.slow
def test_processes_and_shards_give_the_numbers_of_one_process(data, tmp_path):
    """Five experts on two processes, clipping, accumulation, remat; and a run that goes on in shards."""
    settings = RUN | dict(residual_mode="dar_block", grad_clip=0.5, eval_every=3, min_lr=1e-2)
    first = settings | dict(max_steps=3)
    run_training(data, tmp_path / "one", **settings)
    run_training(data, tmp_path / "to shards", **first | dict(schedule="wsd", decay_steps=1))
    muon = RUN | dict(optimizer="muon", max_steps=1, init="papers")
    run_training(data, tmp_path / "muon one", **muon)
    out = spawn([flags(data, tmp_path / "ddp", **settings),
                 flags(data, tmp_path / "fsdp", parallel="fsdp", **settings),
                 flags(data, tmp_path / "remat", parallel="fsdp", remat="true", **settings),
                 flags(data, tmp_path / "from shards", parallel="fsdp", **first | dict(schedule="wsd", decay_steps=1)),
                 flags(data, tmp_path / "to shards", parallel="fsdp", resume="true",
                       **settings | dict(schedule="wsd", decay_steps=1)),
                 flags(data, tmp_path / "muon shards", parallel="fsdp", **muon),
                 [f for f in flags(data, tmp_path / "tuned shards", parallel="fsdp", init_from=tmp_path / "one",
                                   residual_mode="dar_block", eval_every=0) if not f.startswith("--n_")]])
    assert all("all done" in text for text in out), out[0][-3000:]
    train.train(*train.load_config([
        f for f in flags(data, tmp_path / "tuned", init_from=tmp_path / "one", residual_mode="dar_block", eval_every=0)
        if not f.startswith("--n_")]))
    run_training(data, tmp_path / "from shards", resume="true", **settings | dict(schedule="wsd", decay_steps=1))
    for a, b in (("ddp", "one"), ("fsdp", "one"), ("remat", "one"), ("to shards", "from shards"),
                 ("tuned shards", "tuned")):
        assert_same_run(tmp_path / a, tmp_path / b, 1e-10)
        assert torch.equal(biases(tmp_path / a), biases(tmp_path / b)) and biases(tmp_path / a).any()
    with open(tmp_path / "one/log.csv", newline="") as one, open(tmp_path / "fsdp/log.csv", newline="") as two:
        assert [r["load"] for r in csv.DictReader(one)] == [r["load"] for r in csv.DictReader(two)]
    one, two = (torch.load(tmp_path / f"muon {n}/last.pt", weights_only=True)["model"] for n in ("one", "shards"))
    for name, w in one.items():  # Newton and Schulz's iteration is in bf16
        assert (w - two[name]).norm() <= 3e-3 * w.norm(), name


# ---------------------------------------------------------------------------------------------------------------------
# Other programs, mistakes, the configuration


def test_experts_are_evaluated_exported_and_read_back(data, tmp_path, capsys):
    run_training(data, tmp_path / "a", **RUN | dict(dtype="float32", max_steps=3))
    for extra in (["--split=val"], ["--scales", "--windows=2"], ["--prompt=ab", "--tokens=5"]):
        evaluation.main([str(tmp_path / "a"), "--dtype=float32", "--device=cpu", *extra])
    said = capsys.readouterr().out
    assert "loss" in said and "\nmlp 2 " in said
    with pytest.raises(SystemExit):
        evaluation.main([str(tmp_path / "a"), f"--export={tmp_path / 'hf'}", "--form=huggingface"])
    assert "transformers has no class that computes it with experts: use" in capsys.readouterr().err
    saved = train.load_checkpoint(tmp_path / "a/last.pt")
    hub.export(saved, tmp_path / "own")
    back = hub.load(tmp_path / "own")
    assert back["cfg"] == saved["cfg"] and saved["model"].keys() == back["model"].keys()
    assert all(torch.equal(v, back["model"][n]) for n, v in saved["model"].items())
    assert back["model"]["sublayers.1.bias"].any()
    more = [f for f in flags(data, tmp_path / "b", init_from=tmp_path / "own", residual_mode="attnres_block")
            if not f.startswith(("--n_", "--init="))]
    cfg, _ = train.load_config(more)
    assert (cfg.n_expert, cfg.n_expert_active, cfg.n_ffn) == (5, 2, 16)
    train.train(cfg, dataclasses.replace(train.load_config(more)[1], max_steps=1, eval_every=0))
    state = torch.load(tmp_path / "b/last.pt", weights_only=True)["model"]
    assert (state["sublayers.1.bias"] - back["model"]["sublayers.1.bias"]).abs().max() < 1.1e-3
    message = f"n_expert=8 contradicts {tmp_path / 'own'}, which has 5: leave n_expert out"
    assert message in config_error(*more, "--n_expert=8")


@pytest.mark.parametrize("argv, message", [
    ("--n_expert=4 --n_expert_active=5", "n_expert_active=5: must be 2 to n_expert=4, or both must be 0"),
    ("--n_expert=4", "n_expert_active=0: must be 2 to n_expert=4"), ("--n_expert_active=2", "must be 2 to n_expert=0"),
    ("--n_expert=4 --n_expert_active=1", "n_expert_active=1: must be 2"), ("--n_expert=-4", "to n_expert=-4"),
    ("--n_expert=4 --n_expert_active=-2", "n_expert_active=-2: must be 2"),
    ("--num_experts=4", "did you mean n_expert?")])
def test_a_mistake_ends_in_one_line(argv, message):
    assert message in config_error(*argv.split())


def test_the_configuration_of_the_sparse_model():
    path = HERE / "configs/dar_7b.toml"
    cfg, t = train.load_config([str(path)])
    assert "every number of experts is ours" in path.read_text(encoding="utf-8")
    with torch.device("meta"):
        n = GPT(cfg).count()
    assert n["total"] / 1e9 == pytest.approx(6.92, abs=0.01)
    assert (n["total"] - 16 * 56 * 3 * 2048 * 1024) / 1e9 == pytest.approx(1.28, abs=0.01)  # active
    assert train.check_batch(cfg, t, 8) and cfg.residual_mode == "standard"
    assert dataclasses.replace(cfg, residual_mode="dar_block") and math.isfinite(t.lr)
