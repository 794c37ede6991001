"""What the tests share: small models, small data, runs in this process and command lines."""
import csv
import json
import os
import signal
from pathlib import Path

import numpy as np
import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before Triton is imported

import prepare_fineweb
import train
from model import GPT, RESIDUAL_MODES, GPTConfig
from prepare_fineweb import UserError

for number, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:  # pytest was started by nohup or in the background of a script
        signal.signal(number, usual)
torch.set_num_threads(1)  # small shapes: more threads only get in each other's way
HERE = Path(__file__).resolve().parent.parent
MODES = list(RESIDUAL_MODES)

# every mode, and the knobs that change what a mode computes
VARIANTS = {m: (m, {}) for m in MODES} | {
    f"rd: {c}": ("rd", dict(rd_control=c)) for c in ("tied", "average", "frozen_v")} | {
    f"dar_block: {c}": ("dar_block", dict(dar_routing=c)) for c in ("self_kv", "cross_v", "fixed_kv", "sep_v")} | {
    "rd: heads": ("rd", dict(route_heads=4)), "dar: heads": ("dar", dict(route_heads=4)),
    "delta: heads": ("delta", dict(route_heads=4)), "attnres_block: size 4": ("attnres_block", dict(depth_block=4)),
    "delta_block: released": ("delta_block", dict(delta_sources="released")),
    "delta_block: size 3": ("delta_block", dict(depth_block=3)),
    "mhar_delta: size 1": ("mhar_delta", dict(depth_block=1)), "dar: dynamic": ("dar", dict(dynamic_gates=True)),
    "hc: dynamic": ("hc", dict(dynamic_gates=True)), "hc: 2 streams": ("hc", dict(n_streams=2)),
    "mhc: 2 streams": ("mhc", dict(n_streams=2))}
SHIPPED = ("standard attnres attnres_block attnres_cumulative static_block delta delta_block mhar mhar_block "
           "mhar_delta rd dar dar_block hc mhc").split()
OWN = [m for m in MODES if m not in SHIPPED]  # modes that a reader has added: every test that applies runs over them
SMALL = dict(vocab_size=61, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, n_ffn=48, seq_len=16, init="papers")


def make(mode, seed=0, randomise=True, dtype=torch.float64, **changes):
    """A small model; `randomise` moves gains and residual parameters away from their neutral start."""
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SMALL | dict(residual_mode=mode) | changes)).to(dtype)
    if randomise:
        with torch.no_grad():
            for name, p in model.named_parameters():
                if p.dim() == 1 or name.startswith("residual"):
                    p.add_(torch.randn_like(p) * (0.5 if name.startswith("residual") else 0.2))
    return model


def variant(name, **changes):
    mode, knobs = VARIANTS[name]
    return make(mode, **knobs | changes)


def tokens(batch=2, length=16, seed=1, vocab=61):
    return torch.randint(vocab, (batch, length + 1), generator=torch.Generator().manual_seed(seed))


def loss_of(model, idx):
    return model(idx[:, :-1], idx[:, 1:])[1]


def gradients(model, idx):
    model.zero_grad()
    loss = loss_of(model, idx)
    loss.backward()
    return loss.detach(), {n: p.grad for n, p in model.named_parameters()}


def assert_close(a, b, tol):
    """Largest difference, relative to the largest value."""
    if isinstance(a, dict):
        assert a.keys() == b.keys()
        scale = max(v.abs().max() for v in b.values())
        for name in a:
            assert (a[name] - b[name]).abs().max() <= tol * scale, name
    else:
        assert (a - b).abs().max() <= tol * b.abs().max().clamp_min(1e-300)


def flags(data, out, **settings):
    base = dict(data_dir=data, out_dir=out, n_layer=2, n_head=2, n_embd=32, n_ffn=48, seq_len=32, micro_batch=2,
                tokens_per_step=256, max_steps=6, lr=1e-2, min_lr=1e-3, warmup_steps=2, eval_every=3, eval_tokens=500,
                log_every=1, save_every=2, device="cpu", dtype="float64")
    return [f"--{k}={v}" for k, v in (base | settings).items()]


def run_training(data, out, **settings):
    """Train in this process; returns the rows of log.csv."""
    cfg, t = train.load_config(flags(data, out, **settings))
    old = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1,
                                             signal.SIGUSR2)}
    try:
        train.train(cfg, t)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)
    return read_log(out)


