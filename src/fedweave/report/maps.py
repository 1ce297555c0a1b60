"""Pictures of discovery and routing: who has what, how buckets became experts, where prompts lie and go."""

from collections.abc import Callable
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from fedweave.report.groups import Group
from fedweave.report.style import (
    INK,
    MARKERS,
    MUTED,
    PALETTE,
    SURFACE,
    Picture,
    bare_axes,
    canvas,
    colour,
    legend,
    named_rows,
    plain_axes,
    row_name,
    shaded_table,
    stacked,
    tip,
)
from fedweave.runs.reading import RunRecord


def mixture(run: RunRecord) -> Picture | None:
    """Clients × tasks: what each client holds."""
    if not run.mixture or len(run.tasks) < 2:
        return None
    clients = list(run.mixture)
    sizes = [sum(run.mixture[name].values()) for name in clients]
    figure, ax = canvas(height=max(2.2, 1.0 + 0.26 * len(clients)))
    left = np.zeros(len(clients))
    for i, (task, title) in enumerate(run.tasks.items()):
        counts = np.array([run.mixture[name].get(task, 0) for name in clients], dtype=float)
        bars = ax.barh(
            range(len(clients)), counts, 0.74, left, color=colour(i), edgecolor=SURFACE, linewidth=0.6, label=title
        )
        for bar, name, count in zip(bars, clients, counts, strict=True):
            bar.set_gid(tip(f"{name}, {title}: {count:.0f} examples", client=name))
        left += counts
    for y, size in enumerate(sizes):
        ax.text(size + 0.01 * max(sizes), y, str(size), va="center", fontsize=8.5, color=MUTED)
    named_rows(ax, clients, "training examples")
    ax.set_xlim(0, 1.1 * max(sizes))
    legend(ax)
    caption = f"{_at_first(run)}Tasks are known to this page, never to the method."
    return Picture("mixture", "What each client holds", caption, figure)


def feeding(run: RunRecord) -> Picture | None:
    """Clients × experts: whose examples stand behind which expert."""
    if run.aligned < 2 or not run.feeding:
        return None
    values = np.array(list(run.feeding.values()), dtype=float)
    shares = values / np.maximum(values.sum(1, keepdims=True), 1)
    figure, ax = canvas(
        width=max(4.2, min(8.0, 1.6 + 0.6 * run.aligned)), height=max(2.0, 0.7 + 0.27 * len(values))
    )
    shaded_table(ax, shares, list(run.feeding), [f"E{m}" for m in range(run.aligned)], "{:.0%}", clients=True)
    caption = f"{_at_first(run)}Share of a client's examples aligned to each expert."
    return Picture("clients-experts", "Who feeds which expert", caption, figure)


def _at_first(run: RunRecord) -> str:
    """What a picture of the beginning says where it did not stay so."""
    return "Before round 1; what changed since then has a chapter of its own. " if run.changes else ""


# -------------------------------------------------------------------------------------- signatures


class _Bucket(NamedTuple):
    client: str
    name: str
    expert: int
    task: str | None  # its main one, where labels are known


def _buckets(run: RunRecord) -> list[_Bucket]:
    """Every bucket in the order of the signatures."""
    known = run.discovery.get("bucket_tasks", {}) if run.discovery else {}
    rows = []
    for name, client in run.clients.items():
        for c, expert in enumerate(client["experts"]):
            tasks = known[name][c] if name in known else {}
            rows.append(_Bucket(name, f"{name}·{c}", expert, max(tasks, key=lambda t: tasks[t]) if tasks else None))
    return rows


