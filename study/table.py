"""What the rows of a study show: one result for each arm, as a table for the terminal, as Markdown, as sentences."""
import math
import statistics

from hub import holm
from study import stats
from study.plan import documents, finished, long_seeds, losses, trials, tuned


def compare(study, arms, rows):
    """{arm: its result as a dictionary} for each arm with a finished run: `standard`, residuals by their difference to
    the base (those without a run of the main budget behind the others), then controls."""
    main, lengths = study.steps[-1], [*study.steps, *[study.long_steps] * bool(study.long_steps)]
    runs = {name: {n: finished(study, arms, rows, name, n) for n in lengths} for name in arms}
    tokens = {c.steps: int(r["tokens"]) for c, r in rows.items()}

    def against(name, base, steps=main, seeds=None):
        if name not in arms or base not in arms or name == base:
            return None
        mine, other = (losses(runs[x][steps]) for x in (name, base))
        return stats.paired({s: x for s, x in mine.items() if seeds is None or s in seeds}, other)

    def whole(d, n):
        """A comparison of which all planned pairs are there."""
        return d if d and d.n >= n else None
    curve, level = standard_curve(runs.get("standard", {}), tokens, main)
    out = {}
    for name, arm in arms.items():
        mine, base, old = runs[name][main], runs[arm.base][main], name + (study.papers or " ")
        if not any(runs[name].values()):
            continue
        r = out[name] = dict(
            base=arm.base if name != arm.base else "", rate=tuned(study, arms, rows, name),
            seeds={n: losses(r) for n, r in runs[name].items()}, control=arm.control, planned=arm.seeds, p=math.nan,
            loss={n: statistics.mean(losses(r).values()) for n, r in runs[name].items() if r},
            diffs={n: d for n in lengths if (d := against(name, arm.base, n))},
            static=against(name, study.static) if same_blocks(arms, name, study.static) else None,
            papers=whole(against(old, arm.base + study.papers), arms[old].seeds if old in arms else 0),
            documents=stats.over_documents([(documents(mine[s]), documents(base[s])) for s in mine if s in base]),
            test=mean(float(r["test"] or "nan") for r in mine.values()),
            moved=mean(float(r["moved"] or 0) for r in mine.values()))
        r["first"] = against(name, arm.base, lengths[0], runs[name].get(study.long_steps))
        r["last"] = whole(r["diffs"].get(study.long_steps), len(long_seeds(study)))
        d = r["diffs"].get(main)
        r["gain"] = [reached / tokens[main] if (reached := stats.tokens_for(curve, level + x)) else None
                     for x in (d.mean, *d.interval())] if d and arm.base == "standard" and d.n > 1 else [None] * 3
    complete = {n: d for n, r in out.items() if (d := whole(r["diffs"].get(main), r["planned"]))}
    corrected = holm({n: d.p for n, d in complete.items() if not out[n]["control"]}, study.planned)
    for name, r in out.items():
        r["words"] = []
        if d := complete.get(name):
            r["p"] = corrected.get(name, d.p)
            r["words"] = stats.verdict(d, r["p"], r["first"], r["last"], r["papers"], r["static"], r["moved"])
            if r["words"][0] == "gain" and arms[name].long and not r["last"]:
                r["words"].append(f"{study.long_steps:,} steps not run")

    def place(name):
        r = out[name]
        known = max((n for n in r["diffs"] if n <= main), default=0)
        return name != "standard", r["control"], known < main, r["diffs"][known].mean if known else 0.0
    return {n: out[n] for n in sorted(out, key=place)}


def mean(values):
    values = [*values]
    return statistics.mean(values) if values else math.nan


def same_blocks(arms, name, static):
    """Whether an arm reads the same depth blocks as the one with static weights, and differs in nothing else."""
    return static in arms and arms[name].blocks and not arms[name].control and arms[name].base == arms[static].base


