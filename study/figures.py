"""Figures of a study: what gained and how surely, how it was tuned, what losses are worth, where models read."""
import csv
import math
from pathlib import Path

import torch

from eval import load_model, measure_routing, pyplot
from study.plan import Cell, trials
from study.stats import SAME
from study.table import verdict_of
from train import Tokens


def draw(args, study, arms, rows, results, ngrams):
    tokens = {c.steps: int(r["tokens"]) for c, r in rows.items()}
    residuals = [n for n, arm in arms.items() if not arm.control]
    colours = {name: f"C{residuals.index(name) % 10}" if name in residuals else "k" for name in arms}
    for function in (draw_difference, draw_tuning, draw_loss, draw_depth):
        path = Path(args.out) / f"{function.__name__[5:]}.png"
        figure = function(pyplot(), args, study, arms, rows, results, ngrams, tokens, colours)
        if figure:
            figure.tight_layout()
            figure.savefig(path, dpi=110)
            pyplot().close(figure)


def millions(ax, tokens):
    ax.set(xscale="log", xlabel="training tokens of the finished run")
    ax.set_xticks(tokens, [f"{x / 1e6:.1f}M" for x in tokens])
    ax.minorticks_off()


def draw_difference(plt, args, study, arms, rows, results, ngrams, tokens, colours):
    """Left: the difference at each budget with its interval, and the verdict; residuals, below them controls. Right:
    the residuals that have more than one budget, by budget."""
    groups = [[n for n, r in results.items() if r["diffs"] and r["control"] == control] for control in (False, True)]
    groups = [names for names in groups if names]
    if not groups:
        return None
    fig = plt.figure(figsize=(13, 1.9 + 0.5 * sum(map(len, groups)) + 0.8 * len(groups)))
    grid = fig.add_gridspec(len(groups), 2, width_ratios=(4, 3), height_ratios=[1 + len(names) for names in groups])
    for i, names in enumerate(groups):
        title = ("loss minus that of the base, 95 % interval\n"
                 f"(filled: p < 0.05 after {study.steps[-1]:,} steps, corrected for {study.planned} arms)")
        title = "controls (p not corrected)" if results[names[0]]["control"] else title
        draw_forest(fig.add_subplot(grid[i, 0]), study, results, names, tokens, colours, title)
    shown = [name for name in groups[0] if len(results[name]["diffs"]) > 1]
    if not shown:
        return fig
    right = fig.add_subplot(grid[0, 1])
    for i, name in enumerate(shown):
        at = [(tokens[n] * 1.03 ** (i - len(shown) / 2), d) for n, d in results[name]["diffs"].items()]
        right.plot([x for x, _ in at], [d.mean for _, d in at], color=colours[name], marker="o", ms=4, label=name)
        for x, d in at:
            if d.n > 1:
                right.plot([x, x], d.interval(), color=colours[name], lw=1)
            right.annotate(f" {d.n}", (x, d.mean), fontsize=6, color=colours[name])
    right.axhspan(-SAME, SAME, color="0.9", zorder=0)
    right.axhline(0, color="k", lw=0.8)
    millions(right, sorted({tokens[n] for name in shown for n in results[name]["diffs"]}))
    right.set_ylim(*span(results, shown))
    right.set_title("the same by budget, with the number of pairs; grey: ±0.01 nat", fontsize=9)
    right.legend(fontsize=7, loc="upper left", bbox_to_anchor=(1, 1))
    return fig


def span(results, names):
    """Limits that hold all differences and the intervals of three pairs or more: those of two may leave the picture."""
    ends = [y for name in names for d in results[name]["diffs"].values() for y in (
        d.interval() if d.n > 2 else (d.mean - SAME, d.mean + SAME))]
    return min(-0.015, 1.1 * min(ends)), max(0.015, 1.1 * max(ends))


def draw_forest(ax, study, results, names, tokens, colours, title):
    main, labels = study.steps[-1], []
    for i, name in enumerate(reversed(names)):
        r = results[name]
        for k, (n, d) in enumerate(r["diffs"].items()):
            y, solid = i + 0.25 * ((len(r["diffs"]) - 1) / 2 - k), n == main and r["words"][:1] in (["gain"], ["worse"])
            ax.plot(d.mean, y, marker="soD"[k % 3], ms=6 if n == main else 4, color=colours[name],
                    mfc=colours[name] if solid else "w")
            if d.n > 1:
                ax.plot(d.interval(), [y, y], color=colours[name], lw=1.6 if n == main else 0.8, zorder=1)
            ax.annotate(f"{tokens[n] / 1e6:.1f}M: {d.mean:+.3f}, {d.n} pair{'s' * (d.n > 1)}", (1.01, y), fontsize=6,
                        xycoords=("axes fraction", "data"), va="center", weight="bold" if n == main else "normal")
        base = "" if r["base"] == "standard" else f" − {r['base']}"
        labels.append(f"{name}{base}\n{verdict_of(study, r)}")
    ax.set_yticks(range(len(names)), labels, fontsize=8)
    ax.set_ylim(-0.6, len(names) - 0.4)
    ax.set_xlim(*span(results, names))
    ax.axvspan(-SAME, SAME, color="0.9", zorder=0)
    ax.axvline(0, color="k", lw=0.8)
    ax.set_xlabel("nats per token; left is better", fontsize=8)
    ax.set_title(title, fontsize=9)


