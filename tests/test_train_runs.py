"""Runs of train.py from launch to end: processes, signals, the run folder, trackers, the order of data, messages."""
import csv
import os
import re
import signal
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import train
from helpers import HERE, measured, same_weights, shard
from launch import run_script, started
from prepare_fineweb import UserError

TORCHRUN = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """2,000 train and 600 val tokens out of 8 of 61, without a meta.json."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    shard(folder / "x_train_0.bin", rng.integers(8, size=2000))
    shard(folder / "x_val_0.bin", rng.integers(8, size=600))
    return folder


def flags(data, out, **settings):
    base = dict(data_dir=data, out_dir=out, vocab_size=61, n_layer=1, n_head=1, n_embd=16, n_ffn=16, seq_len=16,
                micro_batch=2, tokens_per_step=64, max_steps=6, lr=1e-2, min_lr=1e-3, warmup_steps=2, eval_every=3,
                eval_tokens=100, log_every=1, save_every=2, device="cpu", dtype="float32")
    return [f"--{k}={v}" for k, v in (base | settings).items()]


def run(data, out, **settings):
    """Train in this process; returns the rows of log.csv."""
    numbers = [getattr(signal, n) for n in ("SIGINT", "SIGTERM", "SIGHUP", "SIGUSR1", "SIGUSR2")]
    old = [signal.getsignal(n) for n in numbers]
    try:
        train.train(*train.load_config(flags(data, out, **settings)))
    finally:
        for number, handler in zip(numbers, old):
            signal.signal(number, handler)
        train.folder_lock = None
    return read_log(out)


def read_log(out):
    with open(Path(out) / "log.csv", newline="", encoding="utf-8") as f:
        return list(csv.DictReader(f))


def clear_launch(monkeypatch):
    for name in {*train.LAUNCH, *train.SIZES, "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"}:
        monkeypatch.delenv(name, raising=False)


# ---------------------------------------------------------------------------------------------------------------------
# Processes


@pytest.mark.parametrize("variables, complaint", [
    (dict(RANK="0", WORLD_SIZE="2"), "WORLD_SIZE=2 .*but not LOCAL_RANK, MASTER_ADDR, MASTER_PORT.*torchrun"),
    (dict(SLURM_NTASKS="8"), "SLURM_NTASKS=8 .*srun --ntasks-per-node=1 .*--nnodes=.*env -u SLURM_NTASKS python"),
    (dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1"), "OMPI_COMM_WORLD_SIZE=2 is set, as for several"),
    (dict(PMI_SIZE="2"), "PMI_SIZE=2"),
    (dict(TORCHRUN, SLURM_NTASKS="2"), ""),  # all that a process of several needs, whoever set it
    (dict(RANK="1"), ""), (dict(WORLD_SIZE="1", RANK="0", SLURM_NTASKS="1"), ""), ({}, ""),  # left behind, or nothing
])
def test_a_launch_of_several_processes_is_complete_or_an_error(variables, complaint, monkeypatch):
    clear_launch(monkeypatch)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    if complaint:
        with pytest.raises(UserError, match=complaint):
            train.start_processes(torch.device("cpu"))
    else:
        train.check_launch()
        assert train.launched() == ("MASTER_ADDR" in variables)


@pytest.mark.parametrize("variables, complaint", [
    (dict(RANK="one"), "RANK=one, which the launcher of this process has set, is no whole number"),
    (dict(MASTER_PORT=""), "MASTER_PORT=, which"),
    (dict(RANK="2"), "RANK=2 is not below WORLD_SIZE=2"), (dict(LOCAL_WORLD_SIZE="x"), "LOCAL_WORLD_SIZE=x, which"),
    (dict(RANK="1"), "process 1 of 2 cannot meet the others at 127.0.0.1:0"),
    (dict(MASTER_ADDR="nothere.invalid"), "process 0 of 2 cannot meet the others at nothere.invalid:0")])
def test_a_launch_with_a_mistake_is_one_line(variables, complaint, monkeypatch):
    clear_launch(monkeypatch)
    for name, value in (TORCHRUN | variables).items():
        monkeypatch.setenv(name, value)

    def start(backend, timeout):
        raise (ValueError if "RANK" in variables else torch.distributed.DistNetworkError)("no such place\nlong trace")
    monkeypatch.setattr(train.dist, "init_process_group", start)
    with pytest.raises(UserError, match=complaint) as e:
        train.start_processes(train.choose_device("cpu")[0])
    assert "\n" not in str(e.value)


def test_a_lone_process_is_one_of_several_under_torchrun_alone(monkeypatch):
    clear_launch(monkeypatch)
    for name, value in (TORCHRUN | dict(WORLD_SIZE="1")).items():
        monkeypatch.setenv(name, value)
    assert not train.launched()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert train.launched()


def test_a_slow_process_does_not_time_the_others_out(monkeypatch):
    clear_launch(monkeypatch)
    for name, value in TORCHRUN.items():
        monkeypatch.setenv(name, value)
    seen = []
    monkeypatch.setattr(train.dist, "init_process_group", lambda backend, timeout: seen.append((backend, timeout)))
    monkeypatch.setattr(train.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 2)
    for device in ("cpu", "cuda"):
        assert train.start_processes(torch.device(device)) == (0, 2)
    assert [b for b, _ in seen] == ["gloo", "nccl"] and {t for _, t in seen} == {train.STEP_PATIENCE}
    assert train.STEP_PATIENCE >= timedelta(hours=1) and train.PATIENCE >= timedelta(days=1)  # to prepare data


def facts(data, out, start=0, seed=1, **settings):
    cfg, t = train.load_config(flags(data, out, seed=seed, **settings))
    cfg, _, val, about = train.open_data(cfg, t)
    model = train.build(cfg)
    model.init_weights(t.seed)
    return train.start_facts(cfg, t, torch.float32, start, about, val, model)


def test_processes_that_disagree_stop_before_the_first_step(shards, tmp_path, monkeypatch):
    shard(tmp_path / "d/x_train_0.bin", [1] * 2000)
    shard(tmp_path / "d/x_val_0.bin", [1] * 600)
    mine, gathered = facts(shards, "a"), []
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 3)
    monkeypatch.setattr(train.dist, "all_gather_object", lambda out, own: out.__setitem__(slice(None), gathered))
    for other, complaint in [
            (facts(shards, "a", start=6), "the step to go on from is 0 on rank 0 and 6 on rank 2"),
            (facts(shards, "a", seed=2), "seed is 1 on rank 0 and 2 on rank 2"),
            (facts(shards, "a", lr=0.5), "lr is 0.01 on rank 0 and 0.5 on rank 2"),
            (facts(tmp_path / "d", "a"), "the data's train_crc32 is .* on rank 2"),
            (mine | facts(shards, "a") | {"the checksum of the weights": facts(shards, "a", seed=2)[
                "the checksum of the weights"]}, "the checksum of the weights is"),
            (mine | {"the version of PyTorch": "2.8.0"}, "the version of PyTorch is .* and 2.8.0 on rank 2"),
            (mine | {"the checksum of the code": "0"}, "the checksum of the code is")]:
        gathered[:] = mine, facts(shards, "elsewhere", data_dir=shards), other  # own paths are no disagreement
        with pytest.raises(UserError, match=complaint):
            train.check_agreement(mine)
    gathered[:] = mine, mine, facts(shards, "elsewhere")
    train.check_agreement(mine)


def test_the_comparison_comes_before_anything_is_written(shards, tmp_path, monkeypatch):
    run(shards, tmp_path / "a", stop_after=4)
    before = {p: p.read_bytes() for p in (tmp_path / "a").iterdir() if p.is_file()}
    seen = []

    def disagree(facts):
        seen.append(facts)
        raise UserError("the processes disagree")
    monkeypatch.setattr(train, "check_agreement", disagree)
    with pytest.raises(UserError, match="the processes disagree"):
        run(shards, tmp_path / "a", resume="true")
    assert seen[0]["the step to go on from"] == 4 and seen[0]["lr"] == 0.01
    assert {p: p.read_bytes() for p in (tmp_path / "a").iterdir() if p.is_file()} == before


def test_processes_that_disagree_do_not_evaluate(shards, tmp_path, monkeypatch):
    """Two machines with checkpoints of their own would give the mean of two models."""
    import eval as evaluation
    run(shards, tmp_path / "a", stop_after=2)
    run(shards, tmp_path / "b", stop_after=4)
    args = evaluation.parse_args([str(tmp_path / "a")])
    device, models = torch.device("cpu"), [
        evaluation.load_model(str(tmp_path / name), torch.device("cpu"), torch.float32)[:2] for name in "ab"]
    seen = []
    with monkeypatch.context() as patch:
        patch.setattr(evaluation, "check_agreement", seen.append)
        for model, saved in models:
            evaluation.measure(args, model, saved, device, torch.float32, 0, 1)
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(train.dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(train.dist, "all_gather_object", lambda out, own: out.__setitem__(slice(None), seen))
    with pytest.raises(UserError, match="the processes disagree: the step is 2 on rank 0 and 4 on rank 1"):
        evaluation.measure(args, *models[0], device, torch.float32, 0, 2)


def test_two_machines_without_a_shared_disk_stop_instead_of_training_apart(shards, tmp_path):
    """Only the first has the checkpoint: neither takes a step, and the run can still go on from what is there."""
    for name in ("n0", "n1"):
        (tmp_path / name).mkdir()

    (tmp_path / "machine.py").write_text(f"""import os, runpy, sys
