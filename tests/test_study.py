"""The study and the benchmark."""
import contextlib
import functools
import json
import math
import re
import shutil
import signal
import types

import numpy as np
import pytest
import torch

import eval as evaluation
import hub
import train
from helpers import HERE, assert_close, loss_of, make, run_training, tokens
from model import GPTConfig
from prepare_fineweb import UserError
from study import bench, cell, plan, run, stats, table
from train import Tokens


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


def test_students_t_is_its_integral():
    for df in (1, 2, 3, 4, 7, 30):
        x = np.linspace(-2.5, 2.5, 200_001)
        density = math.gamma((df + 1) / 2) / math.gamma(df / 2) / math.sqrt(df * math.pi) * (1 + x * x / df) ** (
            -(df + 1) / 2)
        inside = ((density[1:] + density[:-1]) / 2 * np.diff(x)).sum()
        assert stats.t_inside(2.5, df) == pytest.approx(inside, abs=1e-9)
        assert stats.t_quantile(inside, df) == pytest.approx(2.5, abs=1e-7)


def test_paired_differences():
    base, mine = {1: 2.0, 2: 2.2, 3: 2.1, 9: 5.0}, {1: 1.9, 2: 1.9, 3: 2.0, 4: 0.0}
    d = stats.paired(mine, base)  # only equal seeds are pairs
    x = np.array([-0.1, -0.3, -0.1])
    assert (d.mean, d.error) == pytest.approx((x.mean(), x.std(ddof=1) / 3**0.5)) and (d.won, d.n) == (3, 3)
    assert max(d.interval(1 - d.p)) == pytest.approx(0, abs=1e-9)  # p is where the interval touches 0
    one = stats.paired({1: 1.9}, base)
    assert math.isnan(one.p) and one.interval() == (-math.inf, math.inf) and stats.paired({5: 1.0}, base) is None


def test_holm_corrects_for_the_number_of_tests():
    assert hub.holm(dict(a=0.01, b=0.04, c=0.03)) == pytest.approx(dict(a=0.03, b=0.06, c=0.06))
    assert hub.holm(dict(a=0.01, b=0.04), 8) == pytest.approx(dict(a=0.08, b=0.28))
    assert hub.holm(dict(a=0.6, b=0.02))["a"] == 0.6 and hub.holm(dict(a=0.9, b=0.8))["a"] == 1
    assert math.isnan(hub.holm(dict(a=math.nan, b=0.02))["a"]) and hub.holm(dict(a=math.nan, b=0.02))["b"] == 0.02


def test_each_verdict_is_said_where_its_rule_holds():
    def d(mean, spread=0.004, n=4):
        return stats.Paired(mean, spread, n, n if mean < 0 else 0)
    for p, args, words in (
            (0.01, dict(main=d(-0.03)), ["gain"]), (0.01, dict(main=d(0.03)), ["worse"]),
            (0.01, dict(main=d(0.005, 0.001)), ["worse"]), (0.01, dict(main=d(-0.005, 0.001)), ["gain"]),
            (0.4, dict(main=d(-0.001)), ["no difference"]), (0.4, dict(main=d(-0.008)), ["cannot tell"]),
            (0.4, dict(main=d(-0.001, 0.03)), ["cannot tell"]),
            (0.01, dict(main=d(-0.03), first=d(-0.05), last=d(-0.024)), ["gain", "transient"]),
            (0.01, dict(main=d(-0.03), first=d(-0.05), last=d(-0.026)), ["gain"]),
            (0.01, dict(main=d(-0.03), first=d(-0.01), last=d(-0.009)), ["gain", "transient"]),
            (0.01, dict(main=d(-0.03), papers=d(-0.07)), ["gain", "due to the start"]),
            (0.01, dict(main=d(-0.03), papers=d(-0.05)), ["gain"]),
            (0.4, dict(main=d(-0.001), papers=d(-0.05)), ["no difference"]),
            (0.01, dict(main=d(-0.03), static=d(-0.02)), ["gain", "attention helps"]),
            (0.01, dict(main=d(-0.03), static=d(-0.004)), ["gain"]),
            (0.01, dict(main=d(-0.03), moved=0.1), ["gain", "routes still moving"])):
        assert stats.verdict(p=p, **args) == words, (p, args)
    assert stats.sentence("rd", "standard", d(-0.021), 0.01).startswith("rd is better than standard by 0.021 nat (0.01")
    assert "4 of 4 pairs" in stats.sentence("rd", "standard", d(0.021), 0.01)
    assert "do not differ" in stats.sentence("rd", "standard", d(-0.001), 0.4)
    assert "cannot be told apart" in stats.sentence("rd", "standard", d(-0.001, 0.03), 0.4)


