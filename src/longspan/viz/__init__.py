"""Pictures of masks, layouts, plans and scans, as SVG or PNG, and reports as self-contained HTML.

Every picture is a `Scene` around a matplotlib figure: `scene.svg()` and `write_png(scene, path)` write it. Needs
matplotlib (`pip install matplotlib`).
"""

from longspan.viz.mask_and_layout import layout_picture, mask_picture
from longspan.viz.plan_pictures import memory_picture, timeline_picture, traffic, traffic_picture
from longspan.viz.report import notebook_html, picture_page, report_html
from longspan.viz.scaling import ScalingPoint, bars_picture, scaling_picture, scaling_points
from longspan.viz.scan import scan_picture
from longspan.viz.scene import Scene, write_png

__all__ = [
    "ScalingPoint",
    "Scene",
    "bars_picture",
    "layout_picture",
    "mask_picture",
    "memory_picture",
    "notebook_html",
    "picture_page",
    "report_html",
    "scaling_picture",
    "scaling_points",
    "scan_picture",
    "timeline_picture",
    "traffic",
    "traffic_picture",
    "write_png",
]