def read_log(out):
    """Rows of log.csv, without the one of the untrained model."""
    with open(Path(out) / "log.csv", newline="") as f:
        return [row for row in csv.DictReader(f) if row["step"] != "0"]


def measured(rows):
    """Log rows without what depends on the clock and the machine."""
    return [{k: v for k, v in r.items() if k not in ("tok_per_s", "ms", "mem_mb", "wait_ms")} for r in rows]


def same_weights(a, b):
    a, b = (torch.load(p, weights_only=True)["model"] for p in (a, b))
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


def copy_of(model, mode, **changes):
    """The same parameters in another mode, as far as it has them."""
    other = make(mode, **changes)
    state = model.state_dict()
    other.load_state_dict({n: state[n] for n in other.state_dict()})
    return other


def config_error(*argv):
    with pytest.raises(UserError) as e:
        train.load_config(list(map(str, argv)))
    assert "\n" not in str(e.value)
    return str(e.value)


def shard(path, ids, magic=20240520, version=1, count=None):
    header = np.zeros(256, "<i4")
    header[:3] = magic, version, len(ids) if count is None else count
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    Path(path).write_bytes(header.tobytes() + np.asarray(ids, "<u2").tobytes())
    return path


def prepare(source, out, *args):
    alone = [] if any(a.startswith("--workers=") for a in args) else ["--workers=1"]
    prepare_fineweb.prepare(prepare_fineweb.parse_args([f"--source={source}", f"--out={out}", *alone, *args]))
    return json.loads((Path(out) / "meta.json").read_text(encoding="utf-8"))


def documents(out, meta, split):
    """Texts of a split, read back from its shards."""
    files = [Path(out) / s["file"] for s in meta["splits"][split]["shards"]]
    ids = np.concatenate([np.fromfile(path, "<u2", offset=1024) for path in files])
    assert ids[0] == 256
    return [bytes(part.astype(np.uint8)).decode() for part in np.split(ids, np.flatnonzero(ids == 256))[1:]
            for part in [part[1:]]]


TRAIN_ONLY = "--val_tokens=0", "--test_tokens=0"  # everything goes to train


def corpus(n=400):
    return [f"document {i} has a text of its own, " + "word " * (i % 50) for i in range(n)]


def write_corpus(folder, kind, texts):
    """The same documents as .jsonl, .parquet or compressed; returns the path."""
    import gzip

    import pyarrow
    import pyarrow.parquet
    import zstandard
    folder.mkdir(exist_ok=True)
    path = folder / f"docs{kind}"
    lines = "".join(json.dumps({"text": t, "id": i}) + "\n" for i, t in enumerate(texts)).encode()
    if kind == ".parquet":
        pyarrow.parquet.write_table(pyarrow.table({"id": range(len(texts)), "text": texts}), path, row_group_size=70)
    else:
        path.write_bytes({".gz": gzip.compress, ".zst": zstandard.compress}.get(path.suffix, bytes)(lines))
    return path


def write_ranks(path, extra=()):
    """A rank file: all bytes, a few merges of English, and `extra` ranks."""
    import base64
    tokens = [bytes([i]) for i in range(256)] + [b"th", b"the", b" the", b"do", b"cu", b"docu", b"  ", b"aa", b"aaaa"]
    ranks = dict(zip(tokens, range(len(tokens)))) | dict(extra)
    path.write_bytes(b"".join(base64.b64encode(t) + b" %d\n" % r for t, r in ranks.items()))
    return path


def write_tokenizer(folder):
    encoding = prepare_fineweb.get_encoding(str(write_ranks(folder / "mine.tiktoken")), "gpt2")
    encoding.save(folder / "tokenizer.json")
    return folder / "tokenizer.json"


TINY_RUN = dict(n_embd=16, n_ffn=16, n_head=1, seq_len=16, tokens_per_step=64, eval_tokens=100)


def tiers(names, *fast):
    """Names of variants as values of a parameter: `fast` ones and own modes are run always, the rest with -m slow."""
    return [name if name in fast or VARIANTS.get(name, SHIPPED)[0] not in SHIPPED else
            pytest.param(name, marks=pytest.mark.slow) for name in names]