def test_documents_are_drawn_anew_with_their_tokens():
    mine = [(10, 1.0), (20, 2.0), (30, 1.5), (5, 1.0), (9, 3.0)]
    assert stats.over_documents([(mine, [(n, x + 0.1) for n, x in mine])]) == pytest.approx((-0.1, -0.1))
    low, high = stats.over_documents([([(10, 1.0)] * 4 + [(10, 2.0)], [(10, 1.0)] * 5)])
    assert low == 0 and 0.2 < high <= 0.8
    assert stats.over_documents([]) is None and stats.over_documents([([], [])]) is None


def test_tokens_for_a_loss_are_never_extrapolated():
    curve = [(100, 4.0), (200, 3.0), (400, 2.0)]
    for loss, n in ((2.0, 400), (2.5, 200 * 2**0.5), (3.0, 200), (1.9, None), (4.1, None)):
        assert stats.tokens_for(curve, loss) == (n if n is None else pytest.approx(n))


def test_n_grams_are_counted_as_their_definition_says(data):
    train_tokens, val = Tokens(data, "train", 32, 257), Tokens(data, "val", 32, 257)
    starts = np.arange(0, 40 * 32, 32)
    rows, text = train_tokens.at(starts).tolist(), val.read(0, 400).tolist()
    val.read, val.total = lambda first, n: np.array(text[first:first + n]), len(text)

    def count(k):
        table = {}
        for row in rows:
            for i in range(max(k, 1), len(row)):
                followers = table.setdefault(tuple(row[i - k:i]), {})
                followers[row[i]] = followers.get(row[i], 0) + 1
        return table
    tables = [count(k) for k in range(4)]

    def p(i, k):
        shorter = p(i, k - 1) if k else 1 / 257
        followers = tables[k].get(tuple(text[i - k:i])) if i >= k else None
        if not followers:
            return shorter
        return (followers.get(text[i], 0) + len(followers) * shorter) / (sum(followers.values()) + len(followers))
    expected = [np.mean([-math.log(p(i, k)) for i in range(1, len(text))]) for k in range(4)]
    assert evaluation.ngram_losses(train_tokens, val, starts[::-1], 4) == pytest.approx(expected, rel=1e-12)


