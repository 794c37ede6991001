"""Figures of a study: what gained and how surely, how it was tuned, what losses are worth, where models read."""
import csv
import math
from pathlib import Path

import torch

from eval import load_model, measure_routing, pyplot
from study.plan import Cell, trials
from study.stats import SAME
from train import Tokens


def draw(args, study, arms, rows, results, ngrams):
    tokens = {c.steps: int(r["tokens"]) for c, r in rows.items()}
    colours = {name: f"C{i % 10}" if name != "standard" else "k" for i, name in enumerate(results)}
    for function in (draw_difference, draw_tuning, draw_loss, draw_depth):
        figure = function(pyplot(), args, study, arms, rows, results, ngrams, tokens, colours)
        if figure:
            figure.tight_layout()
            figure.savefig(Path(args.out) / f"{function.__name__[5:]}.png", dpi=110)
            pyplot().close(figure)


def millions(ax, tokens):
    ax.set(xscale="log", xlabel="training tokens of the finished run")
    ax.set_xticks(tokens, [f"{x / 1e6:.2g}M" for x in tokens])
    ax.minorticks_off()


def draw_difference(plt, args, study, arms, rows, results, ngrams, tokens, colours):
    """Left: the difference at the main budget with its interval and verdict. Right: the difference by budget."""
    main = study.steps[-1]
    shown = [n for n, r in results.items() if main in r["diffs"]]
    if not shown:
        return None
    fig, (left, right) = plt.subplots(1, 2, figsize=(13, 1.5 + 0.42 * max(5, len(shown))), width_ratios=(4, 3))
    for i, name in enumerate(reversed(shown)):
        r, d = results[name], results[name]["diffs"][main]
        low, high = d.interval()
        solid = r["words"][:1] in (["gain"], ["worse"])
        left.errorbar(d.mean, i, xerr=d.mean - low if d.n > 1 else None, color=colours[name], capsize=3, fmt="o",
                      mfc=colours[name] if solid else "w")
        at = [n for n in (*study.steps, study.long_steps) if n in r["diffs"]]
        x = [tokens[n] * 1.03 ** (i - len(shown) / 2) for n in at]
        line = right.errorbar(x, [r["diffs"][n].mean for n in at], color=colours[name], capsize=2, marker="o", ms=3,
                              yerr=[0 if r["diffs"][n].n < 2 else r["diffs"][n].mean - r["diffs"][n].interval()[0]
                                    for n in at], label=name)
        line.lines[0].set_linewidth(1.5)
    names = [f"{n}{'' if results[n]['base'] == 'standard' else ' − ' + results[n]['base']}\n"
             f"{', '.join(results[n]['words']) or 'one pair'}" for n in reversed(shown)]
    left.set_yticks(range(len(shown)), names, fontsize=8)
    left.set(xlabel="loss minus that of the base (nats); left is better", title=f"after {tokens[main] / 1e6:.2g}M "
             "tokens; 95 % intervals, filled where p < 0.05 after Holm")
    left.axvspan(-SAME, SAME, color="0.9", zorder=0)
    left.axvline(0, color="k", lw=0.8)
    right.axhspan(-SAME, SAME, color="0.9", zorder=0)
    right.axhline(0, color="k", lw=0.8)
    millions(right, sorted({tokens[n] for name in shown for n in results[name]["diffs"]}))
    means = [d.mean for name in shown for d in results[name]["diffs"].values()]
    room = max(0.015, 0.4 * (max(means) - min(means)))
    right.set(ylim=(min(0, *means) - room, max(0, *means) + room), title="the same at each budget; grey: ±0.01 nat")
    right.legend(*(x[::-1] for x in right.get_legend_handles_labels()), fontsize=7, loc="upper left",
                 bbox_to_anchor=(1, 1))
    for ax in (left, right):
        ax.title.set_fontsize(9)
    return fig


def draw_tuning(plt, args, study, arms, rows, results, ngrams, tokens, colours):
    """Loss against learning rate for each arm: every trial."""
    done = {name: found for name in arms if (found := trials(study, rows, name))}
    if not done:
        return None
    width, height = min(4, len(done)), math.ceil(len(done) / 4)
    fig, axes = plt.subplots(height, width, figsize=(3 * width, 2.3 * height), sharey=True, sharex=True, squeeze=False)
    for ax, (name, found) in zip(axes.flat, done.items()):
        plain = sorted((lr, loss) for (lr, mult), loss in found.items() if mult == 1)
        ax.plot(*zip(*plain), "o-", color="k", ms=3)
        for (lr, mult), loss in found.items():
            if mult != 1:
                ax.plot(lr, loss, "s", ms=4, color="C1")
                ax.annotate(f"router × {mult:g}", (lr, loss), fontsize=6, xytext=(4, 0), textcoords="offset points")
        best = min(found, key=found.get)
        ax.plot(best[0], found[best], "o", ms=9, mfc="none", color="C3")
        ax.set_title(f"{name}, {len(found)} trials", fontsize=8)
        ax.set_xscale("log")
        rates = sorted({lr for mine in done.values() for lr, _ in mine})
        ax.set_xticks(rates, [f"{lr:g}" for lr in rates], rotation=90)
        ax.minorticks_off()
        ax.tick_params(labelsize=6, labelbottom=True)
    for ax in axes.flat[len(done):]:
        ax.set_axis_off()
    fig.supxlabel("learning rate (ringed: used)", fontsize=8)
    fig.supylabel(f"val loss, {study.steps[0]} steps, seed {study.tuning_seed}", fontsize=8)
    return fig