def draw_tuning(plt, args, study, arms, rows, results, ngrams, tokens, colours):
    """Loss against learning rate for each arm: every trial."""
    done = {name: trials(study, rows, name) for name in arms}
    done = {name: found for name, found in done.items() if min(found.values(), default=math.inf) < math.inf}
    if not done:
        return None
    width, height = min(4, len(done)), math.ceil(len(done) / 4)
    fig, axes = plt.subplots(height, width, figsize=(3 * width, 2.3 * height), sharex=True, squeeze=False)
    for ax, (name, found) in zip(axes.flat, done.items()):
        top = min(found.values()) + 0.16  # the same span everywhere; what is above it is written at the edge
        plain = sorted((lr, loss) for (lr, mult), loss in found.items() if mult == 1)
        ax.plot(*zip(*plain), "o-", color="k", ms=3)
        ax.set_ylim(top - 0.18, top + 0.01)
        for (lr, mult), loss in found.items():
            if mult != 1:
                ax.plot(lr, min(loss, top), "s" if loss < top else "^", ms=4, color="C1")
            if mult != 1 or loss > top:
                says = f"router × {mult:g}" * (mult != 1) + f" {loss:.2f}" * (loss > top)
                ax.annotate(says, (lr, min(loss, top)), fontsize=6, xytext=(5, -2 if mult != 1 else -9),
                            textcoords="offset points")
        if len(found) >= study.trials:
            best = min(found, key=found.get)
            ax.plot(best[0], found[best], "o", ms=9, mfc="none", color="C3")
        ax.set_title(f"{name}, {len(found)} of {study.trials} trials", fontsize=8)
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
        control = r["control"] and r["base"]
        ax.plot([tokens[n] for n in r["loss"]], list(r["loss"].values()), "o--" if control else "o-", ms=4, label=name,
                color=colours[name], mfc="w" if control else colours[name])
    counted = [g for g in ngrams.values() if g.get("5-gram")]
    for n in (4, 5) if counted else ():
        y = [float(g[f"{n}-gram"]) for g in counted]
        ax.plot([int(g["tokens"]) for g in counted], y, ":", color="0.5", lw=1)
        ax.annotate(f"{n}-gram counts", (int(counted[0]["tokens"]), y[0]), fontsize=7, color="0.4",
                    xytext=(4, 4), textcoords="offset points")
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
        if hasattr(model.residual, "query") and not hasattr(model.residual, "histories") and any(
                Path(saved["config"]["data_dir"]).glob("*.bin")):
            data = Tokens(saved["config"]["data_dir"], "val", model.cfg.seq_len, model.cfg.vocab_size)
            routes = measure_routing(model, data.rows(range(min(32, data.windows))), 8, torch.device("cpu"),
                                     torch.float32)
            shown.append((name, [r for r in routes if "_" not in r["route"]]))
    if not shown:
        return None
    fig, (left, right) = plt.subplots(1, 2, figsize=(12, 4.6))
    name, first = next((s for s in shown if s[0] == "attnres_block"), shown[0])
    names = max((r["sources"] for r in reversed(first)), key=len)  # the last ones, as the head sees them
    table = [[w * len(r["weights"]) for w in r["weights"]] + [math.nan] * (len(names) - len(r["sources"]))
             for r in first]
    left.set_facecolor("0.85")  # a source that is not there yet
    image = left.imshow(table, aspect="auto", vmin=0, vmax=2, cmap="RdBu_r")
    left.set_xticks(range(len(names)), names, rotation=90, fontsize=6)
    left.set_yticks(range(len(first)), [r["place"] for r in first], fontsize=6)
    left.set(xlabel="source", ylabel="site that reads", title=f"depth weights of {name}, seed 1")
    fig.colorbar(image, ax=left, label="mean weight × number of sources (1: even)", extend="max")
    for name, first in shown:
        for kind, style in (("attn", ".-"), ("mlp", ".:")):
            sites = [r for r in first if r["place"].startswith(kind)]
            right.plot([r["site"] for r in sites], [r["max"] * len(r["sources"]) for r in sites], style,
                       color=colours[name], label=f"{name}, {kind}")
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