def test_n_grams_of_what_a_run_has_seen(data, tmp_path, capsys):
    run_training(data, tmp_path / "run", max_steps=3, eval_every=0)
    capsys.readouterr()
    evaluation.main([str(tmp_path / "run"), "--ngram=3", "--json"])
    found = json.loads(capsys.readouterr().out)
    saved = train.load_checkpoint(tmp_path / "run/last.pt")
    T, V = saved["cfg"].seq_len, saved["cfg"].vocab_size
    seen, val = Tokens(data, "train", T, V), Tokens(data, "val", T, V)
    starts = np.concatenate([seen.order(saved["config"]["seed"], step, saved["tokens"] // 3 // T) for step in range(3)])
    assert found["losses"] == pytest.approx(evaluation.ngram_losses(seen, val, starts, 3))
    assert found["counted"] == saved["tokens"]
    for argv, message in ((["--ngram=0"], "--ngram=0: must be 1 to 10"), (["--ngram=2", "--routing"], "no effect")):
        with pytest.raises(SystemExit):
            evaluation.main([str(tmp_path / "run"), *argv])
        assert message in capsys.readouterr().err


CONFIG = """
data_dir = "{data}"
n_layer = 2
n_head = 2
n_embd = 32
n_ffn = 32
seq_len = 32
micro_batch = 4
tokens_per_step = 128
lr = 4e-3
min_lr = 0.0
warmup_steps = 2
device = "cpu"
dtype = "float32"
eval_every = 0
save_every = 3
[study]
steps = [5, 10]
seeds = 2
{more}
[arm.standard]
[arm.attnres_block]
"""


@pytest.fixture
def small(data, tmp_path):
    """(path of a study's configuration, function that writes it anew with more in [study])"""
    path = tmp_path / "small.toml"

    def write(more="", **changes):
        text = CONFIG.format(data=data, more=more)
        for old, new in changes.items():
            text = text.replace(old, new)
        path.write_text(text, encoding="utf-8")
    write()
    before = {n: signal.getsignal(n) for n in (*signal.Signals,) if n not in (signal.SIGKILL, signal.SIGSTOP)}
    yield path, write
    for number, handler in before.items():  # which training in this process has replaced
        if handler is not None and signal.getsignal(number) != handler:
            signal.signal(number, handler)


def test_a_branch_is_the_run_of_its_budget(small, tmp_path):
    """Bit for bit: the trunk's copies end where runs of 5 and of 10 steps end that were never cut."""
    path, _ = small
    _, arms, _ = plan.read_config(path, run.parse_args([str(path)]))
    keys = arms["attnres_block"].keys | dict(seed=3, max_steps=400)  # as a configuration of train.py has it
    rows = [cell.finish(keys, tmp_path / "cell", steps) for steps in (5, 10)]
    for steps, row in zip((5, 10), rows):
        straight = tmp_path / f"straight{steps}"
        train.train(*cell.configure(keys | dict(max_steps=steps), out_dir=straight, schedule="wsd",
                                    decay_steps=steps // 5))
        saved, mine = (train.load_checkpoint(folder / "last.pt")["model"] for folder in (
            straight, tmp_path / "cell" / str(steps)))
        assert saved.keys() == mine.keys() and all(torch.equal(saved[k], mine[k]) for k in saved)
        device, dtype = torch.device("cpu"), torch.float32
        model, checkpoint, _ = evaluation.load_model(straight, device, dtype)
        val = Tokens(checkpoint["config"]["data_dir"], "val", 32, 257)
        assert float(row["loss"]) == pytest.approx(train.evaluate(model, val, 4, device, dtype)[0], abs=2e-6)
        parts = [[float(x) for x in d.split(":")] for d in row["documents"].split()]
        assert sum(n for n, _ in parts) == val.total - 1
        assert sum(n * x for n, x in parts) / (val.total - 1) == pytest.approx(float(row["loss"]), abs=1e-4)
        assert row["added"] == 2 * 2 * 32 and float(row["moved"]) > 0
    assert cell.finish(keys, tmp_path / "cell", 10)["loss"] == rows[1]["loss"]  # nothing is trained twice
    with pytest.raises(UserError, match="is at step 8, past step 4"):
        cell.finish(keys, tmp_path / "cell", 5) if shutil.rmtree(tmp_path / "cell/5") is None else None


def row_of(loss, arms, c, **more):
    """A row as a finished run leaves it."""
    return dict.fromkeys(plan.COLUMNS, "") | dict(
        loss=str(loss), tokens=str(128 * c.steps), added="8", moved="0.05", settings=arms[c.arm].settings, data="x",
        documents="") | more


def test_every_arm_gets_as_many_trials_and_every_run_comes_once(small):
    path, write = small
    write("trials = 5\nlong_steps = 20\nlong_seeds = 1")
    study, arms, _ = plan.read_config(path, run.parse_args([str(path), "--modes=attnres_block,rd,mhar"]))
    for slope in (-1, 0, 1):  # the best rate at the lower edge, inside, at the upper edge
        rows, order = {}, []
        while cells := plan.wanted(study, arms, rows):
            c = cells[0]
            assert c not in rows and len({x.trunk for x in cells}) == len(cells)
            loss = 3 + abs(math.log2(c.lr / 4e-3) + 2 * slope) + 0.1 * list(arms).index(c.arm) + 0.01 * c.mult
            rows[c] = row_of(loss, arms, c)
            order.append(c)
        tried = {n: plan.trials(study, rows, n) for n in arms}
        assert {len(x) for x in tried.values()} == {5}
        assert {m for _, m in tried["rd"]} == ({1, 4, 16} if slope == 0 else {1, 4}) and {
            m for _, m in tried["standard"]} == {1}
        runs = [c for c in order if c.seed != 101]
        assert [c.steps for c in runs] == sorted(c.steps for c in runs)  # a cheap answer comes first
        assert len(runs) == 4 * 2 * 2 + 3 and {c.arm for c in runs[-3:]} == {"standard", "attnres_block", "rd"}
        assert all(c.steps == 20 for c in runs[-3:]) and len({c.lr for c in runs if c.arm == "rd"}) == 1
        assert not plan.left_to_train(study, arms, rows)


def test_every_arm_has_its_shortest_runs_before_any_has_longer_ones(small):
    path, write = small
    write("trials = 3\nlong_steps = 20\nlong_seeds = 1", **{
        "[arm.attnres_block]": "[arm.attnres_block]\n[arm.mhar]\ngroup = 2\nseeds = 1"})
    study, arms, _ = plan.read_config(path, run.parse_args([str(path)]))
    rows, order = {}, []
    while cells := plan.wanted(study, arms, rows):
        order.append((cells[0].arm, cells[0].steps))
        rows[cells[0]] = row_of(3 + cells[0].lr, arms, cells[0])
    two = ["standard", "attnres_block"]
    assert order == [(arm, steps) for arms, steps in (
        ([two[0]] * 3 + [two[1]] * 3 + two * 2 + ["mhar"] * 4, 5), (two * 2, 10), (two, 20), (["mhar"], 10))
        for arm in arms]


def test_verdicts_follow_from_the_rows(small):
    """Known effects are put into the rows: each arm is compared with its own base, controls do not count in Holm's."""
    path, write = small
    write('long_steps = 40\nlong_seeds = 3\nseeds = 4\npapers = "+old"\nstatic = "mhar"', **{
        "seeds = 2\n": "", "[arm.attnres_block]": "[arm.attnres_block]\n[arm.rd]\n[arm.mhar]" + "".join(
            f'\n[arm."{n}+old"]\nresidual_mode = "{n}"\ninit = "gpt2"\nbase = "{base}"'
            for n, base in (("standard", "standard"), ("attnres_block", "standard+old")))})
    study, arms, _ = plan.read_config(path, run.parse_args([str(path)]))
    effect = {"attnres_block": -0.03, "rd": -0.02, "mhar": -0.001, "attnres_block+old": -0.10, "standard+old": 0.1}
    rows, noise = {}, np.random.default_rng(0)
    while cells := plan.wanted(study, arms, rows):
        c = cells[0]
        late = 0.3 if c.arm == "rd" and c.steps == 40 else 1
        base = 3 - 0.5 * math.log(c.steps) + 0.1 * c.seed + effect.get(c.arm, 0) * late
        base += effect["standard+old"] if c.arm == "attnres_block+old" else 0
        rows[c] = row_of(base + noise.normal(0, 0.001), arms, c)
    results = table.compare(study, arms, rows)
    assert list(results)[0] == "standard" and not results["standard"]["words"]
    assert {n: r["words"][0] for n, r in results.items() if r["words"]} == {
        "attnres_block": "gain", "rd": "gain", "mhar": "no difference", "attnres_block+old": "gain",
        "standard+old": "worse"}
    assert set(results["attnres_block"]["words"]) == {"gain", "due to the start", "attention helps"}
    assert "transient" in results["rd"]["words"]
    single = {n: r["diffs"][10].p for n, r in results.items() if r["diffs"]}
    corrected = hub.holm({n: single[n] for n in ("attnres_block", "rd", "mhar")})
    assert {n: results[n]["p"] for n in single} == single | corrected and corrected["rd"] > single["rd"]
    assert results["attnres_block"]["gain"] == pytest.approx([math.exp(0.03 / 0.5)] * 3, abs=0.01)
    fewer = {c: r for c, r in rows.items() if (c.arm, c.seed) not in (("rd", 4), ("standard", 1))}
    part = table.compare(study, arms, fewer)  # rd has pairs 2 and 3, whose base is not the mean over seeds 2 to 4
    assert part["rd"]["words"] == [] and math.isnan(part["rd"]["p"]) and part["rd"]["diffs"][10].n == 2
    assert part["rd"]["gain"][0] == pytest.approx(math.exp(0.02 / 0.5), abs=0.01)
    said = "\n".join(table.sentences(study, part, {}) + table.sentences(study, results, {}))
    assert re.search(r"^rd: -0.0.. nat against standard .* in 2 of 4 pairs; no verdict yet\.$", said, re.M), said
    assert re.search(r"^rd is better than standard by 0.0.. nat .*, 4 of 4 pairs; transient", said, re.M), said
    counts = {"10": {"steps": "10", "5-gram": "0.5"}}
    assert "no difference below means anything" in table.sentences(study, results, counts)[0]
    counts["10"]["5-gram"] = "5"
    assert "5-gram" not in "".join(table.sentences(study, results, counts))
    early = {c: r for c, r in rows.items() if c.steps == 5}
    d = stats.paired(*(plan.losses(plan.finished(study, arms, early, n, 5)) for n in ("rd", "standard")))
    shown = table.so_far(study, arms, early, "rd")
    assert f" {d.mean:+.3f} ({table.interval(d)}), won 4/4; 10: not run" in shown and len(shown) <= 75
    assert table.compare(study, arms, {}) == {} and table.so_far(study, arms, {}, "rd") == "not run"
    first = table.compare(study, arms, early)  # differences at the first budget, and no verdict
    assert first.keys() == results.keys() and first["rd"]["diffs"] == {5: d} and not any(
        r["words"] or r["p"] == r["p"] for r in first.values())
    shown = table.markdown(study, first, {n: table.so_far(study, arms, early, n) for n in first}, [
        dict(text="x", paper="y", nat=2 * d.mean, arm="rd", base="standard")], {})
    assert re.search(r"\| `rd` \| 10 steps not run \| `standard` \| -0.*, won 4/4 \| not run \| not run \|", shown)
    assert "), 5 steps only | same sign, 0.5 × | no verdict yet |" in shown and shown.count("`rd` |") == 1
    claim = dict(text="x", paper="y", nat=-0.01, arm="attnres_block", base="rd")
    shown = table.markdown(study, results, {"hc": "not run"}, [claim], {}, ["a line"])
    assert re.search(r"same sign, (0.9|1.0|1.1) × \| gain \|", shown) and "| `hc` | not run |" in shown
    assert shown.startswith("- a line\n\n| arm | verdict | base | difference, 5 steps |") and ", alone |" in shown
    assert re.search(r"\| `attnres_block` \| gain, .*, won 4/4 \|.*, won 4/4 \|.*, won 3/3 \|", shown)
    lines = table.text_table(study, results, {"hc": "not run"}).splitlines()
    assert len(lines) == 8 and max(map(len, lines)) <= 100


class InThisProcess:
    """A process that has trained its cell when it is started."""
    def __init__(self, command, **_):
        self.returncode = 0
        try:
            cell.main([str(x) for x in command[3:]])
        except UserError:
            self.returncode = 1

    def poll(self):
        return self.returncode

    terminate = wait = poll


def test_a_trial_that_diverges_is_a_result_and_a_run_that_does_is_none(small, tmp_path, monkeypatch, capsys):
    path, write = small
    monkeypatch.setattr(run, "subprocess", types.SimpleNamespace(Popen=InThisProcess))
    write("trials = 3", **{"lr = 4e-3": "lr = 1e19", "steps = [5, 10]": "steps = [5]"})
    with pytest.raises(UserError, match="4 runs failed"):
        run.run(run.parse_args([str(path), f"--runs={tmp_path / 'runs'}", "--minutes=9"]))
    rows = plan.read_rows(tmp_path / "runs/rows.csv")
    assert len(rows) == 6 and all(r["loss"] == "inf" and c.seed == 101 for c, r in rows.items())
    assert "standard-lr1e+19-x1-seed101, 5 steps, loss inf" in capsys.readouterr().out


@pytest.mark.slow
def test_a_study_from_its_configuration_to_its_sentence(small, tmp_path, monkeypatch, capsys):
    path, write = small
    monkeypatch.setattr(run, "subprocess", types.SimpleNamespace(Popen=InThisProcess))

    def study(*more):
        run.run(run.parse_args([str(path), f"--runs={tmp_path / 'runs'}", f"--out={tmp_path / 'out'}", *more]))
        return capsys.readouterr().out
    first = study("--jobs=2")
    assert len(re.findall(r"^done: .* steps, loss", first, re.M)) == 8
    assert "8 runs of 2 arms to train, 2 at a time" in first
    assert re.search(r"attnres_block .*standard.* nat \(", first) and "Nothing was tuned" in first
    assert all(len(line) <= 100 for line in first.splitlines() if re.match(r"(arm|standard|attnres_block) {5,}", line))
    stored = (tmp_path / "out/rows.csv").read_bytes()
    write("# a remark changes nothing")
    again = study()
    assert "nothing to train" in again and (tmp_path / "out/rows.csv").read_bytes() == stored
    assert again.splitlines()[-3:] == first.splitlines()[-3:]
    assert {p.name for p in (tmp_path / "out").iterdir()} == {
        "rows.csv", "table.md", "ngrams.csv", "difference.png", "loss.png", "depth.png", "lock"}
    text = (tmp_path / "out/table.md").read_text(encoding="utf-8")
    rows = plan.read_rows(tmp_path / "out/rows.csv")
    assert len(rows) == 8 and {c.steps for c in rows} == {5, 10} and {c.seed for c in rows} == {1, 2}
    losses = {c: float(r["loss"]) for c, r in rows.items() if c.steps == 10}
    delta = np.mean([losses[c] - losses[c._replace(arm="standard")] for c in losses if c.arm == "attnres_block"])
    assert f"| {delta:+.4f} (" in text
    assert "rd                       not run" in study("--modes=rd", "--minutes=0")
    study("--test", "--modes=attnres_block")
    assert all(r["test"] for c, r in plan.read_rows(tmp_path / "out/rows.csv").items() if c.steps == 10)
    with pytest.raises(UserError, match="test is looked at once"):
        study("--test")
    study("--speed")
    assert "standard,1.00,1.00,1.00,1.00" in (tmp_path / "out/speed.csv").read_text(encoding="utf-8")
    write(**{"n_ffn = 32": "n_ffn = 48"})
    with pytest.raises(UserError, match="with other settings than"):
        study("--minutes=0")


def test_what_holm_corrects_for_and_who_is_compared_with_static_weights_is_the_files(small):
    path, write = small
    write('static = "static_block"\npapers = "+old"', **{"[arm.attnres_block]": '''[arm.attnres_block]
[arm.attnres]
[arm.static_block]
[arm."attnres_block+muon"]
residual_mode = "attnres_block"
optimizer = "muon"
base = "standard+muon"
[arm."standard+muon"]
residual_mode = "standard"
optimizer = "muon"
[arm."attnres_block+old"]
residual_mode = "attnres_block"
init = "papers"
base = "standard+old"
[arm."standard+old"]
residual_mode = "standard"
init = "papers"'''})
    for modes in ("", "--modes=attnres_block,static_block", "--modes=rd"):
        study, arms, _ = plan.read_config(path, run.parse_args([str(path), *[modes] * (modes > "")]))
        assert study.planned == 4 + (modes == "--modes=rd")
    study, arms, _ = plan.read_config(path, run.parse_args([str(path)]))
    assert [n for n in arms if n != "static_block" and table.same_blocks(arms, n, "static_block")] == ["attnres_block"]


def test_another_number_of_seeds_keeps_the_longest_budget_and_the_command(small):
    path, write = small
    write("long_steps = 20")
    for more in ((), ("--seeds=2",), ("--seeds=5",), ("--seeds=1", "--runs=elsewhere")):
        args = run.parse_args([str(path), *more])
        assert [n for n, arm in plan.read_config(path, args)[1].items() if arm.long] == ["attnres_block"], more
        assert args.again.split()[1:] == list(more)
    assert run.parse_args([str(path), "--runs=a", "--out=b"]).again.split()[1:] == ["--runs=a", "--out=b"]


def test_the_runs_that_are_left_are_those_that_are_trained(small):
    path, write = small
    write("trials = 4\nlong_steps = 20")
    for argv in ([], ["--seeds=3"], ["--seeds=1"], ["--modes=rd,mhar"]):
        study, arms, _ = plan.read_config(path, run.parse_args([str(path), *argv]))
        rows, done, left = {}, 0, plan.left_to_train(study, arms, {})
        while cells := plan.wanted(study, arms, rows):
            rows[cells[-1]], done = row_of(3 + 0.01 * len(rows), arms, cells[-1]), done + 1
            assert sum(n for n, _ in plan.left_to_train(study, arms, rows).values()) == sum(
                n for n, _ in left.values()) - done
        assert done == sum(n for n, _ in left.values())


def test_a_folder_with_another_run_is_not_taken_for_this_one(small, data, tmp_path):
    path, write = small
    keys = plan.read_config(path, run.parse_args([str(path)]))[1]["attnres_block"].keys | dict(seed=1)
    cell.finish(keys, tmp_path / "cell", 5)
    other = shutil.copytree(data, tmp_path / "other")
    (other / "meta.json").unlink()
    for changed, what in ((keys | dict(n_ffn=48), "n_ffn"), (keys | dict(lr=1e-3, warmup_steps=3), "lr, warmup_steps"),
                          (keys | dict(data_dir=other, vocab_size=257), "the data")):
        with pytest.raises(UserError, match=f"holds a run that differs in {what.replace(', ', '.*')}: give other"):
            cell.finish(changed, tmp_path / "cell", 5)
    assert cell.finish(keys | dict(save_every=7), tmp_path / "cell", 5)


def test_damaged_rows_are_told_with_their_line(small, tmp_path):
    path, _ = small
    _, arms, _ = plan.read_config(path, run.parse_args([str(path)]))
    rows = {c: row_of(2.0, arms, c, documents="10:1.5 20:2.5") for c in (
        plan.Cell("standard", seed, 5, 4e-3, 1.0) for seed in (1, 2))}
    plan.write_rows(tmp_path / "rows.csv", rows)
    text = (tmp_path / "rows.csv").read_text()
    assert plan.read_rows(tmp_path / "rows.csv").keys() == rows.keys()
    lines = text.splitlines()
    for bad, message in ((lines + lines[-1:], "line 4: standard-lr0.004-x1-seed2 of 5 steps is there twice"),
                         (lines[:2] + [lines[2].replace("20:2.5", "21:2.5")], "line 3: its documents have other"),
                         (lines[:2] + [lines[2].replace(",8,", ",,")], "line 3: invalid literal"),
                         (lines[:1] + [lines[1].replace("2.0", "nan")], "line 2: ")):
        (tmp_path / "rows.csv").write_text("\n".join(bad) + "\n")
        with pytest.raises(UserError, match=message):
            plan.read_rows(tmp_path / "rows.csv")


def test_a_signal_after_a_run_is_no_longer_the_runs(small, data, tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    train.train(*cell.configure(plan.read_config(small[0], run.parse_args([str(small[0])]))[1]["standard"].keys,
                                out_dir=tmp_path / "a", max_steps=3))
    assert signal.getsignal(signal.SIGTERM) == before


def test_mistakes_in_a_study_are_told(small, tmp_path):
    path, write = small
    for argv, message in ((["--modes=attnress"], "did you mean attnres"), (["--jobs=-1"], "must not be negative"),
                          (["--modes=rd:heads=2"], "unknown key 'heads'"),
                          (["--modes=mhar:4"], "'4' of mhar:4 is no knob"),
                          (["--modes=rd:seeds=1"], "'seeds=1' of rd:seeds=1 is no knob")):
        with pytest.raises(UserError, match=message):
            run.run(run.parse_args([str(path), f"--runs={tmp_path / 'runs'}", *argv]))
    for old, new, message in (
            ("[arm.standard]", "", "has no arm `standard`"), ("steps = [5, 10]", "", "needs steps"),
            ("steps = [5, 10]", "steps = [10, 5]", "ascending"), ("steps = [5, 10]", "steps = 5", "knows steps"),
            ("seeds = 2", "trials = 8", "trials = 8, and must have 0"),
            ("seeds = 2", "seed = 2", "knows steps"), ("seeds = 2", "seeds = '2'", "knows steps"),
            ("[arm.attnres_block]", '[arm.attnres_block]\nbase = "rd"', "compared with 'rd'"),
            ("lr = 4e-3", "lr = 0", "lr=0.0"), ("[study]", "[study", "cannot read")):
        write(**{old: new})
        with pytest.raises(UserError, match=message):
            plan.read_config(path, run.parse_args([str(path)]))


def test_the_studys_configurations_and_commands_can_be_read():
    for path in (HERE / "study/configs").glob("*.toml"):
        plan.read_config(path, run.parse_args([str(path)]))
    commands = [m for name in ("README.md", "study/README.md", "study/run.py", "study/configs/quick.toml",
                               "study/configs/main.toml")
                for m in re.findall(r"python -m study\.run (\S+\.toml(?: --\S+)*)", (HERE / name).read_text("utf-8"))]
    assert len(commands) > 6
    for command in commands:
        args = run.parse_args(command.split())
        args.config = HERE / args.config
        plan.read_config(args.config, args)


def test_operations_are_counted_as_pytorch_counts_them():
    """Whether the head is tied or not. Attention is added by hand: two products over half a square."""
    from torch.utils.flop_counter import FlopCounterMode
    idx, counts = tokens(2, 64)[:, :64], set()
    for tied in (True, False):
        model = make("standard", dtype=torch.float32, seq_len=64, n_embd=64, tie_embeddings=tied)
        cfg = model.cfg
        with FlopCounterMode(display=False) as counter, torch.no_grad():  # the loss makes its gradients in forward
            loss_of(model, tokens(2, 64))
        matrices = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
        attention = 2 * 2 * idx.numel() * 64 * cfg.n_layer * cfg.n_head * cfg.head_dim / 2
        counts.add(counted := bench.flops_per_step(model, idx))
        assert counted == pytest.approx(3 * (matrices + attention), rel=0.02)
    assert max(counts) < 1.001 * min(counts)


def test_a_pair_of_equal_losses_is_not_won():
    assert stats.paired({1: 2.0, 2: 1.0}, {1: 2.0, 2: 1.5}).won == 1
