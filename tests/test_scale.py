"""train.py beyond one GPU: optimizers, the loss of large vocabularies, processes, estimates."""
import json
import os
import shutil
import socket
import subprocess
import sys
from contextlib import ExitStack, nullcontext

import pytest
import torch
import torch.nn.functional as F
from helpers import (
    HERE,
    MODES,
    assert_close,
    flags,
    gradients,
    loss_of,
    make,
    measured,
    read_log,
    run_training,
    same_weights,
    tokens,
)

from launch import run_script, started
from study import estimate
import model as model_file
import train
from model import GPTConfig
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
        with estimate.Meter() as live, torch.set_grad_enabled(gradients_too):
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


# ---------------------------------------------------------------------------------------------------------------------
# Several processes. They are expensive to start: one start for many runs.

DRIVER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import train
try:
    train.torch._dynamo.config.fail_on_recompile_limit_hit = True  # which else ends in eager mode without a word
    for argv in json.loads(sys.argv[2]):
        train.torch._dynamo.reset()
        train.train(*train.load_config(argv))
    print("all done", flush=True)
finally:  # gloo's threads can hang at the end
    sys.stderr.flush()
    os._exit(int(sys.exc_info()[1] is not None and (print(sys.exc_info()[1], file=sys.stderr, flush=True) or True)))
"""


def spawn(runs, world=2, local=0, timeout=550):
    """Runs, one after the other, on `world` processes, `local` to a machine; returns the outputs of the processes.

    Without `local` it is a launch by hand, which tells the processes what they cannot do without."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = {**os.environ, "WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port),
           "OMP_NUM_THREADS": "1", **(dict(LOCAL_WORLD_SIZE=str(local)) if local else {})}
    jobs = [subprocess.Popen([sys.executable, "-c", DRIVER, str(HERE), json.dumps(runs)], text=True,
                             stdout=subprocess.PIPE, stderr=subprocess.STDOUT, cwd=HERE,
                             env=env | {"RANK": str(r), "LOCAL_RANK": str(r % (local or world))}) for r in range(world)]
    try:
        return [job.communicate(timeout=timeout)[0] for job in jobs]
    finally:
        for job in jobs:
            job.kill()


def assert_same_run(a, b, tol):
    if tol < 1e-9:  # AdamW takes whole steps along gradients that are rounding in float32
        assert_close(*(torch.load(path / "last.pt", weights_only=True)["model"] for path in (a, b)), tol)
    a, b = read_log(a), read_log(b)
    assert len(a) == len(b) > 1
    for x, y in zip(a, b):
        assert x["crc"] == y["crc"] and x["step"] == y["step"]
        for key in ("loss", "val_loss", "grad_norm"):
            assert x[key] == y[key] == "" or abs(float(x[key]) - float(y[key])) < tol, (key, x, y)


def test_shards_give_the_numbers_of_one_process(data, tmp_path):
    """With evaluations that do not divide by the processes, clipping, accumulation, remat; resumed from each other."""
    first = dict(residual_mode="rd", max_steps=2, grad_clip=0.5, eval_every=1, save_every=0, schedule="wsd",
                 decay_steps=1, min_lr=1e-2)
    longer, shards = first | dict(max_steps=3, resume="true"), dict(parallel="fsdp", remat="true")
    run_training(data, tmp_path / "one", **first)
    run_training(data, tmp_path / "to shards", **first)
    muon = dict(optimizer="muon", max_steps=1, eval_every=0, init="papers")
    run_training(data, tmp_path / "muon one", **muon)
    out = spawn([flags(data, tmp_path / "shards", **first | shards),
                 flags(data, tmp_path / "to shards", **longer | shards),
                 flags(data, tmp_path / "muon shards", parallel="fsdp", **muon)])
    assert all("all done" in text for text in out), out[0][-3000:]
    assert_same_run(tmp_path / "shards", tmp_path / "one", 1e-10)
    for name in ("one", "shards"):
        run_training(data, tmp_path / name, **longer)
    for name in ("shards", "to shards"):
        assert_same_run(tmp_path / name, tmp_path / "one", 1e-10)
    one, two = (torch.load(tmp_path / f"muon {n}/last.pt", weights_only=True)["model"] for n in ("one", "shards"))
    for name, w in one.items():  # Newton and Schulz's iteration is in bf16
        assert (w - two[name]).norm() <= 3e-3 * w.norm(), name


