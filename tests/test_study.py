"""The study and the benchmark."""
import contextlib
import csv
import functools
import json
import re

import numpy as np
import pytest
import torch

import eval as evaluation

from helpers import assert_close, flags, loss_of, make, tokens
from model import GPTConfig
from study import bench


def test_benchmark(capsys, monkeypatch):
    clock, cpu = bench.Clock(torch.device("cpu")), torch.device("cpu")
    shape = dict(n_embd=32, n_head=2, n_kv_head=2, n_ffn=64, vocab_size=50)
    make = functools.partial(bench.trainer, cpu, contextlib.nullcontext, 1, 16, n_layer=2, **shape)
    found = bench.steps(clock, bench.TARGETS | {"mhc": {}}, make, contextlib.nullcontext, 1e12, 0, print)
    assert set(found["step_ratio"]) == {"standard", "mhc", *bench.TARGETS} and found["step_ratio"]["standard"] == 1
    bench.passes(clock, cpu, torch.float32, 16, 32, 1e9, print)
    e = torch.randn(1, 8, 32, requires_grad=True)
    bench.chains(clock, e, GPTConfig(residual_mode="attnres", n_layer=2, **shape), True, print)
    bench.main(["--model"])
    assert "attnres" in capsys.readouterr().out
    for argv, message in ((["--fast"], "knows --quick, --json and --model, not --fast"),
                          (["--model", "--quick"], "--quick has no effect with --model")):
        with pytest.raises(SystemExit, match=message):
            bench.main(argv)
    monkeypatch.setattr(bench, "benchmark", lambda quick, say: dict(step_ratio={"standard": 1.0}, quick=quick))
    bench.main(["--quick", "--json"])
    assert json.loads(capsys.readouterr().out) == dict(step_ratio={"standard": 1.0}, quick=True)


def test_the_textbook_form_of_routing_is_the_reference():
    residual, e = make("attnres").residual, torch.randn(2, 3, 32).double()
    assert_close(bench.stack_and_einsum(residual.query, e), bench.routed(residual, e, 6), 1e-12)


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
    for loss, n_tokens in ((2.0, 400), (1.0, 800), (2.5, 200 * 2**0.5), (3.0, 200), (4.5, 100 / 2**0.5)):
        assert evaluation.tokens_needed(curve, loss) == pytest.approx(n_tokens)


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
        counts.add(counted := bench.flops_per_step(model, idx))
        assert counted == pytest.approx(3 * (matrices + attention), rel=0.02)
    assert max(counts) < 1.001 * min(counts)
