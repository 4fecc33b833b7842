"""The tree of a beam search: where each hypothesis stands, and how it is drawn."""

from collections.abc import Sequence

from regard.errors import UsageError
from regard.viewer.fonts import cut
from regard.viewer.panels import INK, LINE, MARGIN, SOFT, Sheet
from regard.viewer.picture import Picture, Tree

_MAX_NODES = 4000  # of a tree that is shown
_PITCH, _ROW = 0.85, 0.17  # inches from a token to the next, and from a line to the next
_LETTERS = 7.5
_WIDEST = 8  # font sizes of a token
_ACCENT = "#2f5bd8"  # as on the page


def place_nodes(tree: Tree) -> list[tuple[int, int]]:
    """Step and line of each node; the best continuation stays on the line of its parent."""
    if len(tree.nodes) > _MAX_NODES:
        raise UsageError(
            f"{len(tree.nodes):,} hypotheses are too many to show, which is {_MAX_NODES:,}; choose "
            "a smaller beam= or a shorter text"
        )
    children: dict[int, list[int]] = {}
    for number, node in enumerate(tree.nodes):
        children.setdefault(node.parent, []).append(number)

    def order(number: int) -> tuple[bool, bool, float]:
        node = tree.nodes[number]
        return not node.best, number not in children, -node.logprob

    places: list[tuple[int, int]] = [(0, 0)] * len(tree.nodes)
    line = 0
    stack = [(number, 0, True) for number in sorted(children.get(-1, ()), key=order)[::-1]]
    # the first child goes on in the same line, so a line begins with every other one
    first = {some[0] for some in (sorted(row, key=order) for row in children.values())}
    begun = False
    while stack:
        number, step, _ = stack.pop()
        if number not in first or not begun:
            line, begun = line + begun, True
        places[number] = step, line
        below = sorted(children.get(number, ()), key=order)
        stack += [(child, step + 1, True) for child in below[::-1]]
    return places


def draw_tree(picture: Picture) -> Sheet:
    """Draw what a beam search considered: its best text dark, what was dropped grey."""
    tree = picture.tree
    assert tree is not None
    places = place_nodes(tree)
    steps, lines = (1 + max((place[n] for place in places), default=0) for n in (0, 1))
    tokens = [node.token.replace("▁", " ").strip() or node.token for node in tree.nodes]
    title = f"{picture.source} → {picture.output}"
    notes = [
        "blue: what was written; black: went on, or ended with its score; grey: dropped from the "
        "beam",
        f"The search ended as {tree.end}." if tree.end else "",
    ]
    width, top = max(6.0, steps * _PITCH + 1.2), 0.85
    height = lines * _ROW + top + MARGIN
    sheet = Sheet(width, height, [title, *notes, *tokens])
    sheet.write(title, MARGIN, 0.3, 11, room=width - 2 * MARGIN)
    for number, note in enumerate(notes):
        sheet.write(note, MARGIN, 0.5 + 0.17 * number, 7.5, SOFT, width - 2 * MARGIN)
    axes = sheet.axes(MARGIN, top, width - 2 * MARGIN, lines * _ROW)
    axes.set(xlim=(0, (width - 2 * MARGIN) / _PITCH), ylim=(lines, 0))
    axes.set_axis_off()
    for node, token, (step, line) in zip(tree.nodes, tokens, places, strict=True):
        dropped = node.fate not in ("open", "finished")
        colour = _ACCENT if node.best else SOFT if dropped else INK
        if node.parent >= 0:
            before = places[node.parent]
            across = (before[0] + 0.06, step - 0.06)
            down = (before[1] + 0.75, line + 0.75) if before[1] != line else (line + 0.85,) * 2
            axes.plot(across, down, color=_ACCENT if node.best else LINE, linewidth=0.7)
        score = f" {node.score:.2f}" if node.fate == "finished" else ""
        shown = cut(sheet.spell(token), _WIDEST) + score
        style = sheet.style(_LETTERS, colour)
        axes.text(step + 0.02, line + 0.6, shown, va="center", **style)
    return sheet


def tree_data(tree: Tree, tokens: Sequence[str]) -> dict:
    """Tree as the plain values that the page's script reads, its tokens as shown."""
    return {
        "nodes": [
            [node.parent, token, node.logprob, node.score, node.fate, node.best, *place, node.when]
            for node, token, place in zip(tree.nodes, tokens, place_nodes(tree), strict=True)
        ],
        "fates": dict(tree.fates),
        "end": tree.end,
    }