os.chdir({str(tmp_path)!r} + "/n" + os.environ["LOCAL_RANK"])
sys.argv[0] = {str(HERE / "train.py")!r}
sys.path.insert(0, {str(HERE)!r})
runpy.run_path(sys.argv[0], run_name="__main__")
""", "utf-8")
    run_script(tmp_path / "machine.py", *flags(shards, "run"), processes=2)
    log = (tmp_path / "n0/run/log.csv").read_bytes()
    second = run_script(tmp_path / "machine.py", *flags(shards, "run", max_steps=12, resume="true"), processes=2,
                        code=1)
    assert "train.py: the processes disagree: the step to go on from is 6 on rank 0 and 0 on rank 1" in second.stderr
    assert (tmp_path / "n0/run/log.csv").read_bytes() == log and "step:7" not in second.stdout


# ---------------------------------------------------------------------------------------------------------------------
# Signals and the end


def same_run(a, b):
    return measured(read_log(a)) == measured(read_log(b)) and all(
        same_weights(a / name, b / name) for name in ("last.pt", "best.pt"))


def send_at(monkeypatch, step, number):
    """The signal comes in the middle of a step."""
    clip, calls = torch.nn.utils.clip_grad_norm_, []

    def clipping(*args):
        calls.append(1)
        if len(calls) == step:
            os.kill(os.getpid(), number)
        return clip(*args)
    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", clipping)


@pytest.mark.parametrize("ignored", [(), (signal.SIGHUP, signal.SIGINT), (signal.SIGUSR1,)])
def test_a_signal_that_was_ignored_at_the_start_stays_ignored(ignored, monkeypatch):
    """nohup ignores SIGHUP, a shell SIGINT for a script's jobs in the background."""
    handled = []
    monkeypatch.setattr(signal, "getsignal", lambda n: signal.SIG_IGN if n in ignored else signal.SIG_DFL)
    monkeypatch.setattr(signal, "signal", lambda n, handler: handled.append(n))
    train.StopSignal()
    assert set(handled) == {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2} - set(ignored)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP])
