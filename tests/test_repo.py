"""README, and what holds for all files: command lines, small print."""
import re
import shlex
import shutil
import signal
from pathlib import Path

import pytest

import eval as evaluation
import model as model_file
import prepare_fineweb
import train
from helpers import HERE, MODES, run_training
from launch import run_script
from model import RESIDUAL_MODES


@pytest.mark.parametrize("mode", MODES)
def test_readme_has_a_row_for_each_mode(mode):
    row = RESIDUAL_MODES[mode]
    added = row.added.replace("*", "·")
    expected = f"| `{mode}` | {row.reads} | {row.stores} | {added} | {row.paper} |"
    assert expected in (HERE / "README.md").read_text(encoding="utf-8"), "this row is not in README's table of modes"


def test_every_command_of_the_readme_parses(monkeypatch):
    monkeypatch.setattr(train, "take_shape", lambda values, last: values)  # would ask the Hub
    readme = (HERE / "README.md").read_text(encoding="utf-8")
    parsers = {"train.py": train.load_config, "eval.py": evaluation.parse_args,
               "prepare_fineweb.py": prepare_fineweb.parse_args}
    blocks = "".join(re.findall(r"```bash\n(.*?)```", readme, re.S))
    commands = re.findall(r"(?:python|torchrun [^&\n]*?) (\w+\.py)(.*)", blocks)
    assert len(commands) > 8 and {script for script, _ in commands} == {*parsers}
    for script, argv in commands:
        parsers[script](shlex.split(argv, comments=True))


def test_the_small_print_of_the_code():
    for path in HERE.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        if path.name != "test_model.py":
            # an assertion that cannot fail; a cast that would make float64 less: at_least_fp32 says the precision
            assert "assert True" not in text and ".float()" not in text
            for call in re.findall(r"(?<![.\w])open\([^\n]*", text):  # text is UTF-8, whatever the system's locale
                assert "encoding=" in call or re.search(r'"[rwa]\+?b"', call), f"{path.name}: {call}"
    assert inspect_forward() <= 10


def inspect_forward():
    import inspect
    source = inspect.getsource(model_file.GPT.forward)
    assert not set(MODES) & set(re.findall(r"\w+", source))
    return len(source.splitlines())


def test_without_triton_all_works_and_without_tomllib_one_line_says_why(tmp_path):
    for missing, modules, message in (("triton", "kernels, model", ""), ("tomllib", "train", "Python 3.11 or newer")):
        (tmp_path / "lacking.py").write_text(
            f"import sys\nfor name in 'model kernels train'.split(): sys.modules.pop(name, None)\n"
            f"sys.modules[{missing!r}] = None\nsys.path.insert(0, {str(HERE)!r})\nimport {modules}", "utf-8")
        result = run_script(tmp_path / "lacking.py", code=int(bool(message)))
        assert message in result.stderr and len(result.stderr.splitlines()) == bool(message)


def test_commands_name_no_port_and_take_a_free_one():
    files = [*HERE.glob("*.py"), *HERE.glob("*.md"), *HERE.glob("configs/*.toml"), *HERE.glob(".ci/*")]
    for path in (p for p in files if p.name != Path(__file__).name):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"2950\d|MASTER_PORT['\"]?\]? ?=|master[_-]port", text), path
        assert text.count("torchrun --standalone --nproc") == text.count("torchrun --"), path


