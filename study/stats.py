"""Statistics of paired runs: exact Student's t, Holm's correction, intervals, verdicts."""
import math
import statistics
from typing import NamedTuple

import numpy as np

SAME = 0.01  # nat: differences within this are none


def t_inside(t, df):
    """P(|T| < t) for Student's t with a whole number of degrees of freedom (Abramowitz and Stegun 26.7.3, 26.7.4)."""
    theta = math.atan(abs(t) / math.sqrt(df))
    cos, sin = math.cos(theta), math.sin(theta)
    odd = df % 2
    term, total = cos if odd else 1.0, 0.0
    for k in range(2, df + 1, 2):  # cos (1 + 2/3 cos^2 + ...) for odd df, 1 + 1/2 cos^2 + ... for even
        total += term
        term *= (k / (k + 1) if odd else (k - 1) / k) * cos * cos
    return 2 / math.pi * (theta + sin * total) if odd else sin * total


def t_quantile(inside, df):
    """t with P(|T| < t) = inside: half the width of an interval in standard errors."""
    low, high = 0.0, 1.0
    while t_inside(high, df) < inside:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if t_inside(middle, df) < inside else (low, middle)
    return high


class Paired(NamedTuple):
    """Differences of a mode to the base over pairs of one seed; `spread` is their standard deviation."""
    mean: float
    spread: float
    n: int
    won: int

    @property
    def error(self):
        return self.spread / math.sqrt(self.n)

    @property
    def p(self):
        """Two-sided, of no difference; nan for a single pair."""
        if self.n < 2:
            return math.nan
        return 1 - t_inside(self.mean / self.error, self.n - 1) if self.error else float(self.mean == 0)

    def interval(self, inside=0.95):
        width = t_quantile(inside, self.n - 1) * self.error if self.n > 1 else math.inf
        return self.mean - width, self.mean + width


def paired(mine, base):
    """{seed: loss} of a mode and of the base -> Paired over the seeds they share, or None."""
    d = [mine[seed] - base[seed] for seed in sorted(mine.keys() & base.keys())]
    if not d:
        return None
    return Paired(statistics.mean(d), statistics.stdev(d) if len(d) > 1 else math.nan, len(d), sum(x < 0 for x in d))


def over_documents(pairs, draws=2000):
    """95 % interval of the mean difference over documents drawn anew (bootstrap), seeds held fixed.

    pairs: ([(tokens, loss), ...] of the mode, the same of the base) for each seed. None with fewer than five documents.
    """
    if not pairs or min(len(x) for pair in pairs for x in pair) < 5:
        return None
    tables = np.array(pairs)  # (seeds, 2, documents, 2)
    tokens, delta = tables[0, 0, :, 0], (tables[:, 0, :, 1] - tables[:, 1, :, 1]).mean(0)
    drawn = np.random.default_rng(0).integers(len(tokens), size=(draws, len(tokens)))
    means = (delta * tokens)[drawn].sum(1) / tokens[drawn].sum(1)
    return tuple(np.quantile(means, (0.025, 0.975)))


def tokens_for(curve, loss):
    """Tokens after which `standard` reaches a loss, on lines in log tokens between its finished runs [(tokens, loss)].
    None outside of them: nothing is extrapolated."""
    for (x0, y0), (x1, y1) in zip(curve, curve[1:]):
        if y1 <= loss <= y0:
            return x0 * (x1 / x0) ** ((y0 - loss) / (y0 - y1))
    return None


def verdict(main, p, first=None, last=None, papers=None, static=None, moved=None):
    """Words for one arm from its Paired differences: to the base at the main budget, at the longest and, over the seeds
    of that, at the first, to the base where both have the papers' start, and to static weights. p is Holm's over all
    arms; moved as in `cell.moved`.

        gain, worse            p < 0.05, and the sign
        no difference          else, if the 90 % interval lies inside +-0.01 nat; "cannot tell" where it does not
        transient              gain at the longest budget below half of that at the first, or below 0.01 nat
        due to the start       gain from the papers' start at least twice that from the sound one
        attention helps        below static learned weights, 95 % interval without 0
        routes still moving    in the last third of the run by a tenth of their way or more
    """
    words = []
    low, high = main.interval(0.90)
    if p < 0.05:
        words.append("gain" if main.mean < 0 else "worse")
    elif -SAME < low and high < SAME:
        words.append("no difference")
    else:
        words.append("cannot tell")
    if words == ["gain"]:
        if last and (last.mean > -SAME or first and last.mean > first.mean / 2):
            words.append("transient")
        if papers and papers.mean <= 2 * main.mean:
            words.append("due to the start")
    if static:
        low, high = static.interval()
        words += ["attention helps"] if high < 0 else []
    return words + (["routes still moving"] if moved is not None and moved >= 0.1 else [])


def sentence(arm, base, d, p, planned=0, more=()):
    """One line for people. planned: pairs that the arm is to have; more: what `verdict` says beside its first word."""
    low, high = d.interval()
    pairs = f"{d.won if d.mean < 0 else d.n - d.won} of {d.n} pairs{''.join(f'; {word}' for word in more)}"
    if 1 < d.n < planned:
        return (f"{arm}: {d.mean:+.3f} nat against {base} ({low:+.3f} to {high:+.3f}) in {d.n} of {planned} pairs; no "
                "verdict yet.")
    if d.n < 2:
        return f"{arm}: {d.mean:+.3f} nat against {base} in one pair; one pair says nothing about chance."
    if p < 0.05:
        a, b = sorted((abs(low), abs(high)))
        word = "better" if d.mean < 0 else "worse"
        return f"{arm} is {word} than {base} by {abs(d.mean):.3f} nat ({a:.3f} to {b:.3f}), {pairs}."
    low90, high90 = d.interval(0.90)
    if -SAME < low90 and high90 < SAME:
        return f"{arm} and {base} do not differ by {SAME} nat (90 %: {low90:+.3f} to {high90:+.3f}), {pairs}."
    why = ", too many comparisons" if low * high > 0 else ""
    return f"{arm} and {base} cannot be told apart: {d.mean:+.3f} nat ({low:+.3f} to {high:+.3f}{why}), {pairs}."