TWO_SHARDS = """
import json, os, sys
sys.path.insert(0, HERE)
import train
rank, add, found = os.environ["RANK"], train.Log.add, {}


def run(argv):
    try:
        train.train(*train.load_config(argv))
    except train.UserError as e:
        return str(e)

cfg, t = train.load_config(failing)
train.start_processes(train.torch.device("cpu"))
cfg = train.open_data(cfg, t)[0]
cpu = train.torch.device("cpu")
try:
    train.build_sharded(train.replace(cfg, n_ffn=33), train.replace(t, optimizer="muon"), cpu, train.torch.float32)
except train.UserError as e:
    found["odd"] = str(e)
sparse = train.replace(cfg, n_expert=4, n_expert_active=2)
model = train.fill(train.build_sharded(sparse, t, cpu, train.torch.bfloat16), cpu, t.seed)
whole = model.experts[0].router.weight.full_tensor()
model.experts[0].router.register_forward_hook(
    lambda module, args, out: found.update(router=((args[0].double() @ whole.double().t() - out).abs().max()
                                                   / out.abs().max()).item()))
with train.autocast(cpu, train.torch.bfloat16):
    model(train.torch.arange(64).view(2, 32))
for kind in "float32", "float64":
    dtype = getattr(train.torch, kind)
    model = train.fill(train.build_sharded(cfg, t, cpu, dtype), cpu, t.seed)
    found[kind] = train.weights_checksum(model)


def full(self, row):
    if row[0] == 3:
        raise OSError(28, "No space left on device")
    add(self, row)
train.Log.add = full
found["failing"] = run(failing)
train.Log.add = add
for name, argvs in apart.items():
    found[name] = run(argvs[int(rank)])
with open(f"{OUT}/{rank}.json", "w", encoding="utf-8") as f:
    json.dump(found, f)
sys.stdout.flush()
os._exit(0)
"""


@pytest.mark.slow
def test_shards_save_before_a_failing_log_ends_the_run_and_are_those_of_one_model(data, tmp_path):
    """Checkpoints of two machines that differ in a weight, or in what was best, stop both before a step."""
    settings = dict(residual_mode="rd", parallel="fsdp", save_every=0, eval_every=2, dtype="float32")
    run_training(data, tmp_path / "one", **settings | dict(max_steps=2))
    train.folder_lock = None  # which this process would hold for the others to find
    for name in ("as saved", "other weight", "better"):
        shutil.copytree(tmp_path / "one", tmp_path / name)
    saved = torch.load(tmp_path / "one/last.pt", weights_only=True)
    saved["model"]["gain"][-1] += 1e-6
    torch.save(saved, tmp_path / "other weight/last.pt")
    torch.save(torch.load(tmp_path / "one/best.pt", weights_only=True) | dict(best=0.5), tmp_path / "better/best.pt")
    apart = {name: [flags(data, tmp_path / n, resume="true", **settings) for n in ("one", name)]
             for name in ("other weight", "better", "as saved")}
    driver = tmp_path / "driver.py"
    driver.write_text(f"HERE, OUT, apart = {str(HERE)!r}, {str(tmp_path)!r}, {apart!r}\n"
                      f"failing = {flags(data, tmp_path / 'failing', **settings)!r}\n{TWO_SHARDS}", "utf-8")
    result = run_script(driver, processes=2)
    zero, one = (json.loads((tmp_path / f"{rank}.json").read_text(encoding="utf-8")) for rank in (0, 1))
    for kind in ("float32", "float64"):
        cfg = train.open_data(*train.load_config(flags(data, "", **settings)))[0]
        model = train.fill(train.build(cfg, "meta").to(getattr(torch, kind)), torch.device("cpu"), 1)
        assert zero.pop(kind) == one.pop(kind) == train.weights_checksum(model)
    message = "optimizer=muon with parallel=fsdp: n_ffn=33 does not divide by 2 processes"
    assert zero.pop("odd") == one.pop("odd") == message
    assert zero.pop("router") < 1e-6 and one.pop("router") < 1e-6  # in bf16 it is 1e-3
    assert zero.pop("failing").endswith("log.csv (No space left on device); the model of step 3 is saved")
    assert one.pop("failing") == "rank 0 cannot write its log"
    assert torch.load(tmp_path / "failing/last.pt", weights_only=True)["step"] == 3
    assert zero == one and zero["as saved"] is None, result.stdout
    assert "the processes disagree: the checksum of last.pt is" in zero["other weight"]
    assert "the processes disagree: the best val loss is" in zero["better"] and "0.5 on rank 1" in zero["better"]


