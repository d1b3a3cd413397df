"""Pictures of masks, layouts and plans, as matplotlib figures. Needs matplotlib: `pip install matplotlib`.

Save a figure with `figure.savefig("mask.png")`; masks, layouts and plans draw themselves in notebooks.
"""

from longspan.viz.html import notebook_html, page_html
from longspan.viz.pictures import layout_picture, mask_picture, memory_picture, timeline_picture

__all__ = ["layout_picture", "mask_picture", "memory_picture", "notebook_html", "page_html", "timeline_picture"]
