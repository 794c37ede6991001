"""Turn text into token shards that train.py reads.

    python prepare_fineweb.py --source=stdlib --tokenizer=bytes --out=data/stdlib    needs no network
    python prepare_fineweb.py --source=my_texts --tokenizer=bytes --out=data/mine    your own .txt: a file or a folder

Every document is encoded as ordinary text behind one end-of-text token. A hash of its text decides its split: of 100
hashes `--holdout` each go to val and to test, the rest to train. Val and test are filled in stream order up to
--val_tokens and --test_tokens and what they cannot take is dropped: so they stay the same however much training data
is prepared, and no text is ever in two splits.

A shard is the .bin of llm.c and modded-nanogpt: a header of 256 int32 (magic 20240520, version 1, number of tokens),
then the tokens as little-endian uint16. It is written as .part and renamed when complete. meta.json, written last,
holds source, tokenizer, vocabulary size, counts and a CRC-32 of each shard's tokens. The same command continues an
interrupted preparation where it stopped, and does nothing when all is done.
"""
import argparse
import hashlib
import json
import multiprocessing
import os
import signal
import sys
import sysconfig
import threading
import time
import tokenize
import unicodedata
import zlib
from collections import deque
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path

import numpy as np

SPLITS = "train", "val", "test"
HEADER_BYTES = 1024  # 256 int32
FORMATS = {(20240520, 1): np.dtype("<u2")}  # (magic, version) -> type of a token
END_OF_TEXT = "<|endoftext|>"
CHUNK_CHARS = 1 << 20  # text handed to a worker at once; with the longest document it bounds the memory
TXT_CHARS = 10_000  # longer .txt files are cut at line ends into documents of about this size
SAVE_SECONDS = 5  # how often the state for a continued run is written


class UserError(Exception):
    """Something the user can mend; the scripts print it as one line."""


# ---------------------------------------------------------------------------------------------------------------------
# Shards


def read_header(path):
    """Check a shard's header against the length of its file; returns (number of tokens, numpy dtype of a token)."""
    header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
    kind = tuple(header[:2].tolist())
    if kind not in FORMATS or header.nbytes < HEADER_BYTES:
        raise UserError(f"{path}: not a token shard: it starts with {kind}, expected magic and version "
                        f"{' or '.join(map(str, FORMATS))}")
    tokens, dtype = int(header[2]), FORMATS[kind]
    found = (os.path.getsize(path) - HEADER_BYTES) / dtype.itemsize
    if tokens != found:
        raise UserError(f"{path}: damaged: its header promises {tokens} tokens, the file holds {found:g}; "
                        "delete it and prepare the data again")
    return tokens, dtype


