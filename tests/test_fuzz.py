"""Damaged inputs. Each case makes one, gives it to a loading function and compares what is accepted with what was
there before the damage, or with a reading of the same input that shares no code with the loading function."""
import contextlib
import dataclasses
import functools
import json
import math
import os
import shutil
import signal
import sys
import warnings

import numpy as np
import pytest
import torch

import eval as evaluation
import prepare_fineweb
import train
from helpers import gradients, prepare, read_log, run_training, TINY_RUN, write_tokenizer
from model import GPT
from prepare_fineweb import UserError
from study import plan


class Hang(BaseException):
    """Not an Exception: no handler of the code under test can take it for a damaged file."""


@contextlib.contextmanager
def time_limit(seconds):
    def stop(*_):
        raise Hang
    old = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old)


ODD_TEXT = ["", " ", "0", "-1", "1", "3", "1e3", "1_0", "0x10", "1" * 5000, "4611686018427387904", "nan", "inf",
            "-0.0", "1e-400", "1e400", "true", "True", "yes", "none", "auto", "cpu", "rd", "dar_block", "a\nb",
            "\0", "\udcff", "\ud800", "☃", "１２", "²", '"', "--help", "\x1b[31m", "a=b", "1,2", ",", "1,-2", "../x"]
ODD_TOML = ["", "nan", "-inf", "1e999", "0x" + "f" * 5000, "[0x" + "f" * 5000 + "]", "1" * 5000, "1.5", "-0", "3",
            "true", '"rd"', '"\\u0000"', '"\\uD800"', '"a\\nb"', "'''\na\nb'''", "2024-01-01", "07:30:00", "{}",
            "{a = 1}", "[]", "[" * 3000, "[1, 'a']", '"' + "x" * 5000 + '"', "1_000", "0o17", "\x00", "\x7f", "#"]
ODD_VALUES = [None, True, -1, 0, 1, 2**31, 2**62, 10**400, 1.5, math.nan, math.inf, "", "x", "\0.bin", "\ud800.bin",
              "../up.bin", "a\nb", [], {}, [1], [[]], {"a": 1}, "9" * 1000]


def damaged(rng, raw):
    """A copy of some bytes with up to three faults of the kinds that disks, transfers and editors make."""
    raw = bytearray(raw)
    for _ in range(rng.integers(4)):
        at, length = int(rng.integers(len(raw) + 1)), int(rng.integers(1, 40))
        match rng.integers(7):
            case 0 if at < len(raw):
                raw[at] ^= 1 << int(rng.integers(8))
            case 1:
                del raw[at:]
            case 2:
                raw[at:at] = rng.bytes(length)
            case 3:
                del raw[at:at + length]
            case 4:
                raw[at:at] = raw[at:at + length]
            case 5:
                raw[at:at + length] = bytes(len(raw[at:at + length]))
            case 6:
                raw[at:at + 1] = (b"\xef\xbb\xbf", b"\r\n", b"\0", b"\xff", b'"', b"{", b"]", b"9")[rng.integers(8)]
    return bytes(raw)


def replaced(rng, tree, odd=ODD_VALUES):
    """A copy of nested lists and dictionaries with one node replaced by an odd value, or removed."""
    spots = []

    def walk(node, path):
        for key in node if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ():
            spots.append((*path, key))
            walk(node[key], (*path, key))

    def copy(node):
        if isinstance(node, dict):
            return {k: copy(v) for k, v in node.items()}
        return [copy(v) for v in node] if isinstance(node, list) else node
    walk(tree, ())
    tree = copy(tree)
    *path, last = spots[rng.integers(len(spots))]
    node = functools.reduce(lambda n, key: n[key], path, tree)
    if rng.integers(5):
        node[last] = odd[rng.integers(len(odd))]
    else:
        del node[last]
    return tree


