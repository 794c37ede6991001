"""train.py beyond one GPU: optimizers, the loss of large vocabularies, processes, estimates."""
import weakref

import pytest
import torch
import torch.nn.functional as F
from helpers import assert_close, gradients, loss_of, make, measured, run_training, same_weights, tokens
from torch.utils._python_dispatch import TorchDispatchMode

import model as model_file
import train
from prepare_fineweb import UserError


def test_muon_is_pytorchs_on_each_matrix_that_is_one():
    """q, k, v, gate and up as parameters of their own under torch.optim.Muon, the rest under AdamW: the same bits."""
    t = train.TrainConfig(optimizer="muon", lr=0.01, min_lr=0.01, route_lr_mult=3.0)
    model, idx = make("dar_block", dar_routing="sep_v", tie_embeddings=False), tokens()
    optimizer, sizes = train.make_optimizer(model, t, torch.device("cpu")), {"qkv": [32, 16, 16], "up": [48, 48]}
    theirs, kind = {}, {}
    for name, p in model.named_parameters():
        matrix = name.startswith("sublayers") and p.dim() == 2
        kind[name] = "muon" if matrix else "residual" if name.startswith("residual.") else "plain"
        rows = sizes.get(name.split(".")[-2], len(p)) if matrix else len(p)
        theirs[name] = [torch.nn.Parameter(part.clone()) for part in p.detach().split(rows)]
    muon, plain, residual = ([p for name, parts in theirs.items() if kind[name] == k for p in parts]
                             for k in ("muon", "plain", "residual"))
    assert len(muon) == 3 * (3 + 1 + 2 + 1)
    muon = torch.optim.Muon(muon, 0.01, 0.1, adjust_lr_fn="match_rms_adamw")
    adamw = torch.optim.AdamW([dict(params=plain), dict(params=residual, lr=0.03)], 0.01, (0.9, 0.95), weight_decay=0,
                              fused=True)
    for group in optimizer.param_groups:
        group["lr"] = 0.01 * group["lr_mult"]
    for _ in range(3):
        loss_of(model, idx).backward()
        for name, p in model.named_parameters():
            for part, grad in zip(theirs[name], p.grad.clone().split([len(x) for x in theirs[name]])):
                part.grad = grad
        for o in (optimizer, muon, adamw):
            o.step()
        optimizer.zero_grad()
        for name, p in model.named_parameters():
            assert torch.equal(p, torch.cat(theirs[name])), name


def test_a_muon_run_is_resumed_to_the_bit_and_by_no_other_optimizer(data, tmp_path):
    settings = dict(residual_mode="rd", optimizer="muon", dtype="float32", tokens_per_step=64, min_lr=1e-2,
                    eval_every=0)
    rows = run_training(data, tmp_path / "whole", max_steps=4, **settings)
    for steps in (1, 3, 4):
        parts = run_training(data, tmp_path / "parts", resume="true", max_steps=steps, **settings)
    assert measured(parts) == measured(rows)
    assert same_weights(tmp_path / "parts" / "last.pt", tmp_path / "whole" / "last.pt")
    with pytest.raises(UserError, match="is of another run .optimizer: muon -> adamw"):
        run_training(data, tmp_path / "parts", resume="true", max_steps=5, **settings | dict(optimizer="adamw"))


def test_without_muon_one_line_says_what_to_do(monkeypatch):
    monkeypatch.delattr(torch.optim, "Muon")
    with pytest.raises(UserError, match="optimizer=muon needs PyTorch 2.9 .* optimizer=adamw"):
        train.load_config(["--optimizer=muon"])


# ---------------------------------------------------------------------------------------------------------------------
# The head and its loss


class Live(TorchDispatchMode):
    """Counts the bytes of the tensors made inside that are alive, and their peak."""

    def __init__(self):
        super().__init__()
        self.known, self.now, self.peak = weakref.WeakSet(), 0, 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **kwargs or {})
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.untyped_storage() not in self.known:
                storage = x.untyped_storage()
                self.known.add(storage)
                self.now += storage.nbytes()
                self.peak = max(self.peak, self.now)
                weakref.finalize(storage, self.free, storage.nbytes())
        return out

    def free(self, n):
        self.now -= n


@pytest.mark.parametrize("dtype, tol", [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("tied", [True, False])
def test_the_loss_in_chunks_is_cross_entropy(dtype, tol, tied, monkeypatch):
    monkeypatch.setattr(model_file, "CHUNK", 2**16)  # three chunks
    model = make("standard", dtype=dtype, vocab_size=1000, tie_embeddings=tied)
    h, y, found = torch.randn(150, 32, dtype=dtype, requires_grad=True), tokens(1, 149, vocab=1000)[0], []
    y[90:110] = -1
    for loss in (model.loss(h, y), F.cross_entropy(model.logits(h), y, ignore_index=-1)):
        used = [h, model.gain, model.head_matrix()]
        found.append((loss.detach(), *torch.autograd.grad(loss / 3, used)))
    with torch.no_grad():
        found[0] += model.loss(h, y),
    for ours, plain in zip(found[0], [*found[1], found[1][0]]):
        assert (ours - plain).norm() <= tol * plain.norm()
    idx = torch.where(y < 0, 0, y)[None, :16]
    assert_close(model(idx, y[None, 80:96])[1], F.cross_entropy(model(idx)[0][0], y[80:96], ignore_index=-1), tol)


def test_logits_never_exist_as_a_whole(monkeypatch):
    monkeypatch.setattr(model_file, "CHUNK", 2**16)
    model, h, y = make("standard", dtype=torch.float32, vocab_size=1000), torch.randn(2048, 32), tokens(1, 2047)[0]
    for gradients_too, most in ((True, 0.7), (False, 0.5)):
        with Live() as live, torch.set_grad_enabled(gradients_too):
            loss = model.loss(h, y)
            if gradients_too:
                loss.backward(retain_graph=True)
                with pytest.raises(RuntimeError, match="runs once"):  # the gradients are given away
                    loss.backward()
        assert live.peak < most * 4 * len(y) * 1000


def test_head_and_loss_are_compiled_in_every_mode(monkeypatch):
    for mode in ("standard", "rd"):
        model, seen, idx = make(mode), [], tokens()
        loss, grads = gradients(model, idx)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", lambda function, seen=seen, **_: seen.append(function) or function)
            patch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
            train.compile_model(model, "on", torch.device("cpu"), print)
        assert model.chunk_loss in seen
        assert_close(gradients(model, idx)[1], grads, 1e-12)