def test_a_stop_comes_before_the_evaluation_which_is_made_up_for(number, shards, tmp_path, monkeypatch, capsys):
    run(shards, tmp_path / "whole")
    evaluate, seen = train.evaluate, []
    with monkeypatch.context() as patch:
        patch.setattr(train, "evaluate", lambda *args, **more: seen.append(1) or evaluate(*args, **more))
        send_at(patch, 3, number)
        with pytest.raises(SystemExit, match=str(128 + number)):
            run(shards, tmp_path / "a")
    assert len(seen) == 1  # of the start
    assert f"go on with: python train.py {tmp_path / 'a'} --resume" in capsys.readouterr().out.replace(
        train.script("train.py"), "train.py")
    assert torch.load(tmp_path / "a/last.pt", weights_only=True)["step"] == 3
    run(shards, tmp_path / "a", resume="true")
    assert same_run(tmp_path / "a", tmp_path / "whole")


@pytest.mark.parametrize("step", [0, 3, 6])
def test_a_stop_does_not_wait_for_the_end_of_an_evaluation(step, shards, tmp_path, monkeypatch):
    run(shards, tmp_path / "whole", micro_batch=1)
    forward, seen = train.GPT.forward, []

    def forwarding(self, idx, targets=None, cache=None):
        if not torch.is_grad_enabled():
            seen.append(1)
            if len(seen) == 1 + 7 * step // 3:  # the first batch of the evaluation behind the step, of seven
                os.kill(os.getpid(), signal.SIGTERM)
        return forward(self, idx, targets, cache)
    with monkeypatch.context() as patch:
        patch.setattr(train.GPT, "forward", forwarding)
        with pytest.raises(SystemExit, match="143"):
            run(shards, tmp_path / "a", micro_batch=1)
    assert len(seen) == 1 + 7 * step // 3
    saved = torch.load(tmp_path / "a/last.pt", weights_only=True)
    assert saved["step"] == step and saved["owed"]
    run(shards, tmp_path / "a", resume="true", micro_batch=1)
    assert same_run(tmp_path / "a", tmp_path / "whole")


@pytest.mark.slow
def test_torchrun_passes_a_schedulers_warning_on_with_the_options_of_the_documentation(shards, tmp_path):
    text = (HERE / "configs/README.md").read_text(encoding="utf-8")
    options = re.findall(r"--(?:signals-to-handle|shutdown-timeout)=\S+", text[text.index("#SBATCH"):])
    assert len(options) == 2
    with started("-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "--max-restarts=3", *options,
                 HERE / "train.py", *flags(shards, tmp_path / "a", resume="true", max_steps=10**6, save_every=0,
                                           eval_every=0), fresh=True) as launch:
        launch.wait(text="step:3/")
        launch.send(signal.SIGUSR1)
        assert launch.wait() and "all is saved" in launch.read("out"), launch.said
    last = (tmp_path / "a/log.csv").read_text().split()[-1].split(",")[0]
    assert torch.load(tmp_path / "a/last.pt", weights_only=True)["step"] == int(last) >= 3


def test_stop_after_ends_a_part_of_the_run_with_the_schedule_of_the_whole(shards, tmp_path, capsys, monkeypatch):
    run(shards, tmp_path / "whole")
    assert len(run(shards, tmp_path / "a", stop_after=4)) == 5  # and the row of the start
    assert "stopped after step 4 of 6 as asked" in capsys.readouterr().out
    run(shards, tmp_path / "a", stop_after=4, resume="true")
    assert "is finished: 4 of 4 steps are done; raise --stop_after" in capsys.readouterr().out
    train.train(*train.load_config([str(tmp_path / "a/config.toml"), "--resume=true"]))  # no wish of the first start
    assert same_run(tmp_path / "a", tmp_path / "whole")
    with monkeypatch.context() as patch:  # what starts one part after the other must not start the next
        send_at(patch, 4, signal.SIGTERM)
        with pytest.raises(SystemExit):
            run(shards, tmp_path / "b", stop_after=4)
    assert train.load_checkpoint(tmp_path / "b/last.pt")["step"] == 4
    with pytest.raises(UserError, match="stop_after=7 is behind the last step, max_steps=6"):
        train.load_config(["--stop_after=7", "--max_steps=6"])


