"""eval.py: loss, samples, statistics of routing."""
import json
import math
import os
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval as evaluation
import model as model_file
import prepare_fineweb
import train
from helpers import (
    corpus, gradients, HERE, make, OWN, prepare, run_training, shard, tiers, tokens, variant, VARIANTS, write_corpus,
    write_ranks,
)
from launch import run_script


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
    for flag in ("--ngram=2", f"--export={tmp_path / 'out'}"):  # one process is enough
        said = run_script(HERE / "eval.py", tmp_path / "a", flag, "--device=cpu", processes=2).stdout
        assert said.count(said.splitlines()[0]) == 1
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
        p = w.abs() / w.abs().sum(0).clamp_min(1e-30)  # a softmax as it is
        assert mine["weights"] == pytest.approx(w.mean((1, 2, 3)).tolist())
        assert mine["weights"] == pytest.approx(again["weights"])
        assert mine["max"] == pytest.approx(w.amax(0).mean().item()) and mine["max"] > 0
        assert mine["entropy"] == pytest.approx(-torch.special.xlogy(p, p).sum(0).mean().item())
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


@pytest.mark.parametrize("mode", tiers(["attnres", "rd", "mhar_block", "dar", *(m for m in OWN if hasattr(
    make(m).residual, "query"))], "rd", "dar"))
def test_routing_report(mode, data, tmp_path, capsys):
    run_training(data, tmp_path / "a", residual_mode=mode, n_head=2, dtype="float32", max_steps=3)
    capsys.readouterr()
    evaluation.main([str(tmp_path / "a"), "--routing", "--windows=6", "--device=cpu"])
    text = capsys.readouterr().out
    assert "mlp 1" in text and "weights.png" in text
    evaluation.main([str(tmp_path / "a"), "--routing", "--json", "--device=cpu"])
    result = json.loads(capsys.readouterr().out)
    figures = {p.name for p in (tmp_path / "a/routing").glob("*.png")}
    assert result["mode"] == mode and {"weights.png", "depth.png"} <= figures
    extra = {"attnres": "probe.png", "rd": "roles.png", "mhar_block": "heads.png", "dar": "histories.png"}
    if mode in extra:
        assert ("roles:" in text) == (mode == "rd") and ("cka" in result) == (mode == "dar")
        assert figures == {"weights.png", "depth.png", extra[mode]}


def test_standard_has_no_routes_to_report(data, tmp_path, capsys):
    run_training(data, tmp_path / "a", dtype="float32", max_steps=1)
    with pytest.raises(SystemExit):
        evaluation.main([str(tmp_path / "a"), "--routing"])
    assert "residual_mode=standard has no routes to report" in capsys.readouterr().err


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


def test_ids_without_a_token_are_shown_and_padding_is_never_sampled(data, tmp_path, capsys):
    """Vocabularies have gaps (cl100k_base has), and models are padded beyond them."""
    ranks = write_ranks(tmp_path / "gap.tiktoken", {b" has": 400})
    encoding = prepare_fineweb.get_encoding(str(ranks), "gpt2")
    assert encoding.decode([104, 300, 258, 401]) == "h\ufffd the<|endoftext|>"
    assert encoding.decode(list("é☃".encode())) == "é☃"
    torch.manual_seed(0)
    out = make("standard").generate(tokens()[:, :1], 200, temperature=5.0, n_vocab=7)[:, 1:]
    assert out.max() < 7 and len(out.unique()) == 7
    run_training(data, tmp_path / "a", max_steps=1)
    encoding.save(tmp_path / "tokenizer.json")
    with pytest.raises(SystemExit):
        evaluation.main([str(tmp_path / "a"), "--prompt=x", f"--data_dir={tmp_path}", "--device=cpu"])
    assert "tokenizer.json has a vocabulary of 402, more than the model's 257" in capsys.readouterr().err


