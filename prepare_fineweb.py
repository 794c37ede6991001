"""Turn text into token shards that train.py reads.

    python prepare_fineweb.py --out=data/fineweb                   FineWeb-Edu, its 10B-token sample, as GPT-2's tokens
    python prepare_fineweb.py --source=my_texts --out=data/mine    your own files: .txt, .jsonl, .parquet
    python prepare_fineweb.py --source=stdlib --out=data/stdlib    the text of this Python: needs no network
    cat docs.jsonl | python prepare_fineweb.py --source=- --format=jsonl --out=data/mine
    python prepare_fineweb.py --verify --out=data/mine                   compare the shards with their checksums

Every document is encoded as ordinary text behind one end-of-text token. A hash of its text decides its split: of 100
hashes `--holdout` each go to val and to test, the rest to train. Val and test are filled in stream order up to
--val_tokens and --test_tokens and what they cannot take is dropped: so they stay the same however much training data
is prepared, and no text is ever in two splits.

A shard is the .bin of llm.c and modded-nanogpt: a header of 256 int32 (magic, version, number of tokens), then the
tokens, uint16, or uint32 where the vocabulary is larger than 65,536. It is written as .part and renamed when complete.
The last shard of a split has what is left and is shorter; train.py reads the shards of a split as one stream.
meta.json, written last, holds source, tokenizer, vocabulary size, counts and a CRC-32 of each shard's tokens;
tokenizer.json all that is needed to encode and decode; both end with a checksum of themselves, the seal. The same
command continues an interrupted preparation where it stopped, to the same bytes, and does nothing when all is done.
Memory is bounded: 2 * workers + 2 chunks of a million characters, the longest document and one row group, however large
the source is.
"""
import argparse
import base64
import fcntl
import glob
import gzip
import hashlib
import io
import json
import multiprocessing
import os
import re
import shlex
import signal
import sys
import sysconfig
import threading
import time
import tokenize
import unicodedata
import urllib.request
import zlib
from collections import deque
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

import numpy as np

SPLITS = "train", "val", "test"
HEADER_BYTES = 1024  # 256 int32
# (magic, version) -> type of a token. The second is llm.c's for larger vocabularies.
FORMATS = {(20240520, 1): np.dtype("<u2"), (20240801, 7): np.dtype("<u4")}
END_OF_TEXT = "<|endoftext|>"
CHUNK_CHARS = 1 << 20  # text handed to a worker at once
TXT_CHARS = 10_000  # longer .txt files are cut at line ends into documents of about this size
SEGMENT_CHARS = 20_000, 100_000  # longer documents are encoded in segments: see `segments`
SAVE_SECONDS = 5  # how often the state for a continued run is written
SUFFIXES = ".txt", ".jsonl", ".parquet"
TIMEOUT = 8  # seconds without an answer from the network


AGAIN = "delete the folder and prepare the data again"


class UserError(Exception):
    """Something the user can mend; the scripts print it as one line."""

    def __str__(self):
        return one_line(super().__str__())


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage of all flags before it."""

    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")


class Bad(str):
    """Why a document cannot be used."""


def one_line(text):
    """Line breaks, escape sequences and the like as Python writes them: names and values may hold any character."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


# ---------------------------------------------------------------------------------------------------------------------
# Shards


