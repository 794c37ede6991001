"""Evaluate a trained model, or let it write.

    python eval.py runs/tiny-standard-seed1                           exact loss on val
    python eval.py runs/tiny-standard-seed1 --split=test --json       the same on test, for programs
    python eval.py runs/tiny-standard-seed1 --prompt="def main("      sample
    torchrun --standalone --nproc_per_node=8 eval.py runs/...         on several processes: the same numbers

The loss is the mean negative log-likelihood over the whole split in nats per token: every token but the first is
predicted once, from at most seq_len tokens before it. Neither the batch size nor the number of processes changes it.
"""
import argparse
import json
import math
import sys
from pathlib import Path

import torch

from model import GPT
from prepare_fineweb import UserError, get_encoding
from train import (Tokens, autocast, choose_device, choose_dtype, evaluate, guard, load_checkpoint, load_weights,
                   read_meta, start_processes)


def parse_args(argv):
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
                                allow_abbrev=False)
    p.add_argument("run", help="run folder (its last.pt) or checkpoint file")
    p.add_argument("--split", choices=("train", "val", "test"), help="default val")
    p.add_argument("--data_dir", help="folder with the token shards (default: that of the run)")
    p.add_argument("--batch", type=int, help="sequences per forward pass (default 8)")
    p.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda", "mps"))
    p.add_argument("--dtype", default="auto", choices=("auto", "float32", "bfloat16", "float64"))
    p.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    p.add_argument("--prompt", help="write a continuation of this text instead of evaluating")
    p.add_argument("--tokens", type=int, help="tokens to write (default 200)")
    p.add_argument("--samples", type=int, help="continuations to write (default 1)")
    p.add_argument("--temperature", type=float, help="0 takes the likeliest token (default 0.8)")
    p.add_argument("--top_k", type=int, help="sample among the k likeliest tokens; 0: among all (default)")
    p.add_argument("--seed", type=int, help="of the samples (default 1)")
    args = p.parse_args(argv)
    measuring = {"split": "val", "batch": 8}
    sampling = {"tokens": 200, "samples": 1, "temperature": 0.8, "top_k": 0, "seed": 1}
    unused, why = (sampling, "without") if args.prompt is None else (measuring, "with")
    for name, default in (measuring | sampling).items():
        value = getattr(args, name)
        if value is None:
            setattr(args, name, default)
        elif name in unused:
            p.error(f"--{name} has no effect {why} --prompt")
        elif name != "split" and not (1 if name in ("batch", "tokens", "samples") else 0) <= value < 2**62:
            p.error(f"--{name}={value}: out of range")
    return args


def load_model(run, device, dtype):
    """(model in eval mode, checkpoint, its path) of a run folder or a checkpoint file."""
    path = Path(run)
    if path.is_dir():
        path = path / "last.pt" if (path / "last.pt").exists() else path / "best.pt"
        if not path.exists():
            raise UserError(f"{run} holds no checkpoint (last.pt or best.pt)")
    saved = load_checkpoint(path)
    model = GPT(saved["cfg"]).to(device, torch.float64 if dtype == torch.float64 else None)
    load_weights(model, saved, path)
    return model.eval(), saved, path


def measure(args, model, saved, device, dtype, rank, world):
    """Loss on a whole split as a dictionary; the same on every rank."""
    data_dir = args.data_dir or saved["config"]["data_dir"]
    meta, cfg = read_meta(data_dir), model.cfg
    data = Tokens(data_dir, args.split, cfg.seq_len, cfg.vocab_size)

    def show(part):
        if sys.stderr.isatty() and rank == 0:
            print(f"\r{100 * part:3.0f} %\033[K\r", end="", file=sys.stderr, flush=True)
    nll, count = evaluate(model, data, args.batch, device, dtype, None, rank, world, show)
    text_bytes = meta["splits"][args.split]["text_bytes"] if meta else None  # the first token is never text
    return {"run": args.run, "mode": cfg.residual_mode, "step": saved["step"], "data_dir": data_dir,
            "split": args.split, "tokens": count, "loss": nll, "perplexity": math.exp(min(nll, 700)),
            "bits_per_byte": nll * count / math.log(2) / text_bytes if text_bytes else None}


def sample(args, model, saved, device, dtype):
    """Continuations of the prompt as a list of texts. The tokenizer is the one beside the data: no network needed."""
    path = Path(args.data_dir or saved["config"]["data_dir"]) / "tokenizer.json"
    if not path.exists() and saved["data"]["tokenizer"] != "bytes":
        raise UserError(f"{path} is missing, so --prompt cannot be encoded: give the data's folder with --data_dir")
    encoding = get_encoding(str(path) if path.exists() else "bytes")
    ids = [encoding.eot_token, *encoding.encode_ordinary(args.prompt)]
    torch.manual_seed(args.seed)
    with autocast(device, dtype):
        prompts = torch.tensor([ids] * args.samples, device=device)
        out = model.generate(prompts, args.tokens, args.temperature, args.top_k, encoding.n_vocab)
    return [encoding.decode(row[1:], errors="replace") for row in out.tolist()]


def run(args):
    device, _ = choose_device(args.device)
    dtype, _ = choose_dtype(args.dtype, device)
    rank, world = start_processes(device)
    model, saved, path = load_model(args.run, device, dtype)
    if args.prompt is not None:
        texts = sample(args, model, saved, device, dtype)
        if rank == 0:
            print(json.dumps(texts) if args.json else "\n---\n".join(texts))
        return
    result = measure(args, model, saved, device, dtype, rank, world)
    if rank == 0 and args.json:
        print(json.dumps(result))
    elif rank == 0:
        bpb = f"{result['bits_per_byte']:.4f} bits per byte" if result["bits_per_byte"] else "bits per byte n/a"
        print(f"{path} ({result['mode']}, step {result['step']}) on {result['data_dir']} {args.split}: loss "
              f"{result['loss']:.6f}, perplexity {result['perplexity']:.3f}, {bpb}, {result['tokens']:,} tokens")


def main(argv=None):
    guard("eval.py", run, parse_args(argv))


if __name__ == "__main__":
    main()
