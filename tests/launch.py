"""Command lines in the tests: run as a user runs them, and with nothing left of them when they end, time out or fail.

Importing PyTorch takes 4 CPU-seconds. So on Linux a command line is a fork of one process that has imported everything,
unless it is `fresh`: a Python of its own, and torchrun where there are several processes.
"""
import atexit
import contextlib
import json
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent.parent
LIMIT = 300  # seconds until a command line counts as hanging, also on a busy machine


class Launch:
    """A command line that has been started; its output goes to files, so that nothing waits for a reader."""
    server = None

    def __init__(self, command, processes, fresh, stdin, out, env):
        self.command, self.folder = [str(word) for word in command], Path(tempfile.mkdtemp(prefix="launch-"))
        self.out, self.err = Path(out or self.folder / "out"), self.folder / "err"
        env = os.environ | {"OMP_NUM_THREADS": "1", "LAUNCHED_BY_A_TEST": str(self.folder)} | env
        if fresh or sys.platform != "linux":
            torchrun = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
            with open(self.out, "ab") as out, open(self.err, "ab") as err:
                self.process = subprocess.Popen(
                    [sys.executable, *(torchrun if processes > 1 else []), *self.command], env=env,
                    stdin=stdin, stdout=out, stderr=err, start_new_session=True)
            self.pid = self.group = self.process.pid
            return
        if Launch.server is None or Launch.server.poll() is not None:
            Launch.server = subprocess.Popen([sys.executable, __file__], stdin=subprocess.PIPE, text=True, cwd=HERE)
            atexit.register(Launch.server.communicate)  # which ends it
        self.process = None
        self.err.touch()
        self.out.touch()
        job = dict(command=self.command, folder=str(self.folder), processes=processes, env=env, cwd=os.getcwd(),
                   streams=[stdin.name if stdin else os.devnull, str(self.out), str(self.err)])
        print(json.dumps(job), file=Launch.server.stdin, flush=True)
        self.group, self.pid = map(int, self.read("pids", wait=LIMIT).split())

    def read(self, name, wait=0):
        end = time.monotonic() + wait
        while wait and not (self.folder / name).exists():
            assert time.monotonic() < end, f"{self.command} did not start"
            time.sleep(0.002)
        return (self.folder / name).read_text("utf-8", "replace") if (self.folder / name).exists() else ""

    @property
    def said(self):
        """All that a user would have seen: for the message of a failing assertion."""
        out, err = self.read("out")[-6000:], self.read("err")[-6000:]
        return f"{' '.join(self.command)[:500]}\n--- stdout\n{out}\n--- stderr\n{err}"

    def code(self):
        """Exit code, minus the number of the signal that killed it, or None while it runs."""
        if self.process:
            return self.process.poll()
        return int(self.read("code")) if (self.folder / "code").exists() else None

    def wait(self, limit=LIMIT, text=None, where=None):
        """Until it ends, or has written `text` to stdout or another file; returns the exit code."""
        end, where = time.monotonic() + limit, where or self.out
        while self.code() is None and not (text and text in self.read(where)):
            assert time.monotonic() < end, f"not ended after {limit} s: {self.said}"
            time.sleep(0.005)
        assert not text or text in self.read(where), f"ended without saying {text!r}: {self.said}"
        return self.code()

    def send(self, number):
        os.kill(self.pid, number)

    def end(self):
        """Kill all that is left. torchrun's workers leave the group, but what a fresh Python starts has its mark."""
        mark, found = f"LAUNCHED_BY_A_TEST={self.folder}\0".encode(), True
        while found:
            found = False
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.group, signal.SIGKILL)
            for path in Path("/proc").glob("[0-9]*/environ"):
                with contextlib.suppress(OSError):
                    if mark in path.read_bytes():
                        os.kill(int(path.parent.name), signal.SIGKILL)
                        found = True
        if self.process:
            self.process.wait()
        shutil.rmtree(self.folder, ignore_errors=True)


@contextlib.contextmanager
def started(*command, processes=1, fresh=False, stdin=None, out=None, **env):
    """A `Launch` of a script and its arguments."""
    launch = Launch(command, processes, fresh, stdin, out, env)
    try:
        yield launch
    finally:
        launch.end()


def run_script(*command, code=0, limit=LIMIT, **options):
    """Run a command line to its end and return what it did. `code`: what it must exit with, None for anything."""
    with started(*command, **options) as launch:
        found = launch.wait(limit)
        result = subprocess.CompletedProcess(launch.command, found, launch.read("out"), launch.read("err"))
        assert code is None or found == code, f"exit code {found} instead of {code}: {launch.said}"
    return result


def serve():
    """The process that is forked: a job is a line of stdin."""
    sys.path.insert(0, str(HERE))
    import torch._dynamo

    import eval  # noqa: F401
    import kernels  # noqa: F401 imports model
    import train  # noqa: F401 imports prepare_fineweb
    torch.set_num_threads(1)
    children = set()
    for line in sys.stdin:
        children.add(pid := os.fork())
        if pid == 0:
            watch(**json.loads(line))
        children -= {pid for pid in children if os.waitpid(pid, os.WNOHANG)[0]}
    for pid in children:
        os.waitpid(pid, 0)


def watch(command, folder, processes, env, cwd, streams):
    """The head of a group of processes: starts them, waits for them, and writes down how they ended."""
    os.setpgid(0, 0)
    pids, place = [], Path(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    for rank in range(processes):
        launcher = dict(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=processes, LOCAL_WORLD_SIZE=processes,
                        MASTER_ADDR="127.0.0.1", MASTER_PORT=port, TORCHELASTIC_RUN_ID="test")
        pids.append(os.fork())
        if pids[-1] == 0:
            become(command, env | {k: str(v) for k, v in launcher.items() if processes > 1}, cwd, streams)
    write(place / "pids", f"{os.getpid()} {pids[0]}")
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    write(place / "code", str(next((c for c in codes if c), 0)))
    os._exit(0)


def write(path, text):
    """Whole or not at all, for another process polls it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)


def become(command, env, cwd, streams):
    for number, name in enumerate(("stdin", "stdout", "stderr")):  # new ones: the server's own has read ahead
        os.dup2(os.open(streams[number], os.O_WRONLY | os.O_APPEND if number else os.O_RDONLY), number)
        stream = open(number, "w" if number else "r", 1 if number == 2 else -1, encoding="utf-8", closefd=False)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    sys.argv, sys.path[0], code = command, os.path.dirname(command[0]), 0
    try:
        runpy.run_path(command[0], run_name="__main__")
    except SystemExit as e:
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
        if isinstance(e.code, str):
            print(e.code, file=sys.stderr)
    except BaseException:
        code = 1
        sys.excepthook(*sys.exc_info())
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    os._exit(code)


if __name__ == "__main__":
    serve()