def read_header(path):
    """Check a shard's header against the length of its file; returns (number of tokens, numpy dtype of a token)."""
    try:
        header = np.fromfile(path, dtype="<i4", count=HEADER_BYTES // 4)
        size = os.path.getsize(path)
    except (OSError, ValueError) as e:  # ValueError: no file can have this name
        raise UserError(f"{path}: cannot be read ({getattr(e, 'strerror', e)}); {AGAIN}") from None
    kind = tuple(header[:2].tolist())
    if kind not in FORMATS or header.nbytes < HEADER_BYTES:
        raise UserError(f"{path}: not a token shard: it starts with {kind}, expected magic and version "
                        f"{' or '.join(map(str, FORMATS))}; {AGAIN}")
    tokens, dtype = int(header[2]), FORMATS[kind]
    found = (size - HEADER_BYTES) / dtype.itemsize
    if tokens != found:
        raise UserError(f"{path}: damaged: its header promises {tokens} tokens, the file holds {found:g}; {AGAIN}")
    return tokens, dtype


def check_shards(folder, shards, contents=True):
    """Compare shards with what meta.json says of them; `contents`: their checksums too, about 1 GB/s."""
    for s in shards:
        path = folder / s["file"]
        if read_header(path)[0] != s["tokens"]:
            raise UserError(f"{path}: not the shard that meta.json describes, which has {s['tokens']} tokens; {AGAIN}")
        if contents and (crc := file_crc(path)) != s["crc32"]:
            raise UserError(f"{path}: damaged: its checksum is {crc:08x}, meta.json has {s['crc32']:08x}; {AGAIN}")


def file_crc(path, tokens_end=None):
    """CRC-32 of a shard's tokens."""
    crc = 0
    with open(path, "rb") as f:
        f.seek(HEADER_BYTES)
        while block := f.read(1 << 22 if tokens_end is None else min(1 << 22, tokens_end - f.tell())):
            crc = zlib.crc32(block, crc)
    return crc


def read_meta(data_dir):
    """meta.json of a data folder, or None for shards that come without one. Raises UserError if there is no data."""
    folder = Path(data_dir)
    try:
        text = (folder / "meta.json").read_bytes()
    except OSError as e:
        if (folder / "progress.json").exists():
            raise UserError(f"{folder} is half prepared: run its prepare_fineweb.py command again") from None
        if not isinstance(e, FileNotFoundError | NotADirectoryError):
            raise UserError(f"cannot read {folder}/meta.json ({e.strerror})") from None
        if not folder.is_dir() or not any(folder.glob("*.bin")):
            raise UserError(f"no data in {folder}: prepare it with: python prepare_fineweb.py --source=... "
                            f"--out={shlex.quote(str(folder))}") from None
        return None
    try:
        meta = parse_sealed(text)
        ok = is_count(meta["vocab_size"]) and 0 < meta["vocab_size"] <= 2**32 and isinstance(meta["tokenizer"], str)
        for split in SPLITS:
            part = meta["splits"][split]
            ok = ok and is_count(part["tokens"]) and is_count(part["text_bytes"])
            for s in part["shards"]:
                ok = ok and re.fullmatch(r"[^/]+\.bin", s["file"]) and is_count(s["tokens"]) and is_count(s["crc32"])
            ok = ok and part["tokens"] == sum(s["tokens"] for s in part["shards"])
        if not ok:
            raise ValueError("a value is not what it should be")
        return meta
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise UserError(f"{folder}/meta.json is damaged ({type(e).__name__}: {first_line(e)}); {AGAIN}") from None


def is_count(value):
    return type(value) is int and 0 <= value < 2**62


def lock_folder(folder, what):
    """Make a folder and keep it for this process, as long as the returned file is open."""
    Path(folder).mkdir(parents=True, exist_ok=True)
    lock = open(Path(folder) / "lock", "w", encoding="utf-8")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise UserError(f"another process is {what} {folder}: wait for it, or choose another folder") from None
    return lock


class Writer:
    """The shards of one split. `state` is plain data, all that a continued run needs to know."""

    def __init__(self, out, stem, limit, shard_tokens, dtype, state):
        self.out, self.stem, self.limit, self.shard_tokens, self.dtype = out, stem, limit, shard_tokens, dtype
        self.state = state or dict(tokens=0, documents=0, text_bytes=0, dropped=0, shards=[], open_tokens=0, open_crc=0)
        self.file = None
        part, done = self.path(".part"), self.path(".bin")
        if done.exists() and not part.exists():
            done.rename(part)  # finished after the state was last written: go back to the state
        check_shards(out, self.state["shards"], contents=False)
        if self.state["open_tokens"]:
            end = HEADER_BYTES + self.state["open_tokens"] * dtype.itemsize
            if not part.exists() or file_crc(part, end) != self.state["open_crc"]:
                raise UserError(f"{part} is missing or damaged, so this preparation cannot go on; {AGAIN}")
            self.file = open(part, "r+b")
            self.file.truncate(end)
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


def seal(value):
    return zlib.crc32(json.dumps({k: v for k, v in value.items() if k != "seal"}).encode())


def parse_sealed(text):
    """The object in JSON that write_json wrote. Files made by others have no seal, and nothing that can be compared."""
    value = json.loads(text.decode())
    if not isinstance(value, dict) or value.get("seal", seal(value)) != seal(value):
        raise ValueError("its content does not match its checksum, the seal")
    return value


def write_json(path, value):
    """Replace a file at once: readers see the old content or the new, never half of it."""
    aside = path.with_suffix(".tmp")
    with open(aside, "w", encoding="utf-8") as f:
        json.dump(value | {"seal": seal(value)}, f, indent=1)
        f.flush()
        os.fsync(f.fileno())
    os.replace(aside, path)


# ---------------------------------------------------------------------------------------------------------------------
# Sources: files in a fixed order, and for each kind a reader


class Source(NamedTuple):
    stem: str  # start of the shards' names
    files: list  # [name, bytes] in the order of the stream
    fetch: Callable  # index of a file -> local path; waits for a download
    kind: str = ""  # suffix that stands for all files, whatever their names
    hub: dict | None = None  # what a continued run needs in place of asking the Hub again

    def changed(self, name):
        """When a local file was last changed, as far as that can be told."""
        return os.stat(name).st_mtime_ns if self.hub is None and name != "-" else 0

    def documents(self, i, skip, text_key):
        """Yield (index, where, bytes of the file read so far, text or Bad) of file i from index `skip` on."""
        name, size = self.files[i]
        index = skip - 1
        reader = READERS[self.kind or suffix(name)]
        try:
            for index, *document in reader(self.fetch(i), skip, text_key):
                yield index, *document
            if index < 0:
                yield 0, 1, size, Bad("empty: it holds no document")
        except (EOFError, OSError, ValueError, zlib.error, *zstd_errors()) as e:  # pyarrow's are among these
            if getattr(e, "errno", None) is not None:
                raise
            yield index + 1, "", size, Bad(f"cut short or damaged: {str(e).strip().splitlines()[0]}")


def find_source(args, hub):
    """--source -> Source; `hub` is what an earlier run found there."""
    if args.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = (p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
        return local_source("stdlib", files, ".py")
    if args.source == "fineweb-edu":
        return hub_source("HuggingFaceFW/fineweb-edu", args.config or "sample-10BT", args, hub)
    if args.source.startswith("hf:"):
        return hub_source(args.source[3:], args.config, args, hub)
    kind = "." + args.format if args.format else ""
    if args.source == "-":
        return Source("stdin", [["-", 0]], lambda i: "-", kind or ".txt")
    path = Path(args.source)
    found = [Path(p) for p in glob.glob(args.source, recursive=True)] or ([path] if path.exists() else [])
    if not found:
        raise UserError(f"--source={args.source}: no such file or folder")
    files = [f for p in found for f in walk(p)]
    usable = [f for f in files if kind or is_text(f.name)]
    if not usable:
        raise UserError(f"--source={args.source}: no file that ends in {', '.join(SUFFIXES)} (or with .gz, .zst "
                        "behind); for other names give --format")
    if len(usable) < len(files):
        left_out = sorted(set(files) - set(usable))
        print(f"{len(left_out)} files of other kinds are left out, the first is {left_out[0]}")
    return local_source(path.name.split(".")[0] if path.exists() else "text", usable, kind)


def local_source(stem, files, kind):
    files = [[str(p), p.stat().st_size] for p in sorted(files)]
    return Source(stem or "text", files, lambda i: files[i][0], kind)


def hub_source(repo, config, args, hub):
    """A dataset of the Hugging Face Hub: the data files that its card lists for a configuration."""
    try:
        import huggingface_hub
    except ImportError:
        raise UserError(f"--source={args.source} needs huggingface_hub: pip install -r requirements-data.txt") from None
    if hub is None:
        try:
            info = huggingface_hub.HfApi().dataset_info(repo, revision=args.revision or None, files_metadata=True,
                                                        timeout=TIMEOUT)
        except Exception as e:  # what is raised depends on the version of the library
            raise UserError(f"cannot reach {repo} on the Hub ({first_line(e)}). Without network: copy the dataset's "
                            ".parquet files into a folder and give --source=FOLDER, or use --source=stdlib") from None
        files = choose_files(info, config, repo)
        size = sum(n for _, n in files) / 1e6
        print(f"{repo}, {config or 'default'}: {len(files)} files, {size:,.0f} MB to download")
        hub = dict(revision=info.sha, files=files)
    files, ahead, waiting = hub["files"], ThreadPoolExecutor(1), {}

    def download(i):
        for pause in (1, 2, 4, 0):  # what is there already of a cut download is kept
            try:
                return huggingface_hub.hf_hub_download(repo, files[i][0], repo_type="dataset", revision=hub["revision"])
            except Exception as e:  # as above; told once the last attempt has failed
                error = first_line(e)
                time.sleep(pause)
        raise UserError(f"cannot download {files[i][0]} of {repo} ({error}); the same command goes on")

    def fetch(i):
        """Wait for file i and start on the next; with --discard the one before is deleted."""
        for j in (i, i + 1):
            if j < len(files) and j not in waiting:
                waiting[j] = ahead.submit(download, j)
        if args.discard and i - 1 in waiting:
            os.unlink(os.path.realpath(waiting.pop(i - 1).result()))
        return waiting[i].result()
    return Source(repo.split("/")[-1], files, fetch, hub=hub)


def choose_files(info, config, repo):
    """Names and sizes of the train files of a configuration, by the patterns in the dataset's card."""
    configs = {c["config_name"]: c for c in (info.card_data or {}).get("configs") or []}
    if config and config not in configs:
        raise UserError(f"{repo} has no configuration {config!r} (it has: {', '.join(configs) or 'none'})")
    default = next((c for c in configs.values() if c.get("default") or c["config_name"] == "default"), {})
    entries = (configs[config] if config else default).get("data_files", "**")
    patterns = []
    for entry in entries if isinstance(entries, list) else [entries]:  # a pattern, or {split, path: one or several}
        entry = entry if isinstance(entry, dict) else {"path": entry}
        if entry.get("split", "train") == "train":
            patterns += entry["path"] if isinstance(entry["path"], list) else [entry["path"]]
    files = sorted([s.rfilename, s.size or 0] for s in info.siblings if is_text(s.rfilename)
                   and any(fnmatch(s.rfilename, p.replace("**/", "*")) for p in patterns))
    if not files:
        raise UserError(f"{repo} {config}: no {', '.join(SUFFIXES)} among its {len(info.siblings)} files")
    return files


def walk(path):
    """The files below a folder, or the file itself. Links to folders are not followed (they may lead back)."""
    if not path.is_dir():
        yield path
        return

    def stop(error):
        raise error
    for folder, below, names in os.walk(path, onerror=stop):
        for link in (name for name in below if os.path.islink(os.path.join(folder, name))):
            print(f"{os.path.join(folder, link)} is a link to a folder: not followed")
        yield from (Path(folder) / name for name in names if (Path(folder) / name).is_file())


def suffix(name):
    """`.txt` of a.txt, A.TXT and a.txt.gz."""
    return os.path.splitext(name.lower().removesuffix(".gz").removesuffix(".zst"))[1]


def is_text(name):
    return suffix(name) in SUFFIXES


def first_line(error):
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


@contextmanager
def open_text(path):
    """(binary file, decompressed; function that tells how many bytes of the file on disk are read)."""
    with sys.stdin.buffer if path == "-" else open(path, "rb") as raw:
        told = raw.tell if raw.seekable() else lambda: 0
        if path.endswith(".gz"):
            yield gzip.open(raw, "rb"), told
        elif path.endswith(".zst"):
            yield io.BufferedReader(ZstdFile(raw, zstandard(path))), told
        else:
            yield raw, told


class ZstdFile(io.RawIOBase):
    """Decompressed stream of a .zst file. The library's own reader takes a file that is cut short for a whole one."""

    def __init__(self, raw, codec):
        self.raw, self.codec, self.frame, self.left, self.out = raw, codec, None, b"", b""

    def readable(self):
        return True

    def readinto(self, buffer):
        while not self.out:
            data = self.left or self.raw.read(1 << 16)
            if not data and self.frame is None:
                return 0
            if not data:
                raise EOFError("it ends in the middle of a frame")
            self.frame = self.frame or self.codec.ZstdDecompressor().decompressobj()
            self.out, self.left = self.frame.decompress(data), b""
            if self.frame.eof:
                self.left, self.frame = self.frame.unused_data, None
        n = min(len(buffer), len(self.out))
        buffer[:n], self.out = self.out[:n], self.out[n:]
        return n


def zstandard(path):
    try:
        import zstandard
        return zstandard
    except ImportError:
        raise UserError(f"{path} needs zstandard: pip install -r requirements-data.txt") from None


def zstd_errors():
    return [sys.modules["zstandard"].ZstdError] if "zstandard" in sys.modules else []


def read_python(path, skip, _):
    """A source file is one document; pydoc's topics, a dictionary of texts, are one each."""
    if path.endswith(os.path.join("pydoc_data", "topics.py")):
        from pydoc_data.topics import topics
        yield from [(i, "", 0, text) for i, text in enumerate(topics.values())][skip:]
    elif not skip:
        with open(path, "rb") as f:
            try:
                encoding, _ = tokenize.detect_encoding(f.readline)
                f.seek(0)
                yield 0, "", 0, f.read().decode(encoding)
            except (SyntaxError, UnicodeDecodeError, LookupError) as e:  # tests of bad encodings
                yield 0, "", 0, Bad(f"not text: {e}")


def read_txt(path, skip, _):
    """Pieces of whole lines, about TXT_CHARS each; a longer line is cut."""
    index, line, start, piece, size = 0, 1, 1, [], 0
    with open_text(path) as (raw, told):
        f = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        while text := f.readline(TXT_CHARS):
            if size >= TXT_CHARS and (text.strip() or size >= 2 * TXT_CHARS):  # blank lines stay with what they follow
                if index >= skip:
                    yield index, start, told(), "".join(piece)
                index, start, piece, size = index + 1, line, [], 0
            piece.append(text)
            size, line = size + len(text), line + text.endswith("\n")
        if piece and index >= skip:
            yield index, start, told(), "".join(piece)


def read_jsonl(path, skip, text_key):
    with open_text(path) as (f, told):
        for index, line in enumerate(f):
            if index >= skip:
                yield index, index + 1, told(), parse_json(line, text_key)


def parse_json(line, text_key):
    try:  # decoded here, because json.loads would guess UTF-16 and UTF-32, whose lines do not end at a byte 0x0a
        document = json.loads(line.decode("utf-8-sig")) if line.strip() else Bad("an empty line")
    except (ValueError, RecursionError) as e:
        return Bad(f"not JSON: {e}")
    if isinstance(document, Bad):
        return document
    if not isinstance(document, dict):
        return Bad(f"not an object with a key {text_key!r} but {type(document).__name__}")
    keys = ", ".join(list(document)[:8])[:200]
    text = document.get(text_key, Bad(f"no key {text_key!r} (it has: {keys}); give --text_key"))
    return text if isinstance(text, str) else Bad(f"{text_key} is {type(text).__name__}, not a string")


def read_parquet(path, skip, text_key):
    try:
        import pyarrow.parquet
    except ImportError:
        raise UserError(f"{path} needs pyarrow: pip install -r requirements-data.txt") from None
    with pyarrow.parquet.ParquetFile(path) as f:
        if text_key not in f.schema_arrow.names:
            names = ", ".join(f.schema_arrow.names)
            raise UserError(f"{path} has no column {text_key!r} (it has: {names}): give --text_key")
        index, per_row = 0, os.path.getsize(path) / max(1, f.metadata.num_rows)
        for group in range(f.num_row_groups):
            rows = f.metadata.row_group(group).num_rows
            if index + rows <= skip:
                index += rows
                continue
            for batch in f.iter_batches(batch_size=256, row_groups=[group], columns=[text_key]):
                for text in batch.column(0).to_pylist():
                    if not isinstance(text, str):
                        text = Bad(f"{text_key} is {type(text).__name__}, not a string")
                    if index >= skip:
                        yield index, f"row {index}", int(index * per_row), text
                    index += 1


READERS = {".py": read_python, ".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}


def check(text):
    """The text, or why it cannot be a document."""
    if isinstance(text, Bad):
        return text
    try:
        text.encode()
    except UnicodeEncodeError as e:
        return Bad(f"not valid UTF-8 (byte 0x{ord(text[e.start]) & 0xff:02x} after {e.start} characters)")
    if not any(unicodedata.category(c)[0] not in "ZC" for c in text):
        return Bad("empty: nothing visible in it")
    if text.count("\0") * 4 > len(text):
        return Bad("not text in UTF-8: it is full of zero bytes, like UTF-16")
    return text


def read_chunks(source, position, args):
    """Yield (texts, position behind them, bytes of input behind them, what was skipped among them).

    A position is [index of the file, number of its documents].
    """
    first, seen = position
    texts, skipped, chars, before = [], [], 0, sum(size for _, size in source.files[:first])
    for i in range(first, len(source.files)):
        for index, where, done, text in source.documents(i, seen if i == first else 0, args.text_key):
            text = check(text)
            if isinstance(text, Bad):
                text = one_line(f"{source.files[i][0]}:{where}{':' * bool(where)} {text}")
                if not args.skip_bad:
                    raise UserError(f"{text}; mend it, or skip and count such documents with --skip_bad")
                skipped.append(text)
                continue
            texts.append(text)
            chars += len(text)
            if chars >= CHUNK_CHARS:
                yield texts, [i, index + 1], before + done, skipped
                texts, skipped, chars = [], [], 0
        before += source.files[i][1]
    yield texts, [len(source.files), 0], before, skipped


# ---------------------------------------------------------------------------------------------------------------------
# Tokens


def get_encoding(name):
    """The tiktoken Encoding of a name, a rank file or a tokenizer.json.

    `bytes`: ids 0 to 255 are the bytes themselves, 256 is end-of-text. A rank file (lines of base64 and rank) is split
    by GPT-2's pattern, end-of-text is the id behind its last.
    """
    import tiktoken
    import tiktoken.load
    import tiktoken_ext.openai_public as public
    if name == "bytes":
        return tiktoken.Encoding(name, pat_str=r"(?s).{1,64}", mergeable_ranks={bytes([i]): i for i in range(256)},
                                 special_tokens={END_OF_TEXT: 256})
    try:
        if name.endswith(".json"):
            saved = parse_sealed(Path(name).read_bytes())
            ranks, special = {base64.b64decode(t): rank for t, rank in saved["ranks"]}, saved["special_tokens"]
            check_ranks(ranks, special)
            return tiktoken.Encoding(saved["name"], pat_str=saved["pat_str"], mergeable_ranks=ranks,
                                     special_tokens=special)
        if os.path.exists(name):
            content = Path(name).read_bytes()
            lines = (line.split() for line in content.splitlines() if line.strip())
            ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
            special = {END_OF_TEXT: max(ranks.values(), default=0) + 1}
            check_ranks(ranks, special)
            return tiktoken.Encoding(f"{Path(name).stem}-{zlib.crc32(content):08x}", pat_str=public.r50k_pat_str,
                                     mergeable_ranks=ranks, special_tokens=special)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as e:
        raise UserError(f"--tokenizer={name}: not a usable rank file ({type(e).__name__}: {first_line(e)})") from None
    if name not in tiktoken.list_encoding_names():
        raise UserError(f"--tokenizer={name} is unknown: give bytes, a tiktoken encoding "
                        f"({', '.join(tiktoken.list_encoding_names())}) or the path of a rank file")
    tiktoken.load.read_file = read_ranks  # the library's own waits for minutes, and its message does not help
    try:
        return tiktoken.get_encoding(name)
    except (ValueError, OSError) as e:  # the library compares checksums, and keeps a copy under a name of its own
        raise UserError(f"--tokenizer={name}: {first_line(e)}. If TIKTOKEN_CACHE_DIR is set, it must be a folder that "
                        "can be written to, with whole files") from None


def check_ranks(ranks, special):
    """What tiktoken takes for granted: with anything else it aborts, or encodes to ids that nothing can decode."""
    ids, missing = [*ranks.values(), *special.values()], [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise ValueError(f"bytes without a rank: {missing}")
    if not all(is_count(i) and i < 2**31 for i in ids) or len(set(ids)) < len(ids):
        raise ValueError("ranks that are not unique numbers below 2^31")
    if END_OF_TEXT not in special:
        raise ValueError(f"no special token {END_OF_TEXT}")


def read_ranks(url):
    """Rank file of a tiktoken encoding: from the cache folder under its plain name, else from the network."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR", "")
    plain = Path(folder) / url.split("/")[-1]
    if folder and plain.exists():
        return plain.read_bytes()
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT) as answer:
            return answer.read()
    except OSError as e:
        raise UserError(f"cannot download the tokenizer's file {url} ({e}). On a machine with network, save it as "
                        f"{plain.name}, put it into a folder here and set TIKTOKEN_CACHE_DIR to that folder") from None


def save_encoding(encoding, path):
    ranks = [(base64.b64encode(token).decode(), rank) for token, rank in encoding._mergeable_ranks.items()]
    write_json(path, dict(name=encoding.name, pat_str=encoding._pat_str, special_tokens=encoding._special_tokens,
                          ranks=ranks))


def segments(text):
    """Cut a long text into pieces whose encodings, joined, are the encoding of the whole.

    A cut is made before a space behind something that is no white space: there every pattern of tiktoken ends a word.
    Only in a stretch of 100,000 characters without such a place it falls anywhere, and the ids around it may differ.
    """
    start, (short, long) = 0, SEGMENT_CHARS
    while len(text) - start > long:
        cut = start + short
        while (cut := text.find(" ", cut, start + long)) > 0 and text[cut - 1].isspace():
            cut += 1
        cut = cut if cut > 0 else start + long
        yield text[start:cut]
        start = cut
    yield text[start:]


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


def encode_chunk(texts, holdout, none, full, dtype):
    """Per document: (split, bytes of text, ids behind an end-of-text token).

    What falls into a split of `none` (not asked for at all) goes to train; splits that are `full` get no ids.
    """
    out = []
    for text in texts:
        data = text.encode()
        split, ids = split_of(data, holdout), None
        split = 0 if split in none else split
        if split not in full:
            try:
                parts = [encoding.encode_to_numpy(part, disallowed_special=()) for part in segments(text)]
            except ValueError as e:
                raise UserError(f"cannot encode a document that begins {text[:50]!r}: {first_line(e)}") from None
            ids = np.concatenate([[encoding.eot_token], *parts]).astype(dtype)
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
            raise UserError("a worker process died (killed, or out of memory?); the same command goes on") from None
        finally:
            pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# The command


def parse_args(argv):
    p = Parser("prepare_fineweb.py", description=__doc__, allow_abbrev=False,
               formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--source", default="fineweb-edu", help="fineweb-edu (default), hf:ORG/NAME for another dataset of "
                   "the Hub, stdlib, a file, a folder, a quoted glob, or - for standard input")
    p.add_argument("--out", required=True, help="folder for the shards and meta.json")
    p.add_argument("--tokenizer", default="", help="a tiktoken encoding (gpt2, cl100k_base, ...), the path of a rank "
                   "file, or bytes (default: gpt2 for datasets of the Hub, bytes for the rest)")
    p.add_argument("--config", default="", help="configuration of a Hub dataset (fineweb-edu: sample-10BT)")
    p.add_argument("--revision", default="", help="revision of a Hub dataset (default: the newest)")
    p.add_argument("--discard", action="store_true", help="delete each downloaded file once the next one is begun")
    p.add_argument("--format", default="", choices=("txt", "jsonl", "parquet"), help="of files with other names")
    p.add_argument("--text_key", default="text", help="key of the text in .jsonl, column in .parquet (default text)")
    p.add_argument("--shard_tokens", type=int, default=100_000_000, help="tokens per shard (default 100M)")
    p.add_argument("--val_tokens", type=int, default=1_000_000, help="most tokens in val; 0: none (default 1M)")
    p.add_argument("--test_tokens", type=int, default=1_000_000, help="most tokens in test; 0: none (default 1M)")
    p.add_argument("--max_tokens", type=int, default=0, help="most tokens in train; 0: no limit (default)")
    p.add_argument("--holdout", type=int, default=1, help="percent of documents for val, and for test (default 1)")
    p.add_argument("--skip_bad", action="store_true", help="skip and count documents that cannot be used")
    p.add_argument("--workers", type=int, default=0, help="processes that encode; 0: one per core (default)")
    p.add_argument("--verify", action="store_true", help="only compare the shards in --out with their checksums")
    args = p.parse_args(argv)
    for name, low, high in (("shard_tokens", 1, 2**31 - 1), ("val_tokens", 0, 2**40), ("test_tokens", 0, 2**40),
                            ("max_tokens", 0, 2**60), ("holdout", 1, 49), ("workers", 0, 1024)):
        if not low <= getattr(args, name) <= high:
            p.error(f"--{name}={getattr(args, name)}: must be {low} to {high}")
    for name in ("source", "out"):
        if not getattr(args, name):  # Path("") is the current folder, which nobody means by it
            p.error(f"--{name} is empty: give a path, or . for the current folder")
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    args.workers = args.workers or cores
    if os.path.exists(args.source):
        args.source = os.path.normpath(args.source)
    args.tokenizer = args.tokenizer or ("gpt2" if args.source.startswith(("fineweb-edu", "hf:")) else "bytes")
    return args


def prepare(args):
    """Lock the folder and fill it, or go on where an earlier run stopped."""
    try:
        lock = lock_folder(args.out, "preparing")
    except OSError as e:
        raise UserError(f"{args.out}: cannot write to this folder ({e.strerror})") from None
    with lock:
        fill(args)


def fill(args):
    out, hub = Path(args.out), args.source.startswith(("fineweb-edu", "hf:"))
    args.skip_bad = args.skip_bad or args.source == "stdlib"
    # what decides the content of the shards: a folder holds one such set for its whole life
    names = "source config revision format text_key tokenizer shard_tokens val_tokens test_tokens max_tokens holdout"
    settings = {name: getattr(args, name) for name in names.split()}
    if os.path.exists(args.tokenizer):  # what is in the file counts, not where it lies
        settings["tokenizer"] = get_encoding(args.tokenizer).name
    old = read_state(out, settings)
    if old and hub and "end_of_text" in old:
        return complete(out)
    source = find_source(args, old and old["hub"])

    def digest(position):
        """Of the files used so far: they must not change between interruption and continuation."""
        used = source.files[:position[0] + (position[1] > 0)]
        text = "".join(f"{os.path.basename(name)} {size} {source.changed(name)}\n" for name, size in used)
        return hashlib.blake2b(text.encode(errors="surrogateescape"), digest_size=16).hexdigest()

    grown = old and old["position"][0] == old["files"] < len(source.files)
    if old and (grown or old["input"] != digest(old["position"])):
        raise UserError(f"{out} was prepared from other files than --source={args.source} holds now: delete it or use "
                        "another --out")
    if old and "end_of_text" in old:
        return complete(out)
    encoder = get_encoding(args.tokenizer)
    dtype = FORMATS[20240520, 1] if encoder.n_vocab <= 2**16 else FORMATS[20240801, 7]
    state = old or dict(settings=settings, hub=source.hub, files=len(source.files), position=[0, 0], skipped=0,
                        skipped_first=[], splits={})
    limits = dict(train=args.max_tokens or None, val=args.val_tokens, test=args.test_tokens)
    writers = [Writer(out, f"{source.stem}_{s}", limits[s], args.shard_tokens, dtype, state["splits"].get(s))
               for s in SPLITS]

    def save():
        for w in writers:
            w.sync()
        state.update(splits={s: w.state for s, w in zip(SPLITS, writers)}, input=digest(state["position"]))
        write_json(out / "progress.json", state)

    def total(key):
        return sum(w.state[key] for w in writers)

    if old:
        print(f"continuing in {out} behind document {total('documents')}")
    save()
    none = [i for i, w in enumerate(writers) if w.limit == 0]
    jobs = (((texts, args.holdout, none, [i for i, w in enumerate(writers) if w.full], dtype), tag)
            for texts, *tag in read_chunks(source, state["position"], args))
    show, saved, before = Progress(sum(size for _, size in source.files)), time.monotonic(), total("tokens")
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
        show(done_bytes, total("tokens") - before, total("documents"))
        if all(w.full for w in writers):
            break
    show.end()
    for w in writers:
        w.finish()
    empty = [name for w, name in zip(writers, SPLITS) if not w.state["tokens"] and not w.full]
    if empty:
        for path in (*(out / s["file"] for w in writers for s in w.state["shards"]), out / "progress.json"):
            path.unlink()
        raise UserError(f"{total('documents')} documents are too few, none falls into {' and '.join(empty)}: raise "
                        f"--holdout={args.holdout} (percent for val, for test), or do without: "
                        + " ".join(f"--{name}_tokens=0" for name in SPLITS[1:]))
    save()
    save_encoding(encoder, out / "tokenizer.json")
    meta = {k: state[k] for k in ("settings", "hub", "files", "position", "input", "skipped", "skipped_first")} | dict(
        source=args.source, tokenizer=encoder.name, vocab_size=encoder.n_vocab, end_of_text=encoder.eot_token,
        splits={s: {k: w.state[k] for k in ("tokens", "documents", "text_bytes", "dropped", "shards")}
                for s, w in zip(SPLITS, writers)})
    write_json(out / "meta.json", meta)
    (out / "progress.json").unlink()
    report(out, meta)


def read_state(out, settings):
    """What an earlier run left in the folder: its meta.json or its progress.json; None for a fresh folder."""
    try:
        path = next((out / name for name in ("meta.json", "progress.json") if (out / name).exists()), None)
        if path is None:
            if any(out.glob("*.bin")):
                raise UserError(f"{out} holds shards of another origin (no meta.json): choose another --out")
            return None
        state = parse_sealed(path.read_bytes())
        if path.name == "progress.json":
            state["seal"]  # all of it is taken as it stands, so it must be what was written
        if path.name == "progress.json" and state["position"] == [0, 0]:  # stopped before anything was done
            for left_over in (*out.glob("*.part"), *out.glob("*.bin")):
                left_over.unlink()
            return None
        old = state["settings"]
        changed = [f"{k}: {old.get(k)} -> {v}" for k, v in settings.items() if old.get(k) != v]
        for key in ("hub", "files", "position", "input", "splits", "skipped", "skipped_first"):
            state[key]
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise UserError(f"{path} is damaged ({type(e).__name__}: {first_line(e)}); {AGAIN}") from None
    if changed:
        raise UserError(f"{out} was prepared otherwise ({', '.join(changed)}): delete it or use another --out")
    return state


def complete(out):
    (out / "progress.json").unlink(missing_ok=True)  # left when a kill came between the two
    check_shards(out, all_shards(read_meta(out)), contents=False)
    print(f"{out} is complete already: nothing to do (--verify compares the checksums)")


def all_shards(meta):
    if meta is None:
        raise UserError("these shards came without a meta.json: there is nothing to compare them with")
    return [s for split in SPLITS for s in meta["splits"][split]["shards"]]


def verify(out):
    shards = all_shards(read_meta(out))
    check_shards(out, shards)
    print(f"{out}: all {len(shards)} shards are as they were written")


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
        line = f"{tokens / 1e6:.1f}M tokens, {tokens / seconds / 1e6:.2f}M tok/s, {documents} documents"
        if done_bytes > self.first:
            left = int(seconds * (self.total - done_bytes) / (done_bytes - self.first))
            left = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
            line = f"{100 * done_bytes / self.total:5.1f} %, {line}, {left} left"
        print(f"\r{line}\033[K" if self.tty else line, end="" if self.tty else "\n", file=sys.stderr, flush=True)

    def end(self):
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def report(out, meta):
    for name, s in meta["splits"].items():
        dropped = f", {s['dropped']} more documents not needed" if s["dropped"] else ""
        print(f"{name:5s} {s['tokens']:>13,} tokens  {s['documents']:>9,} documents  {s['text_bytes']:>13,} bytes  "
              f"{len(s['shards'])} shard{'s' * (len(s['shards']) != 1)}{dropped}")
    if meta["skipped"]:
        print(f"skipped {meta['skipped']} documents that cannot be used, the first: {meta['skipped_first'][0]}")
    print(f"wrote {out}: vocabulary of {meta['vocab_size']} ({meta['tokenizer']})")


def main(argv=None):
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(errors="backslashreplace")  # names of files need not be printable
    try:
        args = parse_args(argv)
        verify(Path(args.out)) if args.verify else prepare(args)
    except UserError as e:
        sys.exit(f"prepare_fineweb.py: {e}")
    except OSError as e:
        sys.exit(f"prepare_fineweb.py: {e.filename or args.out}: {e.strerror or e} (the same command goes on)")
    except KeyboardInterrupt:
        sys.exit("prepare_fineweb.py: interrupted; the same command goes on")


if __name__ == "__main__":
    main()