class Writer:
    """The shards of one split. `state` is plain data, all that a continued run needs to know."""

    def __init__(self, out, stem, limit, shard_tokens, dtype, state):
        self.out, self.stem, self.limit, self.shard_tokens, self.dtype = out, stem, limit, shard_tokens, dtype
        self.state = state or dict(tokens=0, documents=0, text_bytes=0, dropped=0, shards=[], open_tokens=0, open_crc=0)
        self.file = None
        part, done = self.path(".part"), self.path(".bin")
        if done.exists() and not part.exists():
            done.rename(part)  # finished after the state was last written: go back to the state
        if self.state["open_tokens"]:
            self.file = open(part, "r+b")
            self.file.truncate(HEADER_BYTES + self.state["open_tokens"] * dtype.itemsize)
            self.file.seek(0, os.SEEK_END)

    @property
    def full(self):
        return self.limit is not None and self.state["tokens"] >= self.limit

    def path(self, suffix):
        return self.out / f"{self.stem}_{len(self.state['shards']):06d}{suffix}"

    def add(self, ids, text_bytes):
        """Append one document, over as many shards as it needs."""
        self.state["documents"] += 1
        self.state["text_bytes"] += text_bytes
        while len(ids):
            if self.file is None:
                self.file = open(self.path(".part"), "wb")
                self.file.write(bytes(HEADER_BYTES))
            piece = ids[:self.shard_tokens - self.state["open_tokens"]]
            self.file.write(piece.tobytes())
            self.state["open_crc"] = zlib.crc32(piece.tobytes(), self.state["open_crc"])
            self.state["open_tokens"] += len(piece)
            self.state["tokens"] += len(piece)
            if self.state["open_tokens"] == self.shard_tokens:
                self.finish()
            ids = ids[len(piece):]

    def finish(self):
        """Complete the open shard, if there is one: header, flush to disk, rename."""
        if self.file is None:
            return
        header = np.zeros(HEADER_BYTES // 4, dtype="<i4")
        (magic, version), = (kind for kind, dtype in FORMATS.items() if dtype == self.dtype)
        header[:3] = magic, version, self.state["open_tokens"]
        self.file.seek(0)
        self.file.write(header.tobytes())
        self.sync()
        self.file.close()
        done = self.path(".bin")
        os.replace(self.path(".part"), done)
        self.state["shards"].append({"file": done.name, "tokens": self.state["open_tokens"],
                                     "crc32": self.state["open_crc"]})
        self.state.update(open_tokens=0, open_crc=0)
        self.file = None

    def sync(self):
        if self.file is not None:
            self.file.flush()
            os.fsync(self.file.fileno())


def write_json(path, value):
    """Replace a file at once: readers see the old content or the new, never half of it."""
    aside = path.with_suffix(".tmp")
    with open(aside, "w", encoding="utf-8") as f:
        json.dump(value, f, indent=1, ensure_ascii=False)
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, path)


# ---------------------------------------------------------------------------------------------------------------------
# Sources: a list of files, and a reader that yields (line, text), or (line, Bad(reason)), for each document of one


class Bad(str):
    """Why a document cannot be used."""