class Fuzz:
    """The inputs of all cases lie in one folder; `good` are whole files, which no case changes."""

    def __init__(self, data, folder, rng):
        self.rng, self.folder, self.work = rng, folder, folder / "work"
        texts = folder / "texts"
        texts.mkdir()
        for i in range(60):
            (texts / f"{i}.txt").write_text(f"{i} is a document of few words " * (1 + i % 7), "utf-8")
        self.text_args = f"--source={texts}", f"--out={self.work}", "--holdout=20", "--shard_tokens=2000", "--workers=1"
        prepare(texts, folder / "shards", *self.text_args[2:])
        self.shards = {p.name: p.read_bytes() for p in (folder / "shards").iterdir() if p.name != "lock"}
        self.stream = {s: self.read(folder / "shards", s) for s in ("train", "val")}
        with pytest.MonkeyPatch.context() as m:  # a preparation that stopped half way
            m.setattr(prepare_fineweb, "CHUNK_CHARS", 1000)
            m.setattr(prepare_fineweb, "SAVE_SECONDS", 0)
            encode, calls = prepare_fineweb.encode_chunk, []
            m.setattr(prepare_fineweb, "encode_chunk",
                      lambda *a: encode(*a) if len(calls) < 4 and not calls.append(1) else sys.exit("killed"))
            with pytest.raises(SystemExit):
                prepare(texts, folder / "half", *self.text_args[2:])
        self.half = {p.name: p.read_bytes() for p in (folder / "half").iterdir() if p.name != "lock"}
        self.settings = TINY_RUN | dict(max_steps=4, eval_every=2, residual_mode="attnres", dtype="float32")
        run_training(data, folder / "run", **self.settings)
        self.data, self.run = data, {p.name: p.read_bytes() for p in (folder / "run").glob("*.*")}
        self.saved, self.shutil = torch.load(folder / "run/last.pt", weights_only=True), shutil
        self.tokenizer = write_tokenizer(folder)
        self.config = train.load_config([str(folder / "run/config.toml")])

    def pick(self, values):
        return values[self.rng.integers(len(values))]

    def read(self, folder, split):
        tokens = train.Tokens(folder, split, 16, 300)
        return tokens.read(0, tokens.total).tolist()

    def lay_out(self, files):
        self.shutil.rmtree(self.work, ignore_errors=True)
        self.work.mkdir()
        for name, content in files.items():
            (self.work / name).write_bytes(content)

    # each case returns what was accepted, after it has looked at it; refusals are exceptions

    def toml(self):
        base = self.run["config.toml"]
        if self.rng.integers(2):
            key = self.pick([*train.SCHEMA, "n_lyer", "model.x", '"\\n"'])
            lines = [line for line in base.decode().splitlines() if not line.startswith(key + " ")]
            mild = json.dumps(train.SCHEMA[key].default) if key in train.SCHEMA else "1"
            base = "\n".join([*lines, f"{key} = {self.pick([mild, self.pick(ODD_TOML)])}"]).encode()
        else:
            base = damaged(self.rng, base)
        self.lay_out({"c.toml": base})
        cfg, t = train.load_config([str(self.work / "c.toml")])
        import tomllib
        found = dataclasses.asdict(cfg) | dataclasses.asdict(t)
        for key, value in tomllib.loads(base.decode()).items():
            assert found[key] == value or value in ("", 0) or (key, found[key]) == (
                "compile", "on" if value else "off"), key
        (self.work / "again.toml").write_text(train.to_toml(cfg, t), "utf-8")
        assert train.load_config([str(self.work / "again.toml")]) == (
            cfg, dataclasses.replace(t, resume=False, overwrite=False, stop_after=0))

    def flags(self):
        key, text = self.pick([*train.SCHEMA] * 3 + ["n_lyer", "", "-", "seed "]), self.pick(ODD_TEXT)
        text = self.pick([text, text, str(train.SCHEMA[key].default) if key in train.SCHEMA else text])
        arg = self.pick([f"--{key}={text}"] * 6 + [f"--{key}", f"-{key}={text}", text, damaged(
            self.rng, f"--{key}={text}".encode(errors="surrogatepass")).decode("utf-8", "surrogateescape")])
        if {"-h", "--help"} & {arg}:
            return
        cfg, t = train.load_config([arg])
        key, _, text = arg.removeprefix("--").partition("=")
        found, kind = (dataclasses.asdict(cfg) | dataclasses.asdict(t))[key], type(train.SCHEMA[key].default)
        if kind is bool:
            bare = arg == f"--{key}"  # means true
            assert found == (bare or text.lower() == "true") and (bare or text.lower() in ("true", "false"))
        elif key == "compile" and text.lower() in ("true", "false"):
            assert found == ("on" if text.lower() == "true" else "off")
        else:
            assert found == (int(float(text)) if kind is int and "e" in text else kind(text)) or text in ("", "0")

    def shard(self):
        """Beside a meta.json every change of a token is seen."""
        name = self.pick([n for n in self.shards if n.endswith(".bin") and "_test_" not in n])
        raw, at = self.shards[name], 1024 if self.rng.integers(2) else 16
        raw = damaged(self.rng, raw[:at]) + raw[at:] if self.rng.integers(2) else raw[:at] + damaged(self.rng, raw[at:])
        self.lay_out(self.shards | {name: raw})
        for split in self.stream:
            assert self.read(self.work, split) == self.stream[split]

    def foreign_shard(self):
        """Without a meta.json the header and the length must agree."""
        raw = self.pick([v for k, v in self.shards.items() if k.endswith(".bin")])
        for _ in range(self.rng.integers(1, 3)):
            raw = damaged(self.rng, raw[:16]) + raw[16:] if self.rng.integers(2) else damaged(self.rng, raw)
        self.lay_out({"x_train_0.bin": raw})
        tokens = train.Tokens(self.work, "train", 16, 2**32)
        dtype = {20240520: "<u2", 20240801: "<u4"}[int(np.frombuffer(raw, "<i4", 1)[0])]
        assert tokens.read(0, tokens.total).tolist() == np.frombuffer(raw[1024:], dtype).tolist()

    def meta(self):
        """The seal sees every fault; one without a seal is checked as well as can be."""
        text, sealed = self.shards["meta.json"], self.rng.integers(2)
        text = damaged(self.rng, text) if sealed else json.dumps(
            replaced(self.rng, {k: v for k, v in json.loads(text).items() if k != "seal"})).encode()
        self.lay_out(self.shards | {"meta.json": text})
        meta = prepare_fineweb.read_meta(self.work)
        for split in self.stream:
            assert self.read(self.work, split) == self.stream[split]
            assert meta["splits"][split]["tokens"] == len(self.stream[split])
        assert not sealed or meta == json.loads(self.shards["meta.json"])
        evaluation.measure(evaluation.parse_args(["x", f"--data_dir={self.work}"]), self.model(), self.saved,
                           torch.device("cpu"), torch.float32, 0, 1)

    def model(self):
        cfg = dataclasses.replace(self.config[0], vocab_size=257)
        return GPT(cfg).eval()

    def progress(self):
        """What a continued preparation accepts ends in the very shards that were meant."""
        text = self.half["progress.json"]
        text = damaged(self.rng, text) if self.rng.integers(2) else json.dumps(
            replaced(self.rng, json.loads(text))).encode()
        self.lay_out(self.half | {"progress.json": text})
        prepare_fineweb.prepare(prepare_fineweb.parse_args([*self.text_args]))
        for name, content in self.shards.items():
            if name.endswith(".bin"):
                assert (self.work / name).read_bytes() == content
        mine, meant = (json.loads((f / "meta.json").read_text()) for f in (self.work, self.folder / "shards"))
        assert mine["splits"] == meant["splits"]

    def collect(self, path, skip_bad):
        args = prepare_fineweb.parse_args([f"--source={path}", "--out=x"] + ["--skip_bad"] * skip_bad)
        chunks = list(prepare_fineweb.read_chunks(prepare_fineweb.find_source(args, None), [0, 0], args))
        return [text for texts, *_ in chunks for text in texts], [s for *_, skipped in chunks for s, _ in skipped]

    def compare(self, name, raw, expected):
        """`expected`: per document its text, or None where it cannot be used."""
        self.lay_out({name: raw})
        skipping = self.collect(self.work / name, True)
        assert skipping[0] == [e for e in expected if e is not None]
        bad = sum(e is None for e in expected)
        assert len(skipping[1]) == bad and not any("\n" in s for s in skipping[1])
        found = self.collect(self.work / name, False)[0]  # raises when there are bad ones
        assert not bad and found == expected

    def jsonl(self):
        good = [{"text": "one"}, {"text": "two é ☃"}, {"text": "a\r\nb"}, {"text": "x", "text2": 10**50}]
        odd = [3, None, [], "text", {"text": None}, {"txt": "x"}, {"text": ["a"]}, {"a\nb": 1}, *(
            {"text": t} for t in ("\ud800", "  ", "\0"))]
        kinds, ascii_only = self.pick([[good], [good, good, odd]]), bool(self.rng.integers(2))
        lines = [json.dumps(self.pick(self.pick(kinds)), ensure_ascii=ascii_only)
                 for _ in range(self.rng.integers(1, 6))]
        encoding = self.pick(["utf-8"] * 6 + ["utf-8-sig", "utf-16", "utf-16-le", "utf-32", "latin-1"])
        raw = self.pick(["\n", "\n", "\r\n"]).join(lines).encode(encoding, "surrogatepass" if "utf" in encoding else
                                                                 "replace")
        raw = damaged(self.rng, raw) if self.rng.integers(3) else raw
        expected = []
        for line in raw.split(b"\n")[:-1] + [raw.split(b"\n")[-1]] * (not raw.endswith(b"\n") and raw != b""):
            try:
                text = json.loads(line.decode("utf-8-sig"))["text"]
                expected.append(text if self.usable(text) else None)
            except (ValueError, LookupError, TypeError, RecursionError):
                expected.append(None)
        self.compare("docs.jsonl", raw, expected or [None])

    def usable(self, text):
        import unicodedata
        if not isinstance(text, str) or any("\ud800" <= c <= "\udfff" for c in text):
            return False
        return text.count("\0") * 4 <= len(text) and any(unicodedata.category(c)[0] not in "ZC" for c in text)

    def text(self):
        text = "".join(self.pick(["word ", "é", "☃", "\r\n", "\n", "\t", "\0", " ", "\ufeff", "\u200d"])
                       for _ in range(self.rng.integers(0, 60)))
        encoding = self.pick(["utf-8"] * 4 + ["utf-8-sig", "utf-16", "utf-16-le", "latin-1", "cp1252"])
        raw = text.encode(encoding, "replace")
        raw = damaged(self.rng, raw) if self.rng.integers(2) else raw
        try:
            text = raw.removeprefix(b"\xef\xbb\xbf").decode()
        except UnicodeDecodeError:
            text = None
        self.compare("doc.txt", raw, [text if self.usable(text) else None])

    def compressed(self):
        """Both kinds of compression have checksums."""
        import gzip

        import zstandard
        kind = self.pick([".gz", ".zst"])
        content = b"".join(b'{"text": "document %d"}\n' % i for i in range(40))
        compress = gzip.compress if kind == ".gz" else zstandard.ZstdCompressor(write_checksum=True).compress
        raw = compress(content)
        self.lay_out({f"docs.jsonl{kind}": damaged(self.rng, raw)})
        assert self.collect(self.work / f"docs.jsonl{kind}", False)[0] == [f"document {i}" for i in range(40)]

    def parquet(self):
        """Pages with checksums: damage is seen, and what is read before it is whole."""
        import pyarrow
        import pyarrow.parquet
        texts, out = [f"document {i} é " * (1 + i % 5) for i in range(60)], pyarrow.BufferOutputStream()
        pyarrow.parquet.write_table(pyarrow.table({"text": texts}), out, row_group_size=20, data_page_size=300,
                                    use_dictionary=False, write_page_checksum=True)
        raw = out.getvalue().to_pybytes()
        cut = len(raw) - 600 if self.rng.integers(2) else 0  # half of the faults in the footer
        self.lay_out({"docs.parquet": raw[:cut] + damaged(self.rng, raw[cut:])})
        found, skipped = self.collect(self.work / "docs.parquet", True)
        assert found == texts[:len(found)] and (skipped or found == texts)
        assert self.collect(self.work / "docs.parquet", False)[0] == texts

    def ranks(self):
        """A tokenizer that is accepted gives back what it encodes."""
        name = self.pick(["tokenizer.json", "mine.tiktoken"])
        raw = (self.folder / name).read_bytes()
        if name.endswith("json") and self.rng.integers(2):
            raw = json.dumps(replaced(self.rng, {k: v for k, v in json.loads(raw).items() if k != "seal"})).encode()
        else:
            raw = damaged(self.rng, raw)
        self.lay_out({name: raw})
        encoding = prepare_fineweb.get_encoding(str(self.work / name), "gpt2")
        try:
            ids = encoding.encode_ordinary("some text é")
        except ValueError:  # what the preparation and eval.py turn into a line
            return
        assert encoding.n_vocab > max(ids)

    def resume(self):
        cfg, t = self.config
        t = dataclasses.replace(t, out_dir=str(self.work), data_dir=str(self.data))
        cfg, data, _, about = train.open_data(cfg, t)
        torch.manual_seed(0)
        model = GPT(cfg)
        optimizer = train.make_optimizer(model, t, torch.device("cpu"))
        rng = torch.get_rng_state()
        try:
            step, best, *_ = train.resume(cfg, t, model, optimizer, about, lambda line: None)
            idx = torch.from_numpy(data.rows(np.arange(2)))
            gradients(model, idx)
            optimizer.step()  # its state must be fit for use
        finally:
            torch.set_rng_state(rng)
        assert type(step) is int and type(best) is float and not math.isnan(best) and step >= 0

    def checkpoint_bytes(self):
        raw = damaged(self.rng, self.run["last.pt"])
        self.lay_out({"last.pt": raw})
        content = train.load_checkpoint(self.work / "last.pt")
        for part in ("model", "config", "step", "tokens", "best", "data"):
            same = content[part] == self.saved[part] if part != "model" else all(
                torch.equal(content[part][k], v) for k, v in self.saved[part].items())
            assert same, part
        self.resume()

    def checkpoint_content(self):
        odd = ODD_VALUES + [torch.zeros(()), torch.zeros(3), torch.ones(2, dtype=torch.int64), torch.tensor(math.nan)]
        content = self.pick([self.saved, *(replaced(self.rng, self.saved, odd) for _ in range(3)), self.pick(odd)])
        self.lay_out({})
        torch.save(content, self.work / "last.pt")
        self.resume()
        model, saved, _ = evaluation.load_model(self.work / "last.pt", torch.device("cpu"), torch.float32)
        args = evaluation.parse_args(["x", "--prompt=ab", "--tokens=1"])
        evaluation.sample(args, model, saved, torch.device("cpu"), torch.float32)

    def checkpoint_with_code(self):
        import pickle
        marker = self.folder / "code was executed"

        class Code:
            def __reduce__(self):
                return os.mkdir, (str(marker),)
        content = self.pick([Code(), self.saved | {"data": Code()}, {"model": Code()}, [Code()]])
        self.lay_out({})
        match self.rng.integers(3):
            case 0:
                torch.save(content, self.work / "last.pt")
            case 1:
                torch.save(content, self.work / "last.pt", _use_new_zipfile_serialization=False)
            case 2:
                (self.work / "last.pt").write_bytes(pickle.dumps(content))
        try:
            train.load_checkpoint(self.work / "last.pt")
        finally:
            assert not marker.exists()
        raise AssertionError("code was accepted")

    def results(self):
        """The table of a study: no row loses a number, or gets another kind of value."""
        row = b"rd,%d,250,0.002,1.0,1024000,1.512,,9:1.5 8:1.6,768,0.3,0.01,900,a,b,c,d,e\n"
        raw = ",".join(plan.COLUMNS).encode() + b"\n" + row % 1 + row % 2
        self.lay_out({"r.csv": damaged(self.rng, raw)})
        for cell, r in plan.read_rows(self.work / "r.csv").items():
            assert math.isfinite(float(r["loss"])) and cell.steps > 0 and int(r["tokens"]) > 0 and cell.lr > 0

    def log(self):
        """Of a log only whole rows are taken over, whatever else the file holds."""
        raw = self.run["log.csv"]
        raw = damaged(self.rng, raw) if self.rng.integers(4) else raw + self.pick([
            "²" + ",1" * 9, "9" * 5000 + ",1" * 9, '"' + "x" * 200_000, "1,2", "-1" + ",1" * 9]).encode() + b"\r\n"
        self.lay_out({"log.csv": raw})
        log = train.Log(self.config[0], dataclasses.replace(self.config[1], out_dir=str(self.work)), 4, 6,
                        torch.device("cpu"))
        log.file.close()
        rows = read_log(self.work)
        assert all(set(r) == set(log.columns) and 0 <= int(r["step"]) <= 4 for r in rows)