def matrix(data, folder, name, modes=MODES, **settings):
    base = dict(max_steps=10, eval_every=10, grad_clip=0.5, save_every=0, lr=3e-3)
    return [flags(data, folder / f"{name} {mode}", residual_mode=mode, **base | settings) for mode in modes]


@pytest.mark.slow
def test_every_mode_trains_in_two_shards_as_in_one_process(data, tmp_path):
    short = dict(max_steps=3, eval_every=3)
    for runs, world in ((matrix(data, tmp_path, "one", **short), 1),
                        (matrix(data, tmp_path, "two", parallel="fsdp", **short), 2)):
        out = spawn(runs, world)
        assert all("all done" in text for text in out), out[0][-3000:]
    for mode in MODES:
        assert_same_run(tmp_path / f"two {mode}", tmp_path / f"one {mode}", 1e-10)


@pytest.mark.long
@pytest.mark.parametrize("dtype, tol", [("float64", 1e-10), ("float32", 1e-5)])
def test_all_modes_on_all_engines(dtype, tol, data, tmp_path):
    """2 DDP, 2 and 4 FSDP, 2 x 2, remat, tied and untied, compiled: loss, val loss, norm, weights of one process."""
    few, shards = ("standard", "rd", "dar_block", "mhc"), dict(parallel="fsdp", dtype=dtype)
    one = matrix(data, tmp_path, "one", dtype=dtype) + matrix(data, tmp_path, "one untied", few, tie_embeddings="false",
                                                               dtype=dtype)
    for runs, world, local in (
            (one, 1, 1), (matrix(data, tmp_path, "ddp", dtype=dtype), 2, 2),
            (matrix(data, tmp_path, "two", **shards) + matrix(data, tmp_path, "remat", remat="true", **shards) +
             matrix(data, tmp_path, "untied", few, tie_embeddings="false", **shards), 2, 2),
            (matrix(data, tmp_path, "compiled", compile="on", remat="true", **shards), 2, 2),
            (matrix(data, tmp_path, "four", micro_batch=1, **shards), 4, 4),
            (matrix(data, tmp_path, "machines", micro_batch=1, **shards), 4, 2)):
        out = spawn(runs, world, local, timeout=3600)
        assert all("all done" in text for text in out), out[0][-3000:]
    for name, modes in (("ddp", MODES), ("two", MODES), ("remat", MODES), ("untied", few), ("compiled", MODES),
                        ("four", MODES), ("machines", MODES)):
        reference = "one untied" if name == "untied" else "one"
        for mode in modes:
            assert_same_run(tmp_path / f"{name} {mode}", tmp_path / f"{reference} {mode}", tol)


@pytest.mark.slow
def test_checkpoints_go_from_each_engine_to_each(data, tmp_path):
    engines = {"one": (1, {}), "ddp": (2, dict(parallel="ddp")), "fsdp": (2, dict(parallel="fsdp"))}
    settings = dict(residual_mode="dar_block", schedule="wsd", decay_steps=1, min_lr=1e-2, eval_every=0, save_every=0)
    spawn([flags(data, tmp_path / "whole", **settings)], 1)
    for source, (world, options) in engines.items():
        spawn([flags(data, tmp_path / f"{source} {target}", **settings | options | dict(max_steps=3))
               for target in engines], world)
    for target, (world, options) in engines.items():
        spawn([flags(data, tmp_path / f"{source} {target}", resume="true", **settings | options)
               for source in engines], world)
    for source in engines:
        for target in engines:
            assert_same_run(tmp_path / f"{source} {target}", tmp_path / "whole", 1e-10)