# Command lines: (script and arguments; what its one line says). {d}: shards, {r}: a run, {t}: a folder for anything.
TRAIN = "train.py --data_dir={d} --out_dir={t}/new --n_head=2 --n_embd=32 --n_layer=2 --seq_len=32 --micro_batch=2 "
MISTAKES = [
    ("train.py {r}/config.toml --out_dir={t}/new --vocab_size=4611686018427387902", "out of memory"),
    ("eval.py {r} --batch=0", "--batch=0: out of range"),
    ("prepare_fineweb.py --source={t} --out=", "--out is empty"),
    ("train.py {r}/config.toml", "holds a run already"),
    ("train.py nothere.toml", "cannot read nothere.toml"),
    ("train.py {d}/meta.json", "expected a .toml file"),
    ("train.py --n_lyer=3", "unknown key 'n_lyer', did you mean n_layer?"),
    ("train.py --lr", "--lr needs a value"),
    ("train.py --lr=1e-3 extra", "'extra': expected a .toml file"),
    ("train.py --tracker=one\ntwo", r"tracker=one\ntwo is unknown"),
    ("train.py --n_layer=1000000000000", "n_layer=1000000000000: must be at most 10,000"),
    ("train.py --seed=" + "9" * 5000, "must be a whole number"),
    (TRAIN + "--tokens_per_step=100", "use --tokens_per_step=64 or --tokens_per_step=128"),
    (TRAIN + "--tokens_per_step=128 --residual_mode=hc --route_impl=fused", "HyperConnections has no fused form"),
    (TRAIN + "--tokens_per_step=128 --n_ffn=4611686018427387902", "out of memory"),
    (TRAIN + "--tokens_per_step=128 --vocab_size=100", "vocabulary of 257, more than vocab_size=100"),
    ("train.py --data_dir={t}/nothing", "no data in {t}/nothing: prepare it"),
    ("train.py --data_dir={t}/nothing --prepare=--sorce=x", "prepare=--sorce=x: unrecognized arguments: --sorce, did"),
    ("eval.py", "which run? give its folder"),
    ("eval.py {t}/nothing", "does not exist"),
    ("eval.py {t}", "holds no checkpoint"),
    ("eval.py {r}/config.toml", "not a usable checkpoint"),
    ("eval.py {r} --splt=val", "unrecognized arguments: --splt, did you mean --split?"),
    ("eval.py {r} --split=vall", "invalid choice: 'vall'"),
    ("eval.py {r} --data_dir={t}/nothing", "no data in {t}/nothing"),
    ("eval.py {r} --temperature=nan --prompt=x", "--temperature=nan: out of range"),
    ("eval.py {r} --routing", "residual_mode=standard has no routes"),
    ("prepare_fineweb.py", "the following arguments are required: --out"),
    ("prepare_fineweb.py --source={t}/nothing --out={t}/o", "no such file or folder"),
    ("prepare_fineweb.py --source={r}/source --out={t}/o", "no file that ends in .txt"),
    ("prepare_fineweb.py --source= --out={t}/o", "--source is empty"),
    ("prepare_fineweb.py --source={r}/last.pt --format=jsonl --out={t}/o", "not JSON"),
    ("prepare_fineweb.py --source={r}/last.pt --format=txt --out={t}/o", "not valid UTF-8"),
    ("prepare_fineweb.py --source=stdlib --out={t}/o --tokenizer=gpt5", "--tokenizer=gpt5 is unknown"),
    ("prepare_fineweb.py --source=stdlib --out={t}/o --holdout=50", "--holdout=50: must be 1 to 49"),
    ("prepare_fineweb.py --source=stdlib --out=/proc/nope", "cannot write to this folder"),
    ("prepare_fineweb.py --verify --out={t}/nothing", "no data in {t}/nothing")]


@pytest.fixture(scope="session")
def places(data, tmp_path_factory):
    run, folder = tmp_path_factory.mktemp("run"), tmp_path_factory.mktemp("t")
    run_training(data, run, max_steps=1, eval_every=1, eval_at_tokens="256")
    train.folder_lock = None  # which this process would hold for the others to find
    return dict(d=data, r=run, t=folder)


@pytest.mark.parametrize("command, message", MISTAKES, ids=[command[:60] for command, _ in MISTAKES])
def test_a_command_line_with_a_mistake_ends_in_one_line(command, message, places):
    words = [word.format(**places) for word in command.split(" ") if word]
    result = run_script(HERE / words[0], *words[1:], code=None)
    output = [*result.stdout.splitlines(), *result.stderr.splitlines()]
    assert result.returncode not in (0, -signal.SIGKILL) and len(result.stderr.splitlines()) == 1, result
    assert output[-1].startswith(words[0]) and message.format(**places) in output[-1], result


OWN_MODES = """

class PatchyRes(AttnRes):
    \"\"\"What an experiment may look like: weights that are zero, negative, and sum to anything.\"\"\"

    def weights(self, route, keys):
        z = depth_logits(self.query[route].view(self.route_heads, -1), keys, self.eps)
        return (2.5 * z.softmax(0) - 0.2) * (z >= z.mean(0) - 0.5)


RESIDUAL_MODES["patchy"] = RESIDUAL_MODES["attnres_block"]._replace(cls=PatchyRes, exact_start=False)
"""


@pytest.mark.long
def test_an_own_mode_that_is_pasted_into_the_model_passes_every_test_that_applies(tmp_path, monkeypatch):
    """README's example and a wilder one: all tests of attnres run over them too, and README's row alone is missing."""
    copy = tmp_path / "copy"
    shutil.copytree(HERE, copy, ignore=lambda folder, names: {n for n in names if n.startswith(".") or n in (
        "runs", "data", "__pycache__")})
    example, = re.findall(r"```python\n(class .*?)```", (copy / "README.md").read_text(encoding="utf-8"), re.S)
    model = copy / "model.py"
    before, table, after = re.split(r"(\nRESIDUAL_MODES = \{\n.*?\n\}\n)", model.read_text("utf-8"), flags=re.S)
    model.write_text(f"{before}{table}\n\n{example}{OWN_MODES}{after}", "utf-8")
    monkeypatch.chdir(copy)

    def pytest_says(*args):
        return run_script("-m", "pytest", "-p", "no:cacheprovider", *args, fresh=True, code=None, limit=1200).stdout
    listed = re.findall(r"(\S+::\w+)\[(.*)\]", pytest_says("--collect-only", "-q", "-o", "addopts="))

    def tests_of(mode):
        return {test for test, values in listed if re.search(rf"(^|-){mode}(-|$)", values)}
    special = {"test_fused", "test_triton", "test_bytes", "test_inductor", "test_sources"}
    for mode in ("sigmoid", "patchy"):
        missing = {t for t in tests_of("attnres") - tests_of(mode) if not re.search("|".join(special), t)}
        assert missing == set()
        said = pytest_says("-k", mode, "-rfEs")
        failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", said, re.M)
        assert failed == [f"tests/test_repo.py::test_readme_has_a_row_for_each_mode[{mode}]"], said