FUZZED = [name for name, f in vars(Fuzz).items() if callable(f) and f.__code__.co_argcount == 1 and name not in (
    "model", "resume")]


@pytest.mark.parametrize("inputs", [
    34, pytest.param(200, marks=pytest.mark.slow), pytest.param(2000, marks=pytest.mark.long)])
def test_damaged_inputs_are_refused_in_one_line_or_mean_what_they_meant(inputs, data, tmp_path, capsys):
    import io
    fuzz, counts, failures = Fuzz(data, tmp_path, np.random.default_rng(inputs)), {}, []
    for i in range(inputs):
        case, fuzz.rng = FUZZED[i % len(FUZZED)], np.random.default_rng((inputs, i))
        outcome, noise = "accepted", io.StringIO()
        try:
            with time_limit(60), contextlib.redirect_stderr(noise), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                getattr(fuzz, case)()
        except UserError as e:
            outcome = "refused"
            if len(str(e).splitlines()) != 1 or not str(e).isprintable():
                failures.append(f"{case} {i}: not one line: {str(e)[:300]!r}")
        except BaseException as e:
            if isinstance(e, KeyboardInterrupt):
                raise
            import traceback
            place = traceback.extract_tb(e.__traceback__)[-1]
            failures.append(f"{case} {i}: {type(e).__name__}: {str(e)[:200]} ({place.name}:{place.lineno})")
        counts.setdefault(case, dict(accepted=0, refused=0))[outcome] += 1
    with capsys.disabled():
        if inputs > 200:
            print(f"\n{inputs} inputs: {counts}")
    assert not failures, "\n".join([f"{len(failures)} of {inputs}", *failures])
    missing = [f"{name} {o}" for name, c in counts.items() for o in c if not c[o]]
    never = ["checkpoint_with_code accepted", "log refused"]
    assert inputs < 200 or missing == never  # and every other outcome was seen
