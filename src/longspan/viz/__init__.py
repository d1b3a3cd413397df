"""Pictures of masks, layouts, plans and scans, as SVG or PNG, and reports as self-contained HTML.

Every picture is a `Scene`: plain data that is drawn as SVG by the standard library and as PNG by matplotlib.
"""

from longspan.viz.layout import layout_picture
from longspan.viz.mask import mask_picture
from longspan.viz.memory import memory_picture
from longspan.viz.notebook import notebook_html
from longspan.viz.report import picture_page, report_html
from longspan.viz.scaling import ScalingPoint, scaling_picture, scaling_points
from longspan.viz.scan import scan_picture
from longspan.viz.scene import Scene, write_png
from longspan.viz.timeline import timeline_picture
from longspan.viz.traffic_table import traffic, traffic_picture

__all__ = [
    "ScalingPoint",
    "Scene",
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