def on_two_machines(script, argvs, processes=1, restarts=0):
    """The line of configs/README.md by two launchers with arguments of their own: [(exit code, all that it said)]."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    line = ("-m torch.distributed.run --nnodes=2 --rdzv_backend=c10d --rdzv_id=JOB "
            f"--nproc_per_node={processes} --max-restarts={restarts} --rdzv_endpoint=localhost:{port}").split()
    with ExitStack() as ends:
        runs = [ends.enter_context(started(*line, script, *argv, fresh=True, TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1"))
                for argv in argvs]
        return [(run.wait(), run.said) for run in runs]


ENGINES = pytest.mark.parametrize("engine, processes", [("ddp", 1), ("fsdp", 2)])  # 2 machines x 2 shards


@pytest.mark.parametrize("engine, processes", [
    pytest.param("ddp", 1, marks=pytest.mark.slow), pytest.param("fsdp", 2, marks=pytest.mark.long)])
def test_a_worker_that_is_killed_on_one_of_two_machines_changes_nothing(engine, processes, data, tmp_path):
    """Both launchers start theirs again, which go on from the last save of the folder that all of them see."""
    settings = dict(residual_mode="dar_block", save_every=3, eval_every=4, max_steps=8, micro_batch=1)
    run_training(data, tmp_path / "one", **settings)
    driver, killed = tmp_path / "driver.py", tmp_path / "killed"
    driver.write_text(f"""import os, sys
from pathlib import Path
sys.path.insert(0, {str(HERE)!r})
import train
order, killed = train.Tokens.order, Path({str(killed)!r})
def dying(self, seed, step, size):
    if step == 5 and os.environ["RANK"] == "1" and not killed.exists():
        killed.touch()
        os.kill(os.getpid(), 9)
    return order(self, seed, step, size)
train.Tokens.order = dying
train.main()
""", "utf-8")
    argv = flags(data, tmp_path / "two", resume="true", parallel=engine, **settings)
    found = on_two_machines(driver, [argv, argv], processes, restarts=1)
    assert killed.exists() and [code for code, _ in found] == [0, 0], found
    assert sum(f"resuming {tmp_path / 'two'} after step 3" in said for _, said in found) == 1, found
    assert_same_run(tmp_path / "two", tmp_path / "one", 1e-10)


@pytest.mark.long
@ENGINES
def test_two_machines_with_folders_of_their_own_train_from_copies_and_from_nothing_else(engine, processes, data,
                                                                                        tmp_path):
    settings = dict(residual_mode="dar_block", save_every=0, eval_every=4, max_steps=8, micro_batch=1)
    run_training(data, tmp_path / "0", stop_after=3, **settings)
    train.folder_lock = None  # which this process would hold for the others to find
    for name in ("1", "one"):
        shutil.copytree(tmp_path / "0", tmp_path / name)
    run_training(data, tmp_path / "one", resume="true", **settings)
    argvs, longer = ([flags(data, tmp_path / name, resume="true", parallel=engine, **settings | more) for name in "01"]
                     for more in ({}, dict(max_steps=9)))
    found = on_two_machines(HERE / "train.py", argvs, processes)
    assert [code for code, _ in found] == [0, 0], found
    steps = [torch.load(tmp_path / name / "last.pt", weights_only=True)["step"] for name in "01"]
    assert sorted(steps) == [3, 8]  # the first process, on either of them, has saved
    ended = tmp_path / str(steps.index(8))
    assert_same_run(ended, tmp_path / "one", 1e-10)
    log = (ended / "log.csv").read_bytes()
    found = on_two_machines(HERE / "train.py", longer, processes)
    assert [code for code, _ in found] == [1, 1] and (ended / "log.csv").read_bytes() == log, found
    assert any("the processes disagree: the step to go on from is" in said for _, said in found), found


MEMORY = """
import ctypes, os, re, sys
from pathlib import Path
sys.path.insert(0, HERE)
import train
from train import torch
ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD, the environment's MALLOC_MMAP_THRESHOLD_: free is given back
Path("/proc/self/clear_refs").write_text("5")  # the peak is one from here on


