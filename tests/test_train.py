"""train.py: configuration, data, training, resuming, several processes, what users run into."""
import contextlib
import dataclasses
import functools
import json
import math
import os
import re
import shlex
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch

import eval as evaluation
import model as model_file
import train
from helpers import (
    config_error, documents, flags, gradients, HERE, loss_of, make, measured, MODES, prepare, read_log,
    run_training, same_weights, shard, SMALL, TINY_RUN, tokens, TRAIN_ONLY,
)
from launch import run_script, started
from model import GPT, RESIDUAL_MODES, GPTConfig
from prepare_fineweb import UserError


# ---------------------------------------------------------------------------------------------------------------------
# Configuration


def test_configuration_layers(tmp_path, monkeypatch):
    a, b = tmp_path / "a.toml", tmp_path / "b.toml"
    a.write_text("n_layer = 3\nlr = 1\nmax_steps = 1_000\n")
    b.write_text('n_layer = 4\nresidual_mode = "attnres"\n', encoding="utf-8-sig")  # as Windows' editors save it
    cfg, t = train.load_config([str(a), "--seed=7", str(b), "--qk_norm=False", "--max_steps=2_000", "--min_lr=6e-5",
                                "--prepare=--source=x --holdout=3"])
    assert (cfg.n_layer, cfg.residual_mode, cfg.qk_norm) == (4, "attnres", False)
    assert (t.lr, t.max_steps, t.min_lr, t.seed, t.prepare) == (1.0, 2000, 6e-5, 7, "--source=x --holdout=3")
    assert t.out_dir == "runs/b-attnres-seed7"
    monkeypatch.setenv("HOME", "/home/me")  # a shell leaves the ~ of a flag
    _, t = train.load_config(["--data_dir=~/data", "--out_dir=~/runs/a~b"])
    assert (t.data_dir, t.out_dir) == ("/home/me/data", "/home/me/runs/a~b")


def test_configuration_mistakes_name_the_place_and_the_remedy(tmp_path):
    bad = tmp_path / "bad.toml"
    assert "here it is n_layer" in config_error("--n_layers=3")
    for text, expected in (("n_lyer = 3", "did you mean n_layer"), ("[model]\nn_layer = 3", "unknown key 'model'"),
                           ('n_layer = "3"', "must be a whole number"), ("n_layer = 3.5", "must be a whole number"),
                           ("lr = nan", "must be a number"), ("resume = 1", "must be true or false"),
                           ("seed = true", "must be a whole number"), ("data_dir = 3", "must be a string"),
                           ("n_layer =", "cannot read"), ("n_layer = 1\nn_layer = 2", "cannot read")):
        bad.write_text(text)
        message = config_error(bad)
        assert expected in message and "bad.toml" in message
    for flag, expected in (("--lr=fast", "must be a number"), ("--lr=inf", "must be a number"),
                           ("--lr", "needs a value"), ("--seed", "needs a value"),
                           ("seed=3", "expected a .toml file, a run folder or"), ("--n_layer=", "whole number"),
                           ("--resume=yes", "must be true or false"), ("--seed=-1", "must not be negative"),
                           ("nothere.toml", "nothere.toml"), ("--residual_mode=attnres_blok", "mean attnres_block"),
                           ("--depth_block=4", "no effect in residual_mode=standard"), ("--n_embd=65", "n_head=12"),
                           ("--n_kv_head=5", "n_kv_head=5"), ("--head_dim=7", "even"), ("--schedule=cos", "cosine"),
                           ("--dtype=float16", "float16 is not supported"), ("--min_lr=1", "above lr"),
                           ("--eval_at_tokens=1,x", "whole numbers"), ("--tracker=w", "choices"),
                           ("--micro_batch=0", "at least 1"), ("--adam_eps=0", "adam_eps=0.0: must be positive"),
                           ("--norm_eps=0", "norm_eps=0.0: must be positive"),
                           ("--device=gpu", "use cuda; which GPUs, says the environment variable CUDA_VISIBLE"),
                           ("--device=cuda:1", "use cuda; which GPUs, says"),
                           ("--config=a.toml", "here it is nothing: give the file without a flag"),
                           ("--gpus=8", "gpus=8 has no effect without estimate=true")):
        assert expected in config_error(flag), flag
    assert "n_embd=64" in config_error("--n_embd=64", "--n_head=4", "--residual_mode=attnres", "--route_heads=3")
    assert "depth_block" in config_error("--residual_mode=attnres", "--depth_block=2")


@pytest.mark.parametrize("mode", MODES)
def test_unused_knobs_are_refused(mode):
    for knob in model_file.all_knobs():
        default, kind = getattr(GPTConfig, knob), GPTConfig.__dataclass_fields__[knob].type
        value = next((c for c in get_args(kind) if c != default), not default if kind is bool else 3)
        if knob in RESIDUAL_MODES[mode].knobs:
            GPTConfig(residual_mode=mode, n_head=3, **{knob: value})
        else:
            with pytest.raises(ValueError, match=f"{knob}=.* has no effect in residual_mode={mode}"):
                GPTConfig(residual_mode=mode, **{knob: value})


def test_written_configuration_can_be_passed_back(tmp_path):
    odd = 'a "quoted" \\ name\twith ☃, \x7f and\nnewline'
    cfg, t = train.load_config([f"--data_dir={odd}", "--lr=6e-05", "--adam_eps=1e-30", "--eval_at_tokens=1_000,20",
                                "--resume=true", "--residual_mode=attnres_block", "--n_layer=5"])
    path = tmp_path / "config.toml"
    path.write_text(train.to_toml(cfg, t), encoding="utf-8")
    cfg_2, t_2 = train.load_config([str(path)])
    assert cfg_2 == cfg and t_2 == dataclasses.replace(t, resume=False)


def test_help_lists_every_key(capsys):
    with pytest.raises(SystemExit):
        train.load_config(["--help"])
    text = capsys.readouterr().out
    for name, field in train.SCHEMA.items():
        line = next(line for line in text.splitlines() if line.startswith(f"  --{name}={field.default}"))
        assert len(line.split(maxsplit=1)[1]) > 10, name


def test_learning_rate_schedule():
    t = train.TrainConfig(lr=1.0, min_lr=0.1, warmup_steps=10, max_steps=100)
    rates = [t.lr_at(s) for s in range(100)]
    assert rates[0] == 0.1 and rates[9] == 1.0 and rates[-1] == pytest.approx(0.1) and min(rates) > 0
    assert all(a >= b for a, b in zip(rates[9:], rates[10:]))
    wsd = dataclasses.replace(t, schedule="wsd", decay_steps=30)
    rates = [wsd.lr_at(s) for s in range(100)]
    assert rates[9:70] == [1.0] * 61 and rates[-1] == pytest.approx(0.1) and rates[84] == pytest.approx(0.55)
    assert train.TrainConfig(warmup_steps=0, max_steps=1).lr_at(0) == pytest.approx(6e-5)
    assert 0 < train.TrainConfig(warmup_steps=10, max_steps=5).lr_at(4) < 6e-4


# ---------------------------------------------------------------------------------------------------------------------
# Data


