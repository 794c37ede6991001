"""What the rows of a study show: one result for each arm, as a table for the terminal, as Markdown, as sentences."""
import math
import statistics

from study import stats
from study.plan import documents, finished, losses, trials, tuned


def compare(study, arms, rows):
    """{arm: its result as a dictionary} for each arm with a finished run of the main budget; `standard` first, then by
    the difference to the base."""
    main, lengths = study.steps[-1], [*study.steps, *[study.long_steps] * bool(study.long_steps)]
    runs = {name: {n: finished(study, arms, rows, name, n) for n in lengths} for name in arms}
    tokens = {c.steps: int(r["tokens"]) for c, r in rows.items()}

    def against(name, base, steps=main):
        known = name in arms and base in arms and name != base
        return stats.paired(*(losses(runs[x][steps]) for x in (name, base))) if known else None

    def control(name):
        return not arms[name].routed or bool(study.papers) and name.endswith(study.papers)
    out = {}
    for name, arm in arms.items():
        mine, base = runs[name][main], runs[arm.base][main]
        if not mine:
            continue
        out[name] = dict(
            base=arm.base if name != arm.base else "", rate=tuned(study, arms, rows, name), seeds=losses(mine),
            trials=len(trials(study, rows, name)), added=int(next(iter(mine.values()))["added"]),
            loss={n: statistics.mean(losses(r).values()) for n, r in runs[name].items() if r},
            diffs={n: d for n in lengths if (d := against(name, arm.base, n))},
            static=against(name, study.static),
            papers=against(name + study.papers, arm.base + study.papers) if study.papers else None,
            documents=stats.over_documents([(documents(mine[s]), documents(base[s])) for s in mine if s in base]),
            test=statistics.mean(float(r["test"] or "nan") for r in mine.values()),
            moved=statistics.mean(float(r["moved"] or 0) for r in mine.values()))
    corrected = stats.holm({n: r["diffs"][main].p for n, r in out.items() if main in r["diffs"] and not control(n)})
    curve = [(tokens[n], out["standard"]["loss"][n]) for n in lengths if n in out.get("standard", {"loss": ()})["loss"]]
    for name, r in out.items():
        d = r["diffs"].get(main)
        r["p"] = corrected.get(name, d.p if d else math.nan)
        r["words"] = stats.verdict(d, r["p"], r["diffs"].get(lengths[0]), r["diffs"].get(study.long_steps), r["papers"],
                                   r["static"], r["moved"]) if d and d.n > 1 else []
        reached = stats.tokens_for(curve, r["loss"][main]) if r["base"] == "standard" else None
        r["gain"] = reached / tokens[main] if reached else None
    at = {name: r["diffs"][main].mean if main in r["diffs"] else 0.0 for name, r in out.items()}
    return {name: out[name] for name in sorted(out, key=lambda name: (name != "standard", at[name]))}


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
    return "<0.001" if p < 0.001 else f"{p:.3f}"


def text_table(study, results, missing):
    """At most 100 columns. missing: {arm: what there is of it}"""
    main = study.steps[-1]
    lines = [f"{'arm':24} {'lr':>7} {'x':>3} {'loss':>7}  {'vs base':>7}  {'95 % interval':>16}  {'won':>4}  {'p':>6}  "
             "verdict"]
    for name, r in results.items():
        line = f"{name[:24]:24} {r['rate'][0]:7.2g} {r['rate'][1]:3g} {r['loss'][main]:7.4f}"
        if d := r["diffs"].get(main):
            line += f"  {d.mean:+7.3f}  {interval(d):>16}  {d.won:>2}/{d.n}  {small(r['p']):>6}  {(*r['words'], '')[0]}"
        lines.append(line)
    return "\n".join([*lines, *(f"{name[:24]:24} {state}" for name, state in missing.items())])


def markdown(study, results, missing, claims, speed):
    """The table in full, and the claims of papers beside it."""
    main = study.steps[-1]
    head = ["arm", "trials", "lr", "router ×", *(f"loss, {n:,} steps" for n in study.steps), "test", "difference",
            "95 % interval", "over documents", "won", "Holm p", "tokens for `standard`", "speed", "verdict"]
    table = []
    for name, r in results.items():
        d, s = r["diffs"].get(main), speed.get(name)
        table.append([f"`{name}`", r["trials"], f"{r['rate'][0]:.3g}", f"{r['rate'][1]:g}"])
        table[-1] += [f"{r['loss'][n]:.4f}" if n in r["loss"] else "" for n in study.steps]
        table[-1] += ["" if math.isnan(r["test"]) else f"{r['test']:.4f}"]
        table[-1] += [f"{d.mean:+.4f}", interval(d, 4)] if d else ["", ""]
        table[-1] += ["{:+.3f} to {:+.3f}".format(*r["documents"]) if d and r["documents"] else ""]
        table[-1] += [f"{d.won}/{d.n}", small(r["p"]) if d.n > 1 else ""] if d else ["", ""]
        table[-1] += [f"{r['gain']:.2f} ×" if r["gain"] else "", "{speed} ({low} to {high})".format(**s) if s else ""]
        table[-1] += [", ".join(r["words"])]
    table += [[f"`{name}`", state, *[""] * (len(head) - 2)] for name, state in missing.items()]
    text = grid(head, table)
    if not claims:
        return text
    found = [stats.paired(*(results.get(c[k], {"seeds": {}})["seeds"] for k in ("arm", "base"))) for c in claims]
    p, table = stats.holm({i: d.p for i, d in enumerate(found) if d}), []
    for i, (c, d) in enumerate(zip(claims, found)):
        size = f", {abs(d.mean / c['nat']):.1f} ×" if d and "nat" in c else ""
        found_here = [f"{d.mean:+.3f} ({interval(d)})", f"{'same' if d.mean < 0 else 'other'} sign{size}",
                      stats.verdict(d, p[i])[0] if d.n > 1 else "one pair"] if d else ["", "", "not run"]
        table.append([f"{c['text']} ({c['paper']})", c.get("nat", "no number"), f"`{c['arm']}` − `{c['base']}`",
                      *found_here])
    return f"{text}\n{grid(['claim', 'claimed, nat', 'here', 'nat, 95 % interval', 'sign and size', 'verdict'], table)}"


def grid(head, table):
    return "".join(f"| {' | '.join(map(str, row))} |\n" for row in (head, ["---"] * len(head), *table))
