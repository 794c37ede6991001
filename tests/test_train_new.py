"""Tests of train.py: starts, ends, run folders and what is said. Training runs in this process, in tiny shapes."""
import csv
import os
import signal
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch

HERE = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(HERE))

import train  # noqa: E402
from prepare_fineweb import UserError  # noqa: E402

TORCHRUN = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")


def write_shard(path, tokens):
    path.parent.mkdir(parents=True, exist_ok=True)
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    path.write_bytes(header.tobytes() + np.asarray(tokens, "<u2").tobytes())


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """2,000 train and 600 val tokens below 61, without a meta.json."""
    folder, rng = tmp_path_factory.mktemp("shards"), np.random.default_rng(0)
    write_shard(folder / "x_train_0.bin", rng.integers(61, size=2000))
    write_shard(folder / "x_val_0.bin", rng.integers(61, size=600))
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
    (dict(RANK="0", WORLD_SIZE="2"), "WORLD_SIZE=2 .*without LOCAL_RANK, MASTER_ADDR, MASTER_PORT each.*torchrun"),
    (dict(SLURM_NTASKS="8"), "SLURM_NTASKS=8 .*srun --ntasks-per-node=1 .*--nnodes=.*env -u SLURM_NTASKS python"),
    (dict(OMPI_COMM_WORLD_SIZE="2", OMPI_COMM_WORLD_RANK="1"), "OMPI_COMM_WORLD_SIZE=2 looks like several processes"),
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
    assert [b for b, _ in seen] == ["gloo", "nccl"] and all(t >= timedelta(hours=6) for _, t in seen)


def facts(data, out, start=0, seed=1, **settings):
    cfg, t = train.load_config(flags(data, out, seed=seed, **settings))
    cfg, _, val, about = train.open_data(cfg, t)
    model = train.build(cfg)
    model.init_weights(t.seed)
    return train.start_facts(cfg, t, torch.float32, start, about, val, model)


def test_processes_that_disagree_stop_before_the_first_step(shards, tmp_path, monkeypatch):
    write_shard(tmp_path / "d/x_train_0.bin", [1] * 2000)
    write_shard(tmp_path / "d/x_val_0.bin", [1] * 600)
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


@pytest.mark.slow
def test_two_machines_without_a_shared_disk_stop_instead_of_training_apart(shards, tmp_path):
    """Only the first has the checkpoint: neither takes a step, and the run can still go on from what is there."""
    for name in ("n0", "n1"):
        (tmp_path / name).mkdir()

    def start(*more):
        script = f"cd {tmp_path}/n$LOCAL_RANK && exec {sys.executable} {HERE}/train.py " + " ".join(
            [*flags(shards, "run"), *more])
        return subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2",
                               "--no-python", "bash", "-c", script], capture_output=True, text=True, timeout=120,
                              env=os.environ | {"OMP_NUM_THREADS": "1"})
    first = start()
    assert first.returncode == 0, first.stderr
    log = (tmp_path / "n0/run/log.csv").read_bytes()
    second = start("--max_steps=12", "--resume=true")
    assert second.returncode != 0
    assert "train.py: the processes disagree: the step to go on from is 6 on rank 0 and 0 on rank 1" in second.stderr
    assert (tmp_path / "n0/run/log.csv").read_bytes() == log and "step:7" not in second.stdout
