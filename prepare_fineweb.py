"""Turn text into token shards that train.py reads.

    python prepare_fineweb.py --out=data/fineweb                   FineWeb-Edu, its 10B-token sample, as GPT-2's tokens
    python prepare_fineweb.py --source=my_texts --out=data/mine    your own files: .txt, .jsonl, .parquet
    python prepare_fineweb.py --source=stdlib --out=data/stdlib    the text of this Python: needs no network
    cat docs.jsonl | python prepare_fineweb.py --source=- --format=jsonl --out=data/mine
    python prepare_fineweb.py --tokenizer=Qwen/Qwen3-0.6B --out=data/qwen3      the ids of a Hugging Face tokenizer
    python prepare_fineweb.py --verify --out=data/mine                   compare the shards with their checksums

Every document is encoded as ordinary text behind one end-of-text token (or what the tokenizer's own template says). A
hash of its text decides its split: of 100 hashes `--holdout` each go to val and to test, the rest to train. Val and
test are filled in stream order up to --val_tokens and --test_tokens and what they cannot take is dropped: so, once
full, they stay the same however much training data is prepared, and no text is in two splits of a folder. Across
folders this holds for equal --holdout, and where both have val and test: with --val_tokens=0 its documents go to
train. A finished folder is not topped up: for more tokens prepare another. Of a dataset of the Hub its train split is
read (see --files), never what it holds out.

A shard is the .bin of llm.c and modded-nanogpt: a header of 256 int32 (magic, version, number of tokens), then the
tokens, uint16, or uint32 where the vocabulary is larger than 65,536. It is written as .part and renamed when complete.
The last shard of a split has what is left and is shorter; train.py reads the shards of a split as one stream.
meta.json, written last, holds source, tokenizer, vocabulary size, counts and a CRC-32 of each shard's tokens;
tokenizer.json all that is needed to encode and decode; both end with a checksum of themselves, the seal. The same
command continues an interrupted preparation where it stopped, to the same bytes, and does nothing when all is done;
from standard input it begins in a new folder. A .txt file is cut at line ends into documents of about 10,000
characters, and at lines <|endoftext|>: for whole documents use .jsonl or .parquet.
Memory is bounded: 2 * workers + 2 chunks of a million characters, the longest document and one row group, however large
the source is.
"""
import argparse
import base64
import errno
import glob
import gzip
import hashlib
import importlib
import io
import json
import multiprocessing
import os
import queue
import re
import shlex
import shutil
import signal
import sys
import sysconfig
import threading
import time
import tokenize
import unicodedata
import zlib
from collections import Counter, deque
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import NamedTuple

try:
    import fcntl
except ImportError:
    sys.exit("Linux or macOS is needed; on Windows use its Linux, WSL")

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
HUB_ID = r"[\w-][\w.-]*/[\w.-]+(@[\w./-]+)?"  # owner/name[@revision]

AGAIN = "delete the folder and prepare the data again"


class UserError(Exception):
    """Something the user can mend; the scripts print it as one line."""

    def __str__(self):
        return one_line(super().__str__())


PATHS = {"run", "config", "source", "out", "runs", "tokenizer", "data_dir", "task_dir", "figures", "export", "compare"}


class Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, with the nearest flag; `aliases` are what others call ours: {theirs: ours}."""

    def __init__(self, *args, aliases=(), **options):
        form = argparse.RawDescriptionHelpFormatter
        super().__init__(*args, **dict(allow_abbrev=False, formatter_class=form) | options)
        self.aliases = dict(aliases)

    def error(self, message):
        raise UserError(f"{message} (--help lists the flags)")

    def parse_args(self, args=None, namespace=None):
        known = {option.removeprefix("--") for action in self._actions for option in action.option_strings}
        seen = set()
        for arg in args if args is not None else sys.argv[1:]:
            name = arg.partition("=")[0].removeprefix("--")
            if not arg.startswith("--") or not name or " " in name:  # a value, or what argparse has a word for
                continue
            if name not in known:
                plain = name.replace("-", "_").lower()
                near = [self.aliases[plain]] if plain in self.aliases else get_close_matches(plain, known, 1)
                self.error(f"unrecognized arguments: --{name}" + "".join(f", did you mean --{n}?" for n in near))
            if name in seen:
                self.error(f"--{name} is given twice")
            seen.add(name)
        out = super().parse_args(args, namespace)
        for name in PATHS & vars(out).keys():  # a shell leaves the ~ of --out=~/data as it is
            value = getattr(out, name)
            setattr(out, name, [*map(os.path.expanduser, value)] if isinstance(value, list) else
                    value and os.path.expanduser(value))
        return out


def whole(text):
    """A whole number from the command line: 1000000, 1_000_000 or 1e6."""
    try:
        return int(text)
    except ValueError:
        value = float(text)
        if not value.is_integer():  # argparse tells the ValueError
            raise
        return int(value)


def truth(text):
    if text.lower() not in ("true", "false"):
        raise ValueError
    return text.lower() == "true"


whole.__name__, truth.__name__ = "whole number", "true or false"  # in argparse's messages


class Bad(str):
    """Why a document cannot be used."""


class Lost(Bad):
    """Why the rest of a file cannot be used, and how much of it there is; `unread`: in bytes."""


class Damaged(Exception):
    """A file that cannot be read on: (why, bytes of it that could be read, documents that it should have or None)."""


def need(package, what="a Hugging Face model", file="requirements-hub.txt"):
    """Import an optional package, or say what needs it and how to get it."""
    try:
        return importlib.import_module(package)
    except ImportError as e:
        raise UserError(f"{what} needs {package.split('.')[0]} ({first_line(e)}): pip install -r {file}") from None


def print_anything():
    """Names of files and texts may hold what the terminal does not know. (A notebook's stream knows everything.)"""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who started this
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))
        if hasattr(getattr(sys, name), "reconfigure"):
            getattr(sys, name).reconfigure(errors="backslashreplace")