def test_data_of_another_tokenizer_is_refused(data, tmp_path, capsys):
    """Also where its vocabulary has the size of the model's, so that every id is legal."""
    run_training(data, tmp_path / "a", max_steps=1, residual_mode="attnres")
    ranks = tmp_path / "same.tiktoken"
    ranks.write_bytes(b"".join(write_ranks(ranks).read_bytes().splitlines(keepends=True)[:256]))
    texts = write_corpus(tmp_path, ".jsonl", corpus())
    meta = prepare(texts, tmp_path / "other", f"--tokenizer={ranks}", "--holdout=10", "--pattern=gpt2")
    assert meta["vocab_size"] == 257
    for task in ([], ["--routing"], ["--prompt=x"]):
        with pytest.raises(SystemExit):
            evaluation.main([str(tmp_path / "a"), f"--data_dir={tmp_path / 'other'}", "--device=cpu", *task])
        assert f"is of the tokenizer {meta['tokenizer']}, but" in capsys.readouterr().err


def test_a_model_that_copies_is_told_from_one_that_does_not(data, tmp_path, capsys, monkeypatch):
    run_training(data, tmp_path / "a", dtype="float32", max_steps=2)

    def copying(*flags):
        capsys.readouterr()
        evaluation.main([str(tmp_path / "a"), "--copying", "--windows=20", "--json", "--device=cpu", *flags])
        found = json.loads(capsys.readouterr().out)
        return found["first"], found["again"]

    def looks_back(self, idx, targets=None):
        back = F.one_hot(idx, 257).roll(15, 1).float() * (torch.arange(idx.shape[1]) >= 15).view(1, -1, 1)
        return 30 * back, None
    first, again = copying()
    assert first > 4 and abs(first - again) < 0.1
    monkeypatch.setattr(model_file.GPT, "forward", looks_back)  # what comes 16 tokens after the one before
    assert copying() == pytest.approx((math.log(257), 0), abs=1e-3)
    with pytest.raises(SystemExit):
        copying("--seq_len=3")
    assert "--copying needs 4 tokens or more" in capsys.readouterr().err


def test_scales_show_a_drowned_embedding(data, tmp_path, capsys):
    found = {}
    for init in ("papers", "zero"):
        lines = f'data_dir = "{data}"', "n_layer = 16", "n_embd = 64", "n_head = 2", "seq_len = 32", f'init = "{init}"'
        (tmp_path / "start.toml").write_text("\n".join(lines), encoding="utf-8")
        evaluation.main([str(tmp_path / "start.toml"), "--scales", "--json", "--device=cpu", "--dtype=float64"])
        found[init] = json.loads(capsys.readouterr().out)
        assert len(found[init]["sublayers"]) == 32
    assert found["zero"]["cosine"] == pytest.approx(1) and found["papers"]["cosine"] < 0.6
    assert all(output == 0 for _, output, _ in found["zero"]["sublayers"])


def test_scales_are_those_of_the_stream():
    model, idx, states = make("standard", n_layer=2), tokens()[:, :16], []
    embedding, found, cosine = evaluation.scales(model, idx)
    with torch.no_grad():
        h = model.trunk(idx, look=lambda site, state: states.append(state[0]))
    sizes = [x.square().mean().sqrt().item() for x in states]
    assert [embedding, *(stream for _, _, stream in found)] == pytest.approx(sizes, rel=1e-12)
    assert cosine == pytest.approx(F.cosine_similarity(h, states[0], dim=-1).mean().item())


def test_a_limited_evaluation_is_spread_over_the_split(data):
    model, val = make("standard", vocab_size=257, seq_len=32), train.Tokens(data, "val", 32, 257)
    read, old = [], val.read
    val.read = lambda position, n: read.append(position) or old(position, n)
    cpu, windows = torch.device("cpu"), -(-(val.total - 1) // 32)
    loss, count = train.evaluate(model, val, 3, cpu, torch.float64, limit=320)
    assert count == 320 and len(read) == 10 and read[0] == 0 and read[-1] == 9 * windows // 10 * 32
    assert max(b - a for a, b in zip(read, read[1:])) <= 32 * -(-windows // 10)
    assert train.evaluate(model, val, 4, cpu, torch.float64, limit=320)[0] == pytest.approx(loss, abs=1e-12)
    assert train.evaluate(model, val, 3, cpu, torch.float64, limit=10**9)[1] == val.total - 1