def signatures(run: RunRecord) -> Picture | None:
    """Signature distances in the order of their dendrogram, with the expert and the main task of every bucket."""
    distance = run.discovery.get("signature_distance") if run.discovery else None
    if not distance or len(distance) < 3:
        return None
    from scipy.cluster.hierarchy import dendrogram, linkage
    from scipy.spatial.distance import squareform

    matrix = np.array(distance)
    n = len(matrix)
    links = linkage(squareform(matrix, checks=False), "average")  # as alignment does
    rows = _buckets(run)
    tree = dendrogram(links, no_plot=True, link_color_func=_link_colours(links, [row.expert for row in rows]))
    order = tree["leaves"]
    known = all(row.task for row in rows) and len(rows) == n and len(run.tasks) > 1
    figure, (top, strip, low) = stacked(8.6, 7.0, [1.5, 0.4 if known else 0.2, 4.6])
    for xs, ys, shade in zip(tree["icoord"], tree["dcoord"], tree["color_list"], strict=True):
        top.plot((np.array(xs) - 5) / 10, ys, color=shade, linewidth=1.3)
    plain_axes(top)
    top.grid(axis="x", visible=False)
    top.tick_params(labelbottom=False, length=0)
    top.spines["bottom"].set_visible(False)
    top.set_ylabel("distance")
    experts = run.aligned
    if 1 < experts < n:  # the height at which the tree falls apart into M pieces
        cut = (links[n - experts, 2] + links[n - experts - 1, 2]) / 2
        top.axhline(cut, color=PALETTE[1], linewidth=1.2, linestyle=(0, (4, 3)))
        top.text(n - 0.4, cut, f" M = {experts}", color=PALETTE[1], fontsize=9, va="center")
    bare_axes(strip)
    strip.tick_params(labelbottom=False)
    tasks = list(run.tasks)
    for x, leaf in enumerate(order):
        row = rows[leaf]
        (bar,) = strip.bar(x, 0.86, 0.92, 0.07, color=colour(row.expert), linewidth=0)
        bar.set_gid(tip(f"{row.name}: expert {row.expert}", row.client, row.expert))
        if n <= 40:
            strip.text(x, 0.5, str(row.expert), ha="center", va="center", fontsize=8, color=SURFACE)
        if known and row.task:
            (bar,) = strip.bar(x, 0.86, 0.92, 1.07, color=colour(tasks.index(row.task)), linewidth=0, alpha=0.75)
            bar.set_gid(tip(f"{row.name}: mostly {run.tasks[row.task]}", row.client, row.expert))
    strip.set_yticks([0.5, 1.5] if known else [0.5], ["expert", "main task"] if known else ["expert"])
    bare_axes(low)
    shown = matrix[np.ix_(order, order)]
    apart = shown[~np.eye(n, dtype=bool)]
    strength = 1 - (shown - apart.min()) / max(np.ptp(apart), 1e-12)
    low.imshow(_alpha_image(strength), aspect="auto", interpolation="nearest")
    labels = [row_name(rows[i].name) for i in order] if n <= 40 else []
    low.set_yticks(range(len(labels)), labels, fontsize=8)
    low.set_xticks([])
    low.set_xlabel("buckets, in the order of the tree")
    if known:
        for i, task in enumerate(tasks):
            strip.bar(0, 0, color=colour(i), alpha=0.75, label=run.tasks[task])
        low.legend(*strip.get_legend_handles_labels(), loc="upper center", bbox_to_anchor=(0.5, -0.06), ncols=4,
                   frameon=False, fontsize=9, labelcolor=INK)  # fmt: skip
    caption = (
        "Each row and column is one bucket of one client; a stronger colour is nearer. The tree above merges the "
        "nearest first and is cut where the silhouette is best."
    )
    return Picture("signatures", "How buckets aligned into experts", caption, figure, wide=True)


def _link_colours(links: np.ndarray, experts: list[int]) -> Callable[[int], str]:
    """A branch has its expert's colour once all of its leaves belong to one."""
    below: list[set[int]] = [{m} for m in experts]
    for left, right, _, _ in links:
        below.append(below[int(left)] | below[int(right)])
    return lambda node: colour(min(below[node])) if len(below[node]) == 1 else MUTED


def _alpha_image(strength: np.ndarray) -> np.ndarray:
    """One colour at the strength of the value, so that it lies on a light page as well as on a dark one."""
    image = np.zeros((*strength.shape, 4))
    image[..., :3] = np.array([int(PALETTE[0][i : i + 2], 16) / 255 for i in (1, 3, 5)])
    image[..., 3] = 0.03 + 0.92 * np.clip(strength, 0, 1)
    return image


def silhouettes(run: RunRecord) -> Picture | None:
    """Why M is what it is."""
    found = run.silhouettes
    if len(found) < 2:
        return None
    figure, ax = canvas(height=2.8)
    ax.plot(list(found), list(found.values()), color=PALETTE[0], marker="o", linewidth=1.9)
    ax.plot(run.aligned, found[run.aligned], "o", markersize=13, markerfacecolor="none", markeredgewidth=2,
            color=PALETTE[1], label=f"chosen: {run.aligned}")  # fmt: skip
    ax.set(xlabel="number of experts M", ylabel="silhouette")
    ax.set_xticks(list(found))
    legend(ax)
    return Picture("silhouettes", "Choosing M", "Mean silhouette of the buckets' signatures for every M.", figure)


# -------------------------------------------------------------------------------------- prompts