def resident(name):
    return int(re.search(name + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

before = resident("VmRSS")
cfg, t = train.load_config(argv)
device = torch.device("cpu")
rank, world = train.start_processes(device)
model = train.build_sharded(cfg, t, device, torch.float32) if world > 1 else train.build(cfg, "meta")
train.fill(model, device, t.seed)
found = [resident("VmHWM") - before]
optimizer, idx = train.make_optimizer(model, t, device), torch.zeros(1, cfg.seq_len, dtype=torch.long)
for _ in range(2):
    model(idx, idx)[1].backward()
    optimizer.step()
    optimizer.zero_grad()
found.append(resident("VmHWM") - before)
live = [*model.parameters(), *(x for state in optimizer.state.values() for x in state.values())]
found.append(sum((x.to_local() if hasattr(x, "to_local") else x).nbytes for x in live) / 2**20)
Path(f"{OUT}/{world} {rank}").write_text(" ".join(map(str, found)))
os._exit(0)
"""


def memory_of_processes(folder, world, **settings):
    """[(MiB at most while the model is built, at most in two steps, of weights and moments)] of each process."""
    driver = folder / "driver.py"
    argv = [f"--{k}={v}" for k, v in settings.items()]
    driver.write_text(f"HERE, OUT, argv = {str(HERE)!r}, {str(folder)!r}, {argv!r}\n{MEMORY}", "utf-8")
    run_script(driver, processes=world)
    return [tuple(map(float, (folder / f"{world} {rank}").read_text().split())) for rank in range(world)]


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads the resident memory from /proc, which Linux alone has")
def test_memory_of_a_process_falls_with_the_shards(tmp_path):
    settings = dict(vocab_size=512, n_layer=12, n_head=8, n_embd=512, seq_len=16, residual_mode="attnres_block")
    built, stepped, live = zip(*(map(max, zip(*memory_of_processes(tmp_path, n, **settings))) for n in (1, 2, 4)))
    assert live[0] > 400 and built[0] > live[0] / 3
    for n, part in ((1, 1 / 2), (2, 1 / 4)):
        assert live[n] < 1.01 * part * live[0]
        assert built[n] < part * built[0] + 110 and stepped[n] < part * stepped[0] + 110  # modules, a whole sublayer


def test_old_versions_and_uneven_machines_are_refused(monkeypatch):
    monkeypatch.setattr(torch, "__version__", "2.12.1")
    with pytest.raises(UserError, match="parallel=fsdp needs PyTorch 2.13 .* or use parallel=ddp"):
        train.load_config(["--parallel=fsdp"])
    for found, size in (([("2", "a")] * 3, "2 of 3"), ([("2", "a")] * 2 + [("1", "b")], "1 and 2 of 3"),
                        ([(None, "a")] * 2 + [(None, "b")], "1 and 2 of 3"), ([("2", "a")] * 4, 2),
                        ([(None, "a"), (None, "b")] * 2, 2)):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda found=found: len(found))
        monkeypatch.setattr(torch.distributed, "all_gather_object",
                            lambda out, own, found=found: out.__setitem__(slice(None), found))
        if isinstance(size, int):
            assert train.processes_per_machine() == size
        else:
            with pytest.raises(UserError, match=f"as many processes on every machine, not {size}: start equally many"):
                train.build_sharded(None, None, None, None)


# ---------------------------------------------------------------------------------------------------------------------
# Estimates


@pytest.mark.parametrize("mode, remat", [("rd", True), pytest.param("dar_block", False, marks=pytest.mark.slow),
                                         pytest.param("mhc", False, marks=pytest.mark.slow)])
def test_tensors_without_content_need_the_bytes_of_real_ones(mode, remat):
    cfg = GPTConfig(vocab_size=600, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, seq_len=32, residual_mode=mode,
                    remat=remat)
    fake, real = estimate.measure(cfg, 2), estimate.measure(cfg, 2, mode=nullcontext)
    assert fake == real and fake[1] > estimate.measure(cfg, 1)[1] > 0


@pytest.mark.parametrize("mode, sharded", [("static_block", False),
                                           pytest.param("dar_block", True, marks=pytest.mark.slow)])
def test_one_pass_tells_what_grows_with_the_batch(mode, sharded):
    cfg = GPTConfig(vocab_size=30_000, n_layer=2, n_head=4, n_kv_head=2, n_embd=512, seq_len=1024, residual_mode=mode)
    _, states, gathered, rest = estimate.memory(cfg, 1 + sharded, 6)
    for remat, batch in ((False, 6), (False, 8), (True, 8)):  # whose loss has eight chunks
        fixed, each = rest[remat]
        peak = estimate.measure(GPTConfig(**vars(cfg) | dict(remat=remat)), batch, sharded)[1]
        assert fixed + batch * each == pytest.approx(peak, rel=2e-3) and fixed > 0
    assert (gathered > 0) == sharded


def test_bytes_of_views_and_of_what_is_written_in_place_are_not_counted_twice():
    outside = torch.zeros(100, 100)
    with estimate.Meter() as meter:
        kept = outside.t(), outside.add_(1), outside[3], outside.view(-1).mul_(2)
        assert meter.peak == 0 and len(kept) == 4
        more = outside + 1, outside.float()
        assert meter.peak == meter.now == 40_000 and len(more) == 2


def test_operations_of_standard_are_counted_as_everybody_counts_them():
    cfg = GPTConfig(vocab_size=600, n_layer=2, n_head=2, n_embd=32, seq_len=32)
    model = train.build(cfg)
    matrices = sum(p.numel() for p in model.parameters() if p.dim() == 2)  # tied: the embedding is the head
    norms = estimate.flops_per_token(cfg) - 6 * matrices - 6 * 2 * 32 * 32  # attention to half of all pairs
    assert 0 < norms < 0.01 * 6 * matrices
    routed = estimate.flops_per_token(GPTConfig(**vars(cfg) | dict(residual_mode="attnres")))
    assert 0 < routed - estimate.flops_per_token(cfg) - 12 * 32 * (2 + 3 + 4 + 5) < 0.2 * routed


def test_an_estimate_knows_the_engine_and_the_optimizer():
    cfg = GPTConfig(vocab_size=600, n_layer=2, n_head=2, n_embd=32, seq_len=32)
    n, states, gathered, _ = estimate.memory(cfg, 1, 2)
    assert states == 16 * n and gathered == 0
    matrices = sum(p.numel() for name, p in train.build(cfg).named_parameters() if p.dim() == 2 and "sub" in name)
    assert estimate.memory(cfg, 4, 2, muon=True)[1] == (16 * n - 4 * matrices) / 4


@pytest.mark.slow
@pytest.mark.parametrize("gpus, parallel, gb", [(1, "fsdp", 1), (8, "fsdp", 8), (32, "fsdp", 8), (32, "ddp", 1)])
def test_an_estimate_goes_on_behind_a_mode_that_cannot_be(gpus, parallel, gb, capsys, monkeypatch):
    """And shards within a machine, as training does."""
    modes = {m: row for m, row in model_file.RESIDUAL_MODES.items() if m in ("dar_block", "standard", "attnres_block")}
    monkeypatch.setattr(estimate, "RESIDUAL_MODES", modes)
    train.main(["--estimate=true", f"--gpus={gpus}", f"--parallel={parallel}", "--vocab_size=600", "--n_layer=1",
                "--n_head=8", "--n_embd=1024", "--seq_len=32", "--residual_mode=attnres_block", "--depth_block=1"])
    out = capsys.readouterr().out
    assert "\ndar_block " in out and "depth_block=1: both histories" in out.split("\ndar_block ")[1].split("\n")[0]
    line = out.split("\nstandard ")[1].split("\n")[0].split()
    n = float(line[0].removesuffix("M")) * 1e6
    assert float(line[4]) == pytest.approx(16 * n / gb / 1e9, abs=0.06)
    assert (f"({gb} shards)" in out) == (gb > 1)


@pytest.mark.slow
def test_an_estimate_has_a_line_for_every_mode_and_trains_nothing(tmp_path, capsys, monkeypatch):
    modes = {m: row for m, row in model_file.RESIDUAL_MODES.items() if m in ("standard", "rd", "mhc")}
    monkeypatch.setattr(estimate, "RESIDUAL_MODES", modes)  # each takes a while
    train.main(["--estimate=true", "--gpus=8", "--parallel=fsdp", "--vocab_size=600", "--n_layer=2", "--n_head=2",
                "--n_embd=32", "--seq_len=32", "--depth_block=2", "--residual_mode=rd", f"--out_dir={tmp_path}/a"])
    out = capsys.readouterr().out
    assert all(f"\n{mode} " in out for mode in modes) and not (tmp_path / "a").exists()
    with pytest.raises(SystemExit):
        train.main(["--estimate=true", "--gpu=H1000", "--vocab_size=600"])
    assert "gpu=H1000 is unknown, did you mean H100?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train.main(["--estimate=true", "--dtype=float32", "--vocab_size=600"])
    assert "dtype=float32: the estimate is for bfloat16; leave dtype out" in capsys.readouterr().err
