"""Pictures that show themselves in a notebook and save themselves by the name of a file."""

from collections.abc import Sequence
from html import escape
from pathlib import Path

from regard.errors import UsageError
from regard.files import write_atomically
from regard.viewer.html import page
from regard.viewer.picture import Choice, Picture, choose_views


class Look:
    """Pictures of attention, shown inline in a notebook or saved as .html or .png."""

    def __init__(self, pictures: Picture | Sequence[Picture], height: int = 760) -> None:
        self.pictures = [pictures] if isinstance(pictures, Picture) else list(pictures)
        self.height = height

    def html(self) -> str:
        """Whole page as one HTML text."""
        return page(self.pictures)

    def save(self, path: str | Path, layers: Choice = None, heads: Choice = None) -> Path:
        """Write the pictures to a file whose suffix says how."""
        return save(self.pictures, path, layers, heads)

    def _repr_html_(self) -> str:
        # Sandboxed: the page's script runs, but cannot reach the notebook around it.
        return (
            f'<iframe srcdoc="{escape(self.html())}" sandbox="allow-scripts" title="attention" '
            f'style="width:100%;height:{self.height}px;border:0"></iframe>'
        )

    def __repr__(self) -> str:
        views = sum(len(picture.views) for picture in self.pictures)
        return f"Look({len(self.pictures)} pictures, {views} views)"


def save(
    pictures: Picture | Sequence[Picture],
    path: str | Path,
    layers: Choice = None,
    heads: Choice = None,
) -> Path:
    """Write pictures to a file as its suffix says: .html to explore, .png to print."""
    shown = [pictures] if isinstance(pictures, Picture) else list(pictures)
    path = Path(path)
    suffix = path.suffix.lower()
    if suffix in (".html", ".htm"):
        write_atomically(path, page([choose_views(each, layers, heads) for each in shown]))
    elif suffix == ".png":
        if len(shown) != 1:
            raise UsageError(
                f"{path}: a .png holds one picture, not {len(shown)}; give one input, "
                "or save as .html, which holds them all"
            )
        write_atomically(path, draw(shown[0], layers, heads))
    else:
        raise UsageError(
            f"{path}: unknown kind of picture '{path.suffix}'; end it in .html or .png"
        )
    return path


def draw(picture: Picture, layers: Choice = None, heads: Choice = None) -> bytes:
    """Draw chosen layers and heads, over the photo if there is one, and return the PNG.

    A row is a layer, a panel a head. Unless given, all heads are shown, or their mean where they
    would be too many. The tree of a beam search is drawn instead, if there is one.
    """
    if picture.effects is not None or picture.tables:
        from regard.viewer.effects import draw_effects, draw_tables

        sheet = draw_tables(picture) if picture.effects is None else draw_effects(picture)
        return sheet.png()
    if not picture.views and not picture.tiles:
        raise UsageError("there is no attention to draw in this picture; save it as .html instead")
    if picture.tree is not None:
        from regard.viewer.beams import draw_tree

        return draw_tree(picture).png()
    if picture.recording is not None:
        from regard.viewer.sound import draw_recording

        return draw_recording(picture, layers, heads).png()
    if picture.photo is not None or picture.tiles:
        from regard.viewer.overlays import draw_overlays  # matplotlib takes a while to import

        return draw_overlays(picture, layers, heads).png()
    from regard.viewer.heatmaps import draw_heat_maps

    return draw_heat_maps(picture, layers, heads).png(dpi=160)  # for its small labels