# ---------------------------------------------------------------------------------------------------------------------
# The run folder: the best and the last


def contents(folder):
    return {path.name: path.read_bytes() for path in Path(folder).glob("*.*") if path.suffix in (".pt", ".csv")}


def test_the_best_checkpoint_is_never_replaced_by_a_worse_one(shards, tmp_path, monkeypatch, capsys):
    """Also when best.pt is newer than last.pt, after a kill, and the run goes on with worse settings."""
    save = train.save_checkpoint

    def killed(folder, name, content):
        if name == "last.pt" and content["step"] == 4:
            raise KeyboardInterrupt  # as good as a kill
        save(folder, name, content)
    with monkeypatch.context() as patch:
        patch.setattr(train, "save_checkpoint", killed)
        with pytest.raises(KeyboardInterrupt):
            run(shards, tmp_path / "a", eval_every=1, max_steps=8)
    before = torch.load(tmp_path / "a/best.pt", weights_only=True)
    assert before["step"] > torch.load(tmp_path / "a/last.pt", weights_only=True)["step"] == 2
    run(shards, tmp_path / "a", resume="true", eval_every=1, max_steps=8, lr=2, min_lr=2)
    after = torch.load(tmp_path / "a/best.pt", weights_only=True)
    assert after["best"] == before["best"] and after["step"] == before["step"]
    assert f"best val loss {before['best']:.4f}" in capsys.readouterr().out


def test_the_best_loss_of_other_val_tokens_is_not_compared(shards, tmp_path, capsys):
    run(shards, tmp_path / "a", max_steps=3, eval_every=1)
    content = torch.load(tmp_path / "a/best.pt", weights_only=True)
    for name in ("best.pt", "last.pt"):
        path = tmp_path / "a" / name
        torch.save(torch.load(path, weights_only=True) | {"best": 0.1}, path)
    run(shards, tmp_path / "a", max_steps=4, eval_every=1, resume="true")
    assert torch.load(tmp_path / "a/best.pt", weights_only=True)["best"] == 0.1
    assert "the next evaluation makes a new best.pt" not in capsys.readouterr().out
    run(shards, tmp_path / "a", max_steps=5, eval_every=1, resume="true", eval_tokens=300)
    now = torch.load(tmp_path / "a/best.pt", weights_only=True)
    assert now["step"] == 5 and now["best"] > 0.1 and now["val"] != content["val"]
    assert "evaluated on 300 tokens of" in capsys.readouterr().out


def test_a_restarted_job_does_not_overwrite_its_own_run(shards, tmp_path, monkeypatch):
    run(shards, tmp_path / "a", overwrite="true")
    for name in train.RESTARTS:
        with monkeypatch.context() as patch:
            patch.setenv(name, "1")
            with pytest.raises(UserError, match="restarted, and overwrite=true would delete .*--resume=true"):
                run(shards, tmp_path / "a", overwrite="true")
            run(shards, tmp_path / name, overwrite="true")
            run(shards, tmp_path / "a", resume="true", max_steps=8)
    run(shards, tmp_path / "a", overwrite="true")


def test_a_resumed_run_keeps_the_code_that_it_was_started_with(shards, tmp_path, capsys):
    run(shards, tmp_path / "a", max_steps=2)
    source = tmp_path / "a/source/model.py"
    source.write_text("# as it was\n")
    run(shards, tmp_path / "a", max_steps=4, resume="true")
    assert "the code has changed since the last start (model.py); as it was: " in capsys.readouterr().out
    assert (tmp_path / "a/source.1/model.py").read_text() == "# as it was\n"
    assert source.read_bytes() == (HERE / "model.py").read_bytes()
    run(shards, tmp_path / "a", max_steps=6, resume="true")
    assert "the code has changed" not in capsys.readouterr().out and not (tmp_path / "a/source.2").exists()
    assert os.access(source, os.W_OK) and source.stat().st_mode & 0o200


def test_signals_and_the_folder_are_free_again_whatever_ended_a_run(shards, tmp_path, monkeypatch):
    before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)]
    with monkeypatch.context() as patch:
        send_at(patch, 2, signal.SIGINT)
        with pytest.raises(SystemExit):
            train.train(*train.load_config(flags(shards, tmp_path / "a")))
    assert [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)] == before and train.folder_lock is None
    run_script(HERE / "train.py", *flags(shards, tmp_path / "a", resume="true"))  # another process


def test_a_script_whose_output_is_closed_goes_on(shards, tmp_path):
    code = "import sys, train; sys.stdout = sys.stderr = None; train.main(sys.argv[1:])"
    run_script("-c", code, *flags(shards, tmp_path / "a"), fresh=True, PYTHONPATH=str(HERE))
    assert train.load_checkpoint(tmp_path / "a/last.pt")["step"] == 6


