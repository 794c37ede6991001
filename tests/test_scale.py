"""train.py beyond one GPU: optimizers, the loss of large vocabularies, processes, estimates."""
import pytest
import torch
from helpers import loss_of, make, measured, run_training, same_weights, tokens

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
