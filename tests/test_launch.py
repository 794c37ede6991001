"""launch.py, with which all command lines of the tests are started."""
import os
import re
import signal
import time
from pathlib import Path

import pytest

from launch import run_script, started

HANGS = """import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(1000)"])
print("started", os.getpid(), child.pid, flush=True)
print("a remark", file=sys.stderr)
time.sleep(1000)
"""


FORMS = [{}, dict(processes=2), dict(fresh=True), pytest.param(dict(fresh=True, processes=2), marks=pytest.mark.slow)]


def runs(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().split(")")[-1].split()[0] not in "ZX"
    except OSError:
        return False


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc, which Linux alone has")
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_a_command_line_that_times_out_leaves_no_process_behind(options, tmp_path):
    """Neither a child nor, under torchrun, the workers, which leave the launcher's group."""
    script, n = tmp_path / "hangs.py", options.get("processes", 1)
    script.write_text(HANGS)
    with pytest.raises(AssertionError, match="(?s)not ended .*hangs.py\n--- stdout\nstarted .*--- stderr.*remark"):
        with started(script, **options) as run:
            while run.read("out").count("started") < n:
                run.wait(text="started")
            pids = [int(word) for line in run.read("out").splitlines() for word in line.split()[1:]]
            assert len(pids) == 2 * n and all(map(runs, pids))
            run.wait(limit=0.1)
    end = time.monotonic() + 30
    while any(map(runs, pids)):  # a signal takes a moment
        assert time.monotonic() < end
    assert not run.folder.exists()


@pytest.mark.parametrize("fresh", [False, True])
def test_a_command_line_ends_as_a_user_would_see_it(fresh, tmp_path):
    script = tmp_path / "script.py"
    for code, message, expected in (("print(sys.argv[1:], sys.stdin.read())", r"\['a', '--b'\] text", 0),
                                    ("sys.exit(3)", "", 3), ("sys.exit('a reason')", "a reason", 1),
                                    ("raise KeyError('x')", "(?s)Traceback.*KeyError: 'x'", 1),
                                    ("os.kill(os.getpid(), 9)", "", -signal.SIGKILL)):
        script.write_text(f"import os, sys\n{code}\n")
        (tmp_path / "in").write_text("text")
        with open(tmp_path / "in") as stdin:
            result = run_script(script, "a", "--b", code=expected, fresh=fresh, stdin=stdin, A_VARIABLE="1")
        assert re.search(message, result.stdout + result.stderr)
    with pytest.raises(AssertionError, match="(?s)exit code -9 instead of 0: .*script.py a"):
        run_script(script, "a", fresh=fresh)
    script.write_text("import os; print(os.environ['A_VARIABLE'], os.environ.get('RANK'))")
    assert run_script(script, fresh=fresh, A_VARIABLE="☃").stdout == "☃ None\n"
    assert "A_VARIABLE" not in os.environ