def test_what_the_library_of_processes_says_is_shown(monkeypatch, capsys):
    monkeypatch.setattr(train.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(os, "_exit", lambda code: (_ for _ in ()).throw(SystemExit(code)))

    def fail():
        raise train.dist.DistBackendError("NCCL error in: NCCLUtils.cpp:94\nLast error:\nno space in /dev/shm/nccl-x")
    with pytest.raises(SystemExit):
        train.guard("train.py", fail)
    assert "no space in /dev/shm/nccl-x" in capsys.readouterr().err


def test_no_start_loses_what_a_folder_holds(shards, tmp_path, monkeypatch):
    """Whatever of log, best.pt and last.pt is missing or damaged: a start goes on, or stops and changes nothing."""
    run(shards, tmp_path / "a")
    whole, missing = contents(tmp_path / "a"), {}
    assert set(whole) == {"log.csv", "last.pt", "best.pt"}
    states = [{name: raw for i, (name, raw) in enumerate(whole.items()) if bits >> i & 1} for bits in range(8)]
    states += [whole | {name: raw[:len(raw) // 2]} for name, raw in whole.items() if name != "log.csv"]
    for number, state in enumerate(states):
        for start in ("fresh", "resume"):
            out = tmp_path / f"{number}{start}"
            out.mkdir()
            for name, raw in state.items():
                (out / name).write_bytes(raw)
            try:
                run(shards, out, resume=str(start == "resume").lower(), max_steps=8)
            except UserError as e:
                missing[number, start] = str(e)
                assert contents(out) == state and ("--overwrite=true" in str(e) or "move it away" in str(e))
            else:
                assert not state or (start == "resume" and "last.pt" in state)
    assert all((n, "fresh") in missing for n, state in enumerate(states) if state)
    assert sum("no last.pt to go on from" in m for m in missing.values()) == 3
    out = tmp_path / "1fresh"
    run(shards, out, overwrite="true")
    assert measured(read_log(out)) == measured(read_log(tmp_path / "a"))
    assert "overwrite" not in (out / "config.toml").read_text(encoding="utf-8")
    with pytest.raises(UserError, match="resume=true goes on with a run and overwrite=true deletes it"):
        train.load_config(["--resume=true", "--overwrite=true"])


def test_a_start_that_failed_early_does_not_block_the_folder(shards, tmp_path):
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.toml").write_text("n_layer = 1\n", encoding="utf-8")
    (tmp_path / "a/log.csv").write_text("step,tokens\n", encoding="utf-8")
    assert len(run(shards, tmp_path / "a")) == 7


def test_a_run_killed_before_its_first_save_goes_on_from_the_start(shards, tmp_path, monkeypatch):
    run(shards, tmp_path / "whole", save_every=0)
    step = torch.optim.AdamW.step

    def killed(self, *args):
        step(self, *args)
        if len(read_log(tmp_path / "a")) == 5:
            raise KeyboardInterrupt
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", killed)
        with pytest.raises(KeyboardInterrupt):
            run(shards, tmp_path / "a", save_every=0)
    assert torch.load(tmp_path / "a/last.pt", weights_only=True)["step"] == 0
    run(shards, tmp_path / "a", save_every=0, resume="true")
    assert same_run(tmp_path / "a", tmp_path / "whole")


@pytest.mark.parametrize("name", ["init", "n_streams", "tracker", "stop_after", "remat"])
def test_a_checkpoint_older_than_a_setting_goes_on_with_its_default(name, shards, tmp_path):
    run(shards, tmp_path / "a", max_steps=2)
    saved = torch.load(tmp_path / "a/last.pt", weights_only=True)
    del saved["config"][name]
    torch.save(saved, tmp_path / "a/last.pt")
    assert train.load_checkpoint(tmp_path / "a/last.pt")["cfg"] == train.load_config(
        flags(shards, "a"))[0].__class__(**{k: v for k, v in saved["config"].items() if k in train.GPTConfig.
                                            __dataclass_fields__})
    run(shards, tmp_path / "a", max_steps=3, resume="true")
    saved["config"]["top_sources"] = 3
    torch.save(saved, tmp_path / "a/last.pt")
    with pytest.raises(UserError, match="last.pt is not a usable checkpoint .*'top_sources'.*folder source/.*best.pt"):
        train.load_checkpoint(tmp_path / "a/last.pt")


def test_a_setting_the_checkpoint_lacks_may_not_change_silently(shards, tmp_path):
    run(shards, tmp_path / "a", max_steps=2)
    saved = torch.load(tmp_path / "a/last.pt", weights_only=True)
    del saved["config"]["rope_theta"]
    torch.save(saved, tmp_path / "a/last.pt")
    with pytest.raises(UserError, match="of another run .rope_theta: 10000.0 -> 5000.0."):
        run(shards, tmp_path / "a", max_steps=3, resume="true", rope_theta=5000)


def test_a_full_disk_is_told_with_the_bytes_that_were_needed(shards, tmp_path, monkeypatch):
    def full(content, file):
        file.write(b"x" * 1000)
        raise OSError(28, "No space left on device")
    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match=r"cannot write .*last.pt \(.*No space.*it needs 0.0 MB, its disk has .* MB fr"):
        run(shards, tmp_path / "a")
    assert not list((tmp_path / "a").glob("*.pt*"))
    assert train.size_of({"a": [torch.zeros(3)], "b": {"c": torch.zeros(2, dtype=torch.float64)}, "d": 1}) == 28


def test_a_log_that_cannot_be_written_saves_the_model_first(shards, tmp_path, monkeypatch):
    add = train.Log.add

    def full(self, row):
        if row[0] == 3:
            raise OSError(28, "No space left on device")
        add(self, row)
    monkeypatch.setattr(train.Log, "add", full)
    with pytest.raises(UserError, match="cannot write .*log.csv .No space left on device.; the model of step 3 is"):
        run(shards, tmp_path / "a", save_every=0)
    assert torch.load(tmp_path / "a/last.pt", weights_only=True)["step"] == 3


# ---------------------------------------------------------------------------------------------------------------------
# Trackers


class FakeWandb:
    """What wandb does with runs of one id."""

    def __init__(self):
        self.starts, self.points, self.ends, self.axes = [], {}, [], {}

    def init(self, **settings):
        self.starts.append(settings)
        return self

    def define_metric(self, name, step_metric=""):
        self.axes[name] = step_metric

    def log(self, values, step=None):
        assert step is None and self.axes == {"step": "", "*": "step"}  # a step that goes back would be dropped
        self.points[values["step"]] = values

    def finish(self, exit_code):
        self.ends.append(exit_code)


def test_wandb_goes_on_with_its_run_and_knows_every_setting(shards, tmp_path, monkeypatch):
    fake = FakeWandb()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(train, "find_spec", lambda name: SimpleNamespace(origin=name))
    with monkeypatch.context() as patch:
        send_at(patch, 3, signal.SIGTERM)
        with pytest.raises(SystemExit):
            run(shards, tmp_path / "a", tracker="wandb", residual_mode="attnres")
    run(shards, tmp_path / "a", tracker="wandb", residual_mode="attnres", resume="true")
    first, second = fake.starts
    assert first["id"] == second["id"] and second["resume"] == "allow" and first["name"] == "a"
    assert set(first["config"]) == set(train.SCHEMA) and first["config"]["residual_mode"] == "attnres"
    assert fake.ends == [0, 0] or fake.ends == [1, 0]  # a run that was stopped is not finished as if it had failed
    assert sorted(fake.points) == [0, 1, 2, 3, 4, 5, 6] and "val_loss" in fake.points[3]
    monkeypatch.setenv("WANDB_PROJECT", "mine")
    run(shards, tmp_path / "b", tracker="wandb")
    assert fake.starts[-1]["id"] != first["id"]
    assert [s["project"] for s in fake.starts] == ["nanodepth", "nanodepth", "mine"]


def test_a_tracker_that_cannot_start_is_one_line(shards, tmp_path, monkeypatch):
    fake = FakeWandb()
    fake.init = lambda **settings: 1 / 0
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(train, "find_spec", lambda name: SimpleNamespace(origin=name))
    with pytest.raises(UserError, match="tracker=wandb: division by zero .log in with: wandb login"):
        run(shards, tmp_path / "a", tracker="wandb")
    run(shards, tmp_path / "a")  # nothing has been trained: the corrected command starts
    with pytest.raises(UserError, match="tracker=wandb needs a package that is not installed"):
        monkeypatch.setattr(train, "find_spec", lambda name: SimpleNamespace(origin=None))  # a folder of that name
        run(shards, tmp_path / "b", tracker="wandb")


@pytest.mark.parametrize("error", [BrokenPipeError(32, "Broken pipe"), ValueError("no field")])
def test_a_tracker_that_fails_later_does_not_end_the_run(error, shards, tmp_path, monkeypatch, capsys):
    fake = FakeWandb()

    def log(values):
        if values["step"] >= 2:
            raise error
    def finish(exit_code):
        raise error
    fake.log = log
    monkeypatch.setitem(sys.modules, "wandb", fake)
    monkeypatch.setattr(train, "find_spec", lambda name: SimpleNamespace(origin=name))
    run(shards, tmp_path / "a", tracker="wandb")
    assert capsys.readouterr().out.count("warning: tracker=wandb has failed and gets no more rows") == 1
    assert train.load_checkpoint(tmp_path / "a/last.pt")["step"] == 6
    fake.log, fake.finish = lambda values: None, finish
    run(shards, tmp_path / "b", tracker="wandb")
    said = capsys.readouterr().out
    assert "warning: tracker=wandb has not ended well" in said and "done: 6 steps" in said


def test_tensorboard_curves_do_not_go_back_after_a_crash(shards, tmp_path, monkeypatch):
    import types
    made = []

    class Writer:
        def __init__(self, folder, purge_step):
            made.append(purge_step)

        def __getattr__(self, name):
            return lambda *args: None
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    monkeypatch.setattr(train, "find_spec", lambda name: SimpleNamespace(origin=name))
    run(shards, tmp_path / "a", tracker="tensorboard", stop_after=4)
    run(shards, tmp_path / "a", tracker="tensorboard", resume="true")
    assert made == [None, 5]


# ---------------------------------------------------------------------------------------------------------------------
# Data


@pytest.mark.parametrize("total, seq_len", [(128, 64), (127, 64), (66, 64), (200, 64), (1001, 10), (65, 64)])
def test_every_token_of_a_small_corpus_is_seen_equally_often(total, seq_len, tmp_path):
    shard(tmp_path / "x_train_0.bin", np.arange(total))
    data = train.Tokens(tmp_path, "train", seq_len, total)
    epochs = 60
    starts = data.order(3, 0, epochs * data.windows)
    counts = np.bincount(data.at(starts)[:, :-1].ravel(), minlength=total)
    assert counts.sum() == epochs * data.windows * seq_len and counts.max() - counts.min() <= 2
    rows = data.at(starts)
    assert (np.diff(rows) % total == 1).all()  # consecutive, around the end
    assert sorted(starts[:data.windows]) == list(range(0, data.windows * seq_len, seq_len))
    parts = np.concatenate([data.order(3, step, 7) for step in range(10)])
    assert np.array_equal(parts, data.order(3, 0, 70))  # batch k depends on the seed and on k alone
    if data.windows > 2:
        assert set(data.order(3, 1, data.windows)) != set(data.order(4, 1, data.windows))


def test_data_is_read_ahead_in_the_same_order(shards, tmp_path):
    """The next rows are prepared by a thread while the ones before are in use."""
    import threading
    _, t = train.load_config(flags(shards, "a", micro_batch=2))
    data = train.Tokens(shards, "train", 16, 61)
    threads, at, asked = set(), data.at, threading.Semaphore(0)

    def recorded(starts):
        threads.add(threading.current_thread())
        asked.release()
        return at(starts)
    data.at = recorded
    batches = train.read_ahead(data, t, range(3, 6), 2, 1, 2, False)
    first = next(batches)
    assert asked.acquire(timeout=10) and asked.acquire(timeout=10)  # the second ones, which nobody asked for yet
    seen = [first, *batches]
    assert len(seen) == 6 and threading.main_thread() not in threads
    for k, (rows, crc, waited) in enumerate(seen):
        starts = data.order(t.seed, 3 + k // 2, 8)
        assert np.array_equal(rows.numpy(), at(starts.reshape(2, 2, 2)[k % 2, 1])) and waited >= 0
        assert crc == train.zlib.crc32(starts.astype("<u8").tobytes(), data.crc)
    assert len({crc for _, crc, _ in seen}) == 3
    endless = train.read_ahead(data, t, range(2**70), 2, 1, 2, False)  # no list of all steps is made
    assert next(endless)[1] and endless.close() is None


def test_checksums_of_batches_tell_other_data_apart(shards, tmp_path):
    shard(tmp_path / "d/x_train_0.bin", [1] * 2000)
    rows = [run(data, tmp_path / name, eval_every=0, max_steps=2) for data, name in (
        (shards, "a"), (tmp_path / "d", "b"))]
    assert all(a["crc"] != b["crc"] for a, b in zip(*rows)) and float(rows[0][0]["wait_ms"]) >= 0


def test_a_mistake_in_the_data_that_is_read_ahead_is_told(tmp_path):
    shard(tmp_path / "d/x_train_0.bin", [70] * 2000)
    with pytest.raises(UserError, match="x_train_0.bin holds token 70, but the model has vocab_size=61"):
        run(tmp_path / "d", tmp_path / "a", eval_every=0)


# ---------------------------------------------------------------------------------------------------------------------
# What is said


def load(*argv):
    return train.load_config(list(map(str, argv)))


def complaint(*argv):
    with pytest.raises(UserError) as e:
        load(*argv)
    assert "\n" not in str(e.value)
    return str(e.value)


def test_flags_are_taken_in_every_usual_form(tmp_path):
    cfg, t = load("--n_layer", "4", "--lr", "1e-3", "--resume", "--n_embd=48", "--remat", "false",
                  "--max_steps=1e3", "--compile=true")
    assert (cfg.n_layer, t.lr, t.resume, cfg.n_embd, cfg.remat) == (4, 1e-3, True, 48, False)
    assert t.max_steps == 1000 and type(t.max_steps) is int and t.compile == "on"
    path = tmp_path / "c.toml"
    path.write_text("max_steps = 2e3\ncompile = false\n", encoding="utf-8")
    assert load("--overwrite", path)[1].max_steps == 2000 and load(path)[1].compile == "off"
    assert load("--compile", "off")[1].compile == "off"
    assert "--lr needs a value: --lr=0.0006" in complaint("--lr", "--resume")
    assert "max_steps='1.5' must be a whole number" in complaint("--max_steps=1.5")
    assert "max_steps='1.5e0' must be" in complaint("--max_steps=1.5e0")


def test_a_flag_given_twice_is_an_error():
    assert "command line: --lr is given twice" in complaint("--lr=1", "--seed=2", "--lr", "2")


@pytest.mark.parametrize("theirs, ours", [
    ("batch_size", "micro_batch .* and tokens_per_step"), ("block_size", "seq_len"), ("learning_rate", "lr"),
    ("max_iters", "max_steps"), ("dropout", "nothing: there is no dropout"), ("wandb_log", "tracker=wandb"),
    ("gradient_accumulation_steps", "tokens_per_step"), ("hidden_size", "n_embd"), ("num_hidden_layers", "n_layer"),
    ("num-key-value-heads", "n_kv_head"), ("gradient_checkpointing", "remat")])
def test_names_of_other_projects_are_answered_with_ours(theirs, ours, tmp_path):
    assert re.search(f"unknown key '{theirs}', here it is {ours}", complaint(f"--{theirs}=1"))
    (tmp_path / "c.toml").write_text(f"{theirs} = 1\n", encoding="utf-8")
    assert re.search(f"c.toml: unknown key '{theirs}', here it is {ours}", complaint(tmp_path / "c.toml"))


def test_the_table_of_names_fits_the_settings():
    for theirs, ours in train.THEIRS.items():
        assert theirs not in train.SCHEMA and (re.match(r"\w+", ours)[0] in train.SCHEMA or ours.startswith("nothing:"))
    assert "did you mean n_layer?" in complaint("--n-layer=3") and "did you mean n_layer?" in complaint("--n_lyer=3")


def test_a_bad_value_names_the_file_it_came_from(tmp_path):
    for name, text in (("a.toml", "lr = -1.0\n"), ("b.toml", "min_lr = 0.1\nlr = 0.01\n"), ("c.toml", "n_layer = 0\n"),
                       ("d.toml", "max_steps = 'x'\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert complaint(tmp_path / "a.toml") == f"{tmp_path}/a.toml: lr=-1.0: must be positive"
    assert f"{tmp_path}/b.toml: min_lr=0.1 is above lr=0.01" in complaint(tmp_path / "b.toml")
    assert f"{tmp_path}/c.toml: n_layer=0" in complaint(tmp_path / "c.toml")
    assert f"{tmp_path}/d.toml: max_steps='x' must" in complaint(tmp_path / "d.toml")
    assert complaint(tmp_path / "b.toml", "--lr=-1").startswith("lr=-1.0: must")  # the command line's own


def test_a_run_folder_stands_for_its_configuration(shards, tmp_path):
    run(shards, tmp_path / "a", max_steps=2)
    (tmp_path / "a").rename(tmp_path / "b")
    cfg, t = load(tmp_path / "b", "--max_steps=3", "--resume")
    assert (cfg.n_embd, t.out_dir, t.resume, t.max_steps) == (16, str(tmp_path / "b"), True, 3)
    assert load(tmp_path / "b", "--out_dir=c")[1].out_dir == "c"
    assert "cannot read" in complaint(tmp_path) and "expected a .toml file, a run folder or" in complaint("x.json")


def test_the_start_says_what_is_in_force_and_what_may_surprise(shards, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "getloadavg", lambda: (10**6, 0, 0))
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)  # or the advice is followed already
    run(shards, tmp_path / "a", warmup_steps=6, n_ffn=64)
    said = capsys.readouterr().out
    line, = (line for line in said.splitlines() if line.startswith("settings: "))
    assert "n_layer=1" in line and "lr=0.01" in line and "warmup_steps=6" in line and "save_every=2" in line
    assert "n_kv_head" not in line and "head_dim" not in line and "n_ffn" not in line  # derived
    assert "warning: the warm-up of 6 steps takes the whole run of 6" in said
    assert re.search(r"the machine is busy \(load 1000000.0 on \d+ cores\).* OMP_NUM_THREADS=1", said)
    assert said.index("step:0/6 val:") < said.index("step:1/6 loss:")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0, 0))
    run(shards, tmp_path / "b", schedule="wsd", decay_steps=5)
    said = capsys.readouterr().out
    assert "the decay of 5 steps is longer than the 4 behind the warm-up" in said and "busy" not in said
    run(shards, tmp_path / "c", schedule="wsd", decay_steps=4, n_ffn=80)
    said = capsys.readouterr().out
    assert "warning" not in said and "note" not in said and "n_ffn=80" in said


def test_a_vocabulary_above_the_tokenizers_is_said(data, tmp_path, capsys):
    for vocab_size, said in ((257, False), (320, True)):
        run(data, tmp_path / str(vocab_size), vocab_size=vocab_size, max_steps=1, eval_every=0)
        assert ("note: vocab_size=320 is 63 above the tokenizer's" in capsys.readouterr().out) == said


def test_the_first_step_and_the_loss_before_training_are_logged(shards, tmp_path):
    run(shards, tmp_path / "a", log_every=4, eval_every=5, max_steps=9, init="papers")
    rows = read_log(tmp_path / "a")
    assert [r["step"] for r in rows] == ["0", "1", "4", "5", "8", "9"]
    assert float(rows[0]["val_loss"]) == pytest.approx(np.log(61), abs=0.1) and rows[0]["loss"] == ""
    assert [r["step"] for r in run(shards, tmp_path / "b", log_every=4, eval_every=0, max_steps=5)] == ["1", "4", "5"]


def test_help_lists_the_modes(capsys):
    with pytest.raises(SystemExit):
        load("--help")
    lines = capsys.readouterr().out.splitlines()
    for name in train.RESIDUAL_MODES:
        assert sum(line.startswith(f"  {name} ") for line in lines) == 1