def draw_loss(plt, args, study, arms, rows, results, ngrams, tokens, colours):
    """Losses of finished runs beside the n-gram losses of the same tokens."""
    if not results:
        return None
    fig, ax = plt.subplots(figsize=(7, 4.5))
    for name, r in results.items():
        ax.plot([tokens[n] for n in r["loss"]], list(r["loss"].values()), "o-", ms=4, color=colours[name], label=name)
    counted = [g for g in ngrams.values() if g.get("5-gram")]
    for n in range(2, 6) if counted else ():
        y = [float(g[f"{n}-gram"]) for g in counted]
        ax.plot([int(g["tokens"]) for g in counted], y, ":", color="0.5", lw=1)
        ax.annotate(f"{n}-gram counts", (int(counted[-1]["tokens"]), y[-1]), fontsize=7, color="0.4", ha="right",
                    va="bottom")
    millions(ax, sorted({tokens[n] for r in results.values() for n in r["loss"]}))
    ax.set_ylabel("val loss (nats per token)")
    ax.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return fig


def draw_depth(plt, args, study, arms, rows, results, ngrams, tokens, colours):
    """Which sources the first seed's models of the main budget attend to, and how sharply."""
    shown = []
    for name, r in results.items():
        cell = Cell(name, 1, study.steps[-1], *r["rate"])
        folder = Path(args.runs) / cell.trunk / str(cell.steps)
        if not (folder / "last.pt").exists():
            continue
        model, saved, _ = load_model(folder, torch.device("cpu"), torch.float32)
        if hasattr(model.residual, "query") and not hasattr(model.residual, "histories"):
            data = Tokens(saved["config"]["data_dir"], "val", model.cfg.seq_len, model.cfg.vocab_size)
            routes = measure_routing(model, data.rows(range(min(32, data.windows))), 8, torch.device("cpu"),
                                     torch.float32)
            shown.append((name, [r for r in routes if "_" not in r["route"]]))
    if not shown:
        return None
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6))
    name, first = next((s for s in shown if s[0] == "attnres_block"), shown[0])
    names = max((r["sources"] for r in first), key=len)
    table = [[w * len(r["weights"]) for w in r["weights"]] + [math.nan] * (len(names) - len(r["sources"]))
             for r in first]
    image = left.imshow(table, aspect="auto", vmin=0, vmax=2, cmap="RdBu_r")
    left.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
    left.set_yticks(range(len(first)), [r["place"] for r in first], fontsize=6)
    left.set(xlabel="source", ylabel="site that reads", title=f"depth weights of {name}, seed 1")
    fig.colorbar(image, ax=left, label="mean weight × number of sources (1: even)", extend="max")
    for name, first in shown:
        right.plot([r["site"] for r in first], [r["max"] * len(r["sources"]) for r in first], ".-", color=colours[name],
                   label=name)
    right.axhline(1, color="k", lw=0.8, ls=":")
    right.set(xlabel="site (sublayer that reads)", ylabel="largest weight × number of sources (1: even)",
              title="how sharply a site reads")
    right.legend(fontsize=7)
    return fig


def draw_start(rows, path):
    """Stage 1: the lowest loss of `standard` over the rates tried, for each start of the weights and width."""
    plt = pyplot()
    fig, ax = plt.subplots(figsize=(6, 3.2))
    with open(rows, newline="", encoding="utf-8") as f:
        table = list(csv.DictReader(f))
    for init, marker in zip(("papers", "gpt2", "fan_in", "zero"), "os^D"):
        best = {}
        for r in (r for r in table if r["init"] == init):
            best[int(r["width"])] = min(float(r["val_loss"]), best.get(int(r["width"]), math.inf))
        ax.plot(sorted(best), [best[w] for w in sorted(best)], marker=marker, label=init)
    ax.set(xscale="log", xlabel="width", ylabel="validation loss (nats per byte)",
           title="standard, 16 layers, 0.26M tokens: four starts")
    ax.set_xticks((64, 128, 256), ("64", "128", "256"))
    ax.minorticks_off()
    ax.set_ylim(top=2.75)
    ax.legend(ncols=4, loc="upper center")
    fig.tight_layout()
    fig.savefig(path, dpi=90)
    plt.close(fig)


if __name__ == "__main__":  # python -m study.figures
    draw_start("study/start/rows.csv", "study/start/start.png")