def cores():
    """How many this process may use: by its affinity, and by the quota of its container."""
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    with suppress(OSError, ValueError):  # no such file, or no limit
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        n = min(n, max(1, int(quota) // int(period)))
    return n


def one_line(text):
    """Line breaks, escape sequences and the like as Python writes them: names and values may hold any character."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def counted(n, noun):
    return f"{n:,} {noun}{'s' * (n != 1)}"


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
    if (promised := HEADER_BYTES + tokens * dtype.itemsize) != size:
        raise UserError(f"{path}: damaged: its header promises {tokens:,} tokens, which is {promised:,} bytes, and the "
                        f"file has {size:,}; {AGAIN}")
    return tokens, dtype


def check_shards(folder, shards, contents=True):
    """Compare shards with what meta.json says of them; `contents`: their checksums too, about 1 GB/s."""
    for s in shards:
        path = folder / s["file"]
        if read_header(path)[0] != s["tokens"]:
            raise UserError(f"{path}: not the shard that meta.json describes ({s['tokens']:,} tokens); {AGAIN}")
        if contents and (crc := file_crc(path)) != s["crc32"]:
            raise UserError(f"{path}: damaged: its checksum is {crc:08x}, meta.json has {s['crc32']:08x}; {AGAIN}")


def file_crc(path, end=None):
    """CRC-32 of a shard's tokens."""
    crc = 0
    with open(path, "rb") as f:
        f.seek(HEADER_BYTES)
        while block := f.read(1 << 22 if end is None else min(1 << 22, end - f.tell())):
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
            raise UserError(f"no data in {folder.absolute()}: prepare it with: python prepare_fineweb.py --source=... "
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


def lock_folder(folder, what, wait=False):
    """Make a folder and keep it for this process, as long as the returned file is open.

    If another process has it: `wait` for its end, else raise UserError. Some network file systems have no locks: then
    there is a warning and no protection.
    """
    Path(folder).mkdir(parents=True, exist_ok=True)
    lock = open(Path(folder) / "lock", "w", encoding="utf-8")
    said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return lock
        except BlockingIOError:
            if not wait:
                raise UserError(f"another process is {what} {folder}: wait for it, or choose another folder") from None
            if not said:
                print(f"another process is {what} {folder}: waiting until it is done (Ctrl-C ends this)", flush=True)
            said = True
            time.sleep(0.2)
        except OSError as e:
            if e.errno not in (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP, errno.EINVAL):
                raise
            print(f"warning: the file system of {folder} has no locks ({e.strerror}): see to it that no other process "
                  f"is {what} this folder", file=sys.stderr, flush=True)
            return lock


@contextmanager
def writing(path, size):
    """Around writing `size` bytes: an error of the disk then names the file and says what would have been needed."""
    try:
        yield
    except OSError as e:
        free = shutil.disk_usage(Path(path).parent).free
        raise OSError(e.errno, f"{e.strerror} (up to {size:,} bytes were to be written, its disk has {free:,} free)",
                      str(path)) from None


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
            piece = ids[:self.shard_tokens - self.state["open_tokens"]]
            with writing(self.path(".part"), piece.nbytes):
                if self.file is None:
                    self.file = open(self.path(".part"), "wb")
                    self.file.write(bytes(HEADER_BYTES))
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
        with writing(self.path(".part"), io.DEFAULT_BUFFER_SIZE):
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
            with writing(self.path(".part"), io.DEFAULT_BUFFER_SIZE):
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
    aside, text = path.with_suffix(".tmp"), json.dumps(value | {"seal": seal(value)}, indent=1)
    with writing(path, len(text)):
        try:
            with open(aside, "w", encoding="utf-8") as f:
                f.write(text)
                f.flush()
                os.fsync(f.fileno())
            os.replace(aside, path)
        except OSError:
            aside.unlink(missing_ok=True)
            raise


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
        index, reader, path = skip - 1, READERS[self.kind or suffix(name)], self.fetch(i)
        try:
            for index, *document in reader(path, skip, text_key):
                yield index, *document
            if index < 0:
                yield 0, 1, size, Bad("empty: it holds no document")
        except Damaged as e:
            why, read, promised = e.args
            of = f" of {promised:,}" if promised is not None else ""
            bytes_read = f" and {read:,} of {size:,} bytes" if size else ""
            again = f"; delete {os.path.realpath(path)} to download it again" if self.hub else ""
            lost = Lost(f"cut short or damaged: {why}; {index + 1:,}{of} documents{bytes_read} could be read{again}")
            lost.unread = max(size - read, 0)
            yield index + 1, "", size, lost


def find_source(args, hub):
    """--source -> Source; `hub` is what an earlier run found there."""
    kind = "." + args.format if args.format else ""
    if args.source == "stdlib":
        root = Path(sysconfig.get_path("stdlib"))
        files = (p for p in root.rglob("*.py") if not {"site-packages", "dist-packages"} & set(p.parts))
        return local_source("stdlib", files, ".py")
    if args.source == "fineweb-edu":
        return hub_source("HuggingFaceFW/fineweb-edu", args.config or "sample-10BT" * (not args.files), kind, args, hub)
    if args.source.startswith("hf:"):
        return hub_source(args.source[3:], args.config, kind, args, hub)
    if args.source == "-":
        return Source("stdin", [["-", 0]], lambda i: "-", kind or ".txt")
    path = Path(args.source)
    found = [Path(p) for p in glob.glob(args.source, recursive=True)] or ([path] if path.exists() else [])
    if not found:
        raise UserError(f"--source={args.source}: no such file or folder")
    files = {f for p in found for f in walk(p)}  # a set: ** finds a folder and also what is in it
    usable = {f for f in files if kind or is_text(f.name)}
    if not usable:
        raise UserError(f"--source={args.source}: no file that ends in {', '.join(SUFFIXES)} (or with .gz, .zst "
                        "behind); for other names give --format")
    root = path if path.exists() else Path(*takewhile(lambda part: not re.search("[*?[]", part), path.parts))
    splits = split_names({str(f.relative_to(root)) for f in files - {root}})
    if "train" in splits.values():  # a copy of a dataset: what it holds out must not be trained on
        usable = {f for f in usable if splits.get(str(f.relative_to(root)), "train") == "train"}
    if left_out := sorted(files - usable):
        print(f"left out: {counted(len(left_out), 'file')} of other kinds or of held-out splits, the first is "
              f"{left_out[0]}")
    if double := twins(map(str, usable)):
        print(f"warning: {double[0]} and {double[1]} have one name: if they hold one text, it is taken twice")
    return local_source(path.name.split(".")[0] if path.exists() else "text", usable, kind)


def local_source(stem, files, kind):
    files = [[str(p), p.stat().st_size] for p in sorted(files)]
    return Source(stem or "text", files, lambda i: files[i][0], kind)


def hub_source(repo, config, kind, args, hub):
    """The train split of a dataset of the Hugging Face Hub; each file is downloaded while the one before is read."""
    huggingface_hub = need("huggingface_hub", f"--source={args.source}", "requirements-data.txt")
    if hub is None:
        sizes, card, revision = list_dataset(repo, args.revision)
        files = choose_files(sizes, card, config, args.files, kind, repo)
        print(f"{repo}, {args.files or config or 'default'}: {len(files):,} of its {len(sizes):,} files, "
              f"{sum(size for _, size in files) / 1e6:,.0f} MB")
        hub = dict(revision=revision, files=files)
    files, wanted, waiting = hub["files"], queue.SimpleQueue(), {}

    def download(name):
        return patiently(f"download {name} of {repo}", repo, lambda: huggingface_hub.hf_hub_download(
            repo, name, repo_type="dataset", revision=hub["revision"]))

    def work():
        while True:
            i, future = wanted.get()
            try:
                future.set_result(download(files[i][0]))
            except Exception as e:
                future.set_exception(e)

    def fetch(i):
        """Wait for file i and start on the next; with --discard the one before is deleted."""
        for j in (i, i + 1):
            if j < len(files) and j not in waiting:
                waiting[j] = Future()
                wanted.put((j, waiting[j]))
        if args.discard and i - 1 in waiting:
            os.unlink(os.path.realpath(waiting.pop(i - 1).result()))
        try:
            return result_of(waiting[i])
        except Unreachable as e:
            raise UserError(f"{e}; the same command goes on") from None
    threading.Thread(target=work, daemon=True).start()  # a daemon: nobody waits for a file that is not needed
    return Source(repo.split("/")[-1], files, fetch, kind, hub)


class Unreachable(Exception):
    """The Hub gave no answer, or none that helps."""


def patiently(what, repo, ask, pauses=(1, 2, 4)):
    """ask(), again after each pause where it fails; a rate limit is waited for. What a cut download left is kept."""
    pauses, limited = list(pauses), 0
    while True:
        try:
            return ask()
        except Exception as e:  # what is raised depends on the version of the library
            error, answer = first_line(e), None
            while answer is None and e is not None:  # the library may have wrapped the answer's error
                answer, e = getattr(e, "response", None), e.__cause__
        status = getattr(answer, "status_code", None)
        if status in (401, 403):
            raise UserError(f"cannot {what}: the Hub refuses it ({status}). Is the name right? If it is gated or "
                            f"private, accept its terms on the Hub's page of {repo}, then log in with `hf auth "
                            "login` or set HF_TOKEN")
        if status == 404:
            raise UserError(f"cannot {what}: the Hub has no such name, revision or file ({error})")
        if status == 429 and limited < 20:
            limited += 1
            asked = answer.headers.get("Retry-After", "")
            seconds = int(asked) + 1 if asked.isdigit() else 60
            print(f"the Hub limits the number of requests: waiting {seconds:,} s, then going on to {what}",
                  file=sys.stderr, flush=True)
            time.sleep(seconds)
        elif pauses:
            time.sleep(pauses.pop(0))
        else:
            raise Unreachable(f"cannot {what} ({error})")


def list_dataset(repo, revision):
    """({file: bytes}, the card's settings, revision) from the Hub; without network what the local cache has of it."""
    import huggingface_hub
    from huggingface_hub import constants
    pauses = () if constants.HF_HUB_OFFLINE else (1, 2, 4)
    try:
        info = patiently(f"list {repo}", repo, lambda: huggingface_hub.HfApi().dataset_info(
            repo, revision=revision or None, files_metadata=True, timeout=TIMEOUT), pauses)
    except Unreachable as e:
        return list_cached(repo, revision, e)
    sizes = {s.rfilename: s.size or 0 for s in info.siblings}
    if "README.md" in sizes:  # the card: into the cache, for a start without network
        with suppress(Unreachable):
            patiently(f"download README.md of {repo}", repo, lambda: huggingface_hub.hf_hub_download(
                repo, "README.md", repo_type="dataset", revision=info.sha))
    return sizes, info.card_data, info.sha


def list_cached(repo, revision, error):
    from huggingface_hub import constants
    from huggingface_hub.repocard import metadata_load
    cache = Path(constants.HF_HUB_CACHE, f"datasets--{repo.replace('/', '--')}")
    ref = cache / "refs" / (revision or "main")
    roots = list((cache / "snapshots").glob(ref.read_text() if ref.is_file() else revision or "*"))
    if not roots:
        raise UserError(f"{error}, and the cache has nothing of it. Without network: copy the dataset's .parquet files "
                        "into a folder and give --source=FOLDER, or use --source=stdlib")
    root = max(roots, key=os.path.getmtime)
    sizes = {str(f.relative_to(root)): f.stat().st_size for f in walk(root)}
    parts = Counter(m.groups() for n in sizes if (m := re.search(r"(.*)-\d{5}-of-(\d{5})", n)))
    for (name, of), n in parts.items():
        if n < int(of):
            raise UserError(f"{error}, and the cache has only {n:,} of {int(of):,} files {name}-*-of-{of}")
    if not parts and not constants.HF_HUB_OFFLINE:
        raise UserError(f"{error}. The cache has {counted(len(sizes), 'file')} of it, which may not be all: try again, "
                        "or take these with the environment variable HF_HUB_OFFLINE=1")
    try:
        card = metadata_load(root / "README.md") if "README.md" in sizes else None
    except Exception as e:  # YAML's errors
        raise UserError(f"{root}/README.md: not a card ({first_line(e)})") from None
    print(f"{error}: taking what the cache has, {counted(len(sizes), 'file')} of revision {root.name}")
    return sizes, card, root.name


# How names tell a split, as Hugging Face's datasets reads them: words between other signs than letters
SPLIT_WORDS = dict(train="train|training", validation="validation|valid|dev|val", test="test|testing|eval|evaluation")


def split_names(names):
    """{file: split} of those names that tell a split: data/SPLIT-00000-of-00009, else files', else folders' names."""
    if found := {n: m[1] for n in names if (m := re.match(r"data/(\w+)-\d{5}-of-\d{5}[^/]*$", n))}:
        return found
    for part in (os.path.basename, os.path.dirname):
        found = {n: split for split, words in SPLIT_WORDS.items() for n in names
                 if re.search(rf"(^|[-._ 0-9/])({words})([-._ 0-9/]|$)", part(n).lower())}
        if found:
            break
    return found


def twins(names):
    """Two names that differ only in how the text is stored: likely the same text. None if there are none."""
    seen = {}
    for name in sorted(names):
        stem = os.path.splitext(name.removesuffix(".gz").removesuffix(".zst"))[0]
        if stem in seen:
            return seen[stem], name
        seen[stem] = name
    return None


def choose_files(sizes, card, config, pattern, kind, repo):
    """[[name, bytes]] of a dataset's train split.

    Which files these are is said by `pattern`, else by the card's entry for `config`, else by their names as in Hugging
    Face's datasets. What is ambiguous is refused.
    """
    usable = [n for n in sizes if kind or is_text(n)]
    name_them = "name the files that are meant: --files='FOLDER/*.parquet'"
    try:
        configs = {c.get("config_name", "default"): c for c in (card or {}).get("configs") or []}
        if config and not pattern and config not in configs:
            raise UserError(f"{repo} has no configuration {config!r} (it has: {', '.join(configs) or 'none'})")
        standard = [c for c in configs if configs[c].get("default") or c == "default"] or list(configs)
        if not config and not pattern and len(standard) > 1:
            raise UserError(f"{repo} has several configurations, choose one with --config: {', '.join(configs)}")
        entry = configs.get(config or next(iter(standard), ""), {})
        base = (entry.get("data_dir") or "").removeprefix("./").strip("/")
        base, entries = base and base + "/", entry.get("data_files")
        if pattern:
            splits = {n: "train" for n in usable if matches(pattern, n)}
        elif entries:  # a pattern, or {split, path: one or several}, or a list of such
            splits = {}
            for e in entries if isinstance(entries, list) else [entries]:
                e = e if isinstance(e, dict) else dict(path=e)
                for path in e["path"] if isinstance(e["path"], list) else [e["path"]]:
                    for n in usable:  # a file in two splits is held out
                        if matches(base + path.removeprefix("./"), n) and splits.get(n, "train") == "train":
                            splits[n] = e.get("split", "train")
        else:
            inside = [n.removeprefix(base) for n in usable if n.startswith(base)]
            splits = {base + n: split for n, split in (split_names(inside) or dict.fromkeys(inside, "train")).items()}
    except (KeyError, TypeError, AttributeError) as e:
        raise UserError(f"{repo}: its card is not as it should be ({type(e).__name__}: {first_line(e)}); "
                        f"{name_them}") from None
    files = [n for n, split in splits.items() if split == "train" and (
        pattern or not re.match("(readme|licen[sc]e|notice|copying|citation)", os.path.basename(n).lower()))]
    if not files:
        found = f"no file of a split train (it has: {', '.join(sorted(set(splits.values())))})" if splits else (
            f"no {', '.join(SUFFIXES)} among its {len(sizes):,} files (for other names give --format)")
        raise UserError(f"{repo} {config}: {found}; {name_them}")
    formats = sorted({kind or suffix(n) for n in files})
    if len(formats) > 1 or twins(files):
        raise UserError(f"{repo} {config}: its files come in several forms ({', '.join(twins(files) or formats)}), "
                        f"perhaps the same text twice; {name_them}")
    return sorted([n, sizes[n]] for n in files)


def matches(pattern, name):
    """Like fnmatch, but only ** goes beyond a folder."""
    signs = {"**/": "(.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
    parts = re.split(r"(\*\*/|\*\*|\*|\?|\[[^]]+\])", pattern)
    return re.fullmatch("".join(signs.get(part) or (part.replace("[!", "[^") if part[:1] == "[" and len(part) > 2 else
                                                    re.escape(part)) for part in parts), name) is not None


def walk(path):
    """The files below a folder, or the file itself. Links to folders are not followed (they may lead back), and what is
    hidden is not read."""
    if not path.is_dir():
        yield path
        return

    def stop(error):
        raise error
    for folder, below, names in os.walk(path, onerror=stop):
        for link in (name for name in below if os.path.islink(os.path.join(folder, name))):
            print(f"{os.path.join(folder, link)} is a link to a folder: not followed")
        for name in filter(hidden, [*below, *filter(is_text, names)]):
            print(f"{os.path.join(folder, name)} is hidden: not read")
        below[:] = (name for name in below if not hidden(name))
        yield from (Path(folder) / name for name in names if not hidden(name) and (Path(folder) / name).is_file())


def hidden(name):
    """What editors, notebooks and macOS leave beside a text: copies of it, for the most part."""
    return name.startswith(".") or name == "__MACOSX"


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
        try:
            if path.endswith(".gz"):
                yield gzip.open(raw, "rb"), told
            elif path.endswith(".zst"):
                yield io.BufferedReader(ZstdFile(raw, need("zstandard", path, "requirements-data.txt"))), told
            else:
                yield raw, told
        except (EOFError, OSError, zlib.error, *zstd_errors()) as e:
            if getattr(e, "errno", None) is not None:  # the disk's, not the file's
                raise
            late = " (what was read before may be damaged too)" * isinstance(e, gzip.BadGzipFile)  # its CRC comes last
            raise Damaged(first_line(e) + late, told(), None) from None


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
            self.frame = self.frame or self.codec.ZstdDecompressor(max_window_size=2**31).decompressobj()
            self.out, self.left = self.frame.decompress(data), b""
            if self.frame.eof:
                self.left, self.frame = self.frame.unused_data, None
        n = min(len(buffer), len(self.out))
        buffer[:n], self.out = self.out[:n], self.out[n:]
        return n


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
    """Pieces of whole lines, about TXT_CHARS each; a longer line is cut. A line <|endoftext|> ends a document."""
    index, line, start, piece, size = 0, 1, 1, [], 0
    with open_text(path) as (raw, told):
        f = io.TextIOWrapper(raw, encoding="utf-8-sig", errors="surrogateescape", newline="")
        while text := f.readline(TXT_CHARS):
            end = text.strip() == END_OF_TEXT
            if end and any(map(str.strip, piece)) or size >= TXT_CHARS and (
                    text.strip() or size >= 2 * TXT_CHARS):  # blank lines stay with what they follow
                if index >= skip:
                    yield index, start, told(), "".join(piece)
                index, start, piece, size = index + 1, line, [], 0
            piece += [text] * (not end)
            size, line = size + len(text), line + text.endswith("\n")
        if piece and index >= skip and (not index or any(map(str.strip, piece))):
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
    pyarrow, parquet = (need(p, path, "requirements-data.txt") for p in ("pyarrow", "pyarrow.parquet"))
    index, total, size = 0, None, os.path.getsize(path)
    try:
        with parquet.ParquetFile(path, page_checksum_verification=True) as f:
            if text_key not in f.schema_arrow.names:
                names = ", ".join(f.schema_arrow.names)
                raise UserError(f"{path} has no column {text_key!r} (it has: {names}): give --text_key")
            total = f.metadata.num_rows
            for group in range(f.num_row_groups):
                rows = f.metadata.row_group(group).num_rows
                if index + rows <= skip:
                    index += rows
                    continue
                for batch in f.iter_batches(batch_size=256, row_groups=[group], columns=[text_key]):
                    for value in batch.column(0):
                        if index >= skip:
                            yield index, f"row {index:,}", size * index // max(1, total), parquet_text(value, text_key)
                        index += 1
            if index != total:
                raise pyarrow.ArrowInvalid("its parts do not have the number of rows that its end promises")
    except (pyarrow.ArrowException, OSError, OverflowError) as e:  # the last: counts that are no counts
        if getattr(e, "errno", None) is not None:
            raise
        raise Damaged(first_line(e), size * index // max(1, total or 0), total) from None


def parquet_text(value, text_key):
    try:
        text = value.as_py()
    except UnicodeDecodeError as e:
        return Bad(f"not valid UTF-8 ({e.reason} at byte {e.start:,})")
    return text if isinstance(text, str) else Bad(f"{text_key} is {type(text).__name__}, not a string")


READERS = {".py": read_python, ".txt": read_txt, ".jsonl": read_jsonl, ".parquet": read_parquet}


def check(text):
    """The text, or why it cannot be a document."""
    if isinstance(text, Bad):
        return text
    try:
        text.encode()
    except UnicodeEncodeError as e:
        half = ord(text[e.start])  # of a pair in JSON's \\u, or a byte that surrogateescape has kept
        what = f"byte 0x{half & 0xff:02x}" if 0xdc80 <= half <= 0xdcff else f"half of a character, \\u{half:04x}"
        return Bad(f"not valid UTF-8 ({what} after {e.start:,} characters)")
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
                line = one_line(f"{source.files[i][0]}:{where}{':' * bool(where)} {text}")
                if not args.skip_bad:
                    raise UserError(f"{line}; mend it, or " + (
                        "go on without its rest with --skip_bad" if isinstance(text, Lost) else
                        "skip and count such documents with --skip_bad"))
                skipped.append((line, getattr(text, "unread", None)))
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


# How the text is cut into words before its bytes are merged, and the rank files (by SHA-256) of which this is known:
# (pattern, end-of-text). The patterns are part of these tokenizers: another one gives other ids.
CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
REST = r"\s*[\r\n]+|\s+(?!\S)|\s+"
CASED = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]%s[\p{Ll}\p{Lm}\p{Lo}\p{M}]%s" + CONTRACTION + "?|"
PATTERNS = dict(
    gpt2=r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+",
    cl100k=CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + REST,
    qwen=CONTRACTION + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|" + REST,
    o200k=CASED % ("*", "+") + CASED % ("+", "*") + r"\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|" + REST)
KNOWN_RANKS = {
    "306cd27f03c1a714eca7108e03d66b7dc042abe8c258b44c199a7ed9838dd930": ("gpt2", 50256),  # r50k_base, GPT-2
    "94b5ca7dff4d00767bc256fdd1b27e5b17361d7b8a5f968547f9f23eb70d2069": ("gpt2", 50256),  # p50k_base
    "b34b360dbb493e781e479794586d661700670d65564001f23024971d1f2fa126": ("gpt2", 50257),  # Whisper, multilingual
    "223921b76ee99bde995b7ff738513eef100fb51d18c93597a113bcffe865b2a7": ("cl100k", 100257),
    "446a9538cb6c348e3516120d7c08b09f57c36495e2acfffe59a5bf8b0cfb1a2d": ("o200k", 199999),
    "b2b1b8dfb5cc5f024bafc373121c6aba3f66f9a5a0269e243470a1de16a33186": ("qwen", 151643)}  # Qwen to Qwen3


class Tokenizer:
    """Text to ids and back, from plain data, which is also what tokenizer.json of a data folder holds.

    ranks {bytes: id} and pat_str, the pattern that cuts words, make a byte-level BPE that tiktoken runs; `hf` in their
    place is the tokenizer.json of one that only Hugging Face's tokenizers can run. special_tokens {text: id} never come
    from text, those that are listed in `added` do. normal: the Unicode form that text is brought to ("" or NFC, NFKC,
    ...). first, last: the ids before and behind each document; end_of_text alone where nothing is said.
    """

    def __init__(self, name, special_tokens, pat_str="", ranks=(), hf="", normal="", added=(), first=(), last=(),
                 end_of_text=None):
        if end_of_text is None and END_OF_TEXT not in special_tokens:
            raise ValueError(f"no special token {END_OF_TEXT}")
        ranks, end = dict(ranks), special_tokens[END_OF_TEXT] if end_of_text is None else end_of_text
        first = list(first) or [end]
        self.spec = dict(name=name, special_tokens=special_tokens, pat_str=pat_str, ranks=ranks, hf=hf, normal=normal,
                         added=list(added), first=first, last=list(last), end_of_text=end)
        self.name, self.normal, self.first, self.last, self.eot_token = name, normal, first, list(last), end
        self.hf, self.tokens_in_text = bool(hf), dict(allowed_special=set(added), disallowed_special=())
        if hf:
            tokenizers = need("tokenizers", f"the tokenizer {name}")
            try:
                self.core = tokenizers.Tokenizer.from_str(hf)
            except Exception as e:  # the library raises no other
                raise ValueError(first_line(e)) from None
            self.core.encode_special_tokens = True  # a literal <|endoftext|> is ordinary text
            self.core.no_padding()
            self.core.no_truncation()
            self.n_vocab = max([*self.core.get_vocab(with_added_tokens=True).values(), self.eot_token]) + 1
        else:
            import tiktoken
            check_ranks(ranks, special_tokens)
            self.core = tiktoken.Encoding(name, pat_str=pat_str, mergeable_ranks=ranks, special_tokens=special_tokens)
            self.n_vocab, self.bytes_of = self.core.n_vocab, {i: token for token, i in ranks.items()} | {
                i: text.encode() for text, i in special_tokens.items()}
        if not all(is_count(i) and i < self.n_vocab for i in (*self.first, *self.last, self.eot_token)):
            raise ValueError("ids of the ends of a document that are not in the vocabulary")
        if normal not in ("", "NFC", "NFD", "NFKC", "NFKD") or not set(added) <= set(special_tokens):
            raise ValueError("an unknown Unicode form, or added tokens without an id")

    def __reduce__(self):  # the other processes make their own
        return Tokenizer, tuple(self.spec.values())

    def encode_ordinary(self, text):
        """Ids of a text, without what begins a document."""
        text = unicodedata.normalize(self.normal, text) if self.normal else text
        if self.hf:
            return self.core.encode(text, add_special_tokens=False).ids
        return self.core.encode(text, **self.tokens_in_text)

    def document(self, text):
        """Ids of a document as the shards have it: an array, `first` and `last` included."""
        if self.hf:
            parts = [self.encode_ordinary(text)]
        else:
            text = unicodedata.normalize(self.normal, text) if self.normal else text
            parts = [self.core.encode_to_numpy(part, **self.tokens_in_text) for part in segments(text)]
        return np.concatenate([np.asarray(part, np.uint32) for part in (self.first, *parts, self.last)])

    def may_be_cut(self, text):
        """Whether the pieces that `segments` may make of a text have its ids."""
        pieces = re.split(r"(?<=\S)(?= )", text)
        return sum(map(self.encode_ordinary, pieces), []) == self.encode_ordinary(text)

    def decode_bytes(self, ids):
        """Text of ids in UTF-8. An id without a token (vocabularies may have gaps) becomes 0xff, which is no UTF-8."""
        if self.hf:
            return self.core.decode(list(ids), skip_special_tokens=False).encode()
        return b"".join(self.bytes_of.get(i, b"\xff") for i in ids)

    def decode(self, ids, special=True):
        """Text of ids; special=False leaves out tokens that never come from text."""
        out = {i for text, i in self.spec["special_tokens"].items() if not special and text not in self.spec["added"]}
        return self.decode_bytes([i for i in ids if i not in out]).decode(errors="replace")

    def save(self, path):
        ranks = [(base64.b64encode(token).decode(), rank) for token, rank in self.spec["ranks"].items()]
        write_json(path, self.spec | dict(ranks=ranks))


def get_encoding(name, pattern=""):
    """The Tokenizer of a name: bytes, a tiktoken encoding, a file or folder, or the id of a model on the Hub.

    `bytes`: ids 0 to 255 are the bytes themselves, 256 is end-of-text. A file is the tokenizer.json of a data folder or
    of Hugging Face, or holds ranks (lines of base64 and rank), of which `pattern` says how words are cut.
    """
    if name == "bytes":
        return Tokenizer(name, {END_OF_TEXT: 256}, r"(?s).{1,64}", {bytes([i]): i for i in range(256)})
    path = Path(name) / "tokenizer.json" if os.path.isdir(name) else Path(name)
    try:
        if path.suffix == ".json":
            content = path.read_bytes()
            if not is_huggingface(content):
                saved = parse_sealed(content)
                ranks = {base64.b64decode(token): rank for token, rank in saved.pop("ranks")}
                saved.pop("seal", None)
                return Tokenizer(**saved | dict(ranks=ranks))
            import hub
            return hub.read_tokenizer(path)
        if path.exists():
            return read_rank_file(path, pattern)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as e:
        raise UserError(f"--tokenizer={name}: not a usable tokenizer.json or rank file ({type(e).__name__}: "
                        f"{first_line(e)})") from None
    import tiktoken
    import tiktoken.load
    if name not in tiktoken.list_encoding_names():
        if re.fullmatch(HUB_ID, name):
            import hub
            return hub.read_tokenizer(hub.locate_tokenizer(name))
        raise UserError(f"--tokenizer={name} is unknown: give bytes, a tiktoken encoding "
                        f"({', '.join(tiktoken.list_encoding_names())}), the path of a tokenizer.json, of a folder "
                        "with one or of a rank file, or a model of the Hub (OWNER/NAME)")
    tiktoken.load.read_file = read_ranks  # the library's own waits for minutes, and its message does not help
    try:
        found = tiktoken.get_encoding(name)
    except (ValueError, OSError) as e:  # the library compares checksums, and keeps a copy under a name of its own
        raise UserError(f"--tokenizer={name}: {first_line(e)}. If TIKTOKEN_CACHE_DIR is set, it must be a folder that "
                        "can be written to, with whole files") from None
    return Tokenizer(name, found._special_tokens, found._pat_str, found._mergeable_ranks)


def is_huggingface(content):
    value = json.loads(content.decode())
    return isinstance(value, dict) and isinstance(value.get("model"), dict) and "ranks" not in value


def read_rank_file(path, pattern):
    content = path.read_bytes()
    lines = (line.split() for line in content.splitlines() if line.strip())
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    known, end = KNOWN_RANKS.get(hashlib.sha256(content).hexdigest(), ("", max(ranks.values(), default=0) + 1))
    check_ranks(ranks, {END_OF_TEXT: end})
    if not (pattern or known):
        raise UserError(f"--tokenizer={path}: a rank file does not tell how its tokenizer cuts words: say it with "
                        f"--pattern={'|'.join(PATTERNS)} or the regular expression itself")
    pattern = pattern or known
    found = Tokenizer(f"{path.stem}-{zlib.crc32(content + pattern.encode() * (pattern != 'gpt2')):08x}",
                      {END_OF_TEXT: end}, PATTERNS.get(pattern, pattern), ranks)
    if not (found.may_be_cut(__doc__) and found.decode(found.encode_ordinary(__doc__)) == __doc__):
        raise UserError(f"--pattern={pattern}: give {', '.join(PATTERNS)} or a regular expression that matches all of "
                        "a text and ends words before spaces, as GPT-2's does")
    return found


def check_ranks(ranks, special):
    """What tiktoken takes for granted: with anything else it aborts, or encodes to ids that nothing can decode."""
    ids, missing = [*ranks.values(), *special.values()], [i for i in range(256) if bytes([i]) not in ranks]
    if missing:
        raise ValueError(f"bytes without a rank: {missing}")
    if not all(is_count(i) and i < 2**31 for i in ids) or len(set(ids)) < len(ids):
        raise ValueError("ranks that are not unique numbers below 2^31")


def read_ranks(url):
    """Rank file of a tiktoken encoding: from the cache folder under its plain name, else from the network."""
    folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR", "")
    plain = Path(folder) / url.split("/")[-1]
    if folder and plain.exists():
        return plain.read_bytes()
    try:
        answer = importlib.import_module("requests").get(url, timeout=TIMEOUT)  # tiktoken brings it along
        answer.raise_for_status()
        return answer.content
    except OSError as e:
        raise UserError(f"cannot download the tokenizer's file {url} ({e}). On a machine with network, save it as "
                        f"{plain.name}, put it into a folder here and set TIKTOKEN_CACHE_DIR to that folder") from None


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
    encoding = tokenizer
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
                ids = encoding.document(text).astype(dtype)
            except ValueError as e:
                raise UserError(f"cannot encode a document that begins {text[:50]!r}: {first_line(e)}") from None
        out.append((split, len(data), ids))
    return out


def result_of(future):
    """Its result, waited for in short turns: Python may miss a Ctrl-C that comes just before a long wait."""
    while not wait([future], timeout=0.2).done:
        pass
    return future.result()


def in_order(jobs, function, workers, tokenizer):
    """function(*args) for every (args, tag) of jobs in a pool: yields (result, tag) in the order of the jobs."""
    if workers == 1:
        start_worker(tokenizer)
        yield from ((function(*args), tag) for args, tag in jobs)
        return
    others = set(multiprocessing.active_children())
    try:
        pool = ProcessPoolExecutor(workers, initializer=start_worker, initargs=(tokenizer,))
    except OSError as e:  # of semaphores, in /dev/shm
        raise UserError(f"cannot start processes ({e.strerror or e}): use --workers=1") from None

    def submit(args):
        old = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # Ctrl-C must not hit a worker that starts
        try:
            return pool.submit(function, *args)
        except OSError as e:
            raise UserError(f"cannot start a process ({e.strerror or e}): use fewer --workers") from None
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, old)
    waiting = deque()  # bounded: what is read ahead stays in memory
    try:
        for args, tag in jobs:
            waiting.append((submit(args), tag))
            if len(waiting) > 2 * workers:
                future, tag = waiting.popleft()
                yield result_of(future), tag
        for future, tag in waiting:
            yield result_of(future), tag
    except BrokenProcessPool:
        raise UserError("a worker process died (killed, or out of memory?); the same command goes on, perhaps with "
                        "fewer --workers") from None
    except BaseException:  # a mistake, Ctrl-C, or nobody wants the rest: what the workers are at is not needed
        for worker in set(multiprocessing.active_children()) - others:
            worker.kill()
        # one may have been killed inside a result: the pool would wait for its rest as long as anybody could write it
        pool._result_queue._writer.close()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


# ---------------------------------------------------------------------------------------------------------------------
# The command


# What other programs call these flags
ALIASES = dict(dataset="source", dataset_name="source", dataset_path="source", data="source", input="source",
               input_file="source", data_files="files", data_dir="out", out_dir="out", output="out", output_dir="out",
               output_prefix="out", local_dir="out", num_proc="workers", num_workers="workers", nproc="workers",
               subset="config", name="config", dataset_config="config", remote_name="config", encoding="tokenizer",
               tokenizer_name="tokenizer", tokenizer_path="tokenizer", vocab="tokenizer", text_column="text_key",
               text_field="text_key", column="text_key", json_keys="text_key", shard_size="shard_tokens",
               val_ratio="holdout", val_size="val_tokens", test_size="test_tokens", limit="max_tokens",
               max_samples="max_tokens", split="files")


def parse_args(argv):
    p = Parser("prepare_fineweb.py", description=__doc__, aliases=ALIASES)

    def switch(name, help):
        p.add_argument(name, nargs="?", const=True, default=False, type=truth, metavar="true", help=help)
    p.add_argument("--source", default="fineweb-edu", help="fineweb-edu (default), hf:ORG/NAME for another dataset of "
                   "the Hub, stdlib, a file, a folder, a quoted glob, or - for standard input")
    p.add_argument("--out", required=True, help="folder for the shards and meta.json")
    p.add_argument("--tokenizer", default="", help="a tiktoken encoding (gpt2, cl100k_base, ...), a model of the Hub "
                   "(OWNER/NAME), the path of a tokenizer.json, of a folder that has one or of a rank file, or bytes "
                   "(default: gpt2 for datasets of the Hub, bytes for the rest)")
    p.add_argument("--pattern", default="", help=f"how the tokenizer of a rank file cuts words: {', '.join(PATTERNS)} "
                   "or a regular expression; of the well-known files it is known")
    p.add_argument("--config", default="", help="configuration of a Hub dataset (fineweb-edu: sample-10BT)")
    p.add_argument("--files", default="", help="quoted glob: the files of a Hub dataset to take, instead of those that "
                   "its card or their names put into its train split")
    p.add_argument("--revision", default="", help="revision of a Hub dataset (default: the newest)")
    switch("--discard", "delete each downloaded file once the next one is begun")
    p.add_argument("--format", default="", choices=("txt", "jsonl", "parquet"), help="of files with other names")
    p.add_argument("--text_key", default="text", help="key of the text in .jsonl, column in .parquet (default text)")
    p.add_argument("--shard_tokens", type=whole, default=100_000_000, help="tokens per shard (default 100M)")
    p.add_argument("--val_tokens", type=whole, default=1_000_000, help="most tokens in val; 0: none (default 1M)")
    p.add_argument("--test_tokens", type=whole, default=1_000_000, help="most tokens in test; 0: none (default 1M)")
    p.add_argument("--max_tokens", type=whole, default=0, help="most tokens in train; 0: no limit (default)")
    p.add_argument("--holdout", type=whole, default=1, help="percent of documents for val, and for test (default 1); "
                   "decided by a hash of each text, so that of few documents it may be twice as many, or none")
    switch("--skip_bad", "skip and count documents, and the rest of damaged files, that cannot be used")
    p.add_argument("--workers", type=whole, default=0, help="processes that encode; 0: one per core (default)")
    switch("--verify", "only compare the shards in --out with their checksums")
    args = p.parse_args(argv)
    for name, low, high in (("shard_tokens", 1, 2**31 - 1), ("val_tokens", 0, 2**40), ("test_tokens", 0, 2**40),
                            ("max_tokens", 0, 2**60), ("holdout", 1, 49), ("workers", 0, 1024)):
        if not low <= getattr(args, name) <= high:
            p.error(f"--{name}={getattr(args, name)}: must be {low:,} to {high:,}")
    for name in ("source", "out"):
        if not getattr(args, name):  # Path("") is the current folder, which nobody means by it
            p.error(f"--{name} is empty: give a path, or . for the current folder")
    if args.files and args.config:
        p.error("--files names the files itself: leave out --config")
    args.workers = args.workers or cores()
    if os.path.exists(args.source):
        args.source = os.path.normpath(args.source)
    args.tokenizer = args.tokenizer or ("gpt2" if args.source.startswith(("fineweb-edu", "hf:")) else "bytes")
    return args


def prepare(args):
    """Lock the folder and fill it, or go on where an earlier run stopped."""
    try:
        lock = lock_folder(args.out, "preparing", wait=True)
    except OSError as e:
        raise UserError(f"{args.out}: cannot write to this folder ({e.strerror})") from None
    with lock:
        fill(args)


def fill(args):
    out, hub = Path(args.out), args.source.startswith(("fineweb-edu", "hf:"))
    args.skip_bad = args.skip_bad or args.source == "stdlib"
    # what decides the content of the shards: a folder holds one such set for its whole life
    names = ("source config files revision format text_key tokenizer pattern shard_tokens val_tokens test_tokens "
             "max_tokens holdout")
    settings = {name: getattr(args, name) for name in names.split()}
    if os.path.exists(args.tokenizer):  # what is in the file counts, not where it lies
        settings["tokenizer"] = get_encoding(args.tokenizer, args.pattern).name
    old = read_state(out, settings)
    if old and args.source == "-":  # whether it brings the same text, nobody can tell
        raise UserError(f"{out} holds text from standard input already, and more cannot be added: delete it or use "
                        "another --out")
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
        raise UserError(f"{out} was prepared from other files than --source={args.source} holds now (names, sizes or "
                        "times of change differ): delete it or use another --out")
    if old and "end_of_text" in old:
        return complete(out)
    encoder = get_encoding(args.tokenizer, args.pattern)
    if old and old.get("encoder", encoder.name) != encoder.name:
        raise UserError(f"{out} was begun with the tokenizer {old['encoder']}, and {args.tokenizer} is {encoder.name} "
                        "now: delete it or use another --out")
    dtype = FORMATS[20240520, 1] if encoder.n_vocab <= 2**16 else FORMATS[20240801, 7]
    state = dict(settings=settings, encoder=encoder.name, hub=source.hub, files=len(source.files), position=[0, 0],
                 skipped=0, skipped_first=[], lost=[], lost_bytes=0, splits={}) | (old or {})
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
        print(f"continuing in {out} behind document {total('documents'):,}")
    save()
    none = [i for i, w in enumerate(writers) if w.limit == 0]
    jobs = (((texts, args.holdout, none, [i for i, w in enumerate(writers) if w.full], dtype), tag)
            for texts, *tag in read_chunks(source, state["position"], args))
    show, saved, before, size = Progress(), time.monotonic(), total("tokens"), sum(size for _, size in source.files)
    with closing(in_order(jobs, encode_chunk, args.workers, encoder)) as results:
        for documents, (position, done_bytes, skipped) in results:
            shards = [len(w.state["shards"]) for w in writers]
            for split, text_bytes, ids in documents:
                writer = writers[split]
                if writer.full:
                    writer.state["dropped"] += 1
                    continue
                if writer.limit is not None and writer.state["tokens"] + len(ids) > writer.limit:
                    ids = ids[:writer.limit - writer.state["tokens"]]
                    text_bytes = len(encoder.decode_bytes(ids[len(encoder.first):].tolist()))
                writer.add(ids, text_bytes)
            state["position"] = position
            bad, lost = [s for s in skipped if s[1] is None], [s for s in skipped if s[1] is not None]
            state["skipped"] += len(bad)
            state["skipped_first"] = (state["skipped_first"] + [line for line, _ in bad])[:20]
            state["lost"] += [line for line, _ in lost]
            state["lost_bytes"] += sum(unread for _, unread in lost)
            if time.monotonic() - saved > SAVE_SECONDS or shards != [len(w.state["shards"]) for w in writers]:
                save()
                saved = time.monotonic()
            filled = min(w.state["tokens"] / w.limit if w.limit else w.full for w in writers)
            show(max(filled, done_bytes / max(1, size)), total("tokens") - before, total("documents"))
            if all(w.full for w in writers):
                break
    show.end()
    for w in writers:
        w.finish()
    empty = [name for w, name in zip(writers, SPLITS) if not w.state["tokens"] and not w.full]
    if empty:
        for path in (*(out / s["file"] for w in writers for s in w.state["shards"]), out / "progress.json"):
            path.unlink()
        unusable = "; the first that cannot be used: ".join(["", *state["skipped_first"], *state["lost"]][:2])
        if not total("documents") and unusable:
            raise UserError(f"--source={args.source}: no document can be used{unusable}")
        raise UserError(f"{counted(total('documents'), 'document')}: too few, none falls into {' and '.join(empty)}: "
                        f"raise --holdout={args.holdout} (percent for val, for test), or do without: "
                        + " ".join(f"--{name}_tokens=0" for name in SPLITS[1:]) + unusable)
    save()
    encoder.save(out / "tokenizer.json")
    meta = {k: state[k] for k in ("settings", "hub", "files", "position", "input", "skipped", "skipped_first", "lost",
                                  "lost_bytes")} | dict(
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
        changed = [f"{k}: {old[k]} -> {v}" for k, v in settings.items() if old.setdefault(k, "") != v]
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
    print(f"{out}: {counted(len(shards), 'shard')} checked, all are as they were written")


class Progress:
    """One line that renews itself in a terminal; a plain line now and then elsewhere."""

    def __init__(self):
        self.begin, self.first, self.tty = time.monotonic(), None, sys.stderr.isatty()
        self.shown = self.begin

    def __call__(self, done, tokens, documents):
        """done: 0 to 1, of the source or of all that is wanted of it."""
        now = time.monotonic()
        self.first = done if self.first is None else self.first
        if now - self.shown < (0.5 if self.tty else 30):
            return
        self.shown, seconds = now, now - self.begin
        line = f"{tokens / 1e6:.1f}M tokens, {tokens / seconds / 1e6:.2f}M tok/s, {documents:,} documents"
        if done > self.first:
            left = int(seconds * (1 - done) / (done - self.first))
            left = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
            line = f"{100 * done:5.1f} %, {line}, {left} left"
        print(f"\r{line}\033[K" if self.tty else line, end="" if self.tty else "\n", file=sys.stderr, flush=True)

    def end(self):
        if self.tty:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def report(out, meta):
    documents = sum(s["documents"] + s["dropped"] for s in meta["splits"].values())
    for name, s in meta["splits"].items():
        share = (s["documents"] + s["dropped"]) / documents
        dropped = f", {s['dropped']:,} more documents not needed" if s["dropped"] else ""
        print(f"{name:5s} {s['tokens']:>13,} tokens  {s['documents']:>9,} documents ({share:4.0%})  "
              f"{s['text_bytes']:>13,} bytes  {counted(len(s['shards']), 'shard')}{dropped}")
    if documents < 1000 and meta["splits"]["val"]["documents"] + meta["splits"]["test"]["documents"]:
        print(f"A hash of each text decides its split: of only {documents:,} documents --holdout="
              f"{meta['settings']['holdout']} is met roughly")
    left_out = ""
    if meta["skipped"] and meta["source"] == "stdlib":
        left_out = f"; {counted(meta['skipped'], 'file')} left out, empty or no text on purpose"
    elif meta["skipped"]:
        print(f"skipped {counted(meta['skipped'], 'document')} that cannot be used; the first: "
              f"{meta['skipped_first'][0]}")
    if meta["lost"]:
        print(f"lost the rest of {counted(len(meta['lost']), 'damaged file')}, {meta['lost_bytes']:,} bytes; the "
              f"first: {meta['lost'][0]}")
    print(f"wrote {out}: vocabulary of {meta['vocab_size']:,} ({meta['tokenizer']}){left_out}")


def goes_on(args):
    """What an interruption leaves: from standard input a part that cannot be continued."""
    return "; the same command goes on" if args.source != "-" else f"; delete {args.out} and start again"


def main(argv=None):
    print_anything()
    try:
        args = parse_args(argv)
        verify(Path(args.out)) if args.verify else prepare(args)
    except UserError as e:
        sys.exit(f"prepare_fineweb.py: {e}")
    except OSError as e:
        sys.exit(f"prepare_fineweb.py: {e.filename or args.out}: {e.strerror or e}{goes_on(args)}")
    except KeyboardInterrupt:
        sys.exit(f"prepare_fineweb.py: interrupted{goes_on(args)}")


if __name__ == "__main__":
    import prepare_fineweb  # under the name by which hub.py and the workers know it, so that its classes are the same
    prepare_fineweb.main()