def standard_curve(runs, tokens, main):
    """([(tokens, loss)] of `standard`, its loss at the main budget): means over the seeds of that; of a budget that not
    all of them have, by the change over those that do."""
    level = losses(runs.get(main, {}))
    if not level:
        return [], math.nan
    mean, curve = statistics.mean(level.values()), []
    for n, mine in sorted(runs.items()):
        if shared := losses(mine).keys() & level.keys():
            curve.append((tokens[n], mean + statistics.mean(losses(mine)[s] - level[s] for s in shared)))
    return curve, mean


def so_far(study, arms, rows, name):
    """What there is of an arm that has no run of the main budget yet, in at most 75 columns."""
    for steps in reversed(study.steps[:-1]):
        mine, base = (finished(study, arms, rows, n, steps) for n in (name, arms[name].base))
        if mine:
            d = stats.paired(losses(mine), losses(base)) if name != arms[name].base else None
            text = f"{steps:,} steps: {statistics.mean(losses(mine).values()):.4f}"
            text += f", {d.mean:+.3f} ({interval(d)}), won {d.won}/{d.n}" if d else ""
            return f"{text}; {study.steps[-1]:,}: not run"
    done = len(trials(study, rows, name))
    return f"not run, {done} of {study.trials} trials" if done else "not run"


def interval(d, digits=3):
    low, high = d.interval()
    return f"{low:+.{digits}f} to {high:+.{digits}f}" if d.n > 1 else "one pair"


def small(p):
    return "" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}"


def verdict_of(study, r):
    d = r["diffs"].get(study.steps[-1])
    if r["base"] and not d:
        return f"{study.steps[-1]:,} steps not run"
    return ", ".join(r["words"]) or (f"{d.n} of {r['planned']} pairs, no verdict yet" if d else "")


def sentences(study, results, ngrams):
    """What there is to say, a line for each arm; first whether the host is worth anything."""
    main, out = study.steps[-1], []
    counted = next((float(g["5-gram"]) for g in ngrams.values() if int(g["steps"]) == main and g["5-gram"]), None)
    if counted and (own := results.get("standard", {"loss": {}})["loss"].get(main, 0)) > counted:
        out.append(f"5-gram counts of the same tokens ({counted:.3f}) beat standard ({own:.3f}): this host has learned "
                   "too little, and no difference below means anything.")
    for name, r in results.items():
        if d := r["diffs"].get(main):
            out.append(stats.sentence(name, r["base"], d, r["p"], r["planned"], r["words"][1:]))
    return out


def text_table(study, results, missing):
    """At most 100 columns. missing: {arm without a run of the main budget: what there is of it}"""
    main = study.steps[-1]
    lines = [f"{'arm':24} {'lr':>7} {'x':>3} {'loss':>7}  {'vs base':>7}  {'95 % interval':>16}  {'won':>4}  {'p':>6}  "
             "verdict"]
    for name, r in results.items():
        if main not in r["loss"]:
            continue
        line = f"{name[:24]:24} {r['rate'][0]:7.2g} {r['rate'][1]:3g} {r['loss'][main]:7.4f}"
        if d := r["diffs"].get(main):
            line += f"  {d.mean:+7.3f}  {interval(d):>16}  {d.won:>2}/{d.n}  {small(r['p']):>6}  "
            line += r["words"][0] if r["words"] else "no verdict yet"
        lines.append(line)
    return "\n".join([*lines, *(f"{name[:24]:24} {state}" for name, state in missing.items())])