@lru_cache(maxsize=4)
def _plane(points: tuple[tuple[float, ...], ...]) -> np.ndarray:
    """Principal coordinates to a plane: t-SNE, or for a handful of prompts the first two axes; [n, 2]."""
    array = np.array(points)
    if len(array) < 30:
        return array[:, :2]
    from sklearn.manifold import TSNE

    scaled = array / max(array[:, 0].std(), 1e-12) * 1e-4  # scikit-learn's own advice for an initial state
    model = TSNE(2, init=scaled[:, :2], perplexity=min(30, len(array) / 4), random_state=0)
    return model.fit_transform(array)


def embeddings(run: RunRecord) -> list[Picture]:
    """The same map of prompts three times: by bucket, by expert and by task."""
    data = run.embedding
    if not data or len(data["points"]) < 3 or len(data["points"][0]) < 2:
        return []
    plane = _plane(tuple(map(tuple, data["points"])))
    kind = "t-SNE of the prompt features" if len(plane) >= 30 else "The two main axes of the prompt features"
    tasks, clients = list(run.tasks), list(dict.fromkeys(data["clients"]))
    owners = list(zip(data["clients"], data["experts"], strict=True))
    own_marks = [clients.index(name) for name in data["clients"]]
    of_task = [tasks.index(task) for task in data["tasks"]]
    experts = [
        *(f"expert {m}" for m in range(run.aligned)),
        "kept apart",
    ]  # by now there may be others; -1: the last
    pictures = [
        _scatter(plane, owners, data["buckets"], own_marks, [], "bucket", "Colour: a bucket's number within its "
                 "client; shape: the client. Numbers mean nothing across clients until alignment."),
        _scatter(plane, owners, data["experts"], data["experts"], experts, "expert",
                 "Colour: the expert that alignment gave its bucket."),
    ]  # fmt: skip
    if len(tasks) > 1:
        titles, caption = list(run.tasks.values()), "Colour: the task, which no method saw."
        pictures.append(_scatter(plane, owners, of_task, of_task, titles, "task", caption))
    for picture in pictures:
        picture.caption = f"{kind}, {len(plane)} prompts of {len(clients)} clients. {picture.caption}"
    return pictures


def _scatter(
    plane: np.ndarray,  # [n, 2]
    owners: list[tuple[str, int]],  # client and expert of every prompt
    colours: list[int],
    marks: list[int],
    names: list[str],
    by: str,
    caption: str,
) -> Picture:
    figure, ax = canvas(3.7, 3.6)
    bare_axes(ax)
    ax.set_xticks([])
    ax.set_yticks([])
    size = max(6.0, min(20.0, 4000 / len(plane)))
    alike: dict[tuple[int, int, str, int], list[int]] = {}
    for i, (hue, mark, owner) in enumerate(zip(colours, marks, owners, strict=True)):
        alike.setdefault((hue, mark, *owner), []).append(i)
    labelled: set[int] = set()
    for (hue, mark, client, expert), members in sorted(alike.items()):
        label = names[hue] if names and hue not in labelled else None
        labelled.add(hue)
        ax.scatter(plane[members, 0], plane[members, 1], s=size, color=colour(hue), alpha=0.75, linewidths=0,
                   label=label, marker=MARKERS[mark % len(MARKERS)], gid=tip("", client, expert))  # fmt: skip
    legend(ax)
    return Picture(f"prompts-{by}", f"Prompts by {by}", caption, figure)


# -------------------------------------------------------------------------------------- routing


def routing(group: Group) -> Picture | None:
    """Task × expert router weights: the paper's Figure 2. Experts have no common order over seeds: one seed."""
    run = next((r for r in group.runs if r.best and r.experts > 1), None)
    if run is None or run.best is None:
        return None
    table = run.best["routing"]
    values = np.array(list(table.values()))
    names = [run.tasks.get(task, task) for task in table]
    figure, ax = canvas(width=max(4.2, min(8.0, 1.4 + 0.62 * run.experts)), height=0.7 + 0.42 * len(names))
    shaded_table(ax, values, names, [f"E{m}" for m in range(values.shape[1])], "{:.2f}")
    title = f"Routing of {group.label}"
    rest = (
        "; what a row lacks of 1 is the share of prompts that get no expert" if values.sum(1).min() < 0.995 else ""
    )
    caption = f"Mean router weight on the test set (the paper's Figure 2){rest}. Seed {run.seed}."
    slug = "".join(c if c.isalnum() else "-" for c in group.label.lower().replace("α", "alpha"))
    return Picture(f"routing-{slug}", title, caption, figure)