def find_files(source):
    """`stdlib`, or a .txt file or folder -> (reader, list of files in a fixed order)."""
    if source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = (p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
        return read_python, sorted(files)
    path = Path(source)
    if not path.exists():
        raise UserError(f"--source={source}: no such file or folder (`stdlib` is the text of this Python)")
    files = sorted(p for p in path.rglob("*") if p.suffix == ".txt" and p.is_file()) if path.is_dir() else [path]
    if not files:
        raise UserError(f"--source={source}: there is no .txt file in this folder")
    return read_txt, files


def read_python(path):
    """A source file is one document; pydoc's topics, a dictionary of texts, are one each."""
    if path.parent.name == "pydoc_data" and path.stem == "topics":
        from pydoc_data.topics import topics
        yield from enumerate(topics.values())
        return
    with open(path, "rb") as f:
        try:
            encoding, _ = tokenize.detect_encoding(f.readline)
            f.seek(0)
            yield 1, f.read().decode(encoding)
        except (SyntaxError, UnicodeDecodeError, LookupError) as e:  # the installation's own tests of bad encodings
            yield 1, Bad(f"not text: {e}")


def read_txt(path):
    line, start, piece, size = 1, 1, [], 0
    with open(path, encoding="utf-8-sig", errors="surrogateescape", newline="") as f:
        for text in iter(lambda: f.readline(TXT_CHARS), ""):
            piece.append(text)
            size, line = size + len(text), line + text.endswith("\n")
            if size >= TXT_CHARS:
                yield start, "".join(piece)
                piece, size, start = [], 0, line
    if piece or line == 1:
        yield start, "".join(piece)


def check(text):
    """The text, or why it cannot be a document."""
    if isinstance(text, Bad):
        return text
    if not any(unicodedata.category(c)[0] not in "ZC" for c in text):
        return Bad("empty: nothing visible in it")
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return Bad(f"not valid UTF-8 (byte 0x{ord(text[e.start]) & 0xff:02x} after {e.start} characters)")
    return text


def read_chunks(reader, files, position, skip_bad):
    """Yield (texts, position behind them, bytes of whole files behind them, what was skipped among them).

    A position is [index of the file, number of its documents].
    """
    first, seen = position
    texts, skipped, chars, done_bytes = [], [], 0, sum(os.path.getsize(p) for p in files[:first])
    for i in range(first, len(files)):
        for j, (line, text) in enumerate(reader(files[i])):
            if i == first and j < seen:
                continue
            text = check(text)
            if isinstance(text, Bad):
                if not skip_bad:
                    raise UserError(f"{files[i]}:{line}: {text}; mend it, or skip and count such with --skip_bad")
                skipped.append(f"{files[i]}:{line}: {text}")
                continue
            texts.append(text)
            chars += len(text)
            if chars >= CHUNK_CHARS:
                yield texts, [i, j + 1], done_bytes, skipped
                texts, skipped, chars = [], [], 0
        done_bytes += os.path.getsize(files[i])
    yield texts, [len(files), 0], done_bytes, skipped


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def get_encoding(name):
    """The tiktoken Encoding of a name. `bytes`: ids 0 to 255 are the bytes themselves, 256 is end-of-text."""
    import tiktoken
    if name != "bytes":
        raise UserError(f"--tokenizer={name} is unknown (choices: bytes)")
    return tiktoken.Encoding(name, pat_str=r"(?s).{1,64}", mergeable_ranks={bytes([i]): i for i in range(256)},
                             special_tokens={END_OF_TEXT: 256})


def split_of(text_bytes, holdout):
    """Split of a document: 0 train, 1 val, 2 test. A function of its text alone, so equal texts share a split."""
    bucket = int.from_bytes(hashlib.blake2b(text_bytes, digest_size=8).digest(), "little") % 100
    return 1 if bucket < holdout else 2 if bucket < 2 * holdout else 0


def start_worker(tokenizer):
    global encoding
    encoding = get_encoding(tokenizer)
    if multiprocessing.parent_process() is not None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
        threading.Thread(target=lambda: (multiprocessing.parent_process().join(), os._exit(1)), daemon=True).start()


def encode_chunk(texts, holdout, wanted, dtype):
    """Per document: (split, bytes of text, ids behind an end-of-text token); no ids for splits that are not wanted."""
    out = []
    for text in texts:
        data = text.encode()
        split, ids = split_of(data, holdout), None
        if split in wanted:
            ids = np.empty(0, dtype) if not text else encoding.encode_to_numpy(text, disallowed_special=())
            ids = np.concatenate([[encoding.eot_token], ids]).astype(dtype)
        out.append((split, len(data), ids))
    return out


def in_order(jobs, function, workers, tokenizer):
    """function(*args) for every (args, tag) of jobs in a pool: yields (result, tag) in the order of the jobs."""
    if workers == 1:
        start_worker(tokenizer)
        yield from ((function(*args), tag) for args, tag in jobs)
        return
    with ProcessPoolExecutor(workers, initializer=start_worker, initargs=(tokenizer,)) as pool:
        waiting = deque()  # bounded: what is read ahead stays in memory
        try:
            for args, tag in jobs:
                waiting.append((pool.submit(function, *args), tag))
                if len(waiting) > 2 * workers:
                    future, tag = waiting.popleft()
                    yield future.result(), tag
            for future, tag in waiting:
                yield future.result(), tag
        except BrokenProcessPool:
            raise UserError("a worker process died (killed, or out of memory?); the same command continues") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# The command


def parse_args(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument("--source", required=True, help="stdlib, or a .txt file, or a folder of them")
    p.add_argument("--tokenizer", default="bytes", help="bytes (default)")
    p.add_argument("--out", required=True, help="folder for the shards and meta.json")
    p.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard (default %(default)s)")
    p.add_argument("--val_tokens", type=int, default=1_000_000, help="most tokens in val; 0: none (default 1M)")
    p.add_argument("--test_tokens", type=int, default=1_000_000, help="most tokens in test; 0: none (default 1M)")
    p.add_argument("--max_tokens", type=int, default=0, help="most tokens in train; 0: no limit (default)")
    p.add_argument("--holdout", type=int, default=1, help="percent of documents each for val and test (default 1)")
    p.add_argument("--skip_bad", action="store_true", help="skip and count documents that cannot be used")
    p.add_argument("--workers", type=int, default=0, help="processes that encode; 0: one per core (default)")
    args = p.parse_args(argv)
    for name, low, high in (("shard_tokens", 1, 2**31 - 1), ("val_tokens", 0, None), ("test_tokens", 0, None),
                            ("max_tokens", 0, None), ("holdout", 1, 49), ("workers", 0, 512)):
        value = getattr(args, name)
        if value < low or (high is not None and value > high):
            p.error(f"--{name}={value}: must be {'at least ' + str(low) if high is None else f'{low} to {high}'}")
    args.workers = args.workers or len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return args


def prepare(args):
    out, encoder = Path(args.out), get_encoding(args.tokenizer)
    reader, files = find_files(args.source)
    args.skip_bad = args.skip_bad or args.source == "stdlib"
    dtype = np.dtype("<u2")
    # what decides the content of the shards: a folder holds one such set for its whole life
    settings = {name: getattr(args, name) for name in ("source", "tokenizer", "shard_tokens", "val_tokens",
                                                       "test_tokens", "max_tokens", "holdout")}
    sizes = [f"{p.name} {p.stat().st_size}\n" for p in files]

    def digest(position):
        """Of the files used so far: they must not change between interruption and continuation."""
        used = sizes[:position[0] + (position[1] > 0)]
        return hashlib.blake2b("".join(used).encode(errors="surrogateescape"), digest_size=16).hexdigest()

    state = start_or_continue(out, settings, digest)
    if state is None:
        return
    stem = "stdlib" if args.source == "stdlib" else Path(args.source).resolve().stem
    limits = dict(train=args.max_tokens or None, val=args.val_tokens, test=args.test_tokens)
    writers = [Writer(out, f"{stem}_{s}", limits[s], args.shard_tokens, dtype, state["splits"].get(s)) for s in SPLITS]

    def save():
        for w in writers:
            w.sync()
        state.update(splits={s: w.state for s, w in zip(SPLITS, writers)}, input=digest(state["position"]))
        write_json(out / "progress.json", state)

    chunks = read_chunks(reader, files, state["position"], args.skip_bad)
    jobs = (((texts, args.holdout, [i for i, w in enumerate(writers) if not w.full], dtype), tag)
            for texts, *tag in chunks)
    show, saved = Progress(sum(p.stat().st_size for p in files)), time.monotonic()
    before = sum(w.state["tokens"] for w in writers)
    save()
    for documents, (position, done_bytes, skipped) in in_order(jobs, encode_chunk, args.workers, args.tokenizer):
        shards = [len(w.state["shards"]) for w in writers]
        for split, text_bytes, ids in documents:
            writer = writers[split]
            if writer.full:
                writer.state["dropped"] += 1
                continue
            if writer.limit is not None and writer.state["tokens"] + len(ids) > writer.limit:
                ids = ids[:writer.limit - writer.state["tokens"]]
                text_bytes = len(encoder.decode_bytes(ids[1:].tolist()))
            writer.add(ids, text_bytes)
        state["position"] = position
        state["skipped"] += len(skipped)
        state["skipped_first"] = (state["skipped_first"] + skipped)[:20]
        if time.monotonic() - saved > SAVE_SECONDS or shards != [len(w.state["shards"]) for w in writers]:
            save()
            saved = time.monotonic()
        show(done_bytes, sum(w.state["tokens"] for w in writers) - before, sum(w.state["documents"] for w in writers))
        if all(w.full for w in writers):
            break
    show.end()
    for w in writers:
        w.finish()
    for w, name in zip(writers, SPLITS):
        if not w.state["tokens"] and not w.full:
            for path in (*(out / s["file"] for w in writers for s in w.state["shards"]), out / "progress.json"):
                path.unlink()
            n = sum(w.state["documents"] for w in writers)
            raise UserError(f"{name} would be empty, none of {n} documents falls into it: raise --holdout="
                            f"{args.holdout} (percent for val and for test), or do without: --{name}_tokens=0"
                            if n and name != "train" else f"{args.source} leaves no document for {name}: add text")
    save()
    meta = dict(source=args.source, tokenizer=args.tokenizer, vocab_size=encoder.n_vocab, end_of_text=encoder.eot_token,
                settings=settings, position=state["position"], input=state["input"],
                skipped=state["skipped"], skipped_first=state["skipped_first"],
                splits={s: {k: w.state[k] for k in ("tokens", "documents", "text_bytes", "dropped", "shards")}
                        for s, w in zip(SPLITS, writers)})
    write_json(out / "meta.json", meta)
    (out / "progress.json").unlink()
    report(out, meta)


def start_or_continue(out, settings, digest):
    """The state to go on from, or None when everything is done already."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        path = next((out / name for name in ("meta.json", "progress.json") if (out / name).exists()), None)
        if path is None:
            if any(out.glob("*.bin")):
                raise UserError(f"{out} holds shards of another origin (no meta.json); choose another --out")
            return dict(settings=settings, position=[0, 0], skipped=0, skipped_first=[], splits={})
        state = json.loads(path.read_text(encoding="utf-8"))
        old = state["settings"]
        changed = [f"{k}: {old.get(k)} -> {v}" for k, v in settings.items() if old.get(k) != v]
        if state["input"] != digest(state["position"]):
            changed.append("the source's files")
        done = sum(s["documents"] for s in state["splits"].values())
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{out}: cannot use this folder ({type(e).__name__}: {e})") from None
    if changed:
        raise UserError(f"{out} was prepared from other input ({', '.join(changed)}): delete it or use another --out")
    if path.name == "meta.json":
        print(f"{out} is complete already ({done} documents): nothing to do")
        return None
    print(f"continuing in {out} behind document {done}")
    return state


class Progress:
    """One line that renews itself in a terminal; a plain line now and then elsewhere."""

    def __init__(self, total_bytes):
        self.total, self.begin, self.first, self.tty = total_bytes, time.monotonic(), None, sys.stderr.isatty()
        self.shown = self.begin

    def __call__(self, done_bytes, tokens, documents):
        now = time.monotonic()
        self.first = done_bytes if self.first is None else self.first
        if now - self.shown < (0.5 if self.tty else 30):
            return
        self.shown, seconds = now, now - self.begin
        left = seconds * (self.total - done_bytes) / max(1, done_bytes - self.first)
        line = (f"{100 * done_bytes / max(1, self.total):5.1f} %  {tokens / seconds / 1e6:.2f}M tok/s  "
                f"{documents} documents  {int(left) // 60}:{int(left) % 60:02d} left")
        print(f"\r{line}\033[K" if self.tty else line, end="" if self.tty else "\n", file=sys.stderr, flush=True)

    def end(self):
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def report(out, meta):
    for name, s in meta["splits"].items():
        dropped = f", {s['dropped']} more documents not needed" if s["dropped"] else ""
        print(f"{name:5s} {s['tokens']:>13,} tokens  {s['documents']:>9,} documents  {s['text_bytes']:>13,} bytes  "
              f"{len(s['shards'])} shards{dropped}")
    if meta["skipped"]:
        print(f"skipped {meta['skipped']} documents that cannot be used, the first: {meta['skipped_first'][0]}")
    print(f"wrote {out}: vocabulary of {meta['vocab_size']} ({meta['tokenizer']})")


def main(argv=None):
    try:
        prepare(parse_args(argv))
    except UserError as e:
        sys.exit(f"prepare_fineweb.py: {e}")
    except OSError as e:
        sys.exit(f"prepare_fineweb.py: {e.strerror or e}: {e.filename or ''} (the same command continues)")
    except KeyboardInterrupt:
        sys.exit("prepare_fineweb.py: interrupted; the same command continues")


if __name__ == "__main__":
    main()