def markdown(study, results, missing, claims, speed, lines=()):
    """What there is to say, the table in full, and the claims of papers beside it."""
    main, lengths = study.steps[-1], [*study.steps, *[study.long_steps] * bool(study.long_steps)]
    head = ["arm", "verdict", "base", *(f"difference, {n:,} steps" for n in lengths), "loss", "p (Holm)",
            "over documents", "tokens for `standard`", "lr", "router ×", "test", "speed"]
    table = []
    for name, r in results.items():
        d, s, gain = r["diffs"].get(main), speed.get(name), [f"{x:.2f}" if x else "?" for x in r["gain"]]
        at = [r["diffs"].get(n) for n in lengths]
        table.append([f"`{name}`", verdict_of(study, r), f"`{r['base']}`" if r["base"] else ""])
        table[-1] += [f"{x.mean:+.4f} ({interval(x, 4)}), won {x.won}/{x.n}" if x else
                      "not run" if r["base"] else "" for x in at]
        table[-1] += [f"{r['loss'][main]:.4f}" if main in r["loss"] else ""]
        table[-1] += [f"{small(r['p'])}{', alone' * (r['control'] and r['p'] == r['p'])}"]
        table[-1] += ["{:+.3f} to {:+.3f}".format(*r["documents"]) if d and r["documents"] else ""]
        table[-1] += ["{} × ({} to {})".format(gain[0], *gain[:0:-1]) if r["gain"][0] else ""]
        table[-1] += [f"{r['rate'][0]:.3g}", f"{r['rate'][1]:g}", "" if math.isnan(r["test"]) else f"{r['test']:.4f}"]
        table[-1] += ["{speed} ({low} to {high})".format(**s) if s else ""]
    table += [[f"`{n}`", state, *[""] * (len(head) - 2)] for n, state in missing.items() if n not in results]
    text = "".join(f"- {line}\n" for line in lines) + "\n" * bool(lines) + grid(head, table)
    text += ("\nDifference: loss on all of val minus that of the base, in nats per token; mean over pairs, "
             f"95 % interval,\npairs won. p: two-sided t-test at {main:,} steps, corrected for {study.planned} arms "
             "(Holm); alone: a control, not\ncorrected. The rules of the verdicts are in the configuration's head.\n")
    if not claims:
        return text
    found, table = [], []
    for c in claims:
        mine, base = (results.get(c[k], {"seeds": {}})["seeds"] for k in ("arm", "base"))
        d = {n: stats.paired(mine.get(n, {}), base.get(n, {})) for n in study.steps}
        found.append((max((n for n in d if d[n]), default=main), d))
    apart = {i: d[main].p for i, (c, (_, d)) in enumerate(zip(claims, found)) if d[main] and
             results[c["arm"]]["base"] != c["base"]}
    p = holm(apart, sum(results.get(c["arm"], {"base": "standard"})["base"] != c["base"] for c in claims))
    for i, (c, (steps, d)) in enumerate(zip(claims, found)):
        d = d[steps]
        size = f", {abs(d.mean / c['nat']):.1f} ×" if d and "nat" in c else ""
        whole = d and steps == main and d.n >= max(2, min(results[c[k]]["planned"] for k in ("arm", "base")))
        words = [] if not whole else [stats.verdict(d, p[i])[0]] if i in p else results[c["arm"]]["words"]
        short = f", {steps:,} steps only" if steps < main else ""
        found_here = [f"{d.mean:+.3f} ({interval(d)}){short}", f"{'same' if d.mean < 0 else 'other'} sign{size}",
                      ", ".join(words) or "no verdict yet"] if d else ["", "", "not run"]
        table.append([f"{c['text']} ({c['paper']})", c.get("nat", "no number"), f"`{c['arm']}` − `{c['base']}`",
                      *found_here])
    return f"{text}\n{grid(['claim', 'claimed, nat', 'here', 'nat, 95 % interval', 'sign and size', 'verdict'], table)}"


def origin(rows):
    """Where the rows are from, for pairs should share it."""
    kinds = {what: sorted({r[what] for r in rows.values()}) for what in ("commit", "torch", "machine")}
    return "; ".join(f"{what}: {', '.join(found)}" for what, found in kinds.items())


def grid(head, table):
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in (head, ["---"] * len(head), *table))