@pytest.mark.parametrize("n", [1, 2, 3, 7, 64, 1000, 4097])
def test_permutation(n):
    index = np.arange(n, dtype=np.uint64)
    a, b = train.permute(index, n, (1, 0)), train.permute(index, n, (1, 1))
    assert sorted(a.tolist()) == sorted(b.tolist()) == list(range(n))
    assert np.array_equal(a, train.permute(index, n, (1, 0))) and (n < 64 or not np.array_equal(a, b))
    assert a[n // 2:].tolist() == train.permute(index[n // 2:], n, (1, 0)).tolist()  # element by element


def test_permutation_mixes_well_and_has_no_limit():
    n = 10_000
    a = train.permute(np.arange(n, dtype=np.uint64), n, (3, 5)).astype(float)
    assert abs(np.corrcoef(np.arange(n), a)[0, 1]) < 0.05 and abs(np.corrcoef(a[1:], a[:-1])[0, 1]) < 0.05
    big = 10**15
    far = train.permute(np.arange(big - 100, big, dtype=np.uint64), big, (1, 2))
    assert len(set(far.tolist())) == 100 and far.max() < big


def test_windows_cover_the_stream_once_an_epoch_in_any_sharding(tmp_path):
    ids = np.random.default_rng(0).integers(50, size=1001)
    shard(tmp_path / "one/x_train_0.bin", ids)
    for i, part in enumerate(np.split(ids, [3, 4, 400, 990])):  # windows run over the ends of shards
        shard(tmp_path / f"many/x_train_{i}.bin", part)
    one, many = (train.Tokens(tmp_path / name, "train", 10, 50) for name in ("one", "many"))
    assert one.windows == many.windows == 100
    orders = [one.order(1, step, 20) for step in range(10)]
    for epoch in (orders[:5], orders[5:]):
        first = sorted(np.concatenate(epoch).tolist())
        assert len({start % 1001 for w in first for start in range(w, w + 10)}) == 1000  # each token an input once
    assert sorted(np.concatenate(orders[:5]).tolist()) == list(range(0, 1000, 10))
    assert not np.array_equal(np.concatenate(orders[:5]), np.concatenate(orders[5:]))
    across = one.order(1, 1, 80)  # one batch over two epochs
    assert np.array_equal(across[:20], np.concatenate([one.order(1, s, 20) for s in (4,)])) and len(across) == 80
    for w in orders:
        rows = one.at(w)
        assert np.array_equal(rows, many.at(w)) and rows.dtype == np.int64 and rows.shape == (20, 11)
        assert np.array_equal(rows[0], np.concatenate([ids, ids])[int(w[0]):][:11])
    assert np.array_equal(one.rows([3, 99]), one.at([30, 990]))
    assert not np.array_equal(one.order(1, 0, 20), one.order(2, 0, 20))


def test_data_mistakes_are_named(tmp_path):
    def error(name="d", seq_len=10, vocab=50):
        with pytest.raises(UserError) as e:
            train.Tokens(tmp_path / name, "train", seq_len, vocab).rows(np.arange(1))
        assert name in str(e.value)
        return str(e.value)
    assert "prepare_fineweb.py" in error("nothing")
    (tmp_path / "void").mkdir()
    assert "prepare_fineweb.py" in error("void")
    shard(tmp_path / "noval/x_val_0.bin", range(20))
    assert "no train shards" in error("noval")
    good = shard(tmp_path / "d/x_train_0.bin", range(20))
    raw = good.read_bytes()
    for content, expected in ((b"", "not a token shard"), (raw[:100], "not a token shard"), (raw[:-2], "promises 20"),
                              (raw + b"\0", "promises 20"), (raw[::-1], "not a token"), (raw[:1024], "promises 20")):
        good.write_bytes(content)
        assert expected in error()
    shard(good, range(10))
    assert "fewer than one window" in error()
    assert "fewer than one window" in error(seq_len=10**6)
    shard(good, range(11))
    train.Tokens(tmp_path / "d", "train", 10, 50)  # exactly one window
    shard(good, [])
    assert "0 tokens" in error()
    shard(good, [*range(10), 50])
    assert "holds token 50" in error()
    shard(good, range(20), count=-1)
    assert "promises -1 tokens" in error()
    shard(good, range(20), version=9)
    assert "not a token shard" in error()
    for meta in ("{", "[]", '{"splits": 3}', '{"splits": {"train": {"shards": [{"file": 3}]}}}'):
        (tmp_path / "d/meta.json").write_text(meta)
        assert "meta.json is damaged" in error()
    (tmp_path / "d/meta.json").unlink()
    (tmp_path / "d/progress.json").write_text("{}")
    assert "half prepared" in error()


def test_shards_must_match_their_meta(data, tmp_path):
    shutil.copytree(data, tmp_path / "d")
    name = json.loads((data / "meta.json").read_text())["splits"]["train"]["shards"][1]["file"]
    shard(tmp_path / "d" / name, range(200))
    with pytest.raises(UserError, match="not the shard that meta.json describes"):
        train.Tokens(tmp_path / "d", "train", 16, 257)
    (tmp_path / "d" / name).unlink()
    with pytest.raises(UserError, match="cannot be read"):
        train.Tokens(tmp_path / "d", "train", 16, 257)


def test_shards_of_other_projects_train_here(data, tmp_path):
    rng = np.random.default_rng(0)
    for split in ("train", "val"):
        shard(tmp_path / f"d/edu_fineweb_{split}_000001.bin", rng.integers(100, size=5000))
    with pytest.raises(UserError, match="give --vocab_size"):
        run_training(tmp_path / "d", tmp_path / "a")
    rows = run_training(tmp_path / "d", tmp_path / "a", vocab_size=100)
    assert len(rows) == 6 and rows[-1]["val_loss"]


def test_memory_does_not_grow_with_the_data_touched(tmp_path):
    shard(tmp_path / "x_train_0.bin", np.zeros(60_000_000, "<u2"))
    code = f"""import sys; sys.path.insert(0, {str(HERE)!r})
import train
def resident(): return int(open("/proc/self/statm", encoding="utf-8").read().split()[1]) * 4096
t = train.Tokens({str(tmp_path)!r}, "train", 1024, 100)
for step in range(20): t.at(t.order(1, step, 16))
before = resident()
for step in range(20, 3000): t.at(t.order(1, step, 16))
print(resident() - before)"""
    if sys.platform == "linux":
        (tmp_path / "reading.py").write_text(code, "utf-8")
        assert int(run_script(tmp_path / "reading.py").stdout) < 40e6  # the shard has 120 MB, and all of it was read


PAPER_SHAPES = {  # config -> the paper's vocabulary, parameters in millions (spread: what the paper leaves to guess)
    "mhar_100m": (151_936, 115.55, 0.01), "mhar_350m": (151_936, 533.12, 0.01), "mhar_1b": (151_936, 1079.31, 0.01),
    "delta_220m": (151_936, 220.52, 0.01), "delta_1044m": (151_936, 1043.92, 0.01),
    "delta_7.6b": (151_936, 7568.41, 0.01), "delta_qwen3_0.6b": (151_936, 596.05, 0.01),
    "rd_120m": (33_000, 119.89, 0.01), "rd_343m": (33_000, 343.15, 0.01)}


def test_configurations_have_the_papers_shapes():
    found = {p.stem for p in HERE.glob("configs/*.toml")}
    assert found == {*PAPER_SHAPES, "tiny", "gpt2_124m", "finetune_qwen3_0.6b", "finetune_8b", "dar_7b"}
    cfg, t = train.load_config([str(HERE / "configs/gpt2_124m.toml")])
    with torch.device("meta"):
        assert 123 < GPT(cfg).count()["total"] / 1e6 < 125 and cfg.residual_mode == "standard"
    train.check_batch(cfg, t, 1)
    for name, (vocabulary, millions, spread) in PAPER_SHAPES.items():
        path = HERE / "configs" / f"{name}.toml"
        cfg, t = train.load_config([str(path)])
        with torch.device("meta"):
            model = GPT(dataclasses.replace(cfg, vocab_size=vocabulary))
        assert abs(model.count()["total"] / 1e6 - millions) < spread, name
        assert cfg.residual_mode == "standard"
        assert all(getattr(cfg, k) == getattr(GPTConfig, k) for k in model_file.all_knobs())
        train.check_batch(cfg, t, 8)
        comment = path.read_text(encoding="utf-8").splitlines()[0]
        assert comment.startswith(f"# torchrun --standalone --nproc_per_node=8 train.py configs/{name}.toml")


# ---------------------------------------------------------------------------------------------------------------------
# Training


@pytest.mark.parametrize("mode", MODES)
def test_resume_after_any_step_gives_the_identical_run(mode, data, tmp_path, monkeypatch):
    save, kept = train.save_checkpoint, {}

    def keep(folder, name, content):
        save(folder, name, content)
        if name == "last.pt":
            kept[content["step"]] = (Path(folder) / name).read_bytes()
    monkeypatch.setattr(train, "save_checkpoint", keep)
    settings = dict(residual_mode=mode, dtype="float32", save_every=1, max_steps=4, eval_every=2)
    rows = run_training(data, tmp_path / "whole", **settings)
    monkeypatch.setattr(train, "save_checkpoint", save)
    assert list(kept) == [0, 1, 2, 3, 4]
    for step in range(4):
        out = tmp_path / str(step)
        out.mkdir()
        (out / "last.pt").write_bytes(kept[step])
        (out / "log.csv").write_bytes((tmp_path / "whole" / "log.csv").read_bytes())  # with rows from behind the step
        again = run_training(data, out, resume="true", **settings)
        assert measured(again) == measured(rows)
        assert same_weights(out / "last.pt", tmp_path / "whole" / "last.pt")


def test_log_has_what_it_promises(data, tmp_path, capsys):
    rows = run_training(data, tmp_path / "a", log_every=2, eval_every=0, eval_at_tokens="500,1_300", max_steps=7)
    assert [r["step"] for r in rows] == ["1", "2", "4", "6", "7"]
    assert list(rows[0]) == "step tokens loss val_loss lr grad_norm tok_per_s ms mem_mb crc wait_ms".split()
    assert [bool(r["val_loss"]) for r in rows] == [False, True, False, True, False]  # the milestones, 512 and 1536
    assert [int(r["tokens"]) for r in rows] == [256, 512, 1024, 1536, 1792]
    lines = [line for line in capsys.readouterr().out.splitlines() if line.startswith("step:") and "/" in line]
    assert len(lines) == 5
    for line in lines:  # a fixed grammar: words of the form name:value
        assert len(dict(word.split(":", 1) for word in line.split())) == len(line.split())
    stream = train.Tokens(data, "train", 32, 257)
    import zlib
    assert rows[0]["crc"] == f"{zlib.crc32(stream.order(1, 0, 8).astype('<u8').tobytes(), stream.crc):08x}"
    for name in ("model.py", "study/estimate.py"):
        assert (tmp_path / "a/source" / name).read_text() == (HERE / name).read_text()


@pytest.mark.parametrize("mode", MODES)
def test_loss_and_data_do_not_depend_on_micro_batches(mode, data, tmp_path):
    runs = [run_training(data, tmp_path / str(n), micro_batch=n, residual_mode=mode, max_steps=3, tokens_per_step=128)
            for n in ((1, 2, 4) if mode == "attnres" else (1, 4))]
    for rows in runs[1:]:
        assert [r["crc"] for r in rows] == [r["crc"] for r in runs[0]]
        for a, b in zip(rows, runs[0]):
            for key in ("loss", "grad_norm", "val_loss"):
                assert a[key] == b[key] == "" or abs(float(a[key]) - float(b[key])) < 1e-10


@pytest.fixture(scope="session")
def standard_rows(data, tmp_path_factory):
    return run_training(data, tmp_path_factory.mktemp("standard"), max_steps=3)


@pytest.mark.parametrize("mode", MODES)
def test_modes_of_one_seed_share_data_and_start(mode, standard_rows, data, tmp_path):
    rows = run_training(data, tmp_path, residual_mode=mode, max_steps=3)
    assert [r["crc"] for r in rows] == [r["crc"] for r in standard_rows]
    if RESIDUAL_MODES[mode].exact_start:
        assert float(rows[0]["loss"]) == pytest.approx(float(standard_rows[0]["loss"]), abs=1e-12)


def test_seeds_have_data_and_start_of_their_own(standard_rows, data, tmp_path):
    other = run_training(data, tmp_path, seed=2, max_steps=3)
    assert other[0]["crc"] != standard_rows[0]["crc"] and other[0]["loss"] != standard_rows[0]["loss"]


@pytest.mark.parametrize("dtype", ["float64", pytest.param("float32", marks=pytest.mark.slow)])
@pytest.mark.parametrize("mode", MODES)
def test_two_processes_give_the_numbers_of_one(mode, dtype, data, tmp_path):
    """To 1e-10 in fp64, 1e-5 in fp32; the same evaluation too."""
    steps, tolerance = {"float64": (6, 1e-10), "float32": (20, 1e-5)}[dtype]
    settings = dict(residual_mode=mode, dtype=dtype, max_steps=steps, eval_every=steps // 2, lr=3e-3)
    run_script(HERE / "train.py", *flags(data, tmp_path / "two", **settings), processes=2)
    one, two = run_training(data, tmp_path / "one", **settings), read_log(tmp_path / "two")
    assert len(one) == len(two) == steps
    for a, b in zip(one, two):
        assert a["crc"] == b["crc"]
        for key in ("loss", "val_loss", "grad_norm")[:2 if dtype == "float32" else 3]:  # norms feel rounding most
            assert a[key] == b[key] == "" or abs(float(a[key]) - float(b[key])) < tolerance


def test_checkpoints_load_safely_and_carry_no_prefixes(data, tmp_path):
    run_training(data, tmp_path / "a", residual_mode="attnres_block")
    for name in ("last.pt", "best.pt"):
        saved = torch.load(tmp_path / "a" / name, weights_only=True)
        assert saved["model"].keys() == make("attnres_block", n_layer=2).state_dict().keys()
        assert ("optimizer" in saved) == (name == "last.pt")
    saved["model"] = {f"module._orig_mod.{k}": v for k, v in saved["model"].items()}
    torch.save(saved, tmp_path / "wrapped.pt")
    model, _, _ = evaluation.load_model(tmp_path / "wrapped.pt", torch.device("cpu"), torch.float64)
    assert all(torch.equal(v, saved["model"][f"module._orig_mod.{k}"]) for k, v in model.state_dict().items())
    assert not list(tmp_path.glob("a/*.tmp"))


def test_checkpoints_that_cannot_be_used(data, tmp_path):
    run_training(data, tmp_path / "a", max_steps=2)
    last, config = tmp_path / "a" / "last.pt", (tmp_path / "a/config.toml").read_text()
    good = last.read_bytes()

    def error(**settings):
        with pytest.raises(UserError) as e:
            run_training(data, tmp_path / "a", resume="true", **dict(max_steps=4) | settings)
        assert "last.pt" in str(e.value) and "\n" not in str(e.value)
        return str(e.value)
    assert "n_layer: 2 -> 3" in error(n_layer=3)
    assert "residual_mode: standard -> attnres" in error(residual_mode="attnres")
    assert "seed: 1 -> 2" in error(seed=2) and "tokens_per_step" in error(tokens_per_step=512)
    for content in (good[:1000], b"", b"not a zip file at all", good[:-100]):
        last.write_bytes(content)
        assert "not a usable checkpoint" in error()
    saved = torch.load(tmp_path / "a" / "best.pt", weights_only=True)
    torch.save(saved, last)
    assert "no optimizer state" in error()
    torch.save({k: v for k, v in saved.items() if k != "model"}, last)
    assert "not a usable checkpoint" in error()
    torch.save([1, 2], last)
    assert "not a usable checkpoint" in error()
    last.write_bytes(good)
    with pytest.raises(UserError, match="holds a run already"):
        run_training(data, tmp_path / "a")
    assert last.read_bytes() == good and (tmp_path / "a/config.toml").read_text() == config


def test_a_finished_run_stays_finished_and_can_be_extended(data, tmp_path, capsys):
    run_training(data, tmp_path / "a", schedule="wsd", decay_steps=1)
    run_training(data, tmp_path / "a", schedule="wsd", decay_steps=1, resume="true")
    assert "is finished: 6 of 6 steps" in capsys.readouterr().out
    rows = run_training(data, tmp_path / "a", schedule="wsd", decay_steps=1, resume="true", max_steps=9)
    assert [r["step"] for r in rows] == list("123456789") and "max_steps: 6 -> 9" in capsys.readouterr().out
    state = torch.load(tmp_path / "a" / "last.pt", weights_only=True)["optimizer"]["state"]
    assert {int(s["step"]) for s in state.values()} == {9}


def test_resume_without_a_checkpoint_starts_fresh(data, tmp_path, capsys):
    rows = run_training(data, tmp_path / "a", resume="true", max_steps=2)
    assert len(rows) == 2 and "nothing to resume" in capsys.readouterr().out


@pytest.mark.parametrize("settings, message", [
    (dict(tokens_per_step=100), "--tokens_per_step=64 or --tokens_per_step=128"),
    (dict(tokens_per_step=10), "use --tokens_per_step=64 or another --micro_batch"),
    (dict(vocab_size=100), "vocabulary of 257, more than vocab_size=100"),
    (dict(data_dir="/nonexistent"), "no data in /nonexistent: prepare it with: python prepare_fineweb.py"),
    (dict(seq_len=10**6, tokens_per_step=2 * 10**6), "fewer than one window"),
    (dict(out_dir="/proc/nope"), "cannot write to the run folder"),
    (dict(device="cuda"), "no CUDA device"),
])
def test_training_mistakes_are_named(settings, message, data, tmp_path):
    if settings.get("device") == "cuda" and torch.cuda.is_available():
        return
    with pytest.raises(UserError, match=".*".join(message.split("*"))):
        run_training(data, tmp_path / "a", **settings)
    assert not (tmp_path / "a" / "last.pt").exists()


def spoil_weights(monkeypatch, step, value):
    """The optimizer's update number `step` leaves one weight at `value`."""
    update, calls = torch.optim.AdamW.step, []

    def spoiled(self, *args):
        update(self, *args)
        calls.append(1)
        if len(calls) == step:
            self.param_groups[0]["params"][0].data[0, 0] = value
    monkeypatch.setattr(torch.optim.AdamW, "step", spoiled)


def test_a_loss_that_is_not_finite_stops_the_run(data, tmp_path, monkeypatch):
    spoil_weights(monkeypatch, 3, math.nan)
    with pytest.raises(UserError, match="step 4: loss nan, gradient norm nan"):
        run_training(data, tmp_path / "a", eval_every=0)
    saved = torch.load(tmp_path / "a" / "last.pt", weights_only=True)
    assert saved["step"] == 2 and all(v.isfinite().all() for v in saved["model"].values())


def test_a_gradient_that_is_not_finite_stops_the_run(data, tmp_path, monkeypatch):
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def clipping(*args):
        calls.append(1)
        return clip(*args) * (math.inf if len(calls) == 4 else 1)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipping)
    with pytest.raises(UserError, match="step 4: loss [0-9.]+, gradient norm inf"):
        run_training(data, tmp_path / "a", eval_every=0)
    assert train.load_checkpoint(tmp_path / "a" / "last.pt")["step"] == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_the_run_goes_on(number, data, tmp_path):
    settings = dict(max_steps=100_000, eval_every=0, save_every=0)
    with started(HERE / "train.py", *flags(data, tmp_path / "a", **settings)) as run:
        run.wait(text="step:5/")
        run.send(number)
        assert run.wait() == 128 + number, run.said
        assert f"go on with: python {train.script('train.py')} {tmp_path / 'a'} --resume" in run.read("out"), run.said
    step = torch.load(tmp_path / "a" / "last.pt", weights_only=True)["step"]
    rows = read_log(tmp_path / "a")
    assert step == int(rows[-1]["step"]) >= 5
    assert len(run_training(data, tmp_path / "a", **settings | dict(max_steps=step + 2, resume="true"))) == step + 2


def test_no_compiler_means_one_warning_and_eager(data, tmp_path, capsys, monkeypatch):
    def broken(*a, **k):
        raise RuntimeError("no compiler here\nlong trace")
    monkeypatch.setattr(torch, "compile", broken)
    run_training(data, tmp_path / "a", compile="on", max_steps=2)
    out = capsys.readouterr().out
    assert out.count("warning: torch.compile") == 1 and "compile: off, no working compiler" in out


def test_missing_data_is_prepared_when_the_configuration_says_how(data, tmp_path):
    how = f"--source={data.parent / 'text'} --holdout=10 --workers=1"
    run_training(tmp_path / "made", tmp_path / "a", prepare=how, max_steps=1)
    assert (tmp_path / "made/meta.json").exists()
    (tmp_path / "a.toml").write_text('data_dir = "made"\nprepare = "--source=stdlib"\n')
    (tmp_path / "b.toml").write_text('data_dir = "other"\n')
    for more in (["--data_dir=mien"], [str(tmp_path / "b.toml")]):  # is not how other data, perhaps mistyped, are made
        assert train.load_config([str(tmp_path / "a.toml"), *more])[1].prepare == ""
    assert train.load_config([str(tmp_path / "a.toml"), "--seed=2"])[1].prepare == "--source=stdlib"


# ---------------------------------------------------------------------------------------------------------------------
# What users of such repositories run into

PREFIXES = ["", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module."]


@pytest.mark.parametrize("prefix", PREFIXES)
def test_a_run_goes_on_from_a_wrapped_model_and_saves_plain_names(prefix, data, tmp_path):
    """Twice in a row: what was loaded from a file with prefixes must not bring them into the next one."""
    run_training(data, tmp_path, max_steps=2)
    names = make("standard", n_layer=2).state_dict().keys()
    for steps in (3, 4):
        saved = torch.load(tmp_path / "last.pt", weights_only=True)
        assert saved["model"].keys() == names
        saved["model"] = {prefix + k: v for k, v in saved["model"].items()}
        torch.save(saved, tmp_path / "last.pt")
        assert len(run_training(data, tmp_path, resume="true", max_steps=steps)) == steps
    assert evaluation.load_model(tmp_path, torch.device("cpu"), torch.float64)[1]["step"] == 4


def test_compiling_changes_no_names_and_compiles_few_times(monkeypatch):
    """Layers share their graphs, also between training and evaluation: a deep model stays far from dynamo's limit."""
    from torch._dynamo.testing import CompileCounter
    for mode in ("attnres", "rd"):
        torch._dynamo.reset()
        model, idx, counter = make(mode, n_layer=10, route_impl="fused"), tokens(), CompileCounter()
        names = list(model.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(torch, "compile", functools.partial(torch.compile, backend=counter))
            assert train.compile_model(model, "on", torch.device("cpu"), print).startswith("on")
        for _ in range(2):
            gradients(model, idx)
            with torch.no_grad():
                loss_of(model, idx)
        # of the sublayers as before head and loss were compiled too: those have two, with and without gradients
        assert 2 < counter.frame_count - 2 <= 8 and list(model.state_dict()) == names


def test_nothing_asks_for_a_gpu_on_the_cpu(data, tmp_path, capsys, monkeypatch):
    import torch._dynamo  # looks through torch.cuda when it is imported, which may be by the training

    def asked(*args, **kwargs):
        raise AssertionError("CUDA was initialised")
    for name in ("_lazy_init", "set_device", "get_device_name", "is_bf16_supported"):
        monkeypatch.setattr(torch.cuda, name, asked)
    run_training(data, tmp_path / "a", dtype="auto", max_steps=1)
    assert re.search(r"device: cpu \(as asked\); dtype: (float32|bfloat16) \(.*here\)", capsys.readouterr().out)
    evaluation.main([str(tmp_path / "a"), "--device=cpu"])


def test_bfloat16_is_taken_where_the_gpu_has_it(monkeypatch):
    for has, dtype in ((True, torch.bfloat16), (False, torch.float32)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda has=has, **kwargs: has)
        assert train.choose_dtype("auto", torch.device("cuda"))[0] == dtype
    with pytest.raises(UserError, match="this GPU has no bfloat16; use --dtype=float32"):
        train.choose_dtype("bfloat16", torch.device("cuda"))


def test_an_old_pytorch_is_named(capsys, monkeypatch):
    for version, old in (("2.7.1+cu126", True), ("1.13.1", True), ("2.8.0a0+git", False), ("3.0", False)):
        monkeypatch.setattr(torch, "__version__", version)
        with pytest.raises(SystemExit) if old else contextlib.nullcontext():
            train.guard("train.py", lambda: None)
        assert capsys.readouterr().err == old * (f"train.py: PyTorch {version} is older than 2.8: pip install -r "
                                                 "requirements.txt\n")


def test_val_shards_may_be_missing_only_where_they_are_not_needed(tmp_path):
    shard(tmp_path / "d/x_train_0.bin", range(300))
    with pytest.raises(UserError, match="d holds no val shards .*prepare_fineweb.py .*without val with --eval_every=0"):
        run_training(tmp_path / "d", tmp_path / "a", vocab_size=300)
    assert len(run_training(tmp_path / "d", tmp_path / "a", vocab_size=300, eval_every=0)) == 6


def test_training_and_sampling_never_touch_the_network(data, tmp_path, monkeypatch):
    import socket

    def touched(*args, **kwargs):
        raise AssertionError("the network was used")
    monkeypatch.setattr(socket.socket, "connect", touched)
    monkeypatch.setattr(socket, "getaddrinfo", touched)
    run_training(data, tmp_path / "a", max_steps=1)
    evaluation.main([str(tmp_path / "a"), "--prompt=a", "--tokens=2", "--device=cpu"])


@pytest.mark.parametrize("world", [1, 2, 3])
def test_micro_steps_make_up_the_step_or_the_nearest_legal_numbers_are_named(world):
    cfg = GPTConfig(vocab_size=61, seq_len=32)
    for wanted in (1, 100, 192, 5000, 6144):
        t = train.TrainConfig(micro_batch=2, tokens_per_step=wanted)
        try:
            n = train.check_batch(cfg, t, world)
        except UserError as e:
            legal = [int(n) for n in re.findall(r"--tokens_per_step=(\d+)", str(e))]
            assert f"tokens_per_step={wanted} does not divide" in str(e) and legal and max(legal) > wanted
            n = [train.check_batch(cfg, dataclasses.replace(t, tokens_per_step=x), world) for x in legal]
            assert min(n) >= 1 and (len(n) == 1 or n[1] == n[0] + 1)
        else:
            assert n >= 1 and n * world * 2 * 32 == wanted
    t = train.TrainConfig(micro_batch=3, tokens_per_step=256, resume=True)  # of which the step cannot change
    with pytest.raises(UserError, match="use another --micro_batch or another number of processes"):
        train.check_batch(cfg, t, world)


def test_weights_that_are_not_finite_are_never_saved(data, tmp_path, monkeypatch):
    """The loss of the step is still good when the update spoils the weights, and a save may be due at once."""
    spoil_weights(monkeypatch, 4, math.inf)
    with pytest.raises(UserError, match="step 4: loss [0-9.]+, gradient norm .* weights that are not finite"):
        run_training(data, tmp_path / "a", eval_every=0)
    assert train.load_checkpoint(tmp_path / "a" / "last.pt")["step"] == 2


def test_a_kill_in_the_middle_of_a_save_leaves_the_old_checkpoint(data, tmp_path, monkeypatch):
    run_training(data, tmp_path, max_steps=2)
    good, save = (tmp_path / "last.pt").read_bytes(), torch.save

    def half(content, file):
        file.write(good[:1000])
        raise KeyboardInterrupt  # as good as a kill: nothing of save_checkpoint's own runs after it
    monkeypatch.setattr(torch, "save", half)
    with pytest.raises(KeyboardInterrupt):
        run_training(data, tmp_path, resume="true", max_steps=4, eval_every=0)
    assert (tmp_path / "last.pt").read_bytes() == good and (tmp_path / "last.pt.tmp").exists()
    monkeypatch.setattr(torch, "save", save)
    (tmp_path / "best.pt.tmp").write_bytes(b"half")
    assert len(run_training(data, tmp_path, resume="true", max_steps=4, eval_every=0)) == 4
    assert not list(tmp_path.glob("*.tmp"))


def test_resuming_keeps_nothing_of_the_file_in_memory(data, tmp_path, monkeypatch):
    import weakref
    load, step, seen, alive = train.load_checkpoint, torch.optim.AdamW.step, [], []

    def loading(path, **how):
        content = load(path, **how)
        assert {v.device.type for v in content["model"].values()} == {"cpu"}
        seen.extend(weakref.ref(v) for v in content["model"].values())
        return content

    def stepping(self, *args):
        alive.append(sum(r() is not None for r in seen))
        return step(self, *args)
    run_training(data, tmp_path, max_steps=2)
    monkeypatch.setattr(train, "load_checkpoint", loading)
    monkeypatch.setattr(torch.optim.AdamW, "step", stepping)
    run_training(data, tmp_path, max_steps=4, resume="true")
    assert seen and alive == [0, 0]


def test_the_optimizer_goes_on_with_the_settings_of_this_start(data, tmp_path, monkeypatch):
    """`fused` of a file from another device would put the step counters where this device's optimizer has none."""
    run_training(data, tmp_path, max_steps=2)
    saved, load = torch.load(tmp_path / "last.pt", weights_only=True), torch.optim.AdamW.load_state_dict
    for group in saved["optimizer"]["param_groups"]:
        group.update(fused=False, foreach=True, weight_decay=7.0)
    torch.save(saved, tmp_path / "last.pt")
    seen = []

    def loading(self, state):
        seen.extend((g["fused"], g["foreach"], g["weight_decay"]) for g in state["param_groups"])
        load(self, state)
        assert all(v.device == p.device for p, s in self.state.items() for v in s.values())
    monkeypatch.setattr(torch.optim.AdamW, "load_state_dict", loading)
    run_training(data, tmp_path, max_steps=3, resume="true")
    assert seen == [(True, None, 0.1), (True, None, 0.0)]


def test_more_steps_than_data_begin_another_epoch(tmp_path, capsys):
    """Also where a run is resumed in the last windows of one: the same batches as in one go."""
    shard(tmp_path / "d/x_train_0.bin", np.random.default_rng(0).integers(300, size=700))  # 21 windows, 8 in a step
    settings = dict(vocab_size=300, eval_every=0, max_steps=9, lr=1e-3)
    rows = run_training(tmp_path / "d", tmp_path / "whole", **settings)
    assert len(rows) == 9 and len({r["crc"] for r in rows}) == 9 and "3.43 epochs" in capsys.readouterr().out
    for step in (2, 5):
        run_training(tmp_path / "d", tmp_path / str(step), **settings | dict(max_steps=step))
        again = run_training(tmp_path / "d", tmp_path / str(step), **settings | dict(resume="true"))
        assert [r["crc"] for r in again] == [r["crc"] for r in rows]


@pytest.mark.parametrize("device, backend", [("cpu", "gloo"), ("cuda", "nccl"), ("mps", "gloo")])
def test_the_device_decides_the_backend(device, backend, monkeypatch):
    """And sums of numbers go through memory that has float64: a lone process under torchrun takes part in them too."""
    started, dist = [], train.dist
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **more: started.append(backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    monkeypatch.setattr(dist, "get_world_size", lambda: 1)
    for name in ("WORLD_SIZE", "RANK"):  # left behind by something else: still a run of its own
        monkeypatch.setenv(name, "1")
    assert train.start_processes(torch.device(device)) == (0, 1) and not started
    monkeypatch.setattr(train, "launched", lambda: True)
    monkeypatch.setenv("RANK", "0")
    assert train.start_processes(torch.device(device)) == (0, 1) and started == [backend]
    if device != "cuda":
        monkeypatch.setattr(dist, "is_initialized", lambda: True)
        monkeypatch.setattr(dist, "all_reduce", lambda total: None)
        assert train.sum_over_ranks([1.0, 2**40 + 1], torch.device(device)) == [1.0, 2**40 + 1]


def test_the_other_processes_wait_for_hours_and_hear_of_mistakes(monkeypatch):
    """What one process does for all, such as preparing the data, takes longer than the usual time limits."""
    groups, told = [], []
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(train.dist, "new_group", lambda **settings: groups.append(settings))
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train.dist, "broadcast_object_list", lambda values, group: told.extend(values))

    def mistaken():
        raise UserError("no such folder")
    with pytest.raises(UserError, match="no such folder"):
        train.on_first_rank(mistaken)
    assert told == ["no such folder"] and groups[0]["backend"] == "gloo"
    assert groups[0]["timeout"].total_seconds() > 24 * 3600


def test_one_clip_of_the_gradient_of_the_whole_step(data, tmp_path):
    """With every step clipped, runs differ unless the sum over micro-steps, and nothing else, is what is clipped."""
    runs = [run_training(data, tmp_path / str(n), micro_batch=n, grad_clip=0.05, eval_every=0) for n in (1, 4, 8)]
    for rows in runs:
        for a, b in zip(rows, runs[0]):
            assert float(a["grad_norm"]) > 0.1
            for key in ("loss", "grad_norm"):
                assert float(a[key]) == pytest.approx(float(b[key]), abs=1e-10)


def test_the_optimizer_gets_clipped_gradients_and_the_rates_of_its_groups(data, tmp_path, monkeypatch):
    seen, update = [], torch.optim.AdamW.step

    def looking(self, *args):
        norm = torch.cat([p.grad.flatten() for g in self.param_groups for p in g["params"]]).norm().item()
        seen.append((norm, {g["name"]: g["lr"] for g in self.param_groups}))
        return update(self, *args)
    monkeypatch.setattr(torch.optim.AdamW, "step", looking)
    rows = run_training(data, tmp_path / "a", residual_mode="attnres", grad_clip=0.05, route_lr_mult=3.0, max_steps=3,
                        eval_every=0)
    assert len(seen) == 3
    for (norm, rates), row in zip(seen, [r for r in rows if r["step"] != "0"]):
        lr = float(row["lr"])
        assert float(row["grad_norm"]) > 0.05 and norm == pytest.approx(0.05, rel=1e-4)
        assert rates == pytest.approx(dict(matrix=lr, plain=lr, residual=3 * lr), rel=1e-3)


TWO_PROCESSES = """
import hashlib, json, os, signal, sys
sys.path.insert(0, HERE)
import train
rank, clip, forward, models = int(os.environ["RANK"]), train.torch.nn.utils.clip_grad_norm_, train.GPT.forward, []


def run(argv, at_3=lambda: None, factor=1.0):
    calls = []
    def clipping(*args):
        calls.append(1)
        if rank and len(calls) == 3:
            at_3()
        return clip(*args)
    def scaled(self, *args):
        models[:] = [self]
        logits, loss = forward(self, *args)
        return logits, loss * factor if rank and loss is not None and len(calls) == 2 else loss
    train.torch.nn.utils.clip_grad_norm_, train.GPT.forward = clipping, scaled
    try:
        train.train(*train.load_config(argv))
    except (train.UserError, SystemExit) as e:
        return str(e)

clipped, spoilt, stopped, failing = ARGVS
run(clipped)
found = {"weights": hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in models[0].parameters())).hexdigest()}
found["spoilt"] = run(spoilt, factor=float("nan"))
found["stopped"] = run(stopped, at_3=lambda: os.kill(os.getpid(), signal.SIGTERM))
with open(f"{OUT}/{rank}.json", "w", encoding="utf-8") as f:
    json.dump(found, f)
def fail():
    train.time.sleep = lambda seconds: None
    raise RuntimeError("rank one fails")
train.guard("train.py", lambda: run(failing, at_3=fail))
"""


def test_two_processes_clip_alike_and_stop_together(data, tmp_path):
    """One clip of the averaged gradient; a bad loss, a signal or an error of one process ends both."""
    settings = dict(clipped=dict(grad_clip=0.05, max_steps=4), spoilt={}, stopped=dict(max_steps=10**5, save_every=0),
                    failing=dict(max_steps=10**5))
    argvs = [flags(data, tmp_path / "runs" / name, eval_every=0, **s) for name, s in settings.items()]
    driver = tmp_path / "driver.py"
    driver.write_text(f"HERE, OUT, ARGVS = {str(HERE)!r}, {str(tmp_path)!r}, {argvs!r}\n{TWO_PROCESSES}", "utf-8")
    result = run_script(driver, processes=2, code=1)
    assert "rank one fails" in result.stderr and "destroy_process_group" not in result.stderr, result.stderr
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    assert zero == one and zero["stopped"] == "143" and "step 3: loss nan, gradient norm nan" in zero["spoilt"]
    for name, step in (("spoilt", 2), ("stopped", 3)):
        saved = torch.load(tmp_path / "runs" / name / "last.pt", weights_only=True)
        assert saved["step"] == step and saved["model"].keys() == make("standard", n_layer=2).state_dict().keys()
    for a, b in zip(read_log(tmp_path / "runs/clipped"), run_training(data, tmp_path / "one", eval_every=0,
                                                                      **settings["clipped"]), strict=True):
        assert float(a["grad_norm"]) > 0.1 and all(
            float(a[k]) == pytest.approx(float(b[k]), abs=1e-10) for k in ("loss", "grad_norm"))


def test_a_second_interrupt_ends_the_run_at_once(monkeypatch):
    monkeypatch.setattr(signal, "signal", lambda *args: None)
    monkeypatch.setattr(os, "_exit", sys.exit)
    for numbers, code in (([signal.SIGINT, signal.SIGINT], 130), ([signal.SIGINT, signal.SIGTERM], None)):
        stop = train.StopSignal()
        stop.handle(numbers[0], None)
        assert stop.number == signal.SIGINT
        with pytest.raises(SystemExit, match="130") if code else contextlib.nullcontext():
            stop.handle(numbers[1], None)


def test_counts_of_tokens_have_64_bits(tmp_path, monkeypatch):
    for i in range(3):
        shard(tmp_path / f"x_train_{i}.bin", [1])
    monkeypatch.setattr(train, "read_header", lambda path: (np.int32(2**31 - 1), np.dtype("<u2")))
    stream = train.Tokens(tmp_path, "train", 1024, 100)
    assert stream.total == 3 * (2**31 - 1) and stream.windows == (stream.total - 1) // 1024
    order = stream.order(1, 10**6, 488)  # step a million of half a million tokens
    assert order.max() < stream.total and len(set(order.tolist())) == 488


@pytest.mark.parametrize("kills", [pytest.param(3, marks=pytest.mark.slow), pytest.param(50, marks=pytest.mark.long)])
def test_training_killed_at_any_moment_ends_in_the_same_weights(kills, data, tmp_path):
    rng, inside = np.random.default_rng(kills), 0
    settings = TINY_RUN | dict(max_steps=24 * kills, save_every=1, eval_every=7, residual_mode="attnres",
                               resume="true")

    def start(out):
        return started(HERE / "train.py", *flags(data, out, **settings), fresh=True)
    with start(tmp_path / "whole") as run:
        assert run.wait(900) == 0, run.said
    for kill in range(kills + 1):
        with start(tmp_path / "killed") as run:
            if kill < kills:
                if kill % 5 == 2:  # while it starts
                    time.sleep(rng.uniform(0.2, 1))
                else:  # so many steps after the start, and anywhere within the step and its saves
                    wanted = rng.integers(1, 12)
                    while run.code() is None and run.read("out").count("\nstep:") < wanted:
                        time.sleep(0.001)
                    time.sleep(rng.uniform(0, 0.02))
                run.send(signal.SIGKILL)
            assert run.wait(900) == (-signal.SIGKILL if kill < kills else 0), run.said
        inside += any((tmp_path / "killed").glob("*.tmp"))
        for path in (tmp_path / "killed").glob("*.pt"):
            train.load_checkpoint(path)
    print(f"{kills} kills, {inside} of them while a file was written")
    assert same_weights(tmp_path / "killed/last.pt", tmp_path / "whole/last.pt")
    assert same_weights(tmp_path / "killed/best.pt", tmp_path / "whole/best.pt")
    rows = read_log(tmp_path / "killed")
    assert [int(r["step"]) for r in rows] == list(range(1, 24 * kills + 1))
    assert measured(rows) == measured(read_log(tmp_path / "whole"))
    assert not list(tmp_path.glob("killed/*.tmp"))


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can limit a running process (prlimit)")
@pytest.mark.parametrize("what", ["last.pt", "log.csv"])
def test_a_disk_that_fills_up_keeps_the_last_checkpoint_and_says_so(what, data, tmp_path):
    """The limit on the size of a file falls on a running process, to half a checkpoint or just above the log."""
    import resource
    out, settings = tmp_path / "a", TINY_RUN | dict(max_steps=400, eval_every=0, save_every=5)
    with started(HERE / "train.py", *flags(data, out, **settings), out=os.devnull) as run:
        run.wait(text="\n7,", where=out / "log.csv")
        size = (out / what).stat().st_size
        size = size // 2 if what == "last.pt" else size + 150
        resource.prlimit(run.pid, resource.RLIMIT_FSIZE, (size, size))
        assert run.wait() == 1, run.said
        assert re.fullmatch(f"train.py: cannot write {out / what} .*File too large.*\n", run.read("err")), run.said
    assert train.load_checkpoint(out / "last.pt")["step"] >= 5 and not list(out.glob("*.tmp"))
    step = train.load_checkpoint(out / "last.pt")["step"]
    rows = run_training(data, out, **settings | dict(max_steps=step + 2, resume="true"))
    assert [int(r["step"]) for r in rows] == list(range(1, step + 3))


# Odd users


def test_folders_may_have_any_name_and_data_may_be_read_only(data, tmp_path, capsys):
    import shutil
    source, out = tmp_path / "Daten ☃ 'a' $b", tmp_path / "ein Lauf; \"é\" --x"
    shutil.copytree(data, source)
    for path in (*source.iterdir(), source):
        path.chmod(path.stat().st_mode & ~0o222)

    def state():  # root can write all the same, so what is there is compared
        return {p.name: (p.stat().st_mtime_ns, p.stat().st_size) for p in (source, *source.iterdir())}
    before = state()
    run_training(source, out, dtype="float32")
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert shlex.split(line.split("evaluate with: ")[1]) == ["python", "eval.py", str(out)]
    evaluation.main([str(out), "--json", "--device=cpu"])
    evaluation.main([str(out), "--prompt=é", "--tokens=3", "--json", "--device=cpu"])
    loss, texts = map(json.loads, capsys.readouterr().out.splitlines())
    assert loss["run"] == str(out) and texts[0].startswith("é")
    _, t = train.load_config([str(out / "config.toml")])
    assert (t.data_dir, t.out_dir) == (str(source), str(out))
    run_training(source, out, dtype="float32", resume="true", max_steps=7)
    assert state() == before
    source.chmod(0o755)


@pytest.mark.parametrize("options", [  # all of PyTorch is compiled anew for python -O
    [], pytest.param(["-O"], marks=pytest.mark.long)], ids=["plain", "optimized"])
def test_two_runs_at_a_time_do_not_disturb_each_other(options, data, tmp_path):
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(started(*more, HERE / "train.py", *flags(data, tmp_path / name, dtype="float32"),
                                            fresh=bool(options))) for name, more in (("a", []), ("b", options))]
        for run in runs:
            assert run.wait() == 0, run.said
    assert same_weights(tmp_path / "a/last.pt", tmp_path / "b/last.pt")
    assert measured(read_log(tmp_path / "a")) == measured(read_log(tmp_path / "b"))


@pytest.mark.parametrize("lacking", [pytest.param("triton and a compiler", marks=pytest.mark.slow), "kernels.py"])
def test_what_is_missing_is_said_and_the_rest_works(lacking, data, tmp_path):
    code, place = tmp_path / "code", {"PATH": "/nonexistent", "CC": "/nonexistent/cc", "CXX": "/nonexistent/cc"}
    code.mkdir()
    for path in HERE.glob("*.py"):
        shutil.copy(path, code)
    block = "sys.modules['triton'] = None" if lacking != "kernels.py" else (code / "kernels.py").unlink() or ""
    forget = "for name in 'model kernels train eval prepare_fineweb'.split(): sys.modules.pop(name, None)"
    argv, fused = (flags(data, tmp_path / name, residual_mode="attnres", dtype="float32", max_steps=2,
                         compile="on" if block else "off") for name in ("run", "fused"))
    driver = code / "driver.py"
    driver.write_text(f"import sys\n{forget}\n{block}\nimport train\ntrain.main({argv!r})\nimport eval\n"
                      f"eval.main([{str(tmp_path / 'run')!r}])\n"
                      f"eval.main([{str(tmp_path / 'run')!r}, '--prompt=a', '--tokens=3'])\n"
                      f"train.main([*{fused!r}, '--route_impl=fused'])\n", "utf-8")
    cache = tmp_path / "cache"  # a graph that was compiled earlier needs no compiler
    result = run_script(driver, code=None, fresh=bool(block), TORCHINDUCTOR_CACHE_DIR=str(cache),
                        **place if block else {})
    assert "step:2/2" in result.stdout and ", perplexity " in result.stdout, result.stderr
    if block:
        assert result.returncode == 0 and "done: 2 steps" in result.stdout.splitlines()[-1]
        assert result.stdout.count("warning: torch.compile does not work here") == 2  # once in each training
        assert "routing: fused" in result.stdout
    else:
        assert "routing: reference (kernels.py cannot be imported (No module named 'kernels'))" in result.stdout
        error = result.stderr.splitlines()[-1]
        assert result.returncode == 1 and error.startswith("train.py: route_impl=fused: kernels.py cannot be imported")


def test_a_corpus_of_one_document_trains(tmp_path):
    (tmp_path / "one.jsonl").write_bytes(b'\xef\xbb\xbf{"text": "' + b"one document " * 40 + b'"}\r\n')
    meta = prepare(tmp_path / "one.jsonl", tmp_path / "d", *TRAIN_ONLY)
    assert documents(tmp_path / "d", meta, "train") == ["one document " * 40]
    with pytest.raises(UserError, match="holds no val shards.*--eval_every=0"):
        run_training(tmp_path / "d", tmp_path / "a")
    rows = run_training(tmp_path / "d", tmp_path / "b", eval_every=0, max_steps=20)
    assert float(rows[-1]["loss"]) < float(rows[0]["loss"]) - 1


def test_when_one_process_dies_the_others_stop_and_say_why(data, tmp_path):
    argv = flags(data, tmp_path / "a", max_steps=100_000, eval_every=0, save_every=5)
    driver = tmp_path / "driver.py"  # rank 1 leaves without a word, as if the system had killed it
    driver.write_text(f"""import os, sys
sys.path.insert(0, {str(HERE)!r})
import train
order = train.Tokens.order
def dying(self, seed, step, size):
    if step == 13 and os.environ["RANK"] == "1":
        os.kill(os.getpid(), 9)
    return order(self, seed, step, size)
train.Tokens.order = dying
train.main({argv!r})
""", "utf-8")
    result = run_script(driver, processes=2, code=1, fresh=True)  # and does not wait for ever
    assert "device: cpu" in result.stdout and "step:12/" in result.stdout
    assert "train.py: another process of this run has stopped, so this one stops too" in result.stderr
    assert train.load_checkpoint(tmp_path / "a/last.pt")["step"] == 10


@pytest.mark.parametrize("mode", MODES)
def test_a_seed_gives_one_run_and_evaluation_does_not_depend_on_the_batch(mode, data, tmp_path):
    runs = [run_training(data, tmp_path / name, residual_mode=mode, dtype="float32", max_steps=3) for name in "ab"]
    assert measured(runs[0]) == measured(runs[1]) and same_weights(tmp_path / "a/last.pt", tmp_path / "b/last.pt")
    device, val = torch.device("cpu"), train.Tokens(data, "val", 32, 257)
    model = evaluation.load_model(tmp_path / "a", device, torch.float64)[0]
    losses = [train.evaluate(model, val, batch, device, torch.float64, limit=1001) for batch in (1, 7, 10**18)]
    assert {count for _, count in losses} == {1001} and max(losses)[0] - min(losses)[0] < 1e-12


@pytest.mark.long
def test_long_runs_keep_their_memory_and_their_speed(data, tmp_path, steps=2000):
    settings = dict(residual_mode="attnres", dtype="float32", n_layer=4, n_embd=64, n_ffn=128, max_steps=steps,
                    eval_every=100, save_every=100)
    run_script(HERE / "train.py", *flags(data, tmp_path / "a", **settings), limit=3600)
    rows = read_log(tmp_path / "a")
    memory, ms = ([float(r[name]) for r in rows] for name in ("mem_mb", "ms"))
    assert memory[-1] < 1.05 * memory[steps // 10 - 1]  # mem_mb is the peak so far
    first, last = (np.median(part) for part in (ms[steps // 100:][:steps // 10], ms[-steps // 10:]))
    assert last < 1.1 * first, (first, last)


@pytest.mark.parametrize("mode", MODES)
def test_a_model_is_filled_one_parameter_at_a_time_with_the_weights_of_its_seed(mode):
    """Built without content: no process holds a second copy on its host."""
    cfg = GPTConfig(**SMALL | dict(residual_mode=mode))
    whole = train.build(cfg)
    whole.init_weights(5)
    model = train.build(cfg, "meta")
    assert all(p.is_meta for p in model.parameters())
    model = train.fill(model, torch.device("cpu"), 5)
    assert all(torch.equal(p, whole.state_dict()[name]) for name, p in model.state_dict().items())
